"""SIGTERM, which schedulers send before they take a machine away: a checkpoint, then the end.

Lightning's own way costs every step: with several processes it broadcasts a flag before each batch
and reads it on the host, which so waits for all the work that the device has been given
(Lightning-AI/pytorch-lightning#21487). It also broadcasts from within the signal handler, between
whatever else is under way, and ends without a checkpoint. Of its other waits none comes every step:
losses stay on the device until callbacks.metrics reads them.
"""

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from model.checkpoint import Checkpoints
from model.task import say


class StopOnSigterm(Callback):
    """SIGTERM on any process ends the run on all of them after the same step, with a checkpoint.

    Args:
        every_n_steps: steps after which several processes ask each other, the one wait for the
            device that is left; one process alone stops after the step under way.
    """

    def __init__(self, *, every_n_steps: int = 10):
        if every_n_steps < 1:
            raise ValueError(f"every_n_steps must be at least 1, got {every_n_steps}")
        self.every_n_steps = every_n_steps
        self._received = False

    def setup(self, trainer: Trainer, task: LightningModule, stage: str) -> None:
        """Take the place of Lightning's handler, which is registered behind this."""

        def note(signum, frame) -> None:
            if not self._received and trainer.strategy.launcher is not None:
                trainer.strategy.launcher.kill(signum)  # pass it on to processes it started
            self._received = True

        trainer._signal_connector._sigterm_notifier_fn = note
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None

    def on_train_batch_end(self, trainer: Trainer, task, outputs, batch, batch_idx) -> None:
        received = self._received
        if trainer.world_size > 1:
            if trainer.global_step % self.every_n_steps:
                return
            received = trainer.strategy.reduce_boolean_decision(received, all=False)
        if not received:
            return
        for callback in trainer.callbacks:
            if isinstance(callback, Checkpoints):
                callback.on_train_end(trainer, task)
        say(f"SIGTERM: stopped after step {trainer.global_step}; resume=auto goes on from there")
        raise SIGTERMException
