"""data/long_documents.py and what it reads: labels, splits, packed batches, tokenizers."""

import inspect
import json

import numpy as np
import pytest
import tokenizers
import torch

from data.document_sources import DocumentSource
from data.document_tokenizer import load_document_tokenizer
from data.long_documents import LongDocumentData, constant_prediction
from data.order import permute, sample_ids
from data.stepped import IGNORED_LABEL
from data.wordpiece import BERT_UNCASED, load_wordpiece
from tests import loading

WORDS = load_wordpiece()


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def opened(**options):
    defaults = {"num_classes": 2, "tokenizer": BERT_UNCASED, "seqlen": 8, "batch_size": 2}
    data = LongDocumentData(**{**defaults, **options})
    return loading.opened(data)


CASES = [  # label 2 is the rarest
    {"text": ["first paragraph", "the second one"], "labels": [0, 1]},
    {"text": "a text of one string that is longer than the others", "labels": [1, 2]},
    {"text": "no label", "labels": []},
    {"text": "again", "labels": [0]},
]


@pytest.fixture
def cases(tmp_path):
    folder = tmp_path / "cases"
    folder.mkdir()
    write(folder / "train.jsonl", CASES)
    write(folder / "dev.jsonl", [CASES[1], CASES[3], CASES[0]])
    write(folder / "test.jsonl", CASES[:1])
    return folder


def documents(batch):
    starts = batch["cu_seqlens"].tolist()
    return [batch["input_ids"][a:b].tolist() for a, b in zip(starts, starts[1:], strict=False)]


def expected_ids(case, seqlen):
    text = case["text"] if isinstance(case["text"], str) else "\n".join(case["text"])
    return [WORDS.special.cls, *WORDS.encode(text)[: seqlen - 2], WORDS.special.sep]


def test_training_batches_are_packed_documents_in_the_order_of_the_seed(cases, tmp_path):
    data = opened(task="ecthr", source=str(cases), root=str(tmp_path), batch_size=3)
    order = sample_ids(0, 6, seed=1111, num_samples=4)
    loader = iter(data.train_dataloader())
    for step in range(2):
        batch, ids = next(loader), order[3 * step : 3 * step + 3]
        assert documents(batch) == [expected_ids(CASES[i], 8) for i in ids]
        wanted = [[int(label in CASES[i]["labels"]) for label in (0, 1)] for i in ids]
        assert batch["labels"].tolist() == wanted, "the rarest label is left out"
        assert batch["cu_seqlens"].dtype == torch.int32 and batch["max_seqlen"] == 8
        assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
    assert (data.vocab_size, data.num_classes, data.num_samples) == (30522, 2, 4)
    assert data.multi_label and data.store.manifest["facts"] == {"classes": ["0", "1"]}


def test_held_out_documents_come_once_and_fillers_have_no_label(cases, tmp_path):
    data = opened(task="mimic", source=str(cases), root=str(tmp_path), val_batch_size=2)
    first, last = data.val_dataloader()
    mixed = permute(np.arange(3), seed=0, epoch=0, num_samples=3).tolist()
    dev = [(CASES[1], [0, 1]), (CASES[3], [1, 0]), (CASES[0], [1, 1])]
    wanted, labels = zip(*(dev[i] for i in mixed), strict=True)
    assert documents(first) + documents(last)[:1] == [expected_ids(case, 8) for case in wanted]
    assert first["labels"].tolist() + last["labels"].tolist() == [*labels, [IGNORED_LABEL] * 2]
    (test,) = data.test_dataloader()
    assert test["labels"].tolist() == [[1, 1]]


