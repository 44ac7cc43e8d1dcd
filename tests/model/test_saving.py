"""A run that is told to stop saves at the next boundary, and goes on as if never stopped."""

import itertools
import os
import signal
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from lightning import Callback, LightningDataModule, Trainer
from torch.distributed.checkpoint import CheckpointException
from torch.utils.data import DataLoader, IterableDataset

from model import saving
from model.attention import sdpa_attention
from model.checkpoint import newest_intact, read_manifest
from model.gpt import GPT
from model.language_task import CausalLMTask
from model.optim import adamw
from model.saving import Checkpoints
from tests.disturbances import SignalAt
from tests.training import make_trainer

STEPS = 6


class Batches(IterableDataset):
    """Endless: batch i is made of seed i, whatever was read before."""

    def __init__(self, first):
        self.first = first

    def __iter__(self):
        for seed in itertools.count(self.first):
            ids = torch.randint(37, (2, 9), generator=torch.Generator().manual_seed(seed))
            yield {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}


class Tokens(LightningDataModule):
    def train_dataloader(self):
        return DataLoader(Batches(self.trainer.global_step), batch_size=None)

    def val_dataloader(self):
        return DataLoader(list(itertools.islice(Batches(100), 2)), batch_size=None)


class Validations(Callback):
    def __init__(self):
        self.steps = []

    def on_validation_end(self, trainer, task):
        self.steps.append(trainer.global_step)


def fit(folder, *callbacks, resume=False, **options):
    torch.manual_seed(0)
    sizes = {"vocab_size": 37, "max_seqlen": 8, "depth": 1, "dim": 8, "nheads": 2}
    model = GPT(**sizes, attention=sdpa_attention)
    task = CausalLMTask(model, lambda model: adamw(model, lr=1e-2), max_steps=STEPS)
    trainer = make_trainer(
        STEPS,
        [Checkpoints(folder=str(folder), **{"every_n_steps": 50} | options), *callbacks],
        val_every=3,
    )
    trainer.fit(task, Tokens(), ckpt_path=newest_intact(folder) if resume else None)
    return task


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    validations = Validations()
    task = fit(tmp_path_factory.mktemp("undisturbed"), validations)
    return task.model.state_dict(), validations.steps


@pytest.mark.parametrize(
    "numbers, code, step, in_validation",
    [
        ([signal.SIGTERM], 143, 1, False),
        ([signal.SIGINT, signal.SIGTERM], 130, 4, False),  # as torchrun hands a Ctrl-C on
        ([signal.SIGUSR1, signal.SIGUSR1], 143, 2, False),  # the step under way validates
        ([signal.SIGTERM], 143, 3, True),
    ],
)
def test_a_signal_ends_the_run_at_a_boundary_and_costs_nothing(
    tmp_path, undisturbed, numbers, code, step, in_validation
):
    before = {number: signal.getsignal(number) for number in saving.EXIT_CODES}
    validations = Validations()
    with pytest.raises(SystemExit) as stopped:
        fit(
            tmp_path, SignalAt(step=step, numbers=numbers, in_validation=in_validation), validations
        )
    assert stopped.value.code == code
    assert {number: signal.getsignal(number) for number in before} == before
    assert newest_intact(tmp_path).name == f"step-{step + (not in_validation):08d}.ckpt"
    task = fit(tmp_path, validations, resume=True)
    weights, validated = undisturbed
    assert validations.steps == validated
    for name, value in weights.items():
        assert torch.equal(task.model.state_dict()[name], value), name


def test_a_signal_in_a_validation_saves_before_its_end(tmp_path, undisturbed):
    class KilledAtTheEnd(Callback):
        def on_validation_epoch_end(self, trainer, task):
            assert newest_intact(tmp_path).name == "step-00000003.ckpt"
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        fit(
            tmp_path,
            SignalAt(step=3, numbers=[signal.SIGTERM], in_validation=True),
            KilledAtTheEnd(),
        )
    task = fit(tmp_path, resume=True)
    for name, value in undisturbed[0].items():
        assert torch.equal(task.model.state_dict()[name], value), name


def test_a_second_interrupt_later_stops_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "_ECHO_S", -1.0)
    with pytest.raises(SystemExit) as stopped:
        fit(tmp_path, SignalAt(step=2, numbers=[signal.SIGINT] * 2))
    assert stopped.value.code == 1 and newest_intact(tmp_path) is None


