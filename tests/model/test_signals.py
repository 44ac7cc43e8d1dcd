"""SIGTERM ends a run with a checkpoint, on all processes after the same step."""

import os
import signal
from types import SimpleNamespace

import pytest
import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader

from model.checkpoint import AtomicCheckpointIO, Checkpoints
from model.signals import StopOnSigterm


class Task(LightningModule):
    def __init__(self):
        super().__init__()
        self.model = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        return self.model(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Terminate(Callback):
    def on_train_batch_start(self, trainer, task, batch, batch_idx):
        if batch_idx == 2:
            os.kill(os.getpid(), signal.SIGTERM)


def test_sigterm_ends_a_run_with_a_checkpoint(tmp_path, capsys):
    before = signal.getsignal(signal.SIGTERM)
    checkpoints = Checkpoints(folder=str(tmp_path), every_n_steps=100)
    trainer = Trainer(
        accelerator="cpu",
        max_steps=9,
        callbacks=[checkpoints, Terminate(), StopOnSigterm()],
        plugins=[AtomicCheckpointIO()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with pytest.raises(SIGTERMException):
        trainer.fit(Task(), DataLoader(torch.ones(20, 1)))
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["step-00000003.ckpt"]
    assert "SIGTERM: stopped after step 3; resume=auto" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGTERM) == before


def test_processes_agree_now_and_then():
    asked = []

    def decide(mine, all):
        asked.append((trainer.global_step, mine))
        return trainer.global_step >= 20  # another process was told

    trainer = SimpleNamespace(
        world_size=2,
        global_step=0,
        callbacks=[],
        strategy=SimpleNamespace(reduce_boolean_decision=decide),
    )
    stop = StopOnSigterm(every_n_steps=10)
    with pytest.raises(SIGTERMException):
        for trainer.global_step in range(1, 99):
            stop.on_train_batch_end(trainer, None, None, None, 0)
    assert asked == [(10, False), (20, False)]
    with pytest.raises(ValueError, match="every_n_steps must be at least 1, got 0"):
        StopOnSigterm(every_n_steps=0)
