"""GPT-2's byte-level BPE from ranks that ship with the package: nothing is ever downloaded.

Source: Radford et al. 2019 (GPT-2), https://github.com/openai/gpt-2; ranks as tiktoken's r50k_base.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import lzma
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import tiktoken

from data.wordpiece import BERT_UNCASED, WordPiece, load_wordpiece

EOT_TEXT = "<|endoftext|>"
GPT2_RANKS_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
# GPT-2's pre-tokenizer with possessive repeats: the same pieces, no backtracking on long runs.
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
TOKENIZER_NAMES = ("gpt2", BERT_UNCASED)


class Tokenizer:
    """Byte-pair encoding of text; every text encodes and decodes back exactly.

    Attributes:
        name: "gpt2".
        sha256: hex digest of the decompressed rank file; part of a token store's identity.
        vocab_size: number of ids, the end-of-text id included.
        eot: id of the end-of-text token, which text can never produce.
    """

    def __init__(self, name: str, ranks: dict[bytes, int], pattern: str, sha256: str) -> None:
        self.name = name
        self.sha256 = sha256
        self.eot = len(ranks)
        self.vocab_size = len(ranks) + 1
        self._ranks = ranks
        self._encoding = tiktoken.Encoding(
            name=name,
            pat_str=pattern,
            mergeable_ranks=ranks,
            special_tokens={EOT_TEXT: self.eot},
            explicit_n_vocab=self.vocab_size,
        )

    def encode(self, text: str) -> list[int]:
        """Ids of `text`. The text "<|endoftext|>" is ordinary text, never the special id."""
        return self._encoding.encode_ordinary(text)

    def encode_numpy(self, text: str) -> np.ndarray:
        """As `encode`, as a uint32 array of shape (num_tokens,)."""
        return self._encoding.encode_to_numpy(text, disallowed_special=())

    def encode_ordinary_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each text, on several threads."""
        return self._encoding.encode_ordinary_batch(list(texts))

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`; bytes that are no UTF-8 (a character cut in two) become U+FFFD.

        Raises:
            ValueError: an id is outside [0, vocab_size).
        """
        ids = [int(i) for i in ids]
        bad = next((i for i in ids if not 0 <= i < self.vocab_size), None)
        if bad is not None:
            raise ValueError(f"token ids must be in [0, {self.vocab_size}), got {bad}")
        return self._encoding.decode(ids)

    def save_hf(self, folder: str | os.PathLike[str]) -> None:
        """Write vocab.json, merges.txt, tokenizer.json and the two small config files to `folder`.

        vocab.json and merges.txt are byte for byte those published with GPT-2, so that
        `transformers.AutoTokenizer.from_pretrained(folder)` gives the same ids as `encode`.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        printable = _byte_to_printable()
        spelled = {
            token: "".join(printable[b] for b in token)
            for token, _ in sorted(self._ranks.items(), key=lambda item: item[1])
        }
        vocab = {text: self._ranks[token] for token, text in spelled.items()}
        vocab[EOT_TEXT] = self.eot
        merges = [f"{spelled[a]} {spelled[b]}" for a, b in _merges(self._ranks)]
        tokenizer = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [
                {
                    "id": self.eot,
                    "content": EOT_TEXT,
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": False,
                    "normalized": True,
                    "special": True,
                }
            ],
            "normalizer": None,
            "pre_tokenizer": _byte_level(add_prefix_space=False, trim_offsets=True),
            "post_processor": _byte_level(add_prefix_space=True, trim_offsets=False),
            "decoder": _byte_level(add_prefix_space=True, trim_offsets=True),
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": "",
                "end_of_word_suffix": "",
                "fuse_unk": False,
                "byte_fallback": False,
                "vocab": vocab,
                "merges": merges,
            },
        }
        special = {"bos_token": EOT_TEXT, "eos_token": EOT_TEXT, "unk_token": EOT_TEXT}
        config = {
            **special,
            "add_prefix_space": False,
            "model_max_length": 1024,
            "tokenizer_class": "GPT2Tokenizer",
        }
        (folder / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
        (folder / "merges.txt").write_text(
            "#version: 0.2\n" + "".join(line + "\n" for line in merges), encoding="utf-8"
        )
        (folder / "tokenizer.json").write_text(
            json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8"
        )
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
        (folder / "special_tokens_map.json").write_text(json.dumps(special, indent=2) + "\n")


AnyTokenizer = Tokenizer | WordPiece


@functools.cache
def load_tokenizer(name: str = "gpt2") -> AnyTokenizer:
    """The tokenizer called `name`, checked against the published hash of its ranks or vocabulary.

    Raises:
        ValueError: the name is unknown, or the packaged ranks were altered.
    """
    if name not in TOKENIZER_NAMES:
        raise ValueError(f"tokenizer must be one of {', '.join(TOKENIZER_NAMES)}, got {name!r}")
    if name == BERT_UNCASED:
        return load_wordpiece(name)
    raw = lzma.decompress((Path(__file__).parent / "assets" / "gpt2.tiktoken.xz").read_bytes())
    sha256 = hashlib.sha256(raw).hexdigest()
    if sha256 != GPT2_RANKS_SHA256:
        raise ValueError(
            f"data/assets/gpt2.tiktoken.xz must hold ranks with SHA-256 {GPT2_RANKS_SHA256}, "
            f"got {sha256}: reinstall the package"
        )
    ranks = {
        base64.b64decode(token): int(rank)
        for token, rank in (row.split() for row in raw.split(b"\n") if row)
    }
    return Tokenizer(name, ranks, GPT2_PATTERN, sha256)


# Before a space, tab or line break that follows a non-space, and between digits and ASCII letters:
# the pattern has no look-behind and ends a piece there, so the halves encode as they do together.
_EXACT_CUT = re.compile(r"\S(?=[ \t\n\r])|[0-9](?=[A-Za-z])|[A-Za-z](?=[0-9])")


def last_exact_cut(text: str, window: int = 4096) -> int:
    """The largest `cut` with encode(text) == encode(text[:cut]) + encode(text[cut:]), 0 if none.

    True of GPT-2's pieces; WordPiece may spell a word of digits and letters that is cut another way
    (a document is cut once in four million characters). Only the last `window` characters, then the
    whole text, are searched.
    """
    for start in (max(0, len(text) - window), 0):
        cut = 0
        for match in _EXACT_CUT.finditer(text, start):
            cut = match.end()
        if cut:
            return cut
    return 0


def _byte_level(add_prefix_space: bool, trim_offsets: bool) -> dict[str, object]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": add_prefix_space,
        "trim_offsets": trim_offsets,
        "use_regex": True,
    }


def _byte_to_printable() -> dict[int, str]:
    """GPT-2's one-to-one map of bytes to printable characters (encoder.py, bytes_to_unicode)."""
    visible = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    hidden = [b for b in range(256) if b not in set(visible)]
    table = {b: chr(b) for b in visible}
    table.update({b: chr(256 + i) for i, b in enumerate(hidden)})
    return table


def _merges(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """The pair that each multi-byte token was merged from: BPE replayed with lower ranks only."""
    pairs = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) == 1:
            continue
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            candidates = [ranks.get(a + b, rank) for a, b in zip(parts, parts[1:], strict=False)]
            best = min(candidates)
            assert best < rank, f"token {token!r} cannot be merged from earlier ones"
            i = candidates.index(best)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        pairs.append((parts[0], parts[1]))
    return pairs
