"""The training steps that scripts.benchmark_training lets race: the same GPT-2 in our recipe, in
the plain one, and as Hugging Face's; the same BERT as ours and Hugging Face's."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from scripts import bert_contestants

CONFIGS = Path(__file__).parents[1] / "configs"


class Setting(NamedTuple):
    """What all contestants of a race have in common."""

    model: str  # of configs/model
    seqlen: int
    tokens: int  # of a step, a multiple of seqlen
    compile: bool = True  # where the contestant is a compiled one
    overrides: tuple[str, ...] = ()  # of train.py, for ours


class Contestant(NamedTuple):
    title: str
    dropout_p: float
    attention: str  # of configs/attention, or of Hugging Face
    family: str  # ours, plain or hf; of BERT bert or bert_hf
    is_compiled: bool = True
    overrides: tuple[str, ...] = ()  # of train.py


CONTESTANTS = {
    "ours": Contestant("ours", 0.0, "auto", "ours"),
    "ours_dropout": Contestant("ours, dropout", 0.1, "auto", "ours"),
    "ours_bf16": Contestant(
        "ours, bf16 stream", 0.0, "auto", "ours", overrides=("model.residual_in_fp32=false",)
    ),
    "plain": Contestant("plain recipe, SDPA, compiled", 0.0, "sdpa", "plain"),
    "plain_dropout": Contestant("plain recipe, dropout", 0.1, "sdpa", "plain"),
    "hf_eager": Contestant("Hugging Face, eager", 0.1, "eager", "hf", False),
    "hf_sdpa": Contestant("Hugging Face, SDPA", 0.1, "sdpa", "hf", False),
    "hf_compiled": Contestant("Hugging Face, SDPA, compiled", 0.1, "sdpa", "hf"),
    "bert": Contestant("ours, unpadded", 0.1, "auto", "bert"),
    "bert_padded": Contestant("ours, padded", 0.1, "auto", "bert"),
    "bert_hf_eager": Contestant("BertForPreTraining, eager", 0.1, "eager", "bert_hf", False),
    "bert_hf_sdpa": Contestant("BertForPreTraining, SDPA", 0.1, "sdpa", "bert_hf", False),
    "bert_hf_compiled": Contestant("BertForPreTraining, SDPA, compiled", 0.1, "sdpa", "bert_hf"),
}

BERT_MODELS = ("bert_large", "bert_base", "bert_tiny")

# Summed loss of (batch, seqlen) token ids, given those after them.
Loss = Callable[[Tensor, Tensor], Tensor]
# What a micro-batch adds to the mean loss of its step.
PieceLoss = Callable[[dict[str, Any]], Tensor]


def contestants_of(model: str) -> list[str]:
    """Names of those that train a model of configs/model."""
    is_bert = model in BERT_MODELS
    return [name for name, who in CONTESTANTS.items() if who.family.startswith("bert") == is_bert]


def configured(setting: Setting, dropout_p: float, attention: str) -> list[str]:
    """Overrides of train.py for the paper's recipe in this setting; BERT's with AdamW, as rivals
    have no LAMB."""
    is_bert = setting.model in BERT_MODELS
    kinds = ("resid", "attn") if is_bert else ("embd", "resid", "attn")
    return [
        *(
            ["experiment=bert_large_512", "optimizer=adamw", "optimizer.lr=1e-4"]
            if is_bert
            else ["experiment=gpt2_1k"]
        ),
        f"model={setting.model}",
        f"attention={attention}",
        f"data.seqlen={setting.seqlen}",
        f"data.batch_tokens={setting.tokens}",
        f"task.micro_batch_tokens={setting.tokens}",
        *(f"model.{kind}_dropout={dropout_p}" for kind in kinds),
        *setting.overrides,
    ]


def _config(setting: Setting, who: Contestant) -> DictConfig:
    attention = who.attention if who.attention in ("auto", "sdpa") else "sdpa"
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        overrides = configured(setting, who.dropout_p, attention)
        cfg = compose("train", [*overrides, *who.overrides])
    OmegaConf.update(cfg, "task.compile", setting.compile)
    if who.family == "plain":
        cfg.model.fused = False
    return cfg


def _ours(setting: Setting, who: Contestant) -> tuple[nn.Module, Optimizer, Loss]:
    """The task that train.py trains, without the trainer around it."""
    task = instantiate(_config(setting, who).task).to(_device())
    optimizer = task.configure_optimizers()
    if who.family == "ours":
        return task.model, optimizer, lambda ids, labels: task.sums(_batch(ids, labels))["loss"]
    model = task.model

    def plain_loss(ids: Tensor, labels: Tensor) -> Tensor:
        logits = F.linear(model.hidden(ids), model.head_weight)  # padding too, as is usual
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    return model, optimizer, _compiled(plain_loss, setting)


def _hugging_face(setting: Setting, who: Contestant) -> tuple[nn.Module, Optimizer, Loss]:
    """transformers' own model and loss, which leaves out the label behind each sequence."""
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = _config(setting, who).model
    config = GPT2Config(
        n_positions=setting.seqlen, n_layer=shape.depth, n_embd=shape.dim, n_head=shape.nheads,
        embd_pdrop=who.dropout_p, resid_pdrop=who.dropout_p, attn_pdrop=who.dropout_p,
        attn_implementation=who.attention, use_cache=False,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).to(_device()).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, fused=True)
    forward = _compiled(model, setting) if who.is_compiled else model

    def loss(ids: Tensor, labels: Tensor) -> Tensor:
        return forward(input_ids=ids, labels=ids).loss * labels.numel()

    return model, optimizer, loss


