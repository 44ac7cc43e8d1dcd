"""A bad step changes no weight, is written down, and the run ends or goes on as its policy says."""

import functools
import json
import os
import signal

import pytest
import torch
from lightning import Callback, Trainer
from torch.utils.data import DataLoader

import train
from data.stepped import SteppedData
from model.attention import sdpa_attention
from model.callbacks import Metrics
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
    """Makes the gradient of a batch bad: of a step, or wherever some samples come."""

    def __init__(self, how, step=None, samples=()):
        self.how, self.step, self.samples, self.seen, self.weights = how, step, samples, [], []

    def on_train_batch_start(self, trainer, task, batch, batch_idx):
        ids = batch["ids"].tolist()
        self.seen.append((trainer.global_step, ids))
        self.weights.append({n: v.clone() for n, v in task.model.state_dict().items()})
        self.bad = trainer.global_step == self.step or ids[0] in self.samples
        task.factor = self.how if self.bad else 1.0

    def on_after_backward(self, trainer, task):
        if self.bad:
            for param in task.parameters():
                param.grad *= self.how


class Task(CausalLMTask):
    factor = 1.0

    def derived(self, means):
        return {"loss": means["loss"] * abs(self.factor)}


class Validated(Samples):
    def val_dataloader(self):
        return DataLoader([make_batch([1, 2], None)], batch_size=None)


