"""Documents of local text files: .txt, .jsonl, .parquet, plain or compressed, one file at a time.

Every reader yields (text, is_last) pairs: a document is cut into pieces of bounded size, at places
where the tokenizer cuts too, and the last piece of a document says so. Bad bytes, bad lines and
empty documents are counted in a Report, never hidden.
"""

from __future__ import annotations

import dataclasses
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

from data.tokenizer import last_exact_cut

PIECE_CHARS = 1 << 22  # bounds the memory and the unit of parallel work inside one huge document
_BLOCK_BYTES = 1 << 22
_MAX_LISTED = 5  # problems quoted one by one in a report; the rest are only counted
TEXT_FORMATS = (".txt", ".jsonl", ".parquet")
COMPRESSIONS = (".gz", ".xz", ".zst")

Piece = tuple[str, bool]


@dataclasses.dataclass
class Report:
    """What reading came across. Two readings of the same source give equal reports.

    Attributes:
        documents: documents that hold more than white space.
        empty_documents: skipped, as they hold nothing else.
        replaced_characters: bytes that are no UTF-8, and lone surrogates, turned into U+FFFD.
        malformed_lines: lines of .jsonl that are no JSON object, skipped.
        problems: the first few, each with its file (and line).
    """

    documents: int = 0
    empty_documents: int = 0
    replaced_characters: int = 0
    malformed_lines: int = 0
    problems: list[str] = dataclasses.field(default_factory=list)

    def add_problem(self, problem: str) -> None:
        if len(self.problems) < _MAX_LISTED:
            self.problems.append(problem)

    def warnings(self) -> list[str]:
        """One line per kind of problem that came up."""
        lines = []
        if self.replaced_characters:
            lines.append(f"{self.replaced_characters} invalid characters replaced by U+FFFD")
        if self.malformed_lines:
            lines.append(f"{self.malformed_lines} malformed lines skipped")
        if self.empty_documents:
            lines.append(f"{self.empty_documents} empty documents skipped")
        return lines + [f"for example {problem}" for problem in self.problems]


def text_format(path: Path) -> tuple[str, str]:
    """(format, compression) by a file's name, "" for none: a.jsonl.gz is (".jsonl", ".gz")."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    compression = suffixes.pop() if suffixes and suffixes[-1] in COMPRESSIONS else ""
    kind = suffixes[-1] if suffixes and suffixes[-1] in TEXT_FORMATS else ""
    return kind, "" if kind == ".parquet" else compression


def read_file(path: Path, text_field: str, report: Report) -> Iterator[Piece]:
    """Pieces of every document of one file.

    .txt is one document, its line ends made "\\n" and a byte order mark dropped; .jsonl and
    .parquet are one document a row, in `text_field`.

    Raises:
        ValueError: the field is absent, the file is damaged or UTF-16, or the format is unknown.
    """
    kind, compression = text_format(path)
    try:
        if kind == ".parquet":
            texts = _parquet_texts(path, text_field)
        elif kind == ".jsonl":
            texts = _jsonl_texts(path, compression, text_field, report)
        elif kind == ".txt":
            with _open(path, compression) as file:
                yield from _txt_pieces(path, file, report)
            return
        else:
            raise ValueError(
                f"{path} must end in {', '.join(TEXT_FORMATS)} (and {', '.join(COMPRESSIONS)})"
            )
        for place, text in texts:
            yield from document_pieces(text, place, report)
    except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(
            f"{path} is a damaged or truncated {compression[1:]} file ({error}): fetch it again"
        ) from error


def document_pieces(text: str, place: str, report: Report) -> Iterator[Piece]:
    """A whole document cut into pieces; nothing if it is empty. Lone surrogates are replaced."""
    if not text or text.isspace():
        report.empty_documents += 1
        return
    report.documents += 1
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        fixed = "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in text)
        report.replaced_characters += sum(a != b for a, b in zip(text, fixed, strict=True))
        report.add_problem(f"a lone surrogate in {place}")
        text = fixed
    start = 0
    while len(text) - start > PIECE_CHARS:
        piece = text[start : start + PIECE_CHARS]
        cut = last_exact_cut(piece) or PIECE_CHARS
        yield piece[:cut], False
        start += cut
    yield text[start:], True


def _txt_pieces(path: Path, file: IO[bytes], report: Report) -> Iterator[Piece]:
    """The file as one document, read in blocks: memory does not grow with the file."""
    held = ""  # decoded, not yet yielded
    empty = True
    replaced = 0
    for block in _utf8_blocks(path, file):
        text = block.decode("utf-8", errors="replace")
        if "\ufffd" in text:
            replaced += text.count("\ufffd") - block.count(b"\xef\xbf\xbd")
        held += text.replace("\r\n", "\n")
        if len(held) >= PIECE_CHARS and not (empty and held.isspace()):
            empty = False
            cut = last_exact_cut(held) or len(held)
            yield held[:cut], False
            held = held[cut:]
    if replaced:
        report.replaced_characters += replaced
        report.add_problem(f"{replaced} invalid bytes or byte runs in {path}")
    if empty and (not held or held.isspace()):
        report.empty_documents += 1
        return
    report.documents += 1
    yield held, True


def _utf8_blocks(path: Path, file: IO[bytes]) -> Iterator[bytes]:
    """Blocks that cut neither a character nor a CR LF pair in two."""
    rest = b""
    first = True
    while block := file.read(_BLOCK_BYTES):
        block = rest + block
        if first:
            if block.startswith((b"\xff\xfe", b"\xfe\xff")):
                raise ValueError(f"{path} must be UTF-8, got UTF-16: convert it, as with iconv")
            block = block.removeprefix(b"\xef\xbb\xbf")
            first = False
        end = len(block)
        # A character has at most four bytes; its first is not 10xxxxxx.
        for back in range(1, min(4, end) + 1):
            byte = block[-back]
            if byte & 0xC0 != 0x80:
                if byte >= 0xC0 or byte == 0x0D:
                    end -= back
                break
        block, rest = block[:end], block[end:]
        yield block
    yield rest


def _jsonl_texts(
    path: Path, compression: str, text_field: str, report: Report
) -> Iterator[tuple[str, str]]:
    for place, row in _jsonl_rows(path, compression, report):
        yield place, field_text(row, text_field, place)


def read_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, row) of every row of a .jsonl file, which may be compressed, or a .parquet file.

    Raises:
        ValueError: another format, a damaged file, or a line that is no JSON object.
    """
    kind, compression = text_format(path)
    report = Report()
    try:
        if kind == ".parquet":
            yield from _parquet_rows(path, None)
        elif kind == ".jsonl":
            for place_and_row in _jsonl_rows(path, compression, report):
                _refuse_malformed(report)
                yield place_and_row
            _refuse_malformed(report)
        else:
            raise ValueError(f"{path} must end in .jsonl (and {', '.join(COMPRESSIONS)}), .parquet")
    except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(
            f"{path} is a damaged or truncated {compression[1:]} file ({error}): fetch it again"
        ) from error


