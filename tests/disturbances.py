"""Callbacks that disturb a run at a given step, for tests: +callbacks.x={_target_: tests....}.

And a logger that notes how it ended: +logger.x={_target_: tests....}.
"""

import json
import os
from pathlib import Path

import torch
from lightning import Callback
from lightning.pytorch.loggers import Logger


class SignalAt(Callback):
    """Sends signals to one process of the run at the start of a training or a validation batch."""

    def __init__(self, *, step, numbers, rank=0, in_validation=False):
        self.step, self.numbers, self.rank = step, numbers, rank
        self.in_validation = in_validation

    def _send(self, trainer):
        if trainer.global_step == self.step and trainer.global_rank == self.rank:
            for number in self.numbers:
                os.kill(os.getpid(), number)

    def on_train_batch_start(self, trainer, *args):
        if not self.in_validation:
            self._send(trainer)

    def on_validation_batch_start(self, trainer, *args):
        if self.in_validation:
            self._send(trainer)


class PoisonAt(Callback):
    """Makes the gradients of one process NaN, before they are added over processes."""

    def __init__(self, *, step, rank=0):
        self.step, self.rank, self.hooks = step, rank, []

    def on_train_batch_start(self, trainer, task, *args):
        if trainer.global_step == self.step and trainer.global_rank == self.rank:
            params = [param for param in task.parameters() if param.requires_grad]
            self.hooks = [param.register_hook(lambda grad: grad * float("nan")) for param in params]

    def on_train_batch_end(self, *args):
        while self.hooks:
            self.hooks.pop().remove()


class Watch(Callback):
    """Writes what one process reads, as FOLDER/RANK.ids, and how often it calls collectives in
    step `step`, as FOLDER/RANK.json."""

    def __init__(self, *, folder, step):
        self.folder, self.step = Path(folder), step

    def on_train_batch_start(self, trainer, task, batch, *args):
        self.folder.mkdir(exist_ok=True)
        with (self.folder / f"{trainer.global_rank}.ids").open("ab") as file:
            file.write(batch["input_ids"].numpy().tobytes())
        if trainer.global_step == self.step:
            self.profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
            self.profile.start()

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == self.step + 1:
            self.profile.stop()
            events = self.profile.key_averages()
            found = {e.key: e.count for e in events if e.key.startswith("c10d::")}
            (self.folder / f"{trainer.global_rank}.json").write_text(json.dumps(found))


class NotedEnd(Logger):
    """Writes into a file how the run ended."""

    name = version = "end"

    def __init__(self, *, path):
        self.path = Path(path)

    def log_metrics(self, metrics, step=None):
        pass

    def log_hyperparams(self, params):
        pass

    def finalize(self, status):
        self.path.write_text(status)
