"""data/wordpiece.py: against transformers' tokenizer of the same vocabulary."""

import hashlib
import lzma

import pytest

from data import wordpiece as wordpiece_module
from data.tokenizer import load_tokenizer

TEXTS = [
    "",
    "Hello world",
    "Naïve CAFÉ, 東京; don't un-embeddable 3.14!",
    "tabs\tand\nlines\r\n \u2028 \xa0 spaces",
    "x" * 150,
    "\x00 \ufffd control \u200b",
]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("bert-base-uncased")


def test_known_ids(tokenizer):
    assert tokenizer.encode("Hello world") == [7592, 2088]
    assert (tokenizer.vocab_size, tokenizer.eot) == (30522, 102)
    assert tokenizer.special == (0, 100, 101, 102, 103)
    assert tokenizer.sentence_ends == tuple(tokenizer.encode(". ! ?"))
    assert tokenizer.decode([101, 7592, 2088, 102]) == "[CLS] hello world [SEP]"
    with pytest.raises(ValueError, match=r"in \[0, 30522\), got 30522"):
        tokenizer.decode([30522])


def test_special_texts_are_ordinary(tokenizer):
    ids = tokenizer.encode("[SEP] [MASK] [CLS][PAD]")
    assert not set(ids) & set(tokenizer.special)
    assert tokenizer.encode("x" * 150) == [tokenizer.special.unk]


def test_ways_to_encode_agree(tokenizer):
    assert tokenizer.encode_ordinary_batch(TEXTS) == [tokenizer.encode(t) for t in TEXTS]
    for text in TEXTS:
        assert tokenizer.encode_numpy(text).tolist() == tokenizer.encode(text)


@pytest.mark.parametrize("class_name", ["BertTokenizerFast", "AutoTokenizer"])
def test_transformers_loads_the_saved_folder(tokenizer, tmp_path, class_name):
    transformers = pytest.importorskip("transformers")
    tokenizer.save_hf(tmp_path)
    vocab = (tmp_path / "vocab.txt").read_bytes()
    assert hashlib.sha256(vocab).hexdigest() == tokenizer.sha256
    loaded = getattr(transformers, class_name).from_pretrained(str(tmp_path))
    assert (loaded.mask_token_id, loaded.pad_token_id, len(loaded)) == (103, 0, 30522)
    for text in TEXTS:
        assert loaded(text)["input_ids"] == [101, *tokenizer.encode(text), 102], text
    pair = loaded("Hello world", "hello")
    assert pair["input_ids"] == [101, 7592, 2088, 102, 7592, 102]
    assert pair["token_type_ids"] == [0, 0, 0, 0, 1, 1]


def test_ids_are_those_of_the_published_vocabulary(tokenizer, tmp_path):
    """transformers' own tokenizer made from vocab.txt alone."""
    transformers = pytest.importorskip("transformers")
    tokenizer.save_hf(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    theirs = transformers.BertTokenizer.from_pretrained(str(tmp_path))
    for text in TEXTS:
        assert theirs.encode(text, add_special_tokens=False) == tokenizer.encode(text), text


def test_altered_vocabulary_is_refused(monkeypatch):
    monkeypatch.setattr(lzma, "decompress", lambda raw: b"[PAD]\n")
    with pytest.raises(ValueError, match="reinstall the package"):
        wordpiece_module.load_wordpiece.__wrapped__()
    with pytest.raises(ValueError, match="must be bert-base-uncased, got 'x'"):
        wordpiece_module.load_wordpiece("x")
