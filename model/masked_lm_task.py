"""Pre-training of BERT and RoBERTa: masked tokens and, with sentence pairs, the next sentence."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from model.bert import BERT
from model.bert_loss import bert_loss, piece_of, with_host_counts
from model.loss import IGNORE
from model.task import LanguageModelTask


class MaskedLMTask(LanguageModelTask):
    """Training of a BERT on batches of data.masked_lm's form, padded or packed.

    The loss is the mean over the global batch's masked tokens plus, with an NSP head, the mean over
    its pairs. Shown are `loss`, its two parts, and `accuracy`: the share of masked tokens that are
    the likeliest (the metric of MLPerf's BERT); `nsp_accuracy` is that of pairs.

    Args:
        model: a model.bert.BERT with an MLM head, and a pooler only for an NSP head.
        micro_batch_tokens: of one forward and backward on one device, as if all were padded.
        loss_chunk_tokens: masked tokens whose logits exist at once.
        others: see LanguageModelTask; what is compiled are the blocks and embeddings.
    """

    best_metric = ("val/accuracy", True)

    def check_model(self, model: BERT) -> None:
        if model.mlm is None:
            raise ValueError("the model must have an MLM head: set model.mlm_head=true")
        if model.pooler is not None and model.nsp is None:
            # DistributedDataParallel waits for the gradient of every weight.
            raise ValueError("only an NSP head trains the pooler: set model.pooler=false")

    @functools.cached_property
    def _hidden(self) -> Callable[..., Tensor]:
        # The number of packed tokens changes from piece to piece.
        return torch.compile(self.model.hidden) if self._is_compiled else self.model.hidden

    def size_of(self, batch: dict[str, Any]) -> tuple[int, int]:
        return len(batch["nsp_labels"]), batch.get("max_seqlen", batch["input_ids"].shape[-1])

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return with_host_counts(batch) if isinstance(batch, dict) else batch

    def work(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        """Real tokens: padding is no work. Pairs are those of a query and a key."""
        packed = "cu_seqlens" in batch
        lengths = (batch["cu_seqlens"].diff() if packed else batch["lengths"]).long()
        return {
            "tokens": lengths.sum(),
            "samples": torch.full((), len(lengths), device=lengths.device),
            "pairs": lengths.square().sum(),
            "masked": (batch["labels"] != IGNORE).sum(),
        }

    def flops(self, work: dict[str, float]) -> dict[str, float]:
        return {"full": self.model.flops(**work)}

    @property
    def loss_weights(self) -> dict[str, float]:
        return {"mlm_loss": 1.0, **({} if self.model.nsp is None else {"nsp_loss": 1.0})}

    def counts(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        labels = {"mlm_loss": batch["labels"], "nsp_loss": batch["nsp_labels"]}
        return {name: (labels[name] != IGNORE).sum() for name in self.loss_weights}

    def count_of(self, name: str) -> str:
        return {"accuracy": "mlm_loss", "nsp_accuracy": "nsp_loss"}.get(name, name)

    def piece(self, batch: dict[str, Any], rows: slice) -> dict[str, Any]:
        return piece_of(batch, rows)

    def sums(self, piece: dict[str, Any]) -> dict[str, Tensor]:
        sums = bert_loss(
            self.model, piece, chunk_tokens=self.loss_chunk_tokens, hidden=self._hidden
        )
        entries = {"mlm_loss": sums.mlm_loss, "accuracy": sums.mlm_correct.float()}
        if self.model.nsp is not None:
            entries |= {"nsp_loss": sums.nsp_loss, "nsp_accuracy": sums.nsp_correct.float()}
        return entries

    def derived(self, means: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"loss": sum(weight * means[name] for name, weight in self.loss_weights.items())}
