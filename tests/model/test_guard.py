"""A bad step changes no weight, is written down, and the run ends or goes on as its policy says."""

import functools
import json
import os
import signal

import pytest
import torch
from lightning import Callback, Trainer

import train
from data.stepped import SteppedData
from model.attention import sdpa_attention
from model.checkpoint import AtomicCheckpointIO, newest_intact
from model.gpt import GPT
from model.guard import StepGuard, TrainingError, explained
from model.language_task import CausalLMTask
from model.optim import adamw, lamb
from model.saving import Checkpoints

BATCH, SAMPLES = 2, 16


def make_batch(ids, positions):
    """Sample i is made of seed i; its id is kept for the test."""
    rows = [torch.randint(37, (9,), generator=torch.Generator().manual_seed(int(i))) for i in ids]
    tokens = torch.stack(rows)
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:], "ids": torch.tensor(ids)}


class Samples(SteppedData):
    seqlen, batch_size, num_samples, fingerprint = 8, BATCH, SAMPLES, "samples"

    def __init__(self):
        super().__init__(seed=0, num_workers=0)

    def train_batch(self):
        return make_batch

    def val_dataloader(self):
        return []


class Poison(Callback):
    """Makes the gradient of a batch bad: of a step, or wherever a sample comes."""

    def __init__(self, how, step=None, sample=None):
        self.how, self.step, self.sample, self.seen, self.weights = how, step, sample, [], []

    def on_train_batch_start(self, trainer, task, batch, batch_idx):
        ids = batch["ids"].tolist()
        self.seen.append((trainer.global_step, ids))
        self.weights.append({n: v.clone() for n, v in task.model.state_dict().items()})
        self.bad = trainer.global_step == self.step or self.sample in ids
        task.factor = self.how if self.bad else 1.0

    def on_after_backward(self, trainer, task):
        if self.bad:
            for param in task.parameters():
                param.grad *= self.how


class Task(CausalLMTask):
    factor = 1.0

    def derived(self, means):
        return {"loss": means["loss"] * abs(self.factor)}


