import multiprocessing

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from model.loss import IGNORE
from scripts import training_contestants
from scripts.benchmark_training import (
    Contest,
    ask,
    race,
    row_of,
    run_trainer,
    serve,
)
from scripts.bert_contestants import mean_work, random_steps, wikipedia_lengths
from scripts.training_contestants import Racer, Setting, build_racer
from scripts.training_tables import report_blocks, speed_table

TINY = Setting("gpt2_tiny", seqlen=16, tokens=64, compile=False)
BERT = Setting("bert_tiny", seqlen=32, tokens=128, compile=False)


@pytest.mark.parametrize("name", ["ours", "plain", "hf_sdpa"])
def test_a_step_trains_on_the_mean_loss_of_its_batch(name):
    """Whatever the micro-batch; the loss against that of the model's own logits."""
    if name == "hf_sdpa":
        pytest.importorskip("transformers")
    whole, parts = (Racer(name, TINY, micro) for micro in (4, 1))
    if name == "hf_sdpa":
        for racer in (whole, parts):
            racer.model.eval()  # their dropout is 0.1
    tokens = whole.steps[0][0]
    with torch.no_grad():
        if name == "hf_sdpa":
            # Their loss leaves out the last token: a mean of 15 labels, weighed as one of 16.
            logits = whole.model(tokens[:, :-1]).logits[:, :-1]
            expected = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:-1].flatten())
        else:
            hidden = whole.model.hidden(tokens[:, :-1])
            logits = F.linear(hidden, whole.model.head_weight)
            logits = logits[..., : 50257 if name == "ours" else None]
            expected = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    losses = [[racer.step().item() for _ in range(3)] for racer in (whole, parts)]
    assert losses[0][0] == pytest.approx(expected.item(), rel=1e-5)
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0][2] < losses[0][0]  # the batches take turns: the first again


@pytest.mark.parametrize("name", ["bert", "bert_padded", "bert_hf_sdpa"])
def test_a_step_of_bert_trains_on_both_losses(name):
    """The mean over the step's masked tokens and that over its pairs, from logits of each sequence
    by itself, whatever the micro-batch."""
    if name == "bert_hf_sdpa":
        pytest.importorskip("transformers")
    racers = [Racer(name, BERT, micro) for micro in (4, 1)]
    for racer in racers:
        racer.model.eval()  # dropout
    model, (samples, _) = racers[0].model, random_steps(32, 128)
    masked, pairs = [], []
    with torch.no_grad():
        for sample in samples:
            ids, segments = torch.tensor(sample.input_ids)[None], torch.tensor(sample.segment_ids)
            if name == "bert_hf_sdpa":
                out = model(input_ids=ids, token_type_ids=segments[None])
                words, pair = out.prediction_logits[0], out.seq_relationship_logits
            else:
                hidden = model.hidden(ids, segment_ids=segments[None])
                words, pair = model.mlm_logits(hidden)[0], model.nsp_logits(model.pooled(hidden))
            labels = torch.tensor(sample.labels)
            masked.append(F.cross_entropy(words, labels, reduction="none")[labels != IGNORE])
            pairs.append(F.cross_entropy(pair, torch.tensor([sample.nsp_label])))
    expected = torch.cat(masked).mean() + torch.stack(pairs).mean()
    losses = [[racer.step().item() for _ in range(3)] for racer in racers]
    assert losses[0][0] == pytest.approx(expected.item(), rel=1e-5)
    assert losses[0][2] < losses[0][0]  # the steps take turns: the first again
    if name != "bert_hf_sdpa":  # which averages the means of micro-batches
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_lengths_are_wikipedias():
    """Krell et al.'s histogram: 23.4 % have 512 tokens, the mean is 255.8."""
    lengths = wikipedia_lengths(200_000, 512, np.random.default_rng(0))
    assert lengths.min() >= 4 and lengths.max() == 512
    assert lengths.mean() == pytest.approx(255.8, abs=1.2)
    assert (lengths == 512).mean() == pytest.approx(0.2343, abs=0.003)
    work = mean_work(32, 128)
    steps = [[len(sample.input_ids) for sample in step] for step in random_steps(32, 128)]
    assert work["samples"] == 4 and work["tokens"] == sum(map(sum, steps)) / 2
    assert work["pairs"] == sum(length**2 for step in steps for length in step) / 2


