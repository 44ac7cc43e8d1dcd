"""What happens at a step whose loss or gradient is NaN, infinite or far too large."""

import json
import math
import statistics
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning import Callback, LightningModule, Trainer
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from model.checkpoint import newest_intact
from model.saving import Checkpoints, validates_at
from model.task import TrainingTask, say

POLICIES = ("stop", "skip", "rollback")


class TrainingError(RuntimeError):
    """Ends a run with a line that says what can be done."""


class RollBack(Exception):
    """Go on from `checkpoint`, with the samples from `position` on."""

    def __init__(self, checkpoint: Path, position: int):
        super().__init__(f"go on from {checkpoint} with the samples from {position} on")
        self.checkpoint = checkpoint
        self.position = position


class _Undecided(NamedTuple):
    """A step that the device has judged, and the host has yet to."""

    step: int
    numbers: Tensor  # (loss, gradient norm) on the host, once they have come
    arrived: torch.cuda.Event | None
    loops: dict[str, Any]  # Lightning's counters before the step


class StepGuard(Callback):
    """Looks at every step before its weights change: a bad one changes none.

    Bad is a loss or a gradient's norm that is not finite, or a loss of more than `spike_factor`
    times the median of the last `window` good ones. Both are of the global batch, so that all
    processes come to the same end. Each bad step is said, and its sample ids go to
    ``bad_steps.jsonl``.

    On a GPU the host does not wait for the step under way: the device compares, and the fused
    optimizer leaves out what it calls bad. The host hears of it before the next step changes a
    weight, before a validation and before a save, and then does what it would have done at once.

    Args:
        folder: of the run.
        policy: "stop" saves a checkpoint from which the same step can be done again, and ends the
            run. "skip" goes on with the next step. "rollback" goes on from the newest checkpoint,
            with the samples behind the bad step's; before the first checkpoint it is "skip".
        spike_factor: above 1; None looks for no spikes.
        window: good steps whose median a spike is held against; none is seen before so many.
        max_bad_steps: one more ends the run under any policy.
        wait: let the host wait for each step, as it does where an optimizer is not fused or its
            weights are sharded. None: on the CPU alone, where that costs nothing.

    Raises:
        ValueError: an option is out of its range.
    """

    def __init__(
        self,
        *,
        folder: str,
        policy: str = "stop",
        spike_factor: float | None = None,
        window: int = 100,
        max_bad_steps: int = 20,
        wait: bool | None = None,
    ):
        if policy not in POLICIES:
            raise ValueError(f"policy must be one of {', '.join(POLICIES)}, got {policy!r}")
        if spike_factor is not None and not spike_factor > 1.0:
            raise ValueError(f"spike_factor must be above 1 or null, got {spike_factor}")
        if window < 1 or max_bad_steps < 0:
            raise ValueError(
                f"window must be at least 1 and max_bad_steps 0, got {window} and {max_bad_steps}"
            )
        self.folder = Path(folder)
        self.policy = policy
        self.spike_factor = spike_factor
        self.max_bad_steps = max_bad_steps
        self.wait = wait
        self.num_bad = 0
        self._losses: deque[float] = deque(maxlen=window)
        self._undecided: _Undecided | None = None

    def state_dict(self) -> dict:
        return {"losses": list(self._losses), "num_bad": self.num_bad}

    def load_state_dict(self, state: dict) -> None:
        self._losses.clear()
        self._losses.extend(state["losses"])
        self.num_bad = max(self.num_bad, state["num_bad"])  # rolling back does not undo the count

    def on_train_start(self, trainer: Trainer, task: LightningModule) -> None:
        self._undecided = None

    def on_before_optimizer_step(
        self, trainer: Trainer, task: LightningModule, optimizer: Optimizer
    ) -> None:
        self.decide(trainer)
        numbers = torch.stack([task.step_means[name].double() for name in ("loss", "grad_norm")])
        if self._waits(numbers, optimizer):
            loss, grad_norm = numbers.tolist()
            if self._judge(trainer, trainer.global_step, loss, grad_norm):
                optimizer.zero_grad(set_to_none=True)  # no gradient: no weight or moment changes
            return
        is_bad = ~numbers.isfinite().all()
        if (limit := self._limit()) is not None:
            is_bad |= numbers[0] > limit
        optimizer.found_inf = is_bad.float()  # type: ignore[attr-defined]  # torch's fused ones read it
        arrived = None
        if numbers.is_cuda:
            on_host = torch.empty(2, dtype=numbers.dtype, pin_memory=True)
            on_host.copy_(numbers, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
            numbers = on_host
        loops = trainer.fit_loop.state_dict()
        self._undecided = _Undecided(trainer.global_step, numbers, arrived, loops)

    def on_train_batch_end(
        self, trainer: Trainer, task: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if validates_at(trainer, trainer.global_step):
            self.decide(trainer)

    def on_train_end(self, trainer: Trainer, task: LightningModule) -> None:
        self.decide(trainer)

    def decide(self, trainer: Trainer) -> None:
        """Do what the policy says of the last step, should it not have been done yet.

        Raises:
            TrainingError, RollBack: the step was bad, and its policy is not to skip it.
        """
        if self._undecided is None:
            return
        step, numbers, arrived, loops = self._undecided
        self._undecided = None
        if arrived is not None:
            arrived.synchronize()
        loss, grad_norm = numbers.tolist()
        self._judge(trainer, step, loss, grad_norm, loops)

    def _waits(self, numbers: Tensor, optimizer: Optimizer) -> bool:
        if self.wait or (self.wait is None and not numbers.is_cuda):
            return True
        groups = optimizer.param_groups
        is_sharded = any(
            isinstance(param, DTensor) for group in groups for param in group["params"]
        )
        return is_sharded or not all(group.get("fused") for group in groups)

    def _judge(
        self,
        trainer: Trainer,
        step: int,
        loss: float,
        grad_norm: float,
        loops: dict[str, Any] | None = None,
    ) -> bool:
        """Whether the step is bad; does what its policy says, unless that is to skip it.

        loops: Lightning's counters before the step, if it has gone through since.
        """
        reason = self._reason(loss, grad_norm)
        if reason is None:
            self._losses.append(loss)
            return False
        self.num_bad += 1
        data = trainer.datamodule
        checkpoints = [c for c in trainer.callbacks if isinstance(c, Checkpoints)]
        policy = "stop" if self.num_bad > self.max_bad_steps else self.policy
        newest = None
        if policy == "rollback":
            newest = newest_intact(checkpoints[0].folder) if checkpoints else None
            policy = "rollback" if newest else "skip"
        if trainer.is_global_zero:
            ids = data.sample_ids(step).tolist() if hasattr(data, "sample_ids") else None
            # As text where they are no numbers of JSON's.
            shown = [x if math.isfinite(x) else str(x) for x in (loss, grad_norm)]
            facts = {"step": step, "loss": shown[0], "grad_norm": shown[1], "policy": policy}
            self._record({**facts, "reason": reason, "sample_ids": ids})
        say(
            f"step {step}: {reason}; {policy}, its samples are in {self.folder / 'bad_steps.jsonl'}"
        )
        if newest is not None:
            behind = step + 1 - trainer.global_step
            raise RollBack(newest, data.position + behind * data.batch_size)
        if policy == "skip":
            return True
        if loops is not None:
            trainer.fit_loop.load_state_dict(loops)
            for clock in [c for c in trainer.callbacks if hasattr(c, "forget_last")]:
                clock.forget_last(step)
        for callback in checkpoints:
            callback.save(trainer)
        raise TrainingError(
            f"stopped before step {step} changed anything: {reason} (bad step {self.num_bad}). "
            "Go on from its checkpoint by resume=auto with callbacks.guard.policy=skip or "
            "rollback, or with a lower learning rate"
        )

    def _reason(self, loss: float, grad_norm: float) -> str | None:
        if not math.isfinite(loss) or not math.isfinite(grad_norm):
            return f"loss {loss:.4g} and gradient norm {grad_norm:.4g} are not both finite"
        if (limit := self._limit()) is not None and loss > limit:
            usual = statistics.median(self._losses)
            return f"loss {loss:.4g} is {loss / usual:.3g} times the usual {usual:.4g}"
        return None

    def _limit(self) -> float | None:
        """A loss above it is a spike."""
        if self.spike_factor is None or len(self._losses) != self._losses.maxlen:
            return None
        usual = statistics.median(self._losses)
        return self.spike_factor * usual if usual > 0.0 else None

    def _record(self, facts: dict) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / "bad_steps.jsonl").open("a") as file:
                file.write(json.dumps(facts) + "\n")
        except OSError as error:
            say(f"bad_steps.jsonl cannot be written ({error}): {json.dumps(facts)}")


def explained(error: BaseException, trainer: Trainer, task: TrainingTask) -> TrainingError | None:
    """What a user can do about an error of training; None where this program does not know."""
    more = "; resume=auto goes on from the last checkpoint"
    if isinstance(error, torch.OutOfMemoryError):
        if trainer.validating or trainer.testing:
            options = "data.val_batch_tokens or data.val_batch_size"
            return TrainingError(
                f"the GPU's memory does not hold a validation batch: lower {options}{more}"
            )
        total, micro, seqlen = task.cut
        option = task.batch_options[0]
        advice = f"data.seqlen={seqlen // 2}, a smaller model, or context_parallel.size=2"
        if micro > 1:
            fewer = max(size for size in range(1, micro) if total % size == 0)
            advice = f"{option}={fewer * seqlen if option.endswith('tokens') else fewer}"
        return TrainingError(
            f"the GPU's memory does not hold a micro-batch of {micro} x {seqlen} tokens (examples "
            f"x context) at step {trainer.global_step}: try {advice}{more}"
        )
    if isinstance(error, RuntimeError) and "DataLoader worker (pid" in str(error):
        return TrainingError(
            f"a process that loads data died ({error}): if the machine's memory ran out, lower "
            f"data.num_workers{more}"
        )
    is_gloo = isinstance(error, RuntimeError) and "gloo" in str(error)
    if is_gloo or isinstance(error, torch.distributed.DistError):
        return TrainingError(
            "another process of the run ended or cannot be reached, and its own error says why "
            f"({str(error).splitlines()[0].split('. ')[0]}){more}"
        )
    if isinstance(error, RuntimeError) and "the stream cannot go on" in str(error):
        line = str(error).strip().splitlines()[-1]  # a worker's has its traceback before
        return TrainingError(f"{line.removeprefix('RuntimeError: ')}{more}")
    return None
