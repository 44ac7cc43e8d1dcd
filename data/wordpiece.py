"""BERT's uncased WordPiece from a vocabulary that ships with the package: nothing is downloaded.

Source: Devlin et al. 2019, https://github.com/google-research/bert; the algorithm is that of the
`tokenizers` library, the one transformers uses. BERT's own vocabulary, and not GPT-2's BPE with
reserved ids: released BERT checkpoints start a run only with it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import lzma
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

BERT_UNCASED = "bert-base-uncased"
BERT_UNCASED_SHA256 = "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3"
_ASSET = "bert-base-uncased-vocab.txt.xz"
_SPECIAL_TEXTS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


class SpecialIds(NamedTuple):
    """Ids that text never encodes to, but for unk."""

    pad: int
    unk: int
    cls: int
    sep: int
    mask: int


class WordPiece:
    """Lower-cased word pieces without accents: decoding gives words, not the exact text.

    Has what data.prepare asks of data.tokenizer.Tokenizer.

    Attributes:
        name: "bert-base-uncased".
        sha256: hex digest of vocab.txt; part of a token store's identity.
        vocab_size: number of ids.
        special: SpecialIds. The text "[SEP]" is ordinary text, never the special id.
        eot: id that ends a document in a token store: [SEP].
        sentence_ends: ids of ".", "!" and "?".
    """

    def __init__(self, name: str, vocab: dict[str, int], sha256: str) -> None:
        # Imported on use: causal language models do not need it.
        import tokenizers

        self.name = name
        self.sha256 = sha256
        self.vocab_size = len(vocab)
        self.special = SpecialIds(*(vocab[text] for text in _SPECIAL_TEXTS))
        self.eot = self.special.sep
        self.sentence_ends = tuple(vocab[text] for text in ".!?")
        self._vocab = vocab
        self._encoding = self._make(tokenizers)

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, without [CLS] and [SEP]; a word that no pieces spell is [UNK]."""
        return self._encoding.encode(text).ids

    def encode_numpy(self, text: str) -> np.ndarray:
        """As `encode`, as a uint32 array of shape (num_tokens,)."""
        return np.array(self.encode(text), dtype=np.uint32)

    def encode_ordinary_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each text."""
        return [encoded.ids for encoded in self._encoding.encode_batch_fast(list(texts))]

    def decode(self, ids: Iterable[int]) -> str:
        """Words of `ids`, special ones as "[SEP]".

        Raises:
            ValueError: an id is outside [0, vocab_size).
        """
        ids = [int(i) for i in ids]
        bad = next((i for i in ids if not 0 <= i < self.vocab_size), None)
        if bad is not None:
            raise ValueError(f"token ids must be in [0, {self.vocab_size}), got {bad}")
        return self._encoding.decode(ids, skip_special_tokens=False)

    def save_hf(self, folder: str | os.PathLike[str]) -> None:
        """Write vocab.txt, tokenizer.json and tokenizer_config.json to `folder`.

        `transformers.AutoTokenizer.from_pretrained(folder)` then gives [CLS] + encode + [SEP].
        """
        import tokenizers

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        lines = "".join(text + "\n" for text in self._vocab)
        (folder / "vocab.txt").write_text(lines, encoding="utf-8")
        full = self._make(tokenizers)
        full.add_special_tokens(list(_SPECIAL_TEXTS))
        full.post_processor = tokenizers.processors.TemplateProcessing(
            single="[CLS]:0 $A:0 [SEP]:0",
            pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
            special_tokens=[("[CLS]", self.special.cls), ("[SEP]", self.special.sep)],
        )
        full.save(str(folder / "tokenizer.json"))
        names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
        config = {
            **dict(zip(names, _SPECIAL_TEXTS, strict=True)),
            "do_lower_case": True,
            "model_max_length": 512,
            "tokenizer_class": "BertTokenizer",
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")

    def _make(self, tokenizers: Any) -> Any:
        # No special tokens are declared: text can never produce one.
        made = tokenizers.Tokenizer(
            tokenizers.models.WordPiece(
                self._vocab, unk_token="[UNK]", max_input_chars_per_word=100
            )
        )
        made.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
        made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
        made.decoder = tokenizers.decoders.WordPiece()
        return made


@functools.cache
def load_wordpiece(name: str = BERT_UNCASED) -> WordPiece:
    """The packaged vocabulary, checked against the published hash.

    Raises:
        ValueError: the name is unknown, or the packaged vocabulary was altered.
    """
    if name != BERT_UNCASED:
        raise ValueError(f"tokenizer must be {BERT_UNCASED}, got {name!r}")
    raw = lzma.decompress((Path(__file__).parent / "assets" / _ASSET).read_bytes())
    sha256 = hashlib.sha256(raw).hexdigest()
    if sha256 != BERT_UNCASED_SHA256:
        raise ValueError(
            f"data/assets/{_ASSET} must hold a vocabulary with SHA-256 {BERT_UNCASED_SHA256}, got "
            f"{sha256}: reinstall the package"
        )
    # Not splitlines: some pieces are line separators of Unicode.
    pieces = raw.decode("utf-8").removesuffix("\n").split("\n")
    return WordPiece(name, {piece: i for i, piece in enumerate(pieces)}, sha256)
