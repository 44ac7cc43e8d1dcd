"""The optimizer, which parameters decay, and schedules as pure functions of the step."""

import math

from torch import nn
from torch.optim import AdamW

from model.lamb import LAMB

_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._BatchNorm)


def param_groups(
    model: nn.Module, weight_decay: float, *, decay_embeddings: bool = False
) -> list[dict]:
    """Optimizer groups: matrices decay; biases, norms and embeddings do not.

    A weight shared by an embedding and a linear layer counts once, as an embedding. Frozen
    parameters are left out. Order is that of model.parameters(), by which checkpoints number them.
    decay_embeddings: embeddings decay too, as in BERT's recipes.

    Returns:
        [{"params": [...], "weight_decay": weight_decay}, {"params": [...], "weight_decay": 0.0}],
        without an empty group.

    Raises:
        ValueError: weight_decay is negative or nothing is trainable.
    """
    if weight_decay < 0.0:
        raise ValueError(f"weight_decay must be at least 0, got {weight_decay}")
    undecayed = set()
    exempt = _NORMS if decay_embeddings else (nn.Embedding, *_NORMS)
    for module in model.modules():
        for param in module.parameters(recurse=False):
            if param.ndim < 2 or isinstance(module, exempt):
                undecayed.add(id(param))
    trainable = [p for p in model.parameters() if p.requires_grad]
    if not trainable:
        raise ValueError("the model must have a parameter with requires_grad=True, it has none")
    groups = [
        {"params": [p for p in trainable if id(p) not in undecayed], "weight_decay": weight_decay},
        {"params": [p for p in trainable if id(p) in undecayed], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def adamw(
    model: nn.Module,
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    fused: bool = True,
) -> AdamW:
    """AdamW over param_groups(model); the defaults but lr are the paper's (GPT-2, appendix E)."""
    groups = param_groups(model, weight_decay)
    beta1, beta2 = betas  # perhaps a list, from a configuration
    return AdamW(groups, lr=lr, betas=(beta1, beta2), eps=eps, fused=fused)


def lamb(
    model: nn.Module,
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 0.01,
    adapt_undecayed: bool = False,
) -> LAMB:
    """LAMB over param_groups(model), embeddings decay too; the defaults but lr are MLPerf's."""
    groups = param_groups(model, weight_decay, decay_embeddings=True)
    return LAMB(
        groups,
        lr,
        betas=betas,
        eps=eps,
        weight_decay=weight_decay,
        adapt_undecayed=adapt_undecayed,
    )


def _warmup_then(step: int, warmup_steps: int, total_steps: int) -> tuple[float, float]:
    """(warm-up factor, fraction of the decay done), each in [0, 1]."""
    if not 0 <= warmup_steps <= total_steps:
        raise ValueError(
            f"warmup_steps must be in [0, total_steps = {total_steps}], got {warmup_steps}"
        )
    if step < warmup_steps:
        return step / warmup_steps, 0.0
    return 1.0, min((step - warmup_steps) / max(total_steps - warmup_steps, 1), 1.0)


def warmup_linear(
    step: int, warmup_steps: int, total_steps: int, *, final_fraction: float = 0.0
) -> float:
    """Factor on the peak learning rate: 0 to 1 over warmup_steps, then linearly to the final one.

    The paper's schedule (transformers' get_linear_schedule_with_warmup): the factor of the first
    step, step 0, is 0 when there is a warm-up, and reaches final_fraction at total_steps.
    """
    warmup, decayed = _warmup_then(step, warmup_steps, total_steps)
    return warmup * (1.0 - (1.0 - final_fraction) * decayed)


def warmup_cosine(
    step: int, warmup_steps: int, total_steps: int, *, final_fraction: float = 0.0
) -> float:
    """As warmup_linear, with half a cosine for the decay."""
    warmup, decayed = _warmup_then(step, warmup_steps, total_steps)
    cosine = 0.5 * (1.0 + math.cos(math.pi * decayed))
    return warmup * (final_fraction + (1.0 - final_fraction) * cosine)


def warmup_sqrt(
    step: int, warmup_steps: int, total_steps: int, *, final_fraction: float = 0.0
) -> float:
    """As warmup_linear, with the square root of what is left for the decay.

    transformers' get_polynomial_decay_schedule_with_warmup at power 0.5.
    """
    warmup, decayed = _warmup_then(step, warmup_steps, total_steps)
    return warmup * (final_fraction + (1.0 - final_fraction) * (1.0 - decayed) ** 0.5)


def warmup_rsqrt(
    step: int, warmup_steps: int, total_steps: int, *, final_fraction: float = 0.0
) -> float:
    """As warmup_linear, then sqrt(warmup_steps / step), but at least final_fraction.

    The Long Range Arena's: its base rate is the peak times sqrt(warmup_steps).
    """
    warmup, _ = _warmup_then(step, warmup_steps, total_steps)
    return warmup * max(final_fraction, (max(warmup_steps, 1) / max(step, warmup_steps, 1)) ** 0.5)
