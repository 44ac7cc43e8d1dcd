"""Training a classifier of long sequences: accuracy, an optional loss over pixels, a plateau."""

import functools
import math
from collections.abc import Callable
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from model.attention import Packing
from model.classifier_weights import load_from_run
from model.long_range import LongRangeClassifier
from model.loss import IGNORE
from model.task import StepOptions, TrainingTask, say

_PLATEAU_WINDOW = 100  # steps whose mean loss is judged
_PLATEAU_WIDTH = 0.002  # nats around the loss of a guess


class ClassificationTask(TrainingTask):
    """Training of a LongRangeClassifier on batches of data.classification's form.

    With `dense_weight` the batch must hold `dense_labels`, (batch, seqlen) int64, and the loss adds
    the mean cross-entropy of every non-zero pixel. That is more supervision than the Long Range
    Arena allows: say so beside a result.

    Args:
        model: a model.long_range.LongRangeClassifier.
        micro_batch_size: examples of one forward and backward on one device; None is all.
        dense_weight: of the pixels' loss; 0 leaves it out.
        plateau_steps: say once if the loss is still that of a guess after so many steps, or a
            multiple of them; None never does.
        compile: compile the model with torch.compile.
        optimizer, warmup_fraction, decay, options: see TrainingTask.

    Raises:
        ValueError: an option is out of its range, or a dense loss without a dense head.
    """

    model: LongRangeClassifier
    best_metric = ("val/accuracy", True)
    batch_options = ("task.micro_batch_size", "data.batch_size")

    def __init__(
        self,
        model: LongRangeClassifier,
        optimizer: Callable[[nn.Module], Optimizer],
        *,
        warmup_fraction: float = 0.01,
        decay: str = "cosine",
        micro_batch_size: int | None = None,
        dense_weight: float = 0.0,
        plateau_steps: int | None = 2000,
        compile: bool = False,
        **options: Unpack[StepOptions],
    ):
        super().__init__(model, optimizer, warmup_fraction=warmup_fraction, decay=decay, **options)
        for name, size in (
            ("micro_batch_size", micro_batch_size),
            ("plateau_steps", plateau_steps),
        ):
            if size is not None and size < 1:
                raise ValueError(f"{name} must be at least 1 or null, got {size}")
        if dense_weight < 0.0:
            raise ValueError(f"dense_weight must not be negative, got {dense_weight}")
        if dense_weight and model.dense_head is None:
            raise ValueError(
                f"dense_weight={dense_weight} needs a dense head: set model.num_dense_classes"
            )
        self.micro_batch_size = micro_batch_size
        self.dense_weight = dense_weight
        if dense_weight:
            self.caveat = (
                "supervision: labels and a dense target, more than the Long Range Arena allows"
            )
        self.plateau_steps = plateau_steps
        self._is_compiled = compile
        self._plateau_sum: Tensor | float = 0.0
        self._plateau_count = 0

    @functools.cached_property
    def _outputs(self) -> Callable[..., Any]:
        # The number of packed pixels changes from step to step: said at once, as compiling for the
        # first step's would take half a minute that the second one throws away.
        dynamic = self.model.foreground
        return torch.compile(self.model, dynamic=dynamic) if self._is_compiled else self.model

    @property
    def loss_weights(self) -> dict[str, float]:
        return {"loss": 1.0, **({"dense_loss": self.dense_weight} if self.dense_weight else {})}

    def count_of(self, name: str) -> str:
        return "loss" if name == "accuracy" else name

    def result(self, name: str, metrics: dict[str, float], number: int) -> str:
        """The accuracy with its 95 % interval."""
        accuracy = metrics["accuracy"]
        ci95 = accuracy_interval(accuracy, number)
        return f"accuracy ({name}): {accuracy:.2%} +- {ci95:.2%} (95 %, {number:,} examples)"

    def micro_batch_limit(self, seqlen: int) -> int | None:
        return self.micro_batch_size

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        # Read while the numbers are on the CPU: later, pieces would wait for the device.
        if isinstance(batch, dict) and "cu_seqlens" in batch:
            batch = {**batch, "starts": batch["cu_seqlens"].tolist()}
        return batch

    def counts(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        counts = {"loss": (batch["labels"] != IGNORE).sum()}
        if self.dense_weight:
            counts["dense_loss"] = (_dense_labels(batch) != IGNORE).sum()
        return counts

    def piece(self, batch: dict[str, Any], rows: slice) -> dict[str, Any]:
        names = ("input_ids", "labels", "lengths", "dense_labels")
        piece = {name: batch[name][rows] for name in names if name in batch}
        if "starts" in batch and self.model.foreground:
            first, last = batch["starts"][rows.start], batch["starts"][rows.stop]
            piece["foreground"] = (
                batch["foreground"][first:last] - rows.start * batch["input_ids"].shape[1]
            )
            cu_seqlens = batch["cu_seqlens"][rows.start : rows.stop + 1] - first
            piece["packing"] = Packing(cu_seqlens, batch["max_seqlen"])
        return piece

    def sums(self, piece: dict[str, Any]) -> dict[str, Tensor]:
        out = self._outputs(
            piece["input_ids"],
            piece["lengths"],
            foreground=piece.get("foreground"),
            packing=piece.get("packing"),
        )
        sums = {"loss": _summed_cross_entropy(out.logits, piece["labels"])}
        if self.dense_weight:
            labels = _dense_labels(piece).flatten()
            if "foreground" in piece:
                labels = labels[piece["foreground"]]
            sums["dense_loss"] = _summed_cross_entropy(out.dense_logits.flatten(0, -2), labels)
        sums["accuracy"] = (out.logits.detach().argmax(-1) == piece["labels"]).sum().float()
        return sums

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Tensor]:
        outputs = super().training_step(batch, batch_idx)
        if self.plateau_steps is not None:
            self._watch_plateau(outputs["loss"], self.plateau_steps)
        return outputs

    def _watch_plateau(self, loss: Tensor, every: int) -> None:
        """Judge the mean loss of the steps before a multiple of `every`; global_step is one more
        than this step's index already."""
        step = self.global_step
        if -step % every < min(_PLATEAU_WINDOW, every):
            self._plateau_sum += loss
            self._plateau_count += 1
        if step % every == 0 and self._plateau_count:
            guess = math.log(self.model.num_classes)
            if abs(float(self._plateau_sum) / self._plateau_count - guess) < _PLATEAU_WIDTH:
                say(
                    f"still at ln {self.model.num_classes} = {guess:.3f} after {step} steps: "
                    "nothing is learned yet. It may drop late; what helps: more warm-up, a lower "
                    "rate, easier examples first (init_from), a dense target"
                )
                self.plateau_steps = None
            self._plateau_sum, self._plateau_count = 0.0, 0

    def load_weights(self, source: str) -> None:
        """Start from the best checkpoint of another run; see model.classifier_weights."""
        kept = load_from_run(self.model, source)
        if kept:
            say(f"new, not from {source}: {', '.join(kept)}")


def accuracy_interval(accuracy: float, num_examples: int) -> float:
    """Half the width of the 95 % interval of an accuracy, a fraction (normal approximation)."""
    return 1.96 * (accuracy * (1.0 - accuracy) / num_examples) ** 0.5


def _dense_labels(batch: dict[str, Any]) -> Tensor:
    """Labels of the pixels that count, (batch, seqlen): non-zero ones of examples that count.

    Raises:
        ValueError: the batch has none.
    """
    if "dense_labels" not in batch:
        raise ValueError("dense_weight needs data with a dense target: set data.dense_target=true")
    is_counted = (batch["input_ids"] != 0) & (batch["labels"] != IGNORE)[:, None]
    return batch["dense_labels"].masked_fill(~is_counted, IGNORE)


def _summed_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), labels, ignore_index=IGNORE, reduction="sum")