def fit(folder, poison, resume=False, optimizer=adamw, steps=6, every=2, data=None, **options):
    torch.manual_seed(0)
    sizes = {"vocab_size": 37, "max_seqlen": 8, "depth": 1, "dim": 8, "nheads": 2}
    make = functools.partial(optimizer, lr=1e-2)
    task = Task(GPT(**sizes, attention=sdpa_attention), make, max_steps=6)
    saves = Checkpoints(folder=str(folder / "checkpoints"), every_n_steps=every)
    trainer = Trainer(
        accelerator="cpu",
        max_steps=steps,
        callbacks=[poison, StepGuard(folder=str(folder), **options), saves],
        plugins=[AtomicCheckpointIO()],
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    data = data or Samples()
    path = newest_intact(folder / "checkpoints") if resume else None
    train.fit(path, data, task, trainer)
    return task, trainer, data


def records(folder):
    return [json.loads(line) for line in (folder / "bad_steps.jsonl").read_text().splitlines()]


def assert_equal(a, b):
    for name, value in a.items():
        assert torch.equal(b[name], value), name


@pytest.mark.parametrize("how", [float("nan"), float("inf")])
def test_stop_saves_the_state_before_the_step_and_names_the_samples(tmp_path, how):
    poison = Poison(how, step=3)
    with pytest.raises(TrainingError, match="before step 3 changed anything: .*not both finite"):
        fit(tmp_path, poison, every=100)
    (record,) = records(tmp_path)
    assert record["step"] == 3 and record["sample_ids"] == poison.seen[3][1]
    assert record["grad_norm"] == "nan"
    again = Poison(how, step=3)
    task, _, data = fit(tmp_path, again, resume=True, policy="skip", every=100)
    assert again.seen[0] == poison.seen[3]
    assert_equal(again.weights[0], poison.weights[3])
    assert data.position == 6 * BATCH and task.trainer.global_step == 6


@pytest.mark.parametrize("optimizer", [adamw, lamb])
def test_skip_changes_neither_weights_nor_moments(tmp_path, optimizer):
    poison = Poison(float("nan"), step=3)
    task, trainer, _ = fit(tmp_path, poison, policy="skip", optimizer=optimizer)
    assert_equal(poison.weights[3], poison.weights[4])
    assert trainer.global_step == 6 and [ids for _, ids in poison.seen] == [
        Samples().sample_ids(step).tolist() for step in range(6)
    ]
    for state in trainer.optimizers[0].state.values():
        assert all(value.isfinite().all() for value in state.values()) and state["step"] == 5
    assert all(value.isfinite().all() for value in task.model.state_dict().values())


def test_rollback_restores_and_leaves_out_the_samples(tmp_path):
    """At step 5 back to step 4: the samples of steps 4 and 5 do not come again."""
    bad = int(Samples().sample_ids(5)[0])
    poison = Poison(float("nan"), sample=bad)
    _, trainer, data = fit(tmp_path, poison, policy="rollback")
    order = [Samples().sample_ids(step).tolist() for step in range(8)]
    expected = [*zip(range(6), order, strict=False), (4, order[6]), (5, order[7])]
    assert poison.seen == expected and trainer.global_step == 6
    assert_equal(poison.weights[4], poison.weights[6])
    assert data.position == 8 * BATCH
    # A run that is resumed later knows of it.
    later = Poison(1.0)
    fit(tmp_path, later, resume=True, steps=7)
    assert later.seen == [(6, Samples().sample_ids(8).tolist())]


def test_rollback_before_any_checkpoint_skips(tmp_path):
    _, trainer, _ = fit(tmp_path, Poison(float("nan"), step=1), policy="rollback")
    assert records(tmp_path)[0]["policy"] == "skip" and trainer.global_step == 6


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_endless_bad_steps_end_the_run(tmp_path, policy):
    class FromStep3(Poison):
        def on_train_batch_start(self, trainer, task, batch, batch_idx):
            self.step = max(3, trainer.global_step)
            super().on_train_batch_start(trainer, task, batch, batch_idx)

    with pytest.raises(TrainingError, match="bad step 4"):
        fit(tmp_path, FromStep3(float("nan")), policy=policy, max_bad_steps=3, steps=99)
    assert len(records(tmp_path)) == 4
    checkpoint = torch.load(newest_intact(tmp_path / "checkpoints"), weights_only=True)
    assert all(value.isfinite().all() for value in checkpoint["state_dict"].values())


def test_spike_is_held_against_the_median_and_survives_a_resume(tmp_path):
    options = {"policy": "skip", "spike_factor": 3.0, "window": 3}
    fit(tmp_path, Poison(10.0, step=2), steps=4, **options)  # before the window is full
    assert not (tmp_path / "bad_steps.jsonl").exists()
    fit(tmp_path, Poison(4.0, step=4), resume=True, **options)
    (record,) = records(tmp_path)
    assert record["step"] == 4 and "times the usual" in record["reason"]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"policy": "hope"}, "policy must be one of stop, skip, rollback, got 'hope'"),
        ({"spike_factor": 1.0}, "spike_factor must be above 1 or null, got 1.0"),
        ({"window": 0}, "window must be at least 1 and max_bad_steps 0, got 0 and 20"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        StepGuard(folder="", **options)


@pytest.mark.parametrize(
    "micro, advice", [(4, "task.micro_batch_tokens=16"), (1, "data.seqlen=4, a smaller model")]
)
def test_out_of_memory_names_the_micro_batch_to_try(tmp_path, micro, advice):
    task, trainer, _ = fit(tmp_path, Poison(1.0), steps=1)
    task.cut = (8, micro, 8)
    error = explained(torch.OutOfMemoryError("CUDA out of memory"), trainer, task)
    assert f"micro-batch of {micro} x 8 tokens" in str(error) and advice in str(error)
    trainer.validating = True
    error = explained(torch.OutOfMemoryError("CUDA out of memory"), trainer, task)
    assert "lower data.val_batch_tokens" in str(error)
    assert explained(ValueError("other"), trainer, task) is None


@pytest.mark.parametrize(
    "error, cause",
    [
        (
            RuntimeError("[gloo/tcp/pair.cc:537] Connection reset by peer. More of it"),
            "says why ([gloo/tcp/pair.cc:537] Connection reset by peer); resume=auto",
        ),
        (torch.distributed.DistBackendError("NCCL error\nLast"), "says why (NCCL error); resume"),
    ],
)
def test_a_lost_process_is_explained(error, cause):
    message = str(explained(error, None, None))
    assert message.startswith("another process of the run ended") and cause in message
    assert explained(RuntimeError("other"), None, None) is None


class Mortal(Samples):
    """Its worker is killed at the fourth batch, as by a system that is out of memory."""

    def __init__(self):
        super().__init__()
        self._num_workers = 1

    def train_batch(self):
        return make_batch_or_die


def make_batch_or_die(ids, positions):
    if positions[0] >= 3 * BATCH:
        os.kill(os.getpid(), signal.SIGKILL)
    return make_batch(ids, positions)


def test_a_dead_worker_is_explained_and_older_checkpoints_hold(tmp_path):
    with pytest.raises(RuntimeError, match="DataLoader worker") as caught:
        fit(tmp_path, Poison(1.0), every=1, data=Mortal())
    error = explained(caught.value, None, None)
    assert "a process that loads data died" in str(error) and "data.num_workers" in str(error)
    seen = Poison(1.0)
    _, trainer, _ = fit(tmp_path, seen, resume=True)
    assert trainer.global_step == 6 and seen.seen[-1] == (5, Samples().sample_ids(5).tolist())
