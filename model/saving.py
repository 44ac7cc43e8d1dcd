"""When a run is saved: every N steps, at its best validations, at its end, and on a signal."""

import os
import signal
import threading
import time
import warnings
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities import rank_zero_only
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.tensor import DTensor

from model.checkpoint import (
    MANIFEST,
    not_finite,
    read_manifest,
    sync_folder,
    warn_unsaved,
    write_manifest,
)
from model.sharded import finish, link, remove

# SIGUSR1 is what SLURM's --signal is often set to.
EXIT_CODES: dict[int, int] = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGUSR1: 143}
# A launcher hands on what its processes got themselves: a second signal this soon is the first.
_ECHO_S = 2.0


class Checkpoints(Checkpoint):
    """Saves every N steps, at every best validation, at the end, and when the run is told to stop.

    The task's `best_metric` says what is best: the lowest loss or the highest accuracy.

    A save that falls on a validation step waits for the validation, so that a resume finds it done.
    A save that fails (a full disk) is reported and training goes on: older checkpoints stay whole.

    SIGTERM, SIGUSR1 or Ctrl-C to any process of the run ends all of them after the same step, with
    a checkpoint, by SystemExit 143 (130 after Ctrl-C). In a validation the checkpoint comes at
    once, and again at its end, where the run stops. A later second Ctrl-C stops at once.

    Args:
        folder: the run's ``checkpoints`` folder.
        every_n_steps: optimizer steps between saves.
        keep_last: how many of those to keep (at least 2 lets a resume survive a damaged newest).
        ask_every_n_steps: steps after which several processes ask each other for signals, which
            waits for the device; one process alone stops after the step under way.
    """

    def __init__(
        self,
        *,
        folder: str,
        every_n_steps: int = 1000,
        keep_last: int = 2,
        ask_every_n_steps: int = 10,
    ):
        if min(every_n_steps, keep_last, ask_every_n_steps) < 1:
            raise ValueError(
                "every_n_steps, keep_last and ask_every_n_steps must be at least 1, "
                f"got {every_n_steps}, {keep_last} and {ask_every_n_steps}"
            )
        self.ask_every_n_steps = ask_every_n_steps
        self.folder = Path(folder)
        self.every_n_steps = every_n_steps
        self.keep_last = keep_last
        self.best_loss = float("inf")  # or minus what is the better the larger
        self._saved_step = -1
        self._signal = 0  # that this process was sent
        self._agreed = 0  # that some process was sent, as all of them know

    def state_dict(self) -> dict:
        return {"best_loss": self.best_loss}

    def load_state_dict(self, state: dict) -> None:
        self.best_loss = state["best_loss"]

    def on_train_start(self, trainer: Trainer, task: LightningModule) -> None:
        self._saved_step = trainer.global_step
        self._catch_signals(trainer)
        if trainer.is_global_zero:
            for fragment in self.folder.glob("*.part"):  # of a process that was killed
                remove(fragment)
            # Later steps are done again; the next resume must not find the old ones.
            manifest = read_manifest(self.folder)
            self._drop(manifest, [n for n in manifest if manifest[n]["step"] > self._saved_step])

    def on_train_batch_end(
        self, trainer: Trainer, task: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        is_asked = trainer.world_size == 1 or step % self.ask_every_n_steps == 0
        stops = is_asked and self._is_told_to_stop(trainer)
        if validates_at(trainer, step):
            return
        if stops or step % self.every_n_steps == 0:
            self.save(trainer)
        if stops:
            self._stop(step)

    def on_validation_batch_end(self, trainer: Trainer, task: LightningModule, *args: Any) -> None:
        if trainer.state.fn == "fit" and not self._agreed and self._is_told_to_stop(trainer):
            self.save(trainer)  # the time that is left may be shorter than the validation

    def on_validation_end(self, trainer: Trainer, task: LightningModule) -> None:
        if trainer.state.fn != "fit":
            return
        metric, is_larger_better = task.best_metric
        loss = float(trainer.callback_metrics[metric]) * (-1 if is_larger_better else 1)
        best = loss < self.best_loss
        if best:
            self.best_loss = loss
        if best or self._agreed or trainer.global_step % self.every_n_steps == 0:
            self.save(trainer, best=best)
        if self._agreed:
            self._stop(trainer.global_step)

    def _catch_signals(self, trainer: Trainer) -> None:
        """Note signals instead of ending. Lightning puts back the handlers from before the fit.

        With several processes Lightning itself broadcasts a flag before each batch and reads it on
        the host, which so waits for all the work that the device was given
        (Lightning-AI/pytorch-lightning#21487). Of its other waits none comes every step.
        """
        self._agreed = 0  # a signal that came before a roll-back holds
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None
        if threading.current_thread() is threading.main_thread():
            for number in EXIT_CODES:
                signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self._signal:
            self._signal, self._signalled_at = number, now
            if rank_zero_only.rank == 0:  # print may be under way, and is not to be entered twice
                os.write(2, b"\nstopping after this step, with a checkpoint\n")
        elif number == signal.SIGINT and now - self._signalled_at > _ECHO_S:
            raise KeyboardInterrupt

    def _is_told_to_stop(self, trainer: Trainer) -> bool:
        """Whether any process was sent a signal: the same answer, at the same step, on all."""
        self._agreed = self._signal
        if trainer.world_size > 1:
            number = torch.tensor(self._signal, device=trainer.strategy.root_device)
            self._agreed = int(trainer.strategy.reduce(number, reduce_op="max"))
        return bool(self._agreed)

    def _stop(self, step: int) -> None:
        if rank_zero_only.rank == 0:
            print(f"stopped at step {step}; resume=auto goes on from there", flush=True)
        raise SystemExit(EXIT_CODES[self._agreed])

    def on_train_end(self, trainer: Trainer, task: LightningModule) -> None:
        if self._saved_step != trainer.global_step:
            self.save(trainer)

    def save(self, trainer: Trainer, best: bool = False) -> None:
        """Write step-N.ckpt, name it best-N.ckpt too if it is, remove what is too old.

        Metrics up to this step are written out before: a resume continues below them. A step that
        is undecided (model.guard) is decided before.
        """
        for guard in [c for c in trainer.callbacks if hasattr(c, "decide")]:
            guard.decide(trainer)
        step = trainer.global_step
        path = self.folder / f"step-{step:08d}.ckpt"
        clocks = [c for c in trainer.callbacks if hasattr(c, "pause_clock")]
        for clock in clocks:
            clock.pause_clock(trainer.lightning_module)
        if getattr(trainer.strategy, "_save_distributed_checkpoint", False):
            self._save_shards(trainer, path)
        else:
            trainer.save_checkpoint(path)
        self._saved_step = step
        if trainer.is_global_zero and path.name in read_manifest(self.folder):
            try:
                self._tidy(path, best)
            except OSError as error:
                warnings.warn(f"{self.folder / MANIFEST} is not up to date: {error}", stacklevel=2)
        for logger in [logger for logger in trainer.loggers if hasattr(logger, "checkpoint_saved")]:
            logger.checkpoint_saved()
        for clock in clocks:
            clock.resume_clock()

    def _save_shards(self, trainer: Trainer, path: Path) -> None:
        """All processes write into a folder of a temporary name; the first one then renames it."""
        part = path.with_name(path.name + ".part")
        reason = None
        try:
            weights = trainer.lightning_module.state_dict()
            own = {n: w.to_local() if isinstance(w, DTensor) else w for n, w in weights.items()}
            if names := not_finite(own):
                reason = f"NaN or infinity in {', '.join(names[:3])}"
            elif trainer.is_global_zero:
                remove(part)
        except OSError as error:
            reason = str(error)
        agree = partial(trainer.strategy.reduce_boolean_decision, all=True)
        is_written = agree(reason is None)
        if is_written:
            try:
                trainer.save_checkpoint(part)
            except (OSError, CheckpointException) as error:
                reason = str(error)
            is_written = agree(reason is None)
        if is_written and trainer.is_global_zero:
            try:
                entry = {"step": trainer.global_step, **finish(part, path)}
                sync_folder(self.folder)
                write_manifest(self.folder, read_manifest(self.folder) | {path.name: entry})
            except OSError as error:
                reason = str(error)
        if reason is not None:
            warn_unsaved(path, reason)
        trainer.strategy.barrier()  # no one looks for it earlier

    def _tidy(self, path: Path, best: bool) -> None:
        manifest = read_manifest(self.folder)
        old = sorted(name for name in manifest if name.startswith("step-"))[: -self.keep_last]
        if best:
            old += [name for name in manifest if name.startswith("best-")]
            name = path.name.replace("step-", "best-")
            link(path, self.folder / name)
            manifest[name] = manifest[path.name]
            old = [other for other in old if other != name]
        self._drop(manifest, old)

    def _drop(self, manifest: dict[str, dict], names: list[str]) -> None:
        for name in names:
            del manifest[name]
        if manifest or names:
            write_manifest(self.folder, manifest)
        for name in names:
            remove(self.folder / name)


def validates_at(trainer: Trainer, step: int) -> bool:
    """Whether a validation follows the optimizer step that made it `step`."""
    interval = trainer.val_check_batch
    has_batches = trainer.enable_validation and sum(trainer.num_val_batches) > 0
    return bool(has_batches and interval and step % interval == 0)
