"""Lightning modules: what one optimizer step does, in any number of micro-batches and processes.

One batch from the loader is the whole optimizer step of this rank. The task splits it, sums the
losses of every piece and divides once by the number of labels in the *global* batch, so that the
update does not depend on how the batch was split (a mean of means would, as soon as pieces hold
unequal numbers of labels).
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Required, TypedDict

import torch
from lightning import LightningModule
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from model.optim import warmup_cosine, warmup_linear, warmup_rsqrt, warmup_sqrt

SCHEDULES = {
    "linear": warmup_linear,
    "cosine": warmup_cosine,
    "rsqrt": warmup_rsqrt,
    "sqrt": warmup_sqrt,
}


def step_seed(seed: int, step: int, rank: int) -> int:
    """63-bit seed of the random numbers (dropout) of one step on one rank.

    Seeding every step, rather than saving generator states, makes a resumed run repeat the masks of
    the uninterrupted one on any number of processes, and whatever else drew numbers in between.
    """
    digest = hashlib.blake2b(f"{seed}/{step}/{rank}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@rank_zero_only
def say(text: str) -> None:
    print(text, flush=True)


class StepOptions(TypedDict, total=False):
    """Options of TrainingTask that its subclasses hand on to it."""

    max_steps: Required[int]
    final_lr_fraction: float
    grad_clip: float | None
    seed: int


class TrainingTask(LightningModule):
    """What tasks share: the optimizer step, its schedule, exact sums over pieces and ranks.

    A subclass says what is summed, by `counts`, `piece` and `sums`; what is shown is sum / count.

    Args:
        model: with `blocks`, and `config`, from which a checkpoint rebuilds it.
        optimizer: called with the model, returns the optimizer; its lr is the peak.
        max_steps: optimizer steps of the run; the schedule ends there.
        warmup_fraction: share of max_steps over which lr rises linearly from 0.
        decay: "linear", "cosine", "rsqrt" or "sqrt" decay after the warm-up (model.optim).
        final_lr_fraction: share of the peak lr at which the decay ends.
        grad_clip: bound on the global 2-norm of the gradient; None turns clipping off.
        seed: of dropout.

    Raises:
        ValueError: an option is out of its range.
    """

    #: The validation metric that the best checkpoint has, and whether more of it is better.
    best_metric = ("val/loss", False)
    #: What must be said beside a result; "" for nothing.
    caveat = ""
    #: Methods of the model, beside forward, that FSDP2 must gather weights for.
    forward_methods: tuple[str, ...] = ()
    #: Options that decide how a step is cut, as an error names them.
    batch_options = ("task.micro_batch_tokens", "data.batch_tokens")

    def __init__(
        self,
        model: nn.Module,
        optimizer: Callable[[nn.Module], Optimizer],
        *,
        max_steps: int,
        warmup_fraction: float,
        decay: str,
        final_lr_fraction: float = 0.0,
        grad_clip: float | None = 1.0,
        seed: int = 1111,
    ) -> None:
        super().__init__()
        if max_steps < 1:
            raise ValueError(f"max_steps must be at least 1, got {max_steps}")
        if not 0.0 <= warmup_fraction <= 1.0:
            raise ValueError(f"warmup_fraction must be between 0 and 1, got {warmup_fraction}")
        if decay not in SCHEDULES:
            raise ValueError(f"decay must be one of {sorted(SCHEDULES)}, got {decay!r}")
        if grad_clip is not None and grad_clip <= 0.0:
            raise ValueError(f"grad_clip must be positive or null, got {grad_clip}")
        self.automatic_optimization = False
        self.model: Any = model
        self.make_optimizer = optimizer
        self.max_steps = max_steps
        self.warmup_steps = round(warmup_fraction * max_steps)
        self.schedule = SCHEDULES[decay]
        self.final_lr_fraction = final_lr_fraction
        self.grad_clip = grad_clip
        self.seed = seed
        self.validated_step = -1  # global_step of the last validation

    def micro_batch_limit(self, seqlen: int) -> int | None:
        """Most examples of one forward pass, at least 1; None is no bound."""
        raise NotImplementedError

    def micro_batch(self, num_examples: int, seqlen: int) -> int:
        """Examples of one forward pass, given this rank's examples of one optimizer step.

        Raises:
            ValueError: the step cannot be cut into equal pieces.
        """
        micro = min(num_examples, self.micro_batch_limit(seqlen) or num_examples)
        if num_examples % micro:
            raise ValueError(
                f"the {num_examples} examples of a step on one device must divide into "
                f"micro-batches of {micro}; change {' or '.join(self.batch_options)}"
            )
        return micro

    def size_of(self, batch: dict[str, Any]) -> tuple[int, int]:
        """(examples, tokens of the longest one that may come) of a batch."""
        return len(batch["input_ids"]), batch["input_ids"].shape[-1]

    def work(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        """What this rank's batch holds, int64 scalars: `tokens`, `samples`, what `flops` reads."""
        ids = batch["input_ids"]
        sizes = {"tokens": ids.numel(), "samples": len(ids)}
        return {name: torch.full((), size, device=ids.device) for name, size in sizes.items()}

    def flops(self, work: dict[str, float]) -> dict[str, float]:
        """FLOPs of training on so much work, by MFU's conventions; empty if they are not known."""
        per_token = self.model.flops_per_token(round(work["tokens"] / work["samples"]))
        return {kind: number * work["tokens"] for kind, number in per_token.items()}

    def counts(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        """Number of labels of each loss in this rank's batch, in the order of `loss_weights`."""
        raise NotImplementedError

    def piece(self, batch: dict[str, Any], rows: slice) -> dict[str, Any]:
        """The examples `rows` of a batch."""
        return {name: batch[name][rows] for name in ("input_ids", "labels")}

    def sums(self, piece: dict[str, Any]) -> dict[str, Tensor]:
        """What is summed over pieces and ranks, float32: the losses, scalars, then what is shown.

        What is no scalar a subclass makes scalars of in `_means`.
        """
        raise NotImplementedError

    @property
    def loss_weights(self) -> dict[str, float]:
        """The entries of `sums` whose means are minimised, and their weights."""
        return {"loss": 1.0}

    def count_of(self, name: str) -> str:
        """Which entry of `counts` an entry of `sums` is divided by."""
        return name

    def derived(self, means: dict[str, Tensor]) -> dict[str, Tensor]:
        """What is shown beside the means and follows from them."""
        return {}

    def result(self, name: str, metrics: dict[str, float], number: int) -> str:
        """One line that says what a validation or test came to.

        Args:
            name: of what was held out, for instance "validation".
            metrics: its means and what is derived of them.
            number: of held-out samples, or tokens, that these are of.
        """
        raise NotImplementedError

    def load_weights(self, source: str) -> None:
        """Start from the weights that `source` names; says what of the model they have not."""
        raise NotImplementedError

    def configure_model(self) -> None:
        """Where the strategy is FSDP2, shard the model.

        What may lie around a block, from the inside: recomputing (model.recompute, in the block's
        forward), sharding (here, so that weights are gathered for both runs of it), compilation
        (of a subclass, when it first runs). Sequences are split before (train.build).

        Lightning's mesh is (machines, GPUs of one): fully_shard replicates over the first and
        shards over the second.
        """
        if self.device_mesh is None or isinstance(self.model, FSDPModule):
            return
        for block in self.model.blocks:
            fully_shard(block, mesh=self.device_mesh)
        fully_shard(self.model, mesh=self.device_mesh)
        for method in self.forward_methods:
            register_fsdp_forward_method(self.model, method)

    def configure_optimizers(self) -> Optimizer:
        optimizer = self.make_optimizer(self.model)
        for group in optimizer.param_groups:
            group["peak_lr"] = float(group["lr"])
        self._configured = [
            {key: value for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
        return optimizer

    def on_train_start(self) -> None:
        # A resumed optimizer brings the options it was saved with: the configured ones hold.
        optimizer = self.optimizers()
        for group, options in zip(optimizer.param_groups, self._configured, strict=True):
            group.update(options)
        for param, state in optimizer.state.items():
            for name, value in state.items():
                if value.dim() and value.shape != param.shape:
                    raise ValueError(
                        f"the checkpoint's optimizer state must be of this model: {name} has shape "
                        f"{tuple(value.shape)}, its parameter {tuple(param.shape)}. Start a new "
                        "run from the weights: init_from="
                    )

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Tensor]:
        """One optimizer step.

        Returns:
            Means over the global batch of `sums` and what is `derived` of them, the gradient's norm
            before clipping, and the `work` of all ranks as "amount/..."; scalars on the device.
        """
        optimizer = self.optimizers()
        torch.manual_seed(step_seed(self.seed, self.global_step, self.global_rank))
        num_examples, seqlen = self.size_of(batch)
        micro = self.micro_batch(num_examples, seqlen)
        self.cut = (num_examples, micro, seqlen)  # for a message, should memory run out
        work = {f"amount/{name}": amount for name, amount in self.work(batch).items()}
        counts = self._summed({**self.counts(batch), **work})
        totals: dict[str, Tensor] = {}
        for start in range(0, num_examples, micro):
            last = start + micro >= num_examples
            with nullcontext() if last else self._no_gradient_sync():
                sums = self.sums(self.piece(batch, slice(start, start + micro)))
                # Strategies average gradients over ranks; the sum over ranks is wanted.
                parts = [
                    sums[name] * (weight * self.trainer.world_size / counts[name].clamp(min=1))
                    for name, weight in self.loss_weights.items()
                ]
                self.manual_backward(sum(parts[1:], parts[0]))
            for name, value in sums.items():
                totals[name] = totals.get(name, 0.0) + value.detach()
        grad_norm = nn.utils.clip_grad_norm_(
            self.model.parameters(), float("inf") if self.grad_clip is None else self.grad_clip
        )
        if isinstance(grad_norm, DTensor):  # under FSDP2, a sum still to be made over ranks
            grad_norm = grad_norm.full_tensor()
        factor = self.schedule(
            self.global_step,
            self.warmup_steps,
            self.max_steps,
            final_fraction=self.final_lr_fraction,
        )
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor
        # Known before the step: model.guard decides whether it is made.
        self.step_means = {**self._means(self._summed(totals), counts), "grad_norm": grad_norm}
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return {**self.step_means, **{name: counts[name] for name in work}}

    @property
    def lr(self) -> float:
        """Learning rate of the last step."""
        return float(self.optimizers().param_groups[0]["lr"])

    def on_validation_epoch_start(self) -> None:
        self._held_out: dict[str, Tensor] = {}

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        entries = {f"count/{name}": count for name, count in self.counts(batch).items()}
        entries |= self.sums(self.piece(batch, slice(0, self.size_of(batch)[0])))
        for name, value in entries.items():
            self._held_out[name] = self._held_out.get(name, 0.0) + value.double()

    def on_validation_epoch_end(self) -> None:
        self.log_dict({f"val/{name}": v for name, v in self.means().items()}, logger=False)
        self.validated_step = self.global_step

    def on_test_epoch_start(self) -> None:
        self.on_validation_epoch_start()

    def test_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def on_test_epoch_end(self) -> None:
        self.log_dict({f"test/{name}": v for name, v in self.means().items()}, logger=False)

    def means(self) -> dict[str, Tensor]:
        """Means over the held-out examples of all ranks since the epoch started."""
        totals = self._summed(self._held_out)
        counts = {n.removeprefix("count/"): v for n, v in totals.items() if n.startswith("count/")}
        return self._means({n: v for n, v in totals.items() if not n.startswith("count/")}, counts)

    def _means(self, totals: dict[str, Tensor], counts: dict[str, Tensor]) -> dict[str, Tensor]:
        means = {name: total / counts[self.count_of(name)] for name, total in totals.items()}
        return {**means, **self.derived(means)}

    def on_save_checkpoint(self, checkpoint: dict) -> None:
        checkpoint["model_config"] = dict(self.model.config)
        if not isinstance(self.model, FSDPModule):
            for state in checkpoint.get("optimizer_states", ()):
                self._number_like_the_model(state)
        else:  # whose shards name parameters, see model/sharded.py
            checkpoint["parameter_names"] = [name for name, _ in self.named_parameters()]

    def _number_like_the_model(self, state: dict) -> None:
        """Number the parameters of an optimizer's state dict in the model's order, not in that of
        the groups: FSDP2's strategy writes them so, and takes what it reads to be."""
        places = {id(param): place for place, param in enumerate(self.parameters())}
        groups = self.optimizers().param_groups
        numbers = [[places[id(param)] for param in group["params"]] for group in groups]
        old = [number for group in state["param_groups"] for number in group["params"]]
        new = dict(zip(old, [number for group in numbers for number in group], strict=True))
        state["state"] = {new[number]: entry for number, entry in state["state"].items()}
        for group, own in zip(state["param_groups"], numbers, strict=True):
            group["params"] = own

    def _summed(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """The values, of any shape, added over ranks by one reduction a type."""
        if self.trainer.world_size == 1:
            return values
        summed = {}
        for dtype in sorted({value.dtype for value in values.values()}, key=str):
            chosen = {name: value for name, value in values.items() if value.dtype == dtype}
            joined = torch.cat([value.flatten() for value in chosen.values()])
            torch.distributed.all_reduce(joined)
            parts = joined.split([value.numel() for value in chosen.values()])
            for (name, value), part in zip(chosen.items(), parts, strict=True):
                summed[name] = part.view(value.shape)
        return {name: summed[name] for name in values}

    @contextmanager
    def _no_gradient_sync(self) -> Iterator[None]:
        """Gradients of all micro-batches but the last stay on this rank."""
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(False)
            yield
            self.model.set_requires_gradient_sync(True)
        elif hasattr(self.trainer.strategy, "block_backward_sync"):
            with self.trainer.strategy.block_backward_sync():
                yield
        else:
            yield
