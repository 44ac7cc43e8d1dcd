"""Tokenizers of BERT's and RoBERTa's kind, for whole documents: the packaged one, or a model's."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data.wordpiece import BERT_UNCASED, load_wordpiece

_FILE = "tokenizer.json"
# What begins and ends a text, and what fills: BERT's names, RoBERTa's.
_SPECIAL_TEXTS = (("[CLS]", "[SEP]", "[PAD]"), ("<s>", "</s>", "<pad>"))


class DocumentTokenizer:
    """A tokenizer.json of Hugging Face.

    Attributes:
        name: what it was loaded by.
        sha256: hex digest of the file.
        vocab_size: number of ids.
        cls, sep, pad: ids of what begins and ends a text, and of filling.
    """

    def __init__(self, name: str, payload: bytes) -> None:
        import tokenizers

        self.name = name
        self.sha256 = hashlib.sha256(payload).hexdigest()
        self._encoding: Any = tokenizers.Tokenizer.from_buffer(payload)
        self._encoding.no_truncation()
        self._encoding.no_padding()
        self.vocab_size: int = self._encoding.get_vocab_size()
        for texts in _SPECIAL_TEXTS:
            ids: Any = [self._encoding.token_to_id(text) for text in texts]
            if None not in ids:
                self.cls, self.sep, self.pad = ids
                return
        raise ValueError(
            f"the tokenizer {name} must have {' or '.join(map(', '.join, _SPECIAL_TEXTS))}, it has "
            "neither: take that of a BERT or RoBERTa"
        )

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text without special tokens, on several threads."""
        return [e.ids for e in self._encoding.encode_batch(list(texts), add_special_tokens=False)]


class _Packaged(DocumentTokenizer):
    def __init__(self) -> None:
        self._wordpiece = wordpiece = load_wordpiece(BERT_UNCASED)
        self.name, self.sha256 = wordpiece.name, wordpiece.sha256
        self.vocab_size = wordpiece.vocab_size
        special = wordpiece.special
        self.cls, self.sep, self.pad = special.cls, special.sep, special.pad

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._wordpiece.encode_ordinary_batch(texts)


@functools.cache
def load_document_tokenizer(name: str) -> DocumentTokenizer:
    """The tokenizer of a model.

    Args:
        name: "bert-base-uncased", which is packaged, or else the folder of a model with
            tokenizer.json, or its id on the hub.
    Raises:
        FileNotFoundError: the folder has no tokenizer.json.
        ConnectionError: `name` is no folder, and the hub is out of reach or does not know it.
        ValueError: no tokenizer of BERT's or RoBERTa's kind.
    """
    if name == BERT_UNCASED:
        return _Packaged()
    path = Path(name) / _FILE
    if not Path(name).is_dir():
        path = _download(name)
    elif not path.is_file():
        raise FileNotFoundError(f"tokenizer={name} must be a folder with {_FILE}, it has none")
    return DocumentTokenizer(name, path.read_bytes())


def _download(name: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, _FILE))
    except Exception as error:  # no such model, no network, the HTTP client's own errors
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise ConnectionError(
            f"tokenizer={name} must be {BERT_UNCASED}, a folder with {_FILE} or a model of the "
            f"hub; it is no folder, and the hub gave: {reason}. Check the name, or download the "
            "model where there is a network and pass its folder"
        ) from error
