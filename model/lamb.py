"""LAMB: Adam's update of each tensor, scaled to the tensor's own norm; for very large batches.

Source: You et al. 2019 (arXiv 1904.00962), algorithm 2, with phi the identity. No dependency of the
project offers it (torch has Adafactor and Muon, no LAMB).
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class LAMB(Optimizer):
    """Layer-wise adaptive moments, a whole group of tensors at a time (torch's foreach functions).

    For a tensor x with gradient g, at its step t:

        m = beta1 m + (1 - beta1) g              m^ = m / (1 - beta1^t)
        v = beta2 v + (1 - beta2) g^2            v^ = v / (1 - beta2^t)
        u = m^ / (sqrt(v^) + eps) + weight_decay x
        x = x - lr |x| / |u| u                   the ratio is 1 where a norm is 0

    A tensor is a "layer": the fused query, key and value projection has one ratio, not three.

    Args:
        params: parameters, or groups of them with options of their own.
        lr: step size relative to each tensor's norm, at least 0.
        betas: decay of the two moments, each in [0, 1).
        eps: added to the root of the second moment, at least 0.
        weight_decay: factor on x in the update, at least 0.
        adapt_undecayed: scale tensors with weight_decay 0 (biases, norms) too, as in the paper.
            False gives them Adam's plain update, as MLPerf's BERT (Apex's FusedLAMB) does.

    Raises:
        ValueError: an option is out of its range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        adapt_undecayed: bool = True,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "adapt_undecayed": adapt_undecayed,
        }
        super().__init__(params, defaults)
        for group in self.param_groups:
            for name in ("lr", "eps", "weight_decay"):
                if not group[name] >= 0.0:
                    raise ValueError(f"{name} must be at least 0, got {group[name]}")
            if len(group["betas"]) != 2 or not all(0.0 <= beta < 1.0 for beta in group["betas"]):
                raise ValueError(f"betas must be two numbers in [0, 1), got {group['betas']}")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; returns the closure's loss, if given one.

        Raises:
            NotImplementedError: a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self._update(params, group)
        return loss

    def _update(self, params: list[Tensor], group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        grads = [p.grad for p in params if p.grad is not None]
        if any(grad.is_sparse for grad in grads):
            raise NotImplementedError("LAMB needs dense gradients: set sparse=False")
        states = [self._state_of(p) for p in params]
        for state in states:
            state["step"] += 1
        steps = [state["step"].item() for state in states]  # on the CPU: no wait
        first = [state["exp_avg"] for state in states]
        second = [state["exp_avg_sq"] for state in states]
        torch._foreach_lerp_(first, grads, 1.0 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, grads, grads, 1.0 - beta2)

        roots = torch._foreach_sqrt(second)
        torch._foreach_div_(roots, [(1.0 - beta2**t) ** 0.5 for t in steps])
        torch._foreach_add_(roots, group["eps"])
        updates = list(torch._foreach_div(first, roots))
        torch._foreach_div_(updates, [1.0 - beta1**t for t in steps])
        if group["weight_decay"] != 0.0:
            torch._foreach_add_(updates, params, alpha=group["weight_decay"])
        if group["weight_decay"] != 0.0 or group["adapt_undecayed"]:
            torch._foreach_mul_(updates, _trust_ratios(params, updates))
        torch._foreach_add_(params, updates, alpha=-group["lr"])

    def _state_of(self, param: Tensor) -> dict[str, Tensor]:
        state = self.state[param]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        return state


def _trust_ratios(params: list[Tensor], updates: list[Tensor]) -> list[Tensor]:
    """|x| / |u| of each pair, 1 where either is 0; scalars on the device, nothing is waited for."""
    norms = []
    dtype = torch.float32
    for param in params:
        dtype = torch.promote_types(dtype, param.dtype)
    for tensors in (params, updates):
        # No dtype argument: for sharded tensors torch 2.14 takes it for the dimensions.
        scalars = torch._foreach_norm([tensor.to(dtype) for tensor in tensors])
        # A sharded tensor's norm is a sum still to be made over ranks.
        norms.append([s.full_tensor() if hasattr(s, "full_tensor") else s for s in scalars])
    return [
        torch.where((x > 0.0) & (u > 0.0), x / u, torch.ones_like(x))
        for x, u in zip(*norms, strict=True)
    ]