def test_outside_the_main_thread_signals_are_left_alone(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    callback = Checkpoints(folder=str(tmp_path))
    trainer = Trainer(logger=False, enable_checkpointing=False)
    thread = threading.Thread(target=callback._catch_signals, args=(trainer,))
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_clock_that_jumps_changes_nothing(tmp_path, undisturbed, monkeypatch):
    """Backwards and forwards by days: the newest checkpoint is that of the highest step."""
    jumps = itertools.cycle([1e9, 2e9, 5e8])
    monkeypatch.setattr(time, "time", lambda: next(jumps))
    with pytest.raises(SystemExit):
        fit(tmp_path, SignalAt(step=3, numbers=[signal.SIGTERM]), every_n_steps=1)
    for step, stamp in ((3, 2e9), (4, 1e9)):
        os.utime(tmp_path / f"step-{step:08d}.ckpt", (stamp, stamp))
    task = fit(tmp_path, resume=True)
    for name, value in undisturbed[0].items():
        assert torch.equal(task.model.state_dict()[name], value), name


def test_fragments_of_a_killed_process_are_removed(tmp_path):
    (tmp_path / "step-00000001.ckpt.part").write_bytes(b"half")
    fit(tmp_path)
    assert not list(tmp_path.glob("*.part"))


def test_a_file_system_without_links_gets_a_copy(tmp_path, monkeypatch):
    monkeypatch.setattr(saving.os, "link", lambda *paths: os.readlink(""))  # raises OSError
    fit(tmp_path)
    manifest = read_manifest(tmp_path)
    (best,) = [name for name in manifest if name.startswith("best-")]
    assert (tmp_path / best).stat().st_size == manifest[best]["bytes"]


def test_a_disk_that_is_full_after_a_save_ends_no_training(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saving, "write_manifest", full)
    with pytest.warns(UserWarning, match="is not up to date.*No space left"):
        fit(tmp_path, every_n_steps=2)
    assert newest_intact(tmp_path).name == "step-00000006.ckpt"


def several_processes(**more):
    """A trainer that believes in another process, which agrees with this one."""
    strategy = SimpleNamespace(
        _save_distributed_checkpoint=True,
        barrier=lambda: None,
        reduce_boolean_decision=lambda mine, all: mine,
        root_device=torch.device("cpu"),
    )
    trainer = SimpleNamespace(
        strategy=strategy, world_size=2, global_step=4, is_global_zero=True, loggers=[],
        callbacks=[], lightning_module=torch.nn.Linear(1, 1),
    )  # fmt: skip
    trainer.__dict__.update(more)
    return trainer


@pytest.mark.parametrize("error", [OSError(28, "No space left"), CheckpointException("", {})])
def test_shards_that_cannot_be_written_end_no_training(tmp_path, error):
    def save(path):
        raise error

    with pytest.warns(UserWarning, match="step-00000004.ckpt was not saved"):
        Checkpoints(folder=str(tmp_path)).save(several_processes(save_checkpoint=save))
    assert newest_intact(tmp_path) is None


def test_shards_that_are_not_finite_are_never_saved(tmp_path):
    trainer = several_processes(save_checkpoint=lambda path: pytest.fail("saved"))
    torch.nn.init.constant_(trainer.lightning_module.bias, float("nan"))
    with pytest.warns(UserWarning, match="was not saved .NaN or infinity in bias"):
        Checkpoints(folder=str(tmp_path)).save(trainer)


def test_several_processes_ask_each_other_now_and_then(tmp_path):
    asked = []

    def reduce(mine, reduce_op):
        asked.append(trainer.global_step)
        return torch.tensor(signal.SIGTERM if trainer.global_step >= 20 else 0)

    trainer = several_processes(val_check_batch=None, enable_validation=False)
    trainer.strategy.reduce = reduce
    callback = Checkpoints(folder=str(tmp_path), every_n_steps=1000)
    callback.save = lambda trainer: None
    with pytest.raises(SystemExit) as stopped:
        for trainer.global_step in range(1, 99):
            callback.on_train_batch_end(trainer, None, None, None, 0)
    assert asked == [10, 20] and stopped.value.code == 143
