"""data/sources.py and data/text_files.py: odd inputs give the right documents or a clear error."""

import gzip
import io
import json
import lzma
import os

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from data import text_files
from data.sources import EmbeddedSource, HubSource, open_source


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def documents(source):
    """Whole texts of a source's documents, as (list, report)."""
    out, open_document = [], ""
    for text, is_last in source.pieces():
        open_document += text
        if is_last:
            out.append(open_document)
            open_document = ""
    assert open_document == "", "the last document must be ended"
    return out, source.report


def test_embedded_corpus_is_clean_english():
    texts, report = documents(open_source("embedded"))
    assert (len(texts), report.documents) == (249, 249)
    assert texts[0].startswith("Fellow-Citizens of the Senate")
    joined = "".join(texts)
    for residue in ("[Laughter]", "[Applause]", "White House correction", "[Inaudible]", "\r"):
        assert residue.lower() not in joined.lower()
    assert 12_000_000 < len(joined) < 12_300_000
    assert EmbeddedSource().identity() == EmbeddedSource().identity()


def test_txt_is_one_document_without_bom_and_crlf(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n\r\nthree \xc3\xa9 \xe6\x9d\xb1")
    assert documents(open_source(str(path)))[0] == ["one\ntwo\n\nthree é 東"]


def test_bad_utf8_is_replaced_counted_and_named(tmp_path):
    path = tmp_path / "a.txt"
    # U+FFFD itself (ef bf bd) is valid text; a cut character and a stray byte are not.
    path.write_bytes(b"x \xff y \xef\xbf\xbd z \xe6\x9d")
    texts, report = documents(open_source(str(path)))
    assert texts == ["x \ufffd y \ufffd z \ufffd"]
    assert report.replaced_characters == 2
    assert any("a.txt" in line for line in report.warnings())


def test_utf16_is_refused(tmp_path):
    (tmp_path / "a.txt").write_bytes("text".encode("utf-16"))
    with pytest.raises(ValueError, match="must be UTF-8, got UTF-16"):
        documents(open_source(str(tmp_path)))


@pytest.mark.parametrize("block_bytes", [1, 2, 3, 5, 64])
def test_blocks_cut_no_character_and_no_line_end(tmp_path, monkeypatch, block_bytes):
    monkeypatch.setattr(text_files, "_BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(text_files, "PIECE_CHARS", 4)
    text = "aé東👩 b1c\r\n\rd \r\n" * 5
    (tmp_path / "a.txt").write_bytes(text.encode())
    texts, report = documents(open_source(str(tmp_path)))
    assert texts == [text.replace("\r\n", "\n")]
    assert report.replaced_characters == 0


@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".parquet"])
def test_huge_line_comes_in_pieces_of_bounded_size(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr(text_files, "PIECE_CHARS", 1000)
    monkeypatch.setattr(text_files, "_BLOCK_BYTES", 512)
    text = "word1 " * 5000 + "x" * 3000
    path = tmp_path / f"a{suffix}"
    if suffix == ".txt":
        path.write_text(text)
    elif suffix == ".jsonl":
        write_jsonl(path, [{"text": text}])
    else:
        pyarrow.parquet.write_table(pyarrow.table({"text": [text]}), path)
    pieces = list(open_source(str(path)).pieces())
    assert "".join(piece for piece, _ in pieces) == text
    assert [is_last for _, is_last in pieces] == [False] * (len(pieces) - 1) + [True]
    assert max(len(piece) for piece, _ in pieces) <= 1512
    assert documents(open_source(str(path)))[1].documents == 1


def test_empty_documents_are_skipped_and_counted(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"text": t} for t in ["", "a", " \n\t", None, "b"]])
    (tmp_path / "b.txt").write_text("  \n ")
    (tmp_path / "c.txt").write_text("")
    texts, report = documents(open_source(str(tmp_path)))
    assert texts == ["a", "b"]
    assert (report.documents, report.empty_documents) == (2, 5)


def test_malformed_lines_are_counted_with_file_and_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"text": "a"}\r\n\n{"text": \n[1]\n{"text": "b\xff"}\n{"text": "\\ud800c"}'
    )
    texts, report = documents(open_source(str(path)))
    assert texts == ["a", "b\ufffd", "\ufffdc"]
    assert (report.malformed_lines, report.replaced_characters) == (2, 2)
    problems = "\n".join(report.problems)
    for place in ("a.jsonl, line 3", "a.jsonl, line 4", "a.jsonl, line 5", "a.jsonl, line 6"):
        assert place in problems


def test_only_some_problems_are_quoted(tmp_path):
    (tmp_path / "a.jsonl").write_text("{\n" * 1000 + '{"text": "a"}\n')
    _, report = documents(open_source(str(tmp_path)))
    assert report.malformed_lines == 1000
    assert len(report.warnings()) < 10


def test_absent_field_names_those_that_came(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"body": "x", "id": 1}])
    with pytest.raises(
        ValueError, match=r"line 1 must have the field 'text', got \['body', 'id'\]"
    ):
        documents(open_source(str(tmp_path)))
    assert documents(open_source(str(tmp_path), text_field="body"))[0] == ["x"]
    with pytest.raises(ValueError, match="must hold a string in 'id', got int"):
        documents(open_source(str(tmp_path), text_field="id"))


