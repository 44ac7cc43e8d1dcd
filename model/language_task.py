"""What trains language models: a GPT on next tokens, a BERT on masked ones and next sentences."""

import functools
from collections.abc import Callable
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from model.bert import BERT
from model.bert_loss import bert_loss, piece_of, with_host_counts
from model.context_parallel import ContextParallel, split_sequences
from model.gpt import GPT
from model.loss import IGNORE, linear_next_token_loss
from model.positions import EXTENSIONS, extend_in_place
from model.recompute import set_recompute
from model.task import StepOptions, TrainingTask, say
from model.warm_start import load_into


class LanguageModelOptions(StepOptions, total=False):
    """Options of LanguageModelTask that a subclass hands on to it."""

    warmup_fraction: float
    decay: str
    micro_batch_tokens: int
    loss_chunk_tokens: int
    compile: bool
    recompute: str
    extend_positions: str


class LanguageModelTask(TrainingTask):
    """What GPT's and BERT's tasks share: batches stated in tokens, logits made in chunks.

    Args:
        model: what the task trains.
        micro_batch_tokens: tokens of one forward and backward on one device, padding included.
        loss_chunk_tokens: tokens whose logits exist at once.
        compile: compile with torch.compile.
        recompute: activation checkpointing (model.recompute): "none", "selective" or "full".
        extend_positions: how a position table grows, that of weights to start from to the model's
            or that of a context warm-up: "tile" or "interpolate"
            (model.positions.extend_positions).
        optimizer, warmup_fraction, decay, options: see TrainingTask.

    Raises:
        ValueError: an option is out of its range, or the task cannot train the model.
    """

    forward_methods = ("hidden",)  # the method that training calls first

    def __init__(
        self,
        model: nn.Module,
        optimizer: Callable[[nn.Module], Optimizer],
        *,
        warmup_fraction: float = 0.01,
        decay: str = "linear",
        micro_batch_tokens: int = 65536,
        loss_chunk_tokens: int = 8192,
        compile: bool = False,
        recompute: str = "none",
        extend_positions: str = "tile",
        **options: Unpack[StepOptions],
    ):
        super().__init__(model, optimizer, warmup_fraction=warmup_fraction, decay=decay, **options)
        for name, size in (
            ("micro_batch_tokens", micro_batch_tokens),
            ("loss_chunk_tokens", loss_chunk_tokens),
        ):
            if size < 1:
                raise ValueError(f"{name} must be positive, got {size}")
        if extend_positions not in EXTENSIONS:
            raise ValueError(
                f"extend_positions must be one of {', '.join(EXTENSIONS)}, got {extend_positions!r}"
            )
        self.check_model(model)
        set_recompute(model, recompute)
        self.extend_positions = extend_positions
        self.micro_batch_tokens = micro_batch_tokens
        self.loss_chunk_tokens = loss_chunk_tokens
        self._is_compiled = compile

    def check_model(self, model: Any) -> None:
        """Raise ValueError for a model that the task cannot train."""

    def micro_batch_limit(self, seqlen: int) -> int:
        return max(1, self.micro_batch_tokens // seqlen)

    def load_weights(self, source: str) -> None:
        new, left_out = load_into(self.model, source, how=self.extend_positions)
        for names, where in ((new, "new, not from"), (left_out, "left out of")):
            if names:
                say(f"{where} {source}: {', '.join(names)}")


class CausalLMTask(LanguageModelTask):
    """Next-token training of a GPT, whose context may grow during the run.

    The position table has the rows of the final context from the start, so that strategies and
    compiled code see the same parameters throughout. A batch of `context` tokens trains the first
    `context` rows, and the others get no gradient. Where a longer batch comes, its rows are made
    from those, and so are the optimizer's moments of the table: rows that start with none would
    take steps several times too large, as Adam's correction of young averages counts the steps of
    the whole table. Validation, always at the final context, borrows rows made in the same way.

    Args:
        model: a model.gpt.GPT, or what offers the same hidden(), head_weight, vocab_size and
            config, from which a checkpoint rebuilds it.
        final_context: tokens of a training sequence at the end of the run, and of validation. Until
            then a checkpoint counts as a model of the context that it was trained at. None: the
            length of training sequences does not change.
        options: see LanguageModelTask; what is compiled is the model without its head.
    """

    model: GPT
    _parallel: ContextParallel | None = None

    def __init__(
        self,
        model: nn.Module,
        optimizer: Callable[[nn.Module], Optimizer],
        *,
        final_context: int | None = None,
        **options: Unpack[LanguageModelOptions],
    ):
        super().__init__(model, optimizer, **options)
        self.final_context = final_context
        self.context: int | None = None  # of the last training step

    def split_sequences(self, size: int, method: str, seqlen: int, *, packed: bool = False) -> None:
        """Train on shares of sequences of `seqlen` tokens: see model.context_parallel."""
        self._parallel = split_sequences(self.model, size, method, seqlen, packed=packed)
        self._seqlen = seqlen

    @property
    def shares_sequences(self) -> bool:
        """Whether a sequence lies on several processes, which then run the model together."""
        return self._parallel is not None

    def setup(self, stage: str) -> None:
        if self._parallel is not None:
            self._parallel.connect()
            self._share = self._parallel.positions(self._seqlen)

    @functools.cached_property
    def _positions(self) -> Tensor:
        # On the device, but no buffer: DistributedDataParallel would give all ranks those of one.
        return self._share.to(self.device)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        # On the device: the whole batch is small, pinned and copied without a wait.
        if self._parallel is None or not isinstance(batch, dict):
            return batch
        # Where documents start is said of the whole rows.
        return {
            name: tensor if name == "cu_seqlens" else tensor[:, self._positions]
            for name, tensor in batch.items()
        }

    def piece(self, batch: dict[str, Tensor], rows: slice) -> dict[str, Tensor]:
        names = ("input_ids", "labels", "cu_seqlens")
        return {name: batch[name][rows] for name in names if name in batch}

    def work(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Of packed documents the real tokens, and the pairs of a query and a key."""
        work = super().work(batch)
        if "cu_seqlens" in batch:
            work["tokens"] = (batch["labels"] != IGNORE).sum()
            work["pairs"] = batch["cu_seqlens"].diff(dim=-1).long().square().sum()
        if self._parallel is not None and self._parallel.rank > 0:
            for name in work.keys() - {"tokens"}:  # of a whole sequence, which counts once
                work[name].zero_()
        return work

    def flops(self, work: dict[str, float]) -> dict[str, float]:
        if "pairs" not in work:
            return super().flops(work)
        per_token = self.model.flops_per_token(round(work["pairs"] / work["tokens"]))
        return {kind: number * work["tokens"] for kind, number in per_token.items()}

    @functools.cached_property
    def _hidden(self) -> Callable[..., Tensor]:
        # Shapes change with the stage of a run at most: kernels are specialized to each.
        hidden = self.model.hidden
        return torch.compile(hidden, dynamic=False) if self._is_compiled else hidden

    def counts(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"loss": (batch["labels"] != IGNORE).sum()}

    def sums(self, piece: dict[str, Tensor]) -> dict[str, Tensor]:
        options: dict[str, Any] = {}
        if self._parallel is not None:
            options = {"positions": self._positions, "seqlen": self._seqlen}
        if "cu_seqlens" in piece:
            options["cu_seqlens"] = piece["cu_seqlens"]
        hidden = self._hidden(piece["input_ids"], **options)
        # Not compiled: on a GPU it is one operator.
        loss, _ = linear_next_token_loss(
            hidden,
            self.model.head_weight,
            piece["labels"],
            vocab_size=self.model.vocab_size,
            chunk_tokens=self.loss_chunk_tokens,
        )
        return {"loss": loss}

    def derived(self, means: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"ppl": means["loss"].exp()}

    def result(self, name: str, metrics: dict[str, float], number: int) -> str:
        return f"{name} perplexity {metrics['ppl']:.2f}"

    @property
    def _warmup(self) -> tuple[int, int] | None:
        """(context, final context) while the first is shorter."""
        if self.context is None or self.final_context is None:
            return None
        return (self.context, self.final_context) if self.context < self.final_context else None

    def _position_table(self) -> Tensor:
        if isinstance(self.model, FSDPModule):
            self.model.reshard()  # what a forward pass gathered is a copy
        return self.model.embeddings.positions.weight

    def on_train_batch_start(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        seqlen = batch["input_ids"].shape[-1]
        if self._parallel is not None:  # a share of it
            seqlen *= self._parallel.size
        warmup = self._warmup
        if warmup is not None and seqlen != warmup[0]:
            for guard in [c for c in self.trainer.callbacks if hasattr(c, "decide")]:
                guard.decide(self.trainer)  # of the step before, while the table is what it was
            clocks = [c for c in self.trainer.callbacks if hasattr(c, "pause_clock")]
            for clock in clocks:  # an interval of speed has one context
                clock.pause_clock(self)
            self._grow(warmup[0], seqlen)
            for clock in clocks:
                clock.resume_clock()
        self.context = seqlen

    def _grow(self, context: int, seqlen: int) -> None:
        """Take more rows of the position table into use."""
        if seqlen < context:
            raise ValueError(
                f"the context of a run must not shrink, from {context} to {seqlen} at step "
                f"{self.global_step}"
            )
        table = self._position_table()
        state = self.optimizers(use_pl_optimizer=False).state.get(table, {})
        moments = [t for t in state.values() if isinstance(t, Tensor) and t.shape == table.shape]
        for tensor in (table, *moments):
            extend_in_place(tensor, context, seqlen, self.extend_positions)
        say(
            f"step {self.global_step}: context {context:,} -> {seqlen:,} tokens, positions: "
            f"{self.extend_positions}"
        )

    def on_validation_epoch_start(self) -> None:
        super().on_validation_epoch_start()
        self._own_positions = None
        if self._warmup is not None:
            table = self._position_table()
            self._own_positions = table.detach().clone()
            extend_in_place(table, *self._warmup, self.extend_positions)

    def on_validation_epoch_end(self) -> None:
        if self._own_positions is not None:
            with torch.no_grad():
                self._position_table().copy_(self._own_positions)
            self._own_positions = None
        super().on_validation_epoch_end()

    def on_save_checkpoint(self, checkpoint: dict) -> None:
        super().on_save_checkpoint(checkpoint)
        if self._warmup is not None:
            checkpoint["context"] = self.context

    def on_load_checkpoint(self, checkpoint: dict) -> None:
        self.context = checkpoint.get("context")


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

    model: BERT
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
        first, *others = (weight * means[name] for name, weight in self.loss_weights.items())
        return {"loss": sum(others, first)}

    def result(self, name: str, metrics: dict[str, float], number: int) -> str:
        return f"masked-token accuracy {metrics['accuracy']:.2%} on {number:,} fixed examples"
