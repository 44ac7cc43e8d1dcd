"""What W&B shows beside charts: samples of a GPT's text and pictures of its block masks."""

from lightning import Callback, LightningModule, Trainer
from torch import nn
from torch.distributed.fsdp import FSDPModule

from model.block_sparse import BlockSparseAttention
from model.generation import sample_text
from model.gpt import GPT
from model.wandb_logger import PatientWandbLogger

_COLUMNS = ["step", "tokens", "sample", "text"]


class WandbMedia(Callback):
    """A table of samples, longer with every validation, and a picture of each pattern of blocks.

    Samples are drawn by rank 0 from the weights as validation has them, with generators of their
    own: training is the same with and without them. There are none of a model that is sharded
    (FSDP2) or shares its sequences, which no single process can run, nor of one that is no GPT.

    Args:
        prompt: what the samples continue; None for none.
        num_tokens: length of a sample.
        num_samples: samples a validation.
        most_rows: rows of the table, the newest; each validation sends them all.
        seed: of the samples, the same at each validation.

    Raises:
        ValueError: a number is below its least.
    """

    def __init__(
        self,
        *,
        prompt: str | None = "The",
        num_tokens: int = 64,
        num_samples: int = 2,
        most_rows: int = 100,
        seed: int = 1111,
    ):
        for name, number in (
            ("num_tokens", num_tokens), ("num_samples", num_samples), ("most_rows", most_rows)
        ):  # fmt: skip
            if number < 1:
                raise ValueError(f"{name} must be at least 1, got {number}")
        self.prompt, self.num_tokens, self.num_samples = prompt, num_tokens, num_samples
        self.most_rows, self.seed = most_rows, seed
        self._rows: list[list] = []

    def state_dict(self) -> dict:
        return {"rows": self._rows}

    def load_state_dict(self, state: dict) -> None:
        self._rows = state["rows"]

    def on_train_start(self, trainer: Trainer, task: LightningModule) -> None:
        loggers = _wandb_loggers(trainer)
        if not loggers:
            return
        for name, svg in pattern_pictures(task.model).items():
            for logger in loggers:
                logger.log_drawing(f"attention/{name}", svg, trainer.global_step)

    def on_validation_epoch_end(self, trainer: Trainer, task: LightningModule) -> None:
        # Before on_validation_end, where the clock of the training speed goes on.
        loggers = _wandb_loggers(trainer)
        tokenizer = getattr(trainer.datamodule, "tokenizer", None)
        if not loggers or trainer.sanity_checking or tokenizer is None or not self.prompt:
            return
        if not isinstance(task.model, GPT) or isinstance(task.model, FSDPModule):
            return
        if task.shares_sequences:
            return
        step, tokens = trainer.global_step, _tokens(trainer)
        with trainer.precision_plugin.forward_context():
            texts = sample_text(
                task.model, tokenizer, self.prompt, self.num_tokens,
                num_samples=self.num_samples, seed=self.seed,
            )  # fmt: skip
        # A resume may do a validation again.
        kept = [row for row in self._rows if row[0] != step]
        self._rows = kept + [[step, tokens, i, text] for i, text in enumerate(texts)]
        self._rows = self._rows[-self.most_rows :]
        for logger in loggers:
            logger.log_rows("samples/text", _COLUMNS, self._rows, step, tokens)


def pattern_pictures(model: nn.Module) -> dict[str, str]:
    """name -> SVG of each pattern of a block-sparse model; empty for another attention."""
    for module in model.modules():
        layer = getattr(module, "attention", None)
        layer = getattr(layer, "inner", layer)  # of model.context_parallel
        owner = getattr(layer, "attention", None)
        if isinstance(owner, BlockSparseAttention):
            return owner.pictures()
    return {}


def _wandb_loggers(trainer: Trainer) -> list[PatientWandbLogger]:
    """On rank 0 alone: others have none."""
    return [logger for logger in trainer.loggers if isinstance(logger, PatientWandbLogger)]


def _tokens(trainer: Trainer) -> int:
    """Consumed so far, as the callback that counts them says."""
    return next((c.tokens for c in trainer.callbacks if hasattr(c, "tokens")), 0)
