"""Gradients of operators through the dispatcher, and below the transforms of torch.func, which
torch.library.register_autograd does not serve. There are no second ones."""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from .operators import LIBRARY


def with_gradients(
    name: str, save: Callable[..., None], differentiate: Callable[..., Any]
) -> Callable[..., Any]:
    """The operator flash_kernels::`name` with gradients.

    Args:
        save: setup_context of an autograd.Function.
        differentiate: its backward.
    """
    operator = getattr(torch.ops.flash_kernels, name)
    torch.library.register_autograd(
        f"flash_kernels::{name}", differentiate, setup_context=save, lib=LIBRARY
    )
    function = _function(operator, save, differentiate)

    def call(*inputs: Any) -> Any:
        if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
            return operator(*inputs)
        return function.apply(*inputs)

    return call


def once(name: str) -> Callable[..., Any]:
    """The operator flash_kernels::`name`, a backward, whose gradients are an error and not 0.

    Nothing is registered: in a backward that builds no graph it costs nothing.
    """
    operator = getattr(torch.ops.flash_kernels, name)
    function = _function(operator, lambda ctx, inputs, output: None, refuse_second)

    def call(*inputs: Any) -> Any:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return operator(*inputs)
        return function.apply(*inputs)

    return call


def _function(
    operator: Callable[..., Any], save: Callable[..., None], differentiate: Callable[..., Any]
) -> type[torch.autograd.Function]:
    class Differentiable(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*inputs: Any) -> Any:
            return operator(*inputs)

        setup_context = staticmethod(save)
        backward = staticmethod(differentiate)

    return Differentiable


def refuse_second(ctx: Any, *gradients: Tensor | None) -> NoReturn:
    """Raise RuntimeError."""
    raise RuntimeError(
        "the kernels have no second derivatives: differentiate once, or take torch's functions "
        "(in a model: attention=sdpa, fused=False)"
    )