def fit(
    folder,
    poison,
    resume=False,
    optimizer=adamw,
    steps=6,
    every=2,
    data=None,
    accelerator="cpu",
    **options,
):
    torch.manual_seed(0)
    sizes = {"vocab_size": 37, "max_seqlen": 8, "depth": 1, "dim": 8, "nheads": 2}
    make = functools.partial(optimizer, lr=1e-2)
    task = Task(GPT(**sizes, attention=sdpa_attention), make, max_steps=6)
    saves = Checkpoints(folder=str(folder / "checkpoints"), every_n_steps=every)
    trainer = Trainer(
        accelerator=accelerator,
        devices=1,
        max_steps=steps,
        val_check_interval=3,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        callbacks=[
            poison,
            Metrics(every_n_steps=2, show=False),
            StepGuard(folder=str(folder), **options),
            saves,
        ],
        plugins=[AtomicCheckpointIO()],
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    data = data or Samples()
    path = newest_intact(folder / "checkpoints") if resume else None
    train.fit(path, data, task, trainer)
    return task, trainer, data


@pytest.fixture(
    params=[
        pytest.param({"wait": True}, id="waits"),
        pytest.param({"wait": False}, id="goes on"),
        pytest.param({"accelerator": "cuda"}, id="goes on by itself", marks=pytest.mark.gpu),
    ]
)
def host(request):
    """Whether the host waits for each step, or hears of it a step later."""
    return request.param


def records(folder):
    return [json.loads(line) for line in (folder / "bad_steps.jsonl").read_text().splitlines()]


def assert_equal(a, b):
    for name, value in a.items():
        assert torch.equal(b[name], value), name


@pytest.mark.parametrize("how", [float("nan"), float("inf")])
def test_stop_saves_the_state_before_the_step_and_names_the_samples(tmp_path, host, how):
    poison = Poison(how, step=3)
    with pytest.raises(TrainingError, match="before step 3 changed anything: .*not both finite"):
        fit(tmp_path, poison, every=100, **host)
    (record,) = records(tmp_path)
    assert record["step"] == 3 and record["sample_ids"] == poison.seen[3][1]
    assert record["grad_norm"] == "nan"
    again = Poison(how, step=3)
    task, _, data = fit(tmp_path, again, resume=True, policy="skip", every=100, **host)
    assert again.seen[0] == poison.seen[3]
    assert_equal(again.weights[0], poison.weights[3])
    assert data.position == 6 * BATCH and task.trainer.global_step == 6


@pytest.mark.parametrize("optimizer", [adamw, lamb])
def test_skip_changes_neither_weights_nor_moments(tmp_path, host, optimizer):
    poison = Poison(float("nan"), step=3)
    task, trainer, _ = fit(tmp_path, poison, policy="skip", optimizer=optimizer, **host)
    assert_equal(poison.weights[3], poison.weights[4])
    assert trainer.global_step == 6 and [ids for _, ids in poison.seen] == [
        Samples().sample_ids(step).tolist() for step in range(6)
    ]
    for state in trainer.optimizers[0].state.values():
        assert all(value.isfinite().all() for value in state.values()) and state["step"] == 5
    assert all(value.isfinite().all() for value in task.model.state_dict().values())


def test_rollback_restores_and_leaves_out_the_samples(tmp_path, host):
    """At step 5 back to step 4: the samples of steps 4 and 5 do not come again."""
    bad = int(Samples().sample_ids(5)[0])
    poison = Poison(float("nan"), samples=[bad])
    _, trainer, data = fit(tmp_path, poison, policy="rollback", **host)
    order = [Samples().sample_ids(step).tolist() for step in range(8)]
    expected = [*zip(range(6), order, strict=False), (4, order[6]), (5, order[7])]
    assert poison.seen == expected and trainer.global_step == 6
    assert_equal(poison.weights[4], poison.weights[6])
    assert data.position == 8 * BATCH
    # A run that is resumed later knows of it.
    later = Poison(1.0)
    fit(tmp_path, later, resume=True, steps=7)
    assert later.seen == [(6, Samples().sample_ids(8).tolist())]


def test_a_signal_in_the_step_of_a_rollback_is_heard(tmp_path, host):
    class Told(Poison):
        def on_after_backward(self, trainer, task):
            super().on_after_backward(trainer, task)
            if self.bad:
                os.kill(os.getpid(), signal.SIGTERM)

    told = Told(float("nan"), samples=[int(Samples().sample_ids(4)[0])])
    with pytest.raises(SystemExit) as stopped:
        fit(tmp_path, told, policy="rollback", **host)
    assert stopped.value.code == 143 and told.seen[-1] == (4, Samples().sample_ids(5).tolist())


def test_rollback_before_any_checkpoint_skips(tmp_path, host):
    _, trainer, _ = fit(tmp_path, Poison(float("nan"), step=1), policy="rollback", **host)
    assert records(tmp_path)[0]["policy"] == "skip" and trainer.global_step == 6


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_endless_bad_steps_end_the_run(tmp_path, host, policy):
    class FromStep3(Poison):
        def on_train_batch_start(self, trainer, task, batch, batch_idx):
            self.step = max(3, trainer.global_step)
            super().on_train_batch_start(trainer, task, batch, batch_idx)

    with pytest.raises(TrainingError, match="bad step 4"):
        fit(tmp_path, FromStep3(float("nan")), policy=policy, max_bad_steps=3, steps=99, **host)
    assert len(records(tmp_path)) == 4
    checkpoint = torch.load(newest_intact(tmp_path / "checkpoints"), weights_only=True)
    assert all(value.isfinite().all() for value in checkpoint["state_dict"].values())


def test_spike_is_held_against_the_median_and_survives_a_resume(tmp_path, host):
    options = {"policy": "skip", "spike_factor": 3.0, "window": 3, **host}
    fit(tmp_path, Poison(10.0, step=2), steps=4, **options)  # before the window is full
    assert not (tmp_path / "bad_steps.jsonl").exists()
    fit(tmp_path, Poison(4.0, step=4), resume=True, **options)
    (record,) = records(tmp_path)
    assert record["step"] == 4 and "times the usual" in record["reason"]


def differences(a, b, place=""):
    """Where two checkpoints differ, in any bit that is not made anew before it is used: the
    learning rate, and moments before the first step, which are 0 or not there yet."""
    if place.endswith("/lr") or (place.endswith("/state") and not a):
        return []
    if isinstance(a, dict) and a.keys() == b.keys():
        return [d for key in a for d in differences(a[key], b[key], f"{place}/{key}")]
    if isinstance(a, list | tuple) and len(a) == len(b):
        pairs = enumerate(zip(a, b, strict=True))
        return [d for i, (x, y) in pairs for d in differences(x, y, f"{place}/{i}")]
    is_same = torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
    return [] if is_same else [f"{place}: {a} {b}"]


@pytest.mark.parametrize("policy", ["stop", "skip", "rollback"])
@pytest.mark.parametrize("bad", [[0], [1], [2], [5], [2, 3], [3, 4, 5]])
def test_a_host_that_goes_on_comes_to_the_same(tmp_path, policy, bad):
    """Saves behind steps 1, 3 and 5, validations behind 2 and 5: what was seen, said and saved."""
    found = []
    for name in ("waits", "goes on"):
        folder, checkpoints = tmp_path / name, tmp_path / name / "checkpoints"
        samples = [int(Samples().sample_ids(step)[0]) for step in bad]
        poison = Poison(float("nan"), samples=samples)
        is_stopped = True
        while is_stopped:
            try:
                resume = checkpoints.exists()
                fit(folder, poison, resume, data=Validated(), policy=policy, wait=name == "waits")
                is_stopped = False
            except TrainingError:
                samples.remove(records(folder)[-1]["sample_ids"][0])  # it will be good
                found.append([torch.load(newest_intact(checkpoints), weights_only=True)])
                assert found[-1][0]["global_step"] == records(folder)[-1]["step"]
        # A batch more is begun where the host hears of a bad step late, and stops or goes back.
        seen = poison.seen if policy == "skip" else None
        weights = torch.load(newest_intact(checkpoints), weights_only=True)
        found.append((seen, records(folder), weights))
    half = len(found) // 2
    assert len(found) == 2 * half
    for one, other in zip(found[:half], found[half:], strict=True):
        assert not differences(one[-1], other[-1]) and one[:-1] == other[:-1]


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


def test_a_stream_that_ends_is_explained_in_one_line():
    error = RuntimeError(
        "Caught it in a worker.\nOriginal\nRuntimeError: the stream cannot go on: x"
    )
    assert str(explained(error, None, None)).startswith("the stream cannot go on: x; resume=auto")


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