def test_takes_the_largest_micro_batch_that_memory_holds(monkeypatch):
    tried = []

    class Hungry:
        def __init__(self, name, setting, micro_batch):
            tried.append(micro_batch)
            self.micro_batch = micro_batch

        def step(self):
            if self.micro_batch > holds:
                raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(training_contestants, "Racer", Hungry)
    holds = 1
    assert build_racer("ours", TINY).micro_batch == 1 and tried == [4, 2, 1]
    holds = 0
    with pytest.raises(torch.OutOfMemoryError):
        build_racer("ours", TINY)


def test_what_cannot_run_is_reported():
    class Pipe(list):
        send = list.append

    pipe = Pipe()
    serve(pipe, "ours", TINY._replace(model="gpt3"))
    assert len(pipe) == 1 and "gpt3" in pipe[0]["failure"]


def test_a_process_that_ends_in_a_round_ends_no_race():
    near, far = multiprocessing.Pipe()
    far.close()
    assert ask(near, "time", 1) is None


def test_who_finds_too_little_memory_beside_others_is_built_alone(monkeypatch):
    """ "small" takes half of TINY's four sequences beside another one, all of them alone."""
    started = []

    class Stub:
        exitcode = 0

        def __init__(self, answers):
            self.answers = answers

        def recv(self):
            return self.answers

        def kill(self):
            started.append("killed")

        def join(self):
            pass

    def start(self, name):
        alone = name in started
        started.append(name)
        whole = name == "large" or alone
        facts = {"micro_batch": 4 if whole else 2, "peak_gib": 1.0, "failure": None}
        return Stub(facts), Stub(None)

    monkeypatch.setattr(Contest, "_start", start)
    contest = Contest(TINY)
    contest.build(["small", "large"])
    assert started == ["small", "large", "killed", "small"]
    assert {name: facts["micro_batch"] for name, facts in contest.facts.items()} == {
        "small": 4,
        "large": 4,
    }
    assert set(contest.pipes) == {"small", "large"}


def test_race():
    """In a process of its own."""
    (row,) = race(TINY, ["ours"], rounds=2, steps=1, num_kernels=3, sustained_steps=3)
    assert row["impl"] == "ours" and row["failure"] is None
    assert row["tokens_per_s"] > 0 and row["micro_batch"] == 4
    assert row["sustained_tokens_per_s"] > 0
    total, *slowest = row["kernels_ms"].values()
    assert len(slowest) == 3 and sorted(slowest, reverse=True) == slowest
    assert 0 < sum(slowest) <= total


def test_rates_of_bert_are_of_real_tokens():
    (row,) = race(BERT, ["bert"], rounds=1, steps=2)
    assert row["failure"] is None and row["dropout_p"] == 0.1
    assert row["mean_length"] == mean_work(32, 128)["tokens"] / 4 < 32
    assert row["tokens_per_s"] == pytest.approx(row["samples_per_s"] * row["mean_length"])


@pytest.mark.long
def test_the_trainer_is_run_as_a_user_runs_it():
    on_cpu = ("trainer=cpu", "task.compile=false")
    row = run_trainer(TINY._replace(overrides=on_cpu))
    assert row["impl"] == "trainer" and row["failure"] is None and row["tokens_per_s"] > 0
    row = run_trainer(TINY._replace(overrides=(*on_cpu, "optimizer.nothing=1")))
    assert row["tokens_per_s"] is None and "nothing" in row["failure"]


def test_table_of_rates_and_ratios():
    setting = Setting("gpt2_small", 1024, 65536)
    facts = {"failure": None, "micro_batch": 64, "peak_gib": 25.04}
    rows = [
        row_of("ours", setting, facts, 600_000.0),
        row_of("plain", setting, {**facts, "peak_gib": 40.66}, 500_000.0),
        row_of("hf_eager", setting, {"failure": "out of memory"}, None),
    ]
    header, lines = speed_table({"rows": rows})
    assert lines == [["gpt2_small, 1,024", "600 (25.0)", "500 (40.7)", "-", "1.20"]]
    assert header[-1] == "ours / plain recipe, SDPA, compiled"
    lasting = {**rows[0], "sustained_tokens_per_s": 580_000.0}
    header, lines = speed_table({"rows": [lasting, row_of("trainer", setting, facts, 570_000.0)]})
    assert header[-1] == "ours, train.py / ours" and lines[0][-1] == "0.98", "of the same length"
    rows += [{**row, "seqlen": 4096, "tokens_per_s": 4e5} for row in rows[:1]]
    table, plot = report_blocks({"rows": rows})
    assert len(table.rows) == 2
    assert plot.series == {"ours": [(1024, 600.0), (4096, 400.0)]}
