"""data/tokenizer.py: against published hashes and transformers' tokenizer."""

import hashlib
import lzma

import pytest

from data import tokenizer as tokenizer_module
from data.tokenizer import last_exact_cut, load_tokenizer

ODD_TEXTS = [
    "",
    " ",
    "Hello world",
    "  two  spaces\n\n\n and\ttabs \r\n",
    "don't we'll they've I'm she'd it's",
    "naïve café, 東京, שלום, 👩‍👩‍👧 \U0001f9ff",
    "\x00\x01\x7f\xa0\u3000\u2028 \ufffd",
    "1234567890 3.14159e-10 abc123def",
    "<|endoftext|> is ordinary <|endoftext|>",
    "a" * 3000 + " " * 500 + "^" * 700,
    "def f(x):\n    return x  # comment\n",
]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer()


@pytest.fixture(scope="module")
def hf_folder(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf")
    tokenizer.save_hf(folder)
    return folder


def test_known_ids(tokenizer):
    assert tokenizer.encode("Hello world") == [15496, 995]
    assert (tokenizer.eot, tokenizer.vocab_size, tokenizer.name) == (50256, 50257, "gpt2")
    assert tokenizer.decode([15496, 995, 50256]) == "Hello world<|endoftext|>"


@pytest.mark.parametrize("text", ODD_TEXTS)
def test_round_trip_without_special_ids(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.eot not in ids
    assert tokenizer.encode_numpy(text).tolist() == ids
    assert tokenizer.encode_ordinary_batch([text, "x"]) == [ids, tokenizer.encode("x")]


def test_vocab_and_merges_are_those_published_with_gpt2(hf_folder):
    def sha256(name):
        return hashlib.sha256((hf_folder / name).read_bytes()).hexdigest()

    # encoder.json and vocab.bpe of the GPT-2 release, as tiktoken checks them.
    assert sha256("vocab.json").startswith(
        "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256d"
    )
    assert sha256("merges.txt").startswith(
        "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b"
    )


@pytest.mark.parametrize("class_name", ["GPT2TokenizerFast", "AutoTokenizer"])
def test_transformers_loads_the_saved_folder(tokenizer, hf_folder, class_name):
    transformers = pytest.importorskip("transformers")
    loaded = getattr(transformers, class_name).from_pretrained(str(hf_folder))
    assert (loaded.vocab_size, loaded.eos_token_id, loaded.bos_token_id) == (50257, 50256, 50256)
    for text in ODD_TEXTS:
        if "<|endoftext|>" not in text:  # transformers parses it, we never do
            assert loaded(text)["input_ids"] == tokenizer.encode(text), text
    assert loaded("a<|endoftext|>b")["input_ids"] == [64, 50256, 65]
    assert loaded.decode(tokenizer.encode("naïve 東京")) == "naïve 東京"


@pytest.mark.parametrize("text", [*ODD_TEXTS[1:], "word " * 3000, "x" * 9000 + "1y"])
def test_cut_text_encodes_as_the_whole(tokenizer, text):
    cut = last_exact_cut(text)
    assert 0 <= cut < max(len(text), 1)
    assert tokenizer.encode(text[:cut]) + tokenizer.encode(text[cut:]) == tokenizer.encode(text)


def test_cut_is_near_the_end_and_absent_in_one_long_word():
    assert last_exact_cut("word " * 3000) == 14999
    assert last_exact_cut("x" * 10000) == 0
    assert last_exact_cut("a " + "x" * 10000) == 1


def test_unknown_name_lists_the_known():
    with pytest.raises(ValueError, match="must be one of gpt2, bert-base-uncased, got 'gpt3'"):
        load_tokenizer("gpt3")


def test_ids_outside_the_vocabulary_are_refused(tokenizer):
    with pytest.raises(ValueError, match=r"in \[0, 50257\), got 50257"):
        tokenizer.decode([1, 50257])


def test_altered_ranks_are_refused(monkeypatch):
    monkeypatch.setattr(lzma, "decompress", lambda raw: b"IQ== 0\n")
    with pytest.raises(ValueError, match="reinstall the package"):
        tokenizer_module.load_tokenizer.__wrapped__("gpt2")
