"""data/context_warmup.py: which step has which context; no token is lost or comes twice."""

import random
from collections import Counter

import pytest
import torch

from data.causal_lm import CausalLMData
from data.context_warmup import ContextWarmup
from data.prepare import prepare
from data.sources import open_source
from data.tokenizer import load_tokenizer
from tests.loading import placed, take

STAGES, SEQLEN, MAX_STEPS = [[4, 0.4], [8, 0.7]], 16, 20
CONTEXTS = [4] * 8 + [8] * 6 + [16] * 6  # by hand: 40 % of 20 steps, then to 70 %


@pytest.fixture(scope="module")
def store_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    generator = random.Random(0)
    words = [f"word{i}" for i in range(200)]
    for i in range(10):
        (folder / f"{i:02}.txt").write_text(" ".join(generator.choices(words, k=60)))
    options = {"val_fraction": 0.1, "workers": 0, "progress": False}
    prepare(open_source(str(folder)), folder / "store", tokenizer=load_tokenizer(), **options)
    return str(folder / "store")


def make(store_folder, rank=0, world_size=1, global_step=0, **options):
    data = CausalLMData(
        **{
            "source": store_folder,
            "seqlen": SEQLEN,
            "batch_tokens": 4 * SEQLEN,
            "max_steps": MAX_STEPS,
            "context_warmup": STAGES,
            **options,
        }
    )
    placed(data, rank, world_size, global_step)
    data.setup()
    return data


def test_stages_of_the_paper_size_run():
    """70 % and 90 % of 400,000 steps."""
    stages = [[1024, 0.7], [4096, 0.9]]
    warmup = ContextWarmup.planned(stages, seqlen=16384, max_steps=400_000)
    assert warmup.first_steps == (0, 280_000, 360_000)
    at = [0, 279_999, 280_000, 359_999, 360_000, 399_999, 500_000]
    assert [warmup.seqlen(step) for step in at] == [1024, 1024, 4096, 4096, 16384, 16384, 16384]


@pytest.mark.parametrize("first_steps", [(0, 8, 14), (0, 7, 9), (0, 1, 2), (0, 13, 16)])
def test_a_stage_takes_every_piece_of_its_windows_once(first_steps):
    """Whole rounds and not: 8 = 2 rounds of 4 pieces, 7 = a round and 3 steps, ..."""
    warmup = ContextWarmup((4, 8, 16), first_steps)
    for stage, num_pieces in enumerate((4, 2)):
        steps = range(first_steps[stage], first_steps[stage + 1])
        cuts = [warmup.cut(step) for step in steps]
        assert all(len(cut) == num_pieces for cut in cuts)
        expected = [(step, piece) for step in steps for piece in range(num_pieces)]
        assert sorted(sum(cuts, [])) == expected
        whole = len(steps) // num_pieces * num_pieces
        assert all(len({s for s, _ in cut}) == num_pieces for cut in cuts[:whole]), (
            "pieces of one window are in different batches"
        )
    assert warmup.cut(first_steps[2] + 3) == [(first_steps[2] + 3, 0)]


