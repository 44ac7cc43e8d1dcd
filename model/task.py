"""Lightning modules: what one optimizer step does, in any number of micro-batches and processes.

One batch from the loader is the whole optimizer step of this rank. The task splits it, sums the
token losses of every piece and divides once by the number of labelled tokens in the *global* batch,
so that the update does not depend on how the batch was split (a mean of means would, as soon as
pieces hold unequal numbers of labels).
"""

import hashlib
from collections.abc import Callable
from contextlib import contextmanager, nullcontext

import torch
from lightning import LightningModule
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from model.loss import linear_next_token_loss
from model.optim import warmup_cosine, warmup_linear

SCHEDULES = {"linear": warmup_linear, "cosine": warmup_cosine}


def step_seed(seed: int, step: int, rank: int) -> int:
    """63-bit seed of the random numbers (dropout) of one step on one rank.

    Seeding every step, rather than saving generator states, makes a resumed run repeat the masks of
    the uninterrupted one on any number of processes, and whatever else drew numbers in between.
    """
    digest = hashlib.blake2b(f"{seed}/{step}/{rank}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class CausalLMTask(LightningModule):
    """Next-token training of a GPT.

    Args:
        model: a model.gpt.GPT, or what offers the same hidden(), head_weight, vocab_size and
            config, from which a checkpoint rebuilds it.
        optimizer: called with the model, returns the optimizer; its lr is the peak.
        max_steps: optimizer steps of the run; the schedule ends there.
        warmup_fraction: share of max_steps over which lr rises linearly from 0.
        decay: "linear" or "cosine" decay after the warm-up.
        final_lr_fraction: share of the peak lr at which the decay ends.
        grad_clip: bound on the global 2-norm of the gradient; None turns clipping off.
        micro_batch_tokens: tokens of one forward and backward on one device.
        loss_chunk_tokens: tokens whose logits exist at once.
        compile: compile the forward pass and loss with torch.compile.
        seed: of dropout.

    Raises:
        ValueError: an option is out of its range.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Callable[[nn.Module], Optimizer],
        *,
        max_steps: int,
        warmup_fraction: float = 0.01,
        decay: str = "linear",
        final_lr_fraction: float = 0.0,
        grad_clip: float | None = 1.0,
        micro_batch_tokens: int = 65536,
        loss_chunk_tokens: int = 8192,
        compile: bool = False,
        seed: int = 1111,
    ):
        super().__init__()
        if max_steps < 1:
            raise ValueError(f"max_steps must be at least 1, got {max_steps}")
        if not 0.0 <= warmup_fraction <= 1.0:
            raise ValueError(f"warmup_fraction must be between 0 and 1, got {warmup_fraction}")
        if decay not in SCHEDULES:
            raise ValueError(f"decay must be one of {sorted(SCHEDULES)}, got {decay!r}")
        if grad_clip is not None and grad_clip <= 0.0:
            raise ValueError(f"grad_clip must be positive or null, got {grad_clip}")
        for name, size in (
            ("micro_batch_tokens", micro_batch_tokens),
            ("loss_chunk_tokens", loss_chunk_tokens),
        ):
            if size < 1:
                raise ValueError(f"{name} must be positive, got {size}")
        self.automatic_optimization = False
        self.model = model
        self.make_optimizer = optimizer
        self.max_steps = max_steps
        self.warmup_steps = round(warmup_fraction * max_steps)
        self.schedule = SCHEDULES[decay]
        self.final_lr_fraction = final_lr_fraction
        self.grad_clip = grad_clip
        self.micro_batch_tokens = micro_batch_tokens
        self.loss_chunk_tokens = loss_chunk_tokens
        self.seed = seed
        # Shapes do not change during a run: dynamic=False keeps the kernels specialized to them.
        self._loss = torch.compile(self._plain_loss, dynamic=False) if compile else self._plain_loss
        self._val_sums: Tensor | None = None
        self.validated_step = -1  # global_step of the last validation

    def _plain_loss(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Summed loss (float32) and number of labelled tokens of one micro-batch."""
        return linear_next_token_loss(
            self.model.hidden(input_ids),
            self.model.head_weight,
            labels,
            vocab_size=self.model.vocab_size,
            chunk_tokens=self.loss_chunk_tokens,
        )

    def micro_batch(self, num_sequences: int, seqlen: int) -> int:
        """Sequences of one forward pass, given this rank's sequences of one optimizer step.

        Raises:
            ValueError: the step cannot be cut into equal pieces of micro_batch_tokens.
        """
        micro = min(num_sequences, max(1, self.micro_batch_tokens // seqlen))
        if num_sequences % micro:
            raise ValueError(
                f"the {num_sequences} sequences of a step on one device must divide into "
                f"micro-batches of {micro} (task.micro_batch_tokens={self.micro_batch_tokens}, "
                f"data.seqlen={seqlen}); change task.micro_batch_tokens or data.batch_tokens"
            )
        return micro

    def configure_model(self) -> None:
        """Where the strategy is FSDP2, shard the model.

        Lightning's mesh is (machines, GPUs of one): fully_shard replicates over the first and
        shards over the second.
        """
        if self.device_mesh is None or isinstance(self.model, FSDPModule):
            return
        for block in self.model.blocks:
            fully_shard(block, mesh=self.device_mesh)
        fully_shard(self.model, mesh=self.device_mesh)
        register_fsdp_forward_method(self.model, "hidden")  # the method that training calls

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
        for group, options in zip(self.optimizers().param_groups, self._configured, strict=True):
            group.update(options)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        optimizer = self.optimizers()
        torch.manual_seed(step_seed(self.seed, self.global_step, self.global_rank))
        num_sequences, seqlen = batch["input_ids"].shape
        micro = self.micro_batch(num_sequences, seqlen)
        num_tokens = self._sum_over_ranks((batch["labels"] != -100).sum())
        # Strategies average gradients over ranks; the sum over ranks is wanted.
        scale = self.trainer.world_size / num_tokens.clamp(min=1)
        loss_sum = torch.zeros((), device=self.device)
        for start in range(0, num_sequences, micro):
            piece = slice(start, start + micro)
            last = start + micro >= num_sequences
            with nullcontext() if last else self._no_gradient_sync():
                loss, _ = self._loss(batch["input_ids"][piece], batch["labels"][piece])
                self.manual_backward(loss * scale)
            loss_sum += loss.detach()
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
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return {"loss": self._sum_over_ranks(loss_sum) / num_tokens, "grad_norm": grad_norm}

    @property
    def lr(self) -> float:
        """Learning rate of the last step."""
        return float(self.optimizers().param_groups[0]["lr"])

    def on_validation_epoch_start(self) -> None:
        self._val_sums = torch.zeros(2, dtype=torch.float64, device=self.device)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        loss, num_tokens = self._loss(batch["input_ids"], batch["labels"])
        self._val_sums += torch.stack([loss.double(), num_tokens.double()])

    def on_validation_epoch_end(self) -> None:
        loss_sum, num_tokens = self._sum_over_ranks(self._val_sums)
        loss = loss_sum / num_tokens
        self.log_dict({"val/loss": loss, "val/ppl": loss.exp()}, logger=False)
        self.validated_step = self.global_step

    def on_save_checkpoint(self, checkpoint: dict) -> None:
        checkpoint["model_config"] = dict(self.model.config)

    def _sum_over_ranks(self, value: Tensor) -> Tensor:
        if self.trainer.world_size == 1:
            return value
        value = value.clone()
        torch.distributed.all_reduce(value)
        return value

    @contextmanager
    def _no_gradient_sync(self):
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