def _bert(setting: Setting, who: Contestant) -> tuple[nn.Module, Optimizer, PieceLoss]:
    """The task that train.py trains, heads on masked tokens alone."""
    task = instantiate(_config(setting, who).task).to(_device())

    def loss(piece: dict[str, Any]) -> Tensor:
        sums = task.sums(piece)
        return sums["mlm_loss"] / piece["num_masked"] + sums["nsp_loss"] / piece["num_pairs"]

    return task.model, task.configure_optimizers(), loss


def _bert_hugging_face(setting: Setting, who: Contestant) -> tuple[nn.Module, Optimizer, PieceLoss]:
    """transformers' own model and loss: a mean over micro-batches of their means."""
    with torch.device(_device()):
        model, optimizer = bert_contestants.hugging_face(
            _config(setting, who).model, who.attention, who.dropout_p
        )
    forward = _compiled(model, setting) if who.is_compiled else model

    def loss(piece: dict[str, Any]) -> Tensor:
        share = len(piece["nsp_labels"]) / piece["num_pairs"]
        return forward(**bert_contestants.hugging_face_inputs(piece)).loss * share

    return model, optimizer, loss


def _compiled(function: Callable, setting: Setting) -> Callable:
    return torch.compile(function, dynamic=False) if setting.compile else function


def _batch(ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
    return {"input_ids": ids, "labels": labels}


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


class Racer:
    """One contestant, built: `step` is one optimizer step on random tokens, in bf16 autocast on a
    GPU.

    Args:
        micro_batch: sequences of one forward and backward; divides those of a step.
    """

    def __init__(self, name: str, setting: Setting, micro_batch: int):
        who = CONTESTANTS[name]
        torch.manual_seed(0)
        self.micro_batch, self.num_steps = micro_batch, 0
        self.steps: list[list[Any]]  # micro-batches of the steps, which take turns
        self.piece_loss: Callable[[Any], Tensor]
        if who.family.startswith("bert"):
            build = _bert if who.family == "bert" else _bert_hugging_face
            self.model, self.optimizer, self.piece_loss = build(setting, who)
            self.steps = bert_contestants.pieces(
                setting.seqlen, setting.tokens, micro_batch, name == "bert", _device()
            )
        else:
            make = _hugging_face if who.family == "hf" else _ours
            self.model, self.optimizer, loss = make(setting, who)
            shape = (2, setting.tokens // setting.seqlen, setting.seqlen + 1)
            generator = torch.Generator().manual_seed(1)
            batches = torch.randint(0, 50257, shape, generator=generator).to(_device())
            self.steps = [[*batch.split(micro_batch)] for batch in batches]
            self.piece_loss = lambda ids: loss(ids[:, :-1], ids[:, 1:]) / setting.tokens
        self.model.train()

    def step(self) -> Tensor:
        """The mean loss before the step, a scalar that nobody has waited for."""
        pieces = self.steps[self.num_steps % len(self.steps)]
        self.num_steps += 1
        total: Tensor | float = 0.0
        for piece in pieces:
            with torch.autocast("cuda", torch.bfloat16, enabled=torch.cuda.is_available()):
                loss = self.piece_loss(piece)
            loss.backward()
            total = total + loss.detach()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        assert isinstance(total, Tensor)
        return total


def build_racer(name: str, setting: Setting) -> Racer:
    """With the largest micro-batch that memory holds, after two steps of it.

    Raises:
        torch.OutOfMemoryError: it holds not even one sequence.
    """
    micro_batch = setting.tokens // setting.seqlen
    racer: Racer | None
    while True:
        try:
            racer = Racer(name, setting, micro_batch)
            for _ in range(2):
                racer.step()
            return racer
        except torch.OutOfMemoryError:
            if micro_batch == 1:
                raise
        racer = None  # what it held goes before the next try
        torch.compiler.reset()
        release_memory()
        micro_batch //= 2


def release_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