def test_a_run_consumes_the_tokens_that_it_would_without_a_warmup(store_folder):
    """20 steps of 4 windows are more than an epoch; after each stage both runs are at one place."""
    data = make(store_folder)
    assert data.num_samples < MAX_STEPS * 4 and data.contexts == (4, 8, 16)
    batches, plain = (
        take(data.train_dataloader(), 20),
        take(make(store_folder, context_warmup=None).train_dataloader(), 20),
    )
    assert [batch["input_ids"].shape for batch in batches] == [(64 // c, c) for c in CONTEXTS]
    for first, end in ((0, 8), (8, 14), (14, 20)):
        pairs = [
            Counter(
                (inputs, labels)
                for batch in run[first:end]
                for inputs, labels in zip(
                    batch["input_ids"].flatten().tolist(),
                    batch["labels"].flatten().tolist(),
                    strict=True,
                )
            )
            for run in (batches, plain)
        ]
        assert pairs[0] == pairs[1] and pairs[0].total() == (end - first) * 64
    pieces = {tuple(row) for batch in plain[:8] for row in batch["input_ids"].view(-1, 4).tolist()}
    assert {tuple(row) for batch in batches[:8] for row in batch["input_ids"].tolist()} == pieces
    assert all(
        torch.equal(a["labels"], b["labels"]) for a, b in zip(batches[14:], plain[14:], strict=True)
    )


def test_processes_and_workers_change_nothing_but_the_order_in_a_batch(store_folder):
    whole = take(make(store_folder).train_dataloader(), 18)
    for a, b in zip(
        whole, take(make(store_folder, num_workers=2).train_dataloader(), 18), strict=True
    ):
        assert torch.equal(a["input_ids"], b["input_ids"])
    shares = [
        take(make(store_folder, rank=r, world_size=2).train_dataloader(), 18) for r in range(2)
    ]
    for step, batch in enumerate(whole):
        joined = torch.cat([share[step]["input_ids"] for share in shares])
        assert joined.shape == batch["input_ids"].shape
        assert sorted(joined.tolist()) == sorted(batch["input_ids"].tolist())


@pytest.mark.parametrize("stop", [1, 8, 9, 13, 14])
def test_resume_continues_at_the_same_tokens(store_folder, stop):
    expected = take(make(store_folder).train_dataloader(), 20)[stop:]
    state = make(store_folder, global_step=stop).state_dict()
    other = make(store_folder, global_step=stop)
    other.load_state_dict(state)
    for a, b in zip(take(other.train_dataloader(), 20 - stop), expected, strict=True):
        assert torch.equal(a["input_ids"], b["input_ids"])


@pytest.mark.parametrize(
    "change", [{"context_warmup": None}, {"max_steps": 30}, {"batch_tokens": 2 * SEQLEN}]
)
def test_stages_may_change_only_when_they_are_over(store_folder, change):
    for step, is_over in ((9, False), (14, True)):
        state = make(store_folder, global_step=step).state_dict()
        if is_over:
            change = {**change, "context_warmup": None}
        other = make(store_folder, global_step=step, **change)
        other.load_state_dict(state)
        if is_over:
            other.train_dataloader()
            continue
        with pytest.raises(ValueError, match="must be continued on the data that it was trained"):
            other.train_dataloader()


@pytest.mark.parametrize(
    "stages, words",
    [
        ([], r"must be null or a list of \[context, until\], such as .*got \[\]"),
        (0.7, "must be null or a list of"),
        ([[4, 0.4, 1]], "must be null or a list of"),
        ([[4, "half"]], "must be null or a list of"),
        ([[4.5, 0.4]], "must be null or a list of"),
        ([[5, 0.4]], r"must rise and divide seqlen=16, got \[5\]"),
        ([[16, 0.4]], r"must rise and divide seqlen=16, got \[16\]"),
        ([[8, 0.4], [4, 0.7]], r"must rise and divide seqlen=16, got \[8, 4\]"),
        ([[4, 0.7], [8, 0.4]], r"must rise between 0 and 1, got \[0.7, 0.4\]"),
        ([[4, 0.0]], r"must rise between 0 and 1, got \[0.0\]"),
        ([[4, 70]], r"must rise between 0 and 1, got \[70.0\]"),
        ([[4, 0.99]], r"must have a step, got .* \[0, 20\] of 20: train longer or leave out"),
    ],
)
def test_wrong_stages_are_refused(store_folder, stages, words):
    with pytest.raises(ValueError, match=words):
        make(store_folder, context_warmup=stages)


def test_stages_need_the_length_of_the_run(store_folder):
    with pytest.raises(ValueError, match="context_warmup needs max_steps"):
        make(store_folder, max_steps=None)
