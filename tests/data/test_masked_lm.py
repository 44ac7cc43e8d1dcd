"""data/masked_lm.py and masked_samples.py: masks, pairs, order, resuming, validation."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from data.masked_lm import MaskedLMData, collate
from data.masked_samples import IGNORED_LABEL, MaskedOptions, MaskedSamples
from data.order import sample_ids
from data.prepare import prepare
from data.sources import open_source
from data.tokenizer import load_tokenizer
from tests.loading import opened, take

SEQLEN = 32
PAD, UNK, CLS, SEP, MASK = 0, 100, 101, 102, 103
WORDS = ["alpha", "beta", "gamma", "delta", "river", "mountain", "seven", "running"]


@pytest.fixture(scope="module")
def store_folder(tmp_path_factory):
    """40 documents of 5 to 300 words, each with a word of its own in every sentence."""
    folder = tmp_path_factory.mktemp("store")
    generator = random.Random(0)
    for i in range(40):
        sentences = []
        for _ in range(generator.randint(1, 40)):
            words = generator.choices(WORDS, k=generator.randint(3, 9))
            sentences.append(" ".join([str(i), *words]) + ".")
        (folder / f"{i:02}.txt").write_text(" ".join(sentences))
    (folder / "40.txt").write_text("one")  # one token: no sample
    options = {"val_fraction": 0.2, "shard_tokens": 1500, "workers": 0, "progress": False}
    tokenizer = load_tokenizer("bert-base-uncased")
    prepare(open_source(str(folder)), folder / "store", tokenizer=tokenizer, **options)
    return str(folder / "store")


def make(store_folder, rank=0, world_size=1, global_step=0, **options):
    options = {"source": store_folder, "seqlen": SEQLEN, "batch_tokens": 8 * SEQLEN, **options}
    data = MaskedLMData(**options)
    return opened(data, rank, world_size, global_step)


def originals(sample):
    """The tokens of a sample before masking."""
    return np.where(sample.labels == IGNORED_LABEL, sample.input_ids, sample.labels)


def all_samples(data, split="train", epoch=0):
    samples = data.samples(split)
    return [samples.sample(i, epoch) for i in range(len(samples))]


def rows_of(batch):
    """The samples of a batch of either form, as (input_ids, labels, segment_ids, nsp_label)."""
    keys = ("input_ids", "labels", "segment_ids")
    if "cu_seqlens" in batch:
        ends = batch["cu_seqlens"].tolist()
        rows = [
            [batch[k][a:b].tolist() for k in keys] for a, b in zip(ends, ends[1:], strict=False)
        ]
    else:
        rows = [
            [batch[k][i, :length].tolist() for k in keys]
            for i, length in enumerate(batch["lengths"].tolist())
        ]
    return [(*row, label) for row, label in zip(rows, batch["nsp_labels"].tolist(), strict=True)]


def assert_same(a, b):
    assert a.keys() == b.keys()
    assert all(torch.equal(torch.as_tensor(a[key]), torch.as_tensor(b[key])) for key in a)


def test_forms_of_a_batch(store_folder):
    padded, packed = (
        take(make(store_folder, packed=form).train_dataloader(), 2)[1] for form in (False, True)
    )
    shapes = {k: (tuple(v.shape), v.dtype) for k, v in padded.items()}
    assert shapes == {
        **dict.fromkeys(("input_ids", "labels", "segment_ids"), ((8, SEQLEN), torch.int64)),
        "lengths": ((8,), torch.int32),
        "nsp_labels": ((8,), torch.int64),
    }
    total = int(padded["lengths"].sum())
    assert packed["cu_seqlens"].dtype == torch.int32 and packed["max_seqlen"] == SEQLEN
    assert packed["cu_seqlens"].tolist()[-1] == total == len(packed["input_ids"])
    assert rows_of(padded) == rows_of(packed)
    is_pad = torch.arange(SEQLEN) >= padded["lengths"][:, None]
    assert padded["input_ids"][is_pad].eq(PAD).all()
    assert padded["labels"][is_pad].eq(IGNORED_LABEL).all()


def test_masks_are_15_percent_80_10_10_and_never_special(store_folder):
    data = make(store_folder, short_fraction=0.0)
    kinds = {"mask": 0, "same": 0, "random": 0}
    random_ids = []
    for epoch in range(30):
        for sample in all_samples(data, epoch=epoch):
            chosen = sample.labels != IGNORED_LABEL
            assert chosen.sum() == max(1, round(0.15 * len(sample.input_ids)))
            assert not np.isin(sample.labels[chosen], [PAD, UNK, CLS, SEP, MASK]).any()
            got, label = sample.input_ids[chosen], sample.labels[chosen]
            kinds["mask"] += int((got == MASK).sum())
            kinds["same"] += int((got == label).sum())
            changed = got[(got != MASK) & (got != label)]
            kinds["random"] += len(changed)
            random_ids += changed.tolist()
            assert (sample.input_ids[~chosen] != MASK).all()
    total = sum(kinds.values())
    # Three standard deviations of a binomial.
    for kind, share in (("mask", 0.8), ("same", 0.1), ("random", 0.1)):
        assert abs(kinds[kind] / total - share) < 3 * (share * (1 - share) / total) ** 0.5
    assert not set(random_ids) & {PAD, UNK, CLS, SEP, MASK}
    assert min(random_ids) < 3000 and max(random_ids) > 27000  # the whole vocabulary


def test_unknown_words_are_not_predicted():
    tokens = np.array([UNK, 5000, UNK, 5001, UNK, SEP])
    split = SimpleNamespace(
        read=lambda start, length: tokens[start : start + length].copy(),
        document_offsets=lambda: np.array([0, 6]),
    )
    samples = MaskedSamples(
        split,
        MaskedOptions(8, 0.9, None, False, 0.0),
        special=load_tokenizer("bert-base-uncased").special,
        sentence_ends=(1012,),
        vocab_size=30522,
        seed=0,
        name="train",
    )
    assert len(samples) == 1
    labels = samples.sample(0, 0).labels
    assert labels.tolist() == [IGNORED_LABEL, IGNORED_LABEL, 5000, IGNORED_LABEL, 5001, *[-100] * 2]
    assert samples.sample(0, 0).nsp_label == IGNORED_LABEL


def test_bound_on_predicted_tokens(store_folder):
    data = make(store_folder, max_masked=2, mask_fraction=0.5)
    counts = [(s.labels != IGNORED_LABEL).sum() for s in all_samples(data)]
    assert max(counts) == 2


def test_pairs_follow_or_come_from_another_document(store_folder):
    data = make(store_folder, short_fraction=0.0)
    store, tokenizer = data.store.train, data.tokenizer
    offsets = store.document_offsets()
    documents = [
        store.read(int(a), int(b - a)).tolist() for a, b in zip(offsets, offsets[1:], strict=False)
    ]

    def places(segment):
        """Documents that hold the segment."""
        text = " ".join(map(str, segment))
        return {i for i, d in enumerate(documents) if f" {text} " in f" {' '.join(map(str, d))} "}

    labels = []
    for sample in all_samples(data):
        ids = originals(sample)
        assert ids[0] == CLS and ids[-1] == SEP and (ids == SEP).sum() == 2
        assert len(ids) <= SEQLEN
        middle = int(np.flatnonzero(ids == SEP)[0])
        first, second = ids[1:middle], ids[middle + 1 : -1]
        assert len(first) and len(second)
        assert sample.segment_ids.tolist() == [0] * (middle + 1) + [1] * (len(second) + 1)
        if sample.nsp_label == 0:
            assert places([*first, *second])
        else:
            assert places(first) and places(second)
            # Fewer words come everywhere.
            assert min(len(first), len(second)) < 8 or not places([*first, *second])
        labels.append(sample.nsp_label)
        if np.isin(ids[1:-2], tokenizer.sentence_ends).any() and sample.nsp_label == 0:
            assert first[-1] in tokenizer.sentence_ends
    assert 0.35 < np.mean(labels) < 0.65 and len(labels) > 80


def test_single_spans_cover_each_document(store_folder):
    data = make(store_folder, sentence_pairs=False, short_fraction=0.0)
    samples = all_samples(data)
    assert {s.nsp_label for s in samples} == {IGNORED_LABEL}
    assert all((s.segment_ids == 0).all() for s in samples)
    text = np.concatenate([originals(s)[1:-1] for s in samples])
    offsets = data.store.train.document_offsets()
    room = SEQLEN - 2
    expected = []
    for start, end in zip(offsets, offsets[1:] - 1, strict=False):
        length = int(end - start)
        length -= length % room == 1  # a single token left over is dropped
        expected += data.store.train.read(int(start), length).tolist()
    assert text.tolist() == expected
    assert all(originals(s)[0] == CLS and originals(s)[-1] == SEP for s in samples)


def test_some_samples_are_short(store_folder):
    full = [len(s.input_ids) for s in all_samples(make(store_folder, short_fraction=0.0))]
    short = [len(s.input_ids) for s in all_samples(make(store_folder, short_fraction=1.0))]
    assert np.mean(short) < 0.75 * np.mean(full) and min(short) >= 5


def test_samples_are_a_function_of_seed_epoch_and_id(store_folder):
    def ids(seed, epoch, index, split="train"):
        sample = make(store_folder, seed=seed).samples(split).sample(index, epoch)
        return [sample.input_ids.tolist(), sample.labels.tolist()]

    assert ids(1, 0, 3) == ids(1, 0, 3)
    assert ids(1, 0, 3) != ids(1, 1, 3) and ids(1, 0, 3) != ids(2, 0, 3)
    assert ids(1, 0, 3, "val") == ids(2, 0, 3, "val")


def test_batches_follow_the_order_across_epochs(store_folder):
    data = make(store_folder)
    samples, n = data.samples("train"), data.num_samples
    steps = 2 * n // 8
    rows = [row for batch in take(data.train_dataloader(), steps) for row in rows_of(batch)]
    order = sample_ids(0, 8 * steps, seed=1111, num_samples=n)
    for i in (0, 5, n - 1, n, n + 1, 8 * steps - 1):
        sample = samples.sample(int(order[i]), i // n)
        assert rows[i][0] == sample.input_ids.tolist() and rows[i][3] == sample.nsp_label


@pytest.mark.parametrize("packed", [False, True])
def test_processes_and_workers_change_nothing(store_folder, packed):
    whole = take(make(store_folder, packed=packed).train_dataloader(), 4)
    for batch, other in zip(
        whole,
        take(make(store_folder, packed=packed, num_workers=2).train_dataloader(), 4),
        strict=True,
    ):
        assert_same(batch, other)
    shares = [
        take(make(store_folder, rank=r, world_size=4, packed=packed).train_dataloader(), 4)
        for r in range(4)
    ]
    for step, batch in enumerate(whole):
        assert rows_of(batch) == [row for share in shares for row in rows_of(share[step])]


def test_resume_continues_at_the_same_sample(store_folder):
    data = make(store_folder)
    expected = take(data.train_dataloader(), 7)[5:]
    data.trainer.global_step = 5
    state = data.state_dict()
    assert state == {"position": 40, "global_step": 5, "fingerprint": data.fingerprint}
    other = make(store_folder, global_step=5)
    other.load_state_dict(state)
    for a, b in zip(expected, take(other.train_dataloader(), 2), strict=True):
        assert_same(a, b)
    for change in (
        {"mask_fraction": 0.2},
        {"max_masked": 3},
        {"sentence_pairs": False},
        {"short_fraction": 0.5},
        {"seqlen": 16},
        {"seed": 3},
    ):
        changed = make(store_folder, **change)
        changed.load_state_dict(state)
        with pytest.raises(ValueError, match="must be continued on the data"):
            changed.train_dataloader()
    packed_or_not = make(store_folder, packed=False)
    packed_or_not.load_state_dict(state)
    packed_or_not.train_dataloader()


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("limit", [None, 7])
def test_held_out_examples_come_once_and_never_change(store_folder, world_size, packed, limit):
    options = {"val_batch_tokens": 4 * SEQLEN, "batch_tokens": 12 * SEQLEN, "packed": packed}
    ranks = [
        make(store_folder, r, world_size, val_samples_limit=limit, seed=r, **options)
        for r in range(world_size)
    ]
    batches = [list(data.val_dataloader()) for data in ranks]
    assert len({len(b) for b in batches}) == 1
    assert len({len(x["nsp_labels"]) for b in batches for x in b}) == 1
    rows = [row for b in batches for x in b for row in rows_of(x)]
    real = [row for row in rows if len(row[0]) > 1]
    filler = [row for row in rows if len(row[0]) == 1]
    assert filler == [([PAD], [IGNORED_LABEL], [0], IGNORED_LABEL)] * len(filler)
    data = ranks[0]
    everything = [s.input_ids.tolist() for s in all_samples(data, "val")]
    assert len(real) == data.num_val_samples == (limit or len(everything))
    assert (data.num_held_out("val"), data.num_held_out("test")) == (len(real), 0)
    remaining = list(everything)
    for row in real:
        remaining.remove(row[0])
    assert len(data.val_dataloader()) == len(data.test_dataloader())


def test_nothing_held_out_means_no_validation(tmp_path):
    (tmp_path / "a.txt").write_text("some words. " * 40)
    options = {"source": str(tmp_path / "a.txt"), "root": str(tmp_path / "r"), "val_fraction": 0.0}
    data = make(None, **options)
    assert data.val_dataloader() == []
    # One document: no other one to draw a segment from.
    assert {s.nsp_label for s in all_samples(data)} == {0}
    (tmp_path / "a.txt").write_text("word")
    with pytest.raises(ValueError, match="a document of at least 2 tokens, got 2 tokens"):
        make(None, **options)


def test_constant_guess_is_the_commonest_training_token(tmp_path):
    """Training text has most of "river"; the held-out text has it in 2 of 8 tokens."""
    (tmp_path / "a.txt").write_text("seven")
    data = MaskedLMData(source=str(tmp_path), seqlen=8, batch_tokens=8, root=str(tmp_path / "r"))
    tokens = data.tokenizer.encode("river beta. river gamma. seven seven") + [SEP]
    data._store = SimpleNamespace(
        train_counts=lambda: np.bincount(
            data.tokenizer.encode("river river river beta beta.") + [SEP] * 9,
            minlength=data.vocab_size,
        ),
        val=SimpleNamespace(num_tokens=len(tokens), read=lambda start, n: np.array(tokens)[:n]),
    )
    assert data.constant_accuracy() == 2 / 8
    assert data.comparison("val") == (
        "the commonest token everywhere: 25.00%",
        {"constant_accuracy": 0.25},
    )


def test_global_random_state_is_untouched(store_folder):
    states = []
    for _ in range(2):
        states.append((torch.get_rng_state().tolist(), np.random.get_state()[1].tolist()))
        take(make(store_folder).train_dataloader(), 2)
    assert states[0] == states[1]


def test_wrong_arguments_are_refused(store_folder, tmp_path):
    for change, words in [
        ({"seqlen": 4, "batch_tokens": 8}, "seqlen must be at least 5"),
        ({"mask_fraction": 0.0}, r"mask_fraction must be in \(0, 1\), got 0.0"),
        ({"short_fraction": 1.5}, r"short_fraction must be in \[0, 1\], got 1.5"),
        ({"max_masked": 0}, "max_masked must be at least 1, got 0"),
        ({"val_samples_limit": 0}, "val_samples_limit must be at least 1"),
        ({"batch_tokens": 100}, "multiple of seqlen=32"),
    ]:
        options = {"source": store_folder, "seqlen": SEQLEN, "batch_tokens": 8 * SEQLEN, **change}
        with pytest.raises(ValueError, match=words):
            MaskedLMData(**options)
    (tmp_path / "a.txt").write_text("some words. " * 40)
    prepare(
        open_source(str(tmp_path / "a.txt")),
        tmp_path / "gpt2",
        tokenizer=load_tokenizer("gpt2"),
        workers=0,
        progress=False,
    )
    with pytest.raises(ValueError, match="must be tokenized with 'bert-base-uncased', got 'gpt2'"):
        make(str(tmp_path / "gpt2"))


def test_collate_keeps_the_longest_sample(store_folder):
    sample = make(store_folder).samples("train").sample(0, 0)
    batch = collate([sample], seqlen=len(sample.input_ids), pad=PAD, packed=False)
    assert batch["input_ids"][0].tolist() == sample.input_ids.tolist()