def test_parquet_rows_and_absent_field(tmp_path):
    table = pyarrow.table({"text": ["a", None, "", "b"], "n": [1, 2, 3, 4]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    texts, report = documents(open_source(str(tmp_path)))
    assert (texts, report.empty_documents) == (["a", "b"], 2)
    with pytest.raises(ValueError, match=r"must have the field 'body', got \['n', 'text'\]"):
        documents(open_source(str(tmp_path), text_field="body"))
    with pytest.raises(ValueError, match="must hold a string in 'n', got int"):
        documents(open_source(str(tmp_path), text_field="n"))


def compress(raw, suffix):
    if suffix == ".zst":
        # Two frames: some writers start a new one every few megabytes.
        compressor = zstandard.ZstdCompressor()
        return compressor.compress(raw[:100]) + compressor.compress(raw[100:])
    return {".gz": gzip.compress, ".xz": lzma.compress}[suffix](raw)


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
@pytest.mark.parametrize("kind", [".txt", ".jsonl"])
def test_compressed_files_read_as_plain_ones(tmp_path, kind, suffix):
    texts = [f"document {i} " + "é" * i for i in range(50)]
    raw = b"".join(json.dumps({"text": t}).encode() + b"\n" for t in texts)
    path = tmp_path / f"a{kind}{suffix}"
    path.write_bytes(compress(raw, suffix))
    expected = texts if kind == ".jsonl" else [raw.decode()]
    assert documents(open_source(str(path)))[0] == expected
    path.write_bytes(compress(raw, suffix)[:-30])
    with pytest.raises(ValueError, match="damaged or truncated"):
        documents(open_source(str(path)))


@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.xz", "a.jsonl.zst", "a.parquet"])
def test_files_that_are_not_what_their_name_says(tmp_path, name):
    (tmp_path / name).write_bytes(b"certainly no archive of any kind")
    with pytest.raises(ValueError, match="damaged"):
        documents(open_source(str(tmp_path)))


def test_folders_are_read_recursively_in_sorted_order(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x.txt").write_text("3")
    (tmp_path / "a.txt").write_text("1")
    write_jsonl(tmp_path / "ab.jsonl", [{"text": "2"}])
    (tmp_path / "notes.md").write_text("not read")
    (tmp_path / "c.TXT").write_text("4")
    source = open_source(str(tmp_path))
    assert documents(source)[0] == ["1", "2", "3", "4"]
    assert documents(source)[1].documents == 4  # a second pass starts afresh


def test_identity_follows_files_and_field(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "x"}])
    first = open_source(str(path)).identity()
    assert open_source(str(path)).identity() == first
    assert open_source(str(path), text_field="body").identity() != first
    os.utime(path, ns=(1, 1))
    assert open_source(str(path)).identity() != first


def test_missing_and_unreadable_paths(tmp_path):
    with pytest.raises(FileNotFoundError, match="existing file or folder, got '/no/such'"):
        open_source("/no/such")
    with pytest.raises(FileNotFoundError, match="found none in"):
        open_source(str(tmp_path))
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(ValueError, match="belong to hf: sources"):
        open_source(str(tmp_path), config="plain_text")


@pytest.mark.parametrize("kind", ["hf", "stream"])
def test_hub_data_set(monkeypatch, kind):
    import datasets

    asked = []

    def load_dataset(path, name, *, split, revision, streaming):
        asked.append((path, name, split, revision))
        rows = datasets.Dataset.from_dict({"text": ["a", "", "b"], "id": [1, 2, 3]})
        assert streaming == (kind == "stream")
        return rows.to_iterable_dataset() if streaming else rows

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    source = open_source(f"{kind}:Skylion007/openwebtext", revision="abc")
    assert source.identity() == open_source("hf:Skylion007/openwebtext", revision="abc").identity()
    texts, report = documents(source)
    assert (texts, report.empty_documents) == (["a", "b"], 1)
    assert asked == [("Skylion007/openwebtext", None, "train", "abc")]
    assert source.name == "Skylion007-openwebtext"
    assert source.identity()["revision"] == "abc"
    with pytest.raises(ValueError, match=r"field 'body', got \['id', 'text'\]"):
        documents(open_source(f"{kind}:a/b", text_field="body"))


def test_sources_start_at_a_file(monkeypatch, tmp_path):
    import datasets

    for name, texts in (("a", ["1", "2"]), ("b", [" "]), ("c", ["3", "4", "5"])):
        rows = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (tmp_path / f"{name}.jsonl").write_text(rows)
    paths = [str(path) for path in sorted(tmp_path.iterdir())]
    streamed = datasets.load_dataset(
        "json", data_files=paths, split="train", streaming=True, cache_dir=str(tmp_path / "cache")
    )
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **options: streamed)
    for source in (open_source(str(tmp_path)), open_source("stream:a/b")):
        for first, starts in enumerate([{0: 0, 1: 2, 2: 2}, {1: 0, 2: 0}, {2: 0}]):
            texts = [text for text, _ in source.pieces(first)]
            assert texts == ["12345"[i] for i in range(2 if first else 0, 5)]
            assert source.file_starts == starts


def test_hub_without_network_is_one_clear_line(monkeypatch):
    import datasets

    def load_dataset(*args, **kwargs):
        raise ConnectionError("Couldn't reach 'a/b' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(ConnectionError, match="connect this machine to the network, or") as caught:
        documents(open_source("hf:a/b"))
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="must read hf:OWNER/NAME, got 'hf:a/b/c'"):
        HubSource("a/b/c", "text", None, "train", None)


def test_zstd_reader_reads_in_small_steps(tmp_path):
    raw = bytes(range(256)) * 4000
    path = tmp_path / "x.zst"
    path.write_bytes(zstandard.ZstdCompressor().compress(raw))
    with text_files._ZstdFile(path) as file:
        out = io.BytesIO()
        while chunk := file.read(777):
            out.write(chunk)
    assert out.getvalue() == raw
