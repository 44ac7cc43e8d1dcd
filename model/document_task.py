"""Training a classifier of documents: one label or several, micro- and macro-F1."""

import functools
from collections.abc import Callable
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import Optimizer

from model.attention import Packing
from model.document_classifier import DocumentClassifier
from model.loss import IGNORE
from model.positions import EXTENSIONS
from model.task import StepOptions, TrainingTask, say
from model.warm_start import load_into

_PER_LABEL = ("hits", "predicted", "actual")


class DocumentTask(TrainingTask):
    """Training of a DocumentClassifier on batches of data.long_documents' form.

    The loss is the mean binary cross-entropy of all documents and labels, or the mean cross-entropy
    of the documents where each has one label. Shown are micro-F1, over all decisions, and macro-F1,
    the mean over labels; a label is predicted at a probability above a half, or as the likeliest.
    With one label a document micro-F1 is the accuracy.

    Args:
        model: a DocumentClassifier.
        micro_batch_tokens: tokens of one forward and backward on one device, as if all documents
            were as long as they may be.
        compile: compile the model with torch.compile.
        extend_positions: how the position table of weights to start from grows to the model's:
            "tile" or "interpolate" (model.positions.extend_positions).
        optimizer, warmup_fraction, decay, options: see TrainingTask.

    Raises:
        ValueError: an option is out of its range.
    """

    model: DocumentClassifier
    best_metric = ("val/micro_f1", True)
    batch_options = ("task.micro_batch_tokens", "data.batch_size")

    def __init__(
        self,
        model: DocumentClassifier,
        optimizer: Callable[[torch.nn.Module], Optimizer],
        *,
        warmup_fraction: float = 0.1,
        decay: str = "linear",
        micro_batch_tokens: int = 65536,
        compile: bool = False,
        extend_positions: str = "tile",
        **options: Unpack[StepOptions],
    ):
        super().__init__(model, optimizer, warmup_fraction=warmup_fraction, decay=decay, **options)
        if not isinstance(model, DocumentClassifier):
            raise ValueError(
                f"the model must be a DocumentClassifier, got a {type(model).__name__}: choose "
                "model=roberta_classifier or model=bert_classifier"
            )
        if micro_batch_tokens < 1:
            raise ValueError(f"micro_batch_tokens must be positive, got {micro_batch_tokens}")
        if extend_positions not in EXTENSIONS:
            raise ValueError(
                f"extend_positions must be one of {', '.join(EXTENSIONS)}, got {extend_positions!r}"
            )
        self.micro_batch_tokens = micro_batch_tokens
        self.extend_positions = extend_positions
        self._is_compiled = compile

    @functools.cached_property
    def _logits(self) -> Callable[[Tensor, Packing], Tensor]:
        # The number of tokens changes from piece to piece.
        return torch.compile(self.model, dynamic=True) if self._is_compiled else self.model

    def micro_batch_limit(self, seqlen: int) -> int:
        return max(1, self.micro_batch_tokens // seqlen)

    def size_of(self, batch: dict[str, Any]) -> tuple[int, int]:
        return len(batch["labels"]), batch["max_seqlen"]

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        # Read while the numbers are on the CPU: later, pieces would wait for the device.
        if isinstance(batch, dict):
            batch = {**batch, "starts": batch["cu_seqlens"].tolist()}
        return batch

    def work(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        """Real tokens, documents, and pairs of a query and a key."""
        lengths = batch["cu_seqlens"].diff().long()
        return {
            "tokens": lengths.sum(),
            "samples": torch.full((), len(lengths), device=lengths.device),
            "pairs": lengths.square().sum(),
        }

    def flops(self, work: dict[str, float]) -> dict[str, float]:
        return {"full": self.model.flops(**work)}

    def counts(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        return {"loss": (batch["labels"] != IGNORE).sum()}

    def piece(self, batch: dict[str, Any], rows: slice) -> dict[str, Any]:
        starts = batch["starts"][rows.start : rows.stop + 1]
        longest = max(end - start for start, end in zip(starts, starts[1:], strict=False))
        cu_seqlens = batch["cu_seqlens"][rows.start : rows.stop + 1] - starts[0]
        return {
            "input_ids": batch["input_ids"][starts[0] : starts[-1]],
            "packing": Packing(cu_seqlens, longest),
            "labels": batch["labels"][rows],
        }

    def sums(self, piece: dict[str, Any]) -> dict[str, Tensor]:
        logits, labels = self._logits(piece["input_ids"], piece["packing"]), piece["labels"]
        is_real = labels != IGNORE
        if self.model.multi_label:
            loss = F.binary_cross_entropy_with_logits(
                logits, labels.clamp(min=0).float(), weight=is_real.float(), reduction="sum"
            )
            predicted, actual = (logits.detach() > 0.0) & is_real, (labels == 1)
        else:
            loss = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")
            chosen = (logits.detach().argmax(-1), labels.clamp(min=0))
            predicted, actual = (
                F.one_hot(index, self.model.num_classes).bool() & is_real[:, None]
                for index in chosen
            )
        decisions = (predicted & actual, predicted, actual)
        per_label = {n: d.sum(0).float() for n, d in zip(_PER_LABEL, decisions, strict=True)}
        return {"loss": loss, **per_label}

    def _means(self, totals: dict[str, Tensor], counts: dict[str, Tensor]) -> dict[str, Tensor]:
        scalars = {name: total for name, total in totals.items() if name not in _PER_LABEL}
        micro, macro = f1_scores(*(totals[name] for name in _PER_LABEL))
        return {**super()._means(scalars, counts), "micro_f1": micro, "macro_f1": macro}

    def result(self, name: str, metrics: dict[str, float], number: int) -> str:
        micro, macro = metrics["micro_f1"], metrics["macro_f1"]
        return f"micro-F1 ({name}): {micro:.2%}, macro-F1 {macro:.2%} ({number:,} documents)"

    def load_weights(self, source: str) -> None:
        """Start from an encoder: a BERT or RoBERTa of Hugging Face, a run of BERT or of this task.

        The head keeps its values.
        """
        _, left_out = load_into(self.model.encoder, source, how=self.extend_positions)
        say(f"new, not from {source}: head")
        if left_out:
            say(f"left out of {source}: {', '.join(left_out)}")


def f1_scores(hits: Tensor, predicted: Tensor, actual: Tensor) -> tuple[Tensor, Tensor]:
    """(micro-F1, macro-F1), scalars, of counts a label.

    Args:
        hits: (num_labels,) how often each label is predicted and there.
        predicted, actual: (num_labels,) how often it is predicted, and there.

    Returns:
        2 hits / (predicted + actual) of the sums over labels, and the mean of that of each label; 0
        where nothing is predicted or there.
    """
    each = 2.0 * hits / (predicted + actual).clamp(min=1.0)
    micro = 2.0 * hits.sum() / (predicted.sum() + actual.sum()).clamp(min=1.0)
    return micro, each.mean()