def test_a_limit_takes_documents_of_the_whole_split(tmp_path):
    """The source has the labels one after the other; equally many, so that label 0 is constant."""
    rows = [{"text": str(i), "label": str(i // 100)} for i in range(400)]
    path = write(tmp_path / "rows.jsonl", rows)
    options = {"task": "stand_in", "source": str(path), "root": str(tmp_path), "num_classes": 4}
    data = opened(**options, val_limit=12, val_batch_size=12)
    (batch,) = data.val_dataloader()
    counts = batch["labels"].bincount(minlength=4).tolist()
    assert sum(counts) == 12 and sum(count > 0 for count in counts) >= 3
    assert f"micro-F1 {counts[0] / 12:.2%}" in data.comparison("val").line


def test_every_seqlen_reads_the_same_store(cases, tmp_path):
    short = opened(task="ecthr", source=str(cases), root=str(tmp_path), seqlen=3)
    long = opened(task="ecthr", source=str(cases), root=str(tmp_path), seqlen=500)
    assert short.store.folder == long.store.folder
    assert short.fingerprint != long.fingerprint, "a run does not go on at another length"
    lengths = {len(row) for row in documents(next(iter(short.train_dataloader())))}
    assert lengths == {3}
    whole = documents(next(iter(long.val_dataloader())))
    assert expected_ids(CASES[0], 500) in whole or expected_ids(CASES[1], 500) in whole


def test_the_hub_is_asked_for_lexglues_cases(tmp_path, monkeypatch):
    import datasets

    asked = []

    def load(name, config, split):
        asked.append((name, config, split))
        return CASES

    monkeypatch.setattr(datasets, "load_dataset", load)
    data = opened(task="ecthr", root=str(tmp_path), num_classes=3)
    assert set(asked) == {
        ("coastalcph/lex_glue", "ecthr_b", s) for s in ("train", "validation", "test")
    }
    assert data.store.labels("train").tolist() == [[1, 1, 0], [0, 1, 1], [0, 0, 0], [1, 0, 0]]


BOOKS = [
    {"id": f"{author}/{i}", "text": " ".join([author, str(i)] * (5 + i))}
    for author, number in (("ann", 20), ("bob", 10), ("cy", 3), ("di", 1))
    for i in range(number)
] + [{"id": "unknown", "text": "nobody wrote this"}]


def stand_in(tmp_path, **options):
    path = write(tmp_path / "books.jsonl", BOOKS)
    options = {"num_classes": 3, "label_pattern": "^(.+)/", **options}
    return opened(
        task="stand_in", source=str(path), label_field="id", root=str(tmp_path), **options
    )


def test_a_stand_in_holds_out_a_tenth_of_each_labels_documents(tmp_path, capsys):
    data = stand_in(tmp_path)
    assert data.stand_in == "books.jsonl, labels from 'id', instead of ECtHR and MIMIC"
    assert f"stand-in data: {data.stand_in}" in capsys.readouterr().out
    assert data.store.manifest["facts"]["classes"] == ["ann", "bob", "cy"]
    counts = {s: np.bincount(data.store.labels(s)).tolist() for s in ("train", "val", "test")}
    assert counts == {"train": [16, 8, 1], "val": [2, 1, 1], "test": [2, 1, 1]}
    line, numbers = data.comparison("val")
    assert numbers == {"constant_micro_f1": 0.5}
    assert line.startswith("the commonest label for every document: micro-F1 50.00%; stand-in data")
    assert "not comparable with published results" in line and not data.multi_label


def test_pieces_of_a_document_stay_in_one_split(tmp_path):
    data = stand_in(tmp_path, piece_tokens=6, num_classes=1)
    seen = {}
    total = 0
    for split in ("train", "val", "test"):
        for i in range(len(data.store.labels(split))):
            piece = data.store.sequence(split, i)
            assert len(piece) == 6
            total += 1
            words = WORDS.decode(piece).split()
            seen.setdefault(words[1] if words[0] == "ann" else words[0], set()).add(split)
    assert all(len(splits) == 1 for splits in seen.values()) and len(seen) == 20
    tokens = [len(WORDS.encode(row["text"])) for row in BOOKS[:20]]
    assert total == sum(n // 6 for n in tokens)


def test_the_best_constant_prediction():
    """Labels in 9, 6 and 1 of 10 documents: one label 2 * 9 / (10 + 16), two 2 * 15 / (20 + 16)."""
    train = np.zeros((10, 3), np.uint8)
    train[:9, 1], train[:6, 2], train[0, 0] = 1, 1, 1
    held_out = np.array([[1, 1, 0], [0, 1, 1]], np.uint8)
    assert constant_prediction(train, held_out, most=3) == (3, 4, 4)
    assert constant_prediction(train, held_out, most=1) == (2, 2, 4)


def test_comparison_of_several_labels(cases, tmp_path):
    data = opened(task="ecthr", source=str(cases), root=str(tmp_path))
    # In training 2 and 2 of 4: both labels, 8 / 12, before one, 4 / 8. Validation: 4 hits of 6.
    line, numbers = data.comparison("val")
    assert line == "the commonest labels for every document: micro-F1 80.00%"
    assert numbers == {"constant_micro_f1": pytest.approx(0.8)}


def test_a_models_own_tokenizer(tmp_path):
    WORDS.save_hf(tmp_path / "bert")
    packaged, saved = (load_document_tokenizer(n) for n in (BERT_UNCASED, str(tmp_path / "bert")))
    texts = ["Hello world", "an Écrit [SEP] text"]
    assert saved.encode_batch(texts)[0] == packaged.encode_batch(texts)[0] == [7592, 2088]
    for name, value in (("cls", 101), ("sep", 102), ("pad", 0), ("vocab_size", 30522)):
        assert getattr(saved, name) == getattr(packaged, name) == value
    made = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=False))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    made.enable_truncation(4)
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]  # RoBERTa's first ids
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=special,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(["some text"], trainer)
    (tmp_path / "roberta").mkdir()
    made.save(str(tmp_path / "roberta" / "tokenizer.json"))
    roberta = load_document_tokenizer(str(tmp_path / "roberta"))
    assert (roberta.cls, roberta.pad, roberta.sep) == (0, 1, 2)
    assert len(roberta.encode_batch(["abc def ghi"])[0]) > 4, "nothing is cut"


@pytest.mark.parametrize(
    "options, message",
    [
        ({"task": "mimic"}, "given to trained persons under a contract .*source=FOLDER with train"),
        ({"task": "books"}, "task must be one of ecthr, mimic, stand_in, got 'books'"),
        ({"task": "ecthr", "source": "nowhere"}, "a folder with one train.jsonl or .parquet"),
        ({"task": "stand_in"}, "must be a .jsonl or .parquet file, got None"),
        ({"task": "ecthr", "piece_tokens": 4}, "are of stand_in, ecthr takes neither"),
        ({"task": "ecthr", "num_classes": 257}, "num_classes must be from 1 to 256, got 257"),
        ({"task": "ecthr", "seqlen": 2}, "seqlen must be at least 3"),
    ],
)
def test_wrong_options_say_what_to_do(options, message):
    options = {"num_classes": 2, "tokenizer": BERT_UNCASED, "seqlen": 8, "batch_size": 2, **options}
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        LongDocumentData(**options)


def test_wrong_content_says_what_to_do(cases, tmp_path):
    with pytest.raises(ValueError, match="must have num_classes=4 labels, got 3: set data.num"):
        opened(task="ecthr", source=str(cases), root=str(tmp_path), num_classes=4)
    with pytest.raises(ValueError, match="label_pattern must have a group"):
        stand_in(tmp_path, label_pattern="^.+/")
    write(cases / "train.jsonl", [{"text": "a", "labels": 3}])
    with pytest.raises(ValueError, match="train.jsonl, line 1 must hold list in 'labels', got 3"):
        opened(task="ecthr", source=str(cases), root=str(tmp_path))
    (cases / "validation.jsonl").write_text("")
    with pytest.raises(FileNotFoundError, match="one val or dev or validation.jsonl .* with 2"):
        opened(task="ecthr", source=str(cases), root=str(tmp_path))


def test_a_tokenizer_that_is_not_there_says_what_to_do(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match="a folder with tokenizer.json, it has none"):
        load_document_tokenizer(str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConnectionError, match="a folder with tokenizer.json or a model of the hub"):
        load_document_tokenizer("nobody/nothing")
    (tmp_path / "tokenizer.json").write_text(
        tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, "a")).to_str()
    )
    with pytest.raises(ValueError, match="it has neither: take that of a BERT or RoBERTa"):
        load_document_tokenizer(str(tmp_path))


def test_every_argument_is_documented():
    for kind in (LongDocumentData, DocumentSource):
        for name in list(inspect.signature(kind.__init__).parameters)[1:]:
            assert name in kind.__doc__, f"{kind.__name__}: {name}"
