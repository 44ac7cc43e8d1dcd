"""What a run shows while it trains: metrics to the loggers and a progress display."""

import math
import time
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_only
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from model.loggers import CsvLogger

# Dense bf16 peak of a device, TFLOP/s, from the vendors' data sheets (SXM parts).
PEAK_BF16_TFLOPS = {
    "NVIDIA A100": 312.0,
    "NVIDIA H100 PCIe": 756.0,
    "NVIDIA H100 NVL": 835.0,
    "NVIDIA H100": 989.4,
    "NVIDIA H200": 989.4,
    "NVIDIA H200 NVL": 835.0,
    "NVIDIA GH200": 989.4,
    "NVIDIA B200": 2250.0,
    "NVIDIA L4": 121.0,
    "NVIDIA L40": 181.0,
    "NVIDIA L40S": 362.0,
    "NVIDIA GeForce RTX 4090": 165.2,
    "NVIDIA GeForce RTX 3090": 71.0,
    "AMD Instinct MI300X": 1307.4,
}

# Metrics that are shown where a task has them: their name and format.
_VALIDATED = {
    "accuracy": ("accuracy", ".2%"),
    "micro_f1": ("micro-F1", ".2%"),
    "macro_f1": ("macro-F1", ".2%"),
    "ppl": ("perplexity", ".2f"),
}
_TRAINED = {
    "accuracy": ("accuracy", ".1%"),
    "micro_f1": ("micro-F1", ".1%"),
    "ppl": ("ppl", ".1f"),
}


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 FLOP/s of the device whose name starts like a known one; None if none does."""
    known = [name for name in PEAK_BF16_TFLOPS if device_name.startswith(name)]
    return PEAK_BF16_TFLOPS[max(known, key=len)] * 1e12 if known else None


class Metrics(Callback):
    """Loss of every step, and speed, MFU and memory of every interval, to all loggers.

    Losses wait on the device until the interval ends: one host synchronization an interval.
    Speed leaves out validation and checkpoints. MFU is printed in the conventions that the model
    tells: "full" counts the whole attention square, "causal" its half (both of the dense bf16 peak
    of the device).

    Args:
        every_n_steps: length of the interval, in optimizer steps.
        show: also show progress (a bar on a terminal, lines elsewhere).
    """

    def __init__(self, *, every_n_steps: int = 10, show: bool = True) -> None:
        if every_n_steps < 1:
            raise ValueError(f"every_n_steps must be at least 1, got {every_n_steps}")
        self.every_n_steps = every_n_steps
        self.display = Display() if show else None
        self._waiting: list[tuple[int, float, dict[str, torch.Tensor]]] = []
        self.tokens = 0  # consumed since the run began, a resume included
        self._before_last = (0, 0)  # step and tokens before the last one that was written out
        self._paused_at: float | None = None
        self._peak: float | None = None

    def state_dict(self) -> dict:
        return {"tokens": self.tokens}

    def load_state_dict(self, state: dict) -> None:
        self.tokens = state["tokens"]

    def on_train_start(self, trainer: Trainer, task: LightningModule) -> None:
        self._waiting.clear()  # of steps before a roll-back, which are done again
        device = task.device
        if device.type == "cuda":
            name = torch.cuda.get_device_name(device)
            self._peak = peak_flops(name)
            torch.cuda.reset_peak_memory_stats(device)
            if self.display and trainer.is_global_zero:
                peak = "none, its peak is not known"
                if self._peak is not None:
                    peak = f"of {self._peak / 1e12:.1f} TFLOP/s, its dense bf16 peak"
                self.display.message(f"MFU on {name}: {peak}")
        for logger in trainer.loggers:
            if isinstance(logger, CsvLogger):
                logger.forget_after(trainer.global_step)
        self._began = self._interval_start = time.perf_counter()
        if self.display and trainer.is_global_zero:
            self.display.start(trainer.global_step, trainer.max_steps)

    def on_train_batch_end(
        self, trainer: Trainer, task: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        self._waiting.append((step, task.lr, outputs))
        if step % self.every_n_steps == 0 or step == trainer.max_steps:
            self._flush(trainer, task)

    def _flush(self, trainer: Trainer, task: LightningModule) -> None:
        if not self._waiting:
            return
        names = list(self._waiting[0][2])
        values = torch.stack(
            # float64 holds every count of tokens exactly
            [torch.stack([outputs[n].double() for n in names]) for *_, outputs in self._waiting]
        ).tolist()
        now = time.perf_counter()  # after the synchronization above
        rows = []
        work: dict[str, float] = {}  # of the interval
        for (step, lr, _), step_values in zip(self._waiting, values, strict=True):
            row = {f"train/{name}": value for name, value in zip(names, step_values, strict=True)}
            self._before_last = (step - 1, self.tokens)
            for name in [name for name in row if name.startswith("train/amount/")]:
                kind = name.removeprefix("train/amount/")
                amount = row.pop(name)
                work[kind] = work.get(kind, 0.0) + amount
                if kind == "tokens":
                    self.tokens += int(amount)
            rows.append((step, {"tokens": self.tokens, "lr": lr, **row}))
        last = rows[-1][1]
        seconds = max(now - self._interval_start, 1e-9)
        last |= {f"{kind}_per_s": work[kind] / seconds for kind in ("tokens", "samples")}
        last["seconds"] = now - self._began
        if getattr(task, "context", None):  # of the steps of the interval, which all have one
            last["context"] = task.context
        if self._peak:
            for kind, number in task.flops(work).items():
                last[f"mfu_{kind}"] = number / (seconds * self._peak * trainer.world_size)
        if task.device.type == "cuda":
            last["peak_gib"] = torch.cuda.max_memory_allocated(task.device) / 2**30
        for logger in trainer.loggers:
            for step, row in rows:
                logger.log_metrics(row, step)
            logger.save()
        if self.display and trainer.is_global_zero:
            self.display.update(rows[-1][0], last)
        self._waiting.clear()
        self._interval_start = time.perf_counter()

    def forget_last(self, step: int) -> None:
        """Count nothing of steps behind `step`, that is of the last one: it will be done again."""
        self._waiting = [waiting for waiting in self._waiting if waiting[0] <= step]
        if self._before_last[0] == step:
            self.tokens = self._before_last[1]

    def on_validation_start(self, trainer: Trainer, task: LightningModule) -> None:
        self.pause_clock(task)

    def on_validation_end(self, trainer: Trainer, task: LightningModule) -> None:
        metrics = trainer.callback_metrics
        row = {key: float(value) for key, value in metrics.items() if key.startswith("val/")}
        row["tokens"] = self.tokens
        for logger in trainer.loggers:
            logger.log_metrics(row, trainer.global_step)
            logger.save()
        if self.display and trainer.is_global_zero:
            self.display.message(
                f"step {trainer.global_step}: validation loss {row['val/loss']:.4f}, "
                + ", ".join(
                    f"{name} {row[f'val/{key}']:{form}}"
                    for key, (name, form) in _VALIDATED.items()
                    if f"val/{key}" in row
                )
            )
        self.resume_clock()

    def pause_clock(self, task: LightningModule) -> None:
        """Write out the steps so far and stop counting time as training time."""
        self._flush(task.trainer, task)
        self._paused_at = time.perf_counter()

    def resume_clock(self) -> None:
        if self._paused_at is not None:
            self._interval_start = getattr(self, "_interval_start", self._paused_at)
            self._interval_start += time.perf_counter() - self._paused_at
            self._paused_at = None

    def on_train_end(self, trainer: Trainer, task: LightningModule) -> None:
        self._flush(trainer, task)
        if self.display:
            self.display.stop()

    def on_exception(
        self, trainer: Trainer, task: LightningModule, exception: BaseException
    ) -> None:
        for logger in trainer.loggers:
            logger.save()
        if self.display:
            self.display.stop()


class StopAtTarget(Callback):
    """Ends a run at the first validation whose metric reaches a target, as MLPerf's runs end.

    A resumed run that had reached it does no further step.

    Args:
        metric: of the validation, the larger the better.
        at_least: the target.
    """

    def __init__(self, *, at_least: float, metric: str = "val/accuracy") -> None:
        self.metric = metric
        self.at_least = at_least
        self.reached: tuple[int, float] | None = None  # step and value

    def state_dict(self) -> dict:
        return {"reached": self.reached}

    def load_state_dict(self, state: dict) -> None:
        self.reached = state["reached"]

    def on_train_start(self, trainer: Trainer, task: LightningModule) -> None:
        self._stop_if_reached(trainer)

    def on_validation_end(self, trainer: Trainer, task: LightningModule) -> None:
        if trainer.state.fn != "fit":
            return
        if self.metric not in trainer.callback_metrics:
            raise ValueError(
                f"the target's metric must be one of {', '.join(trainer.callback_metrics)}, got "
                f"{self.metric}"
            )
        value = float(trainer.callback_metrics[self.metric])
        if value >= self.at_least:
            self.reached = (trainer.global_step, value)
        self._stop_if_reached(trainer)

    def _stop_if_reached(self, trainer: Trainer) -> None:
        # A target raised since then is not reached yet.
        if self.reached is not None and self.reached[1] >= self.at_least:
            trainer.should_stop = True
        else:
            self.reached = None


class StopAfter(Callback):
    """Ends each start of a run after so many minutes, with a checkpoint; resume=auto goes on.

    Counted from when the callback is made, before the data are prepared, and anew at every start
    (Lightning's max_time counts all starts of a run together). What comes after training, the last
    validation and the test, is not counted. For machines that are lent for so long.

    Args:
        minutes: None never ends a run.
    """

    _EVERY = 10  # steps between looks at the clock, on which processes must agree

    def __init__(self, *, minutes: float | None = None) -> None:
        if minutes is not None and minutes <= 0:
            raise ValueError(f"minutes must be positive or null, got {minutes}")
        self._ends_at = None if minutes is None else time.monotonic() + 60 * minutes

    def on_train_batch_end(
        self, trainer: Trainer, task: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._ends_at is None or trainer.global_step % self._EVERY:
            return
        is_over = time.monotonic() >= self._ends_at
        if trainer.strategy.reduce_boolean_decision(is_over, all=False):
            trainer.should_stop = True


class Display:
    """A progress bar on a terminal; elsewhere (a log file, CI) a line an update, at most one in
    ten seconds."""

    def __init__(self) -> None:
        self.console = Console()
        self._progress: Progress | None = None
        self._last_line = -math.inf
        self._total = 0

    def start(self, step: int, total: int) -> None:
        self._total = total
        if self.console.is_terminal:
            self._progress = Progress(
                TextColumn("training"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[text]}"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=self.console,
            )
            self._progress.start()
            self._bar = self._progress.add_task("training", total=total, completed=step, text="")

    def update(self, step: int, row: dict) -> None:
        text = f"loss {row['train/loss']:.3f} "
        for key, (name, form) in _TRAINED.items():
            if f"train/{key}" in row:
                text += f"{name} {row[f'train/{key}']:{form}} "
        text += f"{row['tokens_per_s']:,.0f} tokens/s"
        mfu = [f"{row[f'mfu_{k}']:.1%} {k}" for k in ("full", "causal") if f"mfu_{k}" in row]
        if mfu:
            text += f" MFU {', '.join(mfu)}"
        if "peak_gib" in row:
            text += f" {row['peak_gib']:.1f} GiB"
        if self._progress:
            self._progress.update(self._bar, completed=step, text=text)
        elif time.monotonic() - self._last_line >= 10.0 or step == self._total:
            self._last_line = time.monotonic()
            self.message(f"step {step}/{self._total}: {text}")

    def message(self, text: str) -> None:
        (self._progress.console if self._progress else self.console).print(
            text, markup=False, highlight=False, soft_wrap=True
        )

    @rank_zero_only
    def stop(self) -> None:
        if self._progress:
            self._progress.stop()
            self._progress = None