def _refuse_malformed(report: Report) -> None:
    if report.malformed_lines:
        raise ValueError(f"every line must be a JSON object, got {report.problems[-1]}")


def _jsonl_rows(
    path: Path, compression: str, report: Report
) -> Iterator[tuple[str, dict[str, Any]]]:
    with _open(path, compression) as file:
        for number, line in enumerate(file, start=1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not line.strip():
                continue
            place = f"{path}, line {number}"
            text = line.decode("utf-8", errors="replace")
            if "\ufffd" in text:
                replaced = text.count("\ufffd") - line.count(b"\xef\xbf\xbd")
                if replaced:
                    report.replaced_characters += replaced
                    report.add_problem(f"invalid UTF-8 in {place}")
            try:
                row = json.loads(text)
            except (ValueError, RecursionError) as error:
                report.malformed_lines += 1
                report.add_problem(f"{place}: {error}")
                continue
            if not isinstance(row, dict):
                report.malformed_lines += 1
                report.add_problem(f"{place}: an object is wanted, got {type(row).__name__}")
                continue
            yield place, row


def field_text(row: dict[str, Any], text_field: str, place: str) -> str:
    """row[text_field], "" for null.

    Raises:
        ValueError: no such field (the error lists those that came), or no string in it.
    """
    if text_field not in row:
        raise ValueError(
            f"{place} must have the field {text_field!r}, got {sorted(map(str, row))}: "
            "set text_field to one of these"
        )
    text = row[text_field]
    if text is None:
        return ""
    if not isinstance(text, str):
        raise ValueError(
            f"{place} must hold a string in {text_field!r}, got {type(text).__name__}: "
            "set text_field to a field with text"
        )
    return text


def _parquet_texts(path: Path, text_field: str) -> Iterator[tuple[str, str]]:
    for place, row in _parquet_rows(path, text_field):
        yield place, field_text(row, text_field, place)


def _parquet_rows(path: Path, column: str | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows with one column, which must be there, or with all."""
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if column is not None and column not in names:
                field_text(dict.fromkeys(names), column, str(path))
            row = 0
            for batch in file.iter_batches(batch_size=256, columns=column and [column]):
                for values in batch.to_pylist():
                    row += 1
                    yield f"{path}, row {row}", values
    except (pyarrow.ArrowInvalid, pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} is a damaged parquet file ({error}): fetch it again") from error


def _open(path: Path, compression: str) -> IO[bytes]:
    if compression == ".gz":
        return cast(IO[bytes], gzip.open(path, "rb"))
    if compression == ".xz":
        return cast(IO[bytes], lzma.open(path, "rb"))
    if compression == ".zst":
        return io.BufferedReader(_ZstdFile(path), buffer_size=1 << 20)
    return open(path, "rb", buffering=1 << 20)


class _ZstdFile(io.RawIOBase):
    """Decompressed bytes of a .zst file. Raises EOFError if it ends inside a frame.

    zstandard's own stream reader ends silently there.
    """

    def __init__(self, path: Path) -> None:
        import zstandard

        self._zstandard = zstandard
        self._file = open(path, "rb")
        self._frame: Any = None
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            chunk = self._file.read(1 << 18)
            if not chunk:
                if self._frame is not None:
                    raise EOFError("it ends inside a frame")
                return 0
            self._ready = self._decompress(chunk)
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()

    def _decompress(self, chunk: bytes) -> bytes:
        out = []
        try:
            while chunk:
                if self._frame is None:
                    self._frame = self._zstandard.ZstdDecompressor().decompressobj()
                out.append(self._frame.decompress(chunk))
                if not self._frame.eof:
                    break
                chunk = self._frame.unused_data
                self._frame = None
        except self._zstandard.ZstdError as error:
            raise EOFError(str(error)) from error
        return b"".join(out)
