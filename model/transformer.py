"""Parts of a transformer: embeddings, MLP, pre-norm block."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.attention import Attention, Packing, auto_attention
from model.recompute import Recomputing
from model.self_attention import KVCache, SelfAttention


def check_sizes(sizes: dict[str, Any], dropouts: dict[str, Any]) -> None:
    """Raise ValueError for the first option of a model that is no size, or no probability."""
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} must be an integer of at least 1, got {size!r}")
    for name, dropout in dropouts.items():
        if not isinstance(dropout, int | float) or not 0.0 <= dropout < 1.0:
            raise ValueError(f"{name} must be a number in [0, 1), got {dropout!r}")


def has_kernels(x: Tensor) -> bool:
    """Whether flash_kernels.fused serves a tensor and pays: eager code without gradients, such as
    decoding a token, waits for the host, whom torch's own operators cost less."""
    return x.is_cuda and (torch.is_grad_enabled() or torch.compiler.is_compiling())


class Embeddings(nn.Module):
    """Token plus learned position embeddings, then dropout.

    The token table has vocab_size rows rounded up to a multiple of vocab_multiple: the padding rows
    make the output projection's matrix sizes friendly to tensor cores and belong to no token.

    Args:
        vocab_size: number of tokens.
        max_seqlen: rows of the position table.
        dim: width.
        vocab_multiple: what the rows of the token table are a multiple of.
        dropout: probability of dropping an element of the sum.
    """

    def __init__(
        self,
        vocab_size: int,
        max_seqlen: int,
        dim: int,
        *,
        vocab_multiple: int = 1,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        num_rows = -(-vocab_size // vocab_multiple) * vocab_multiple
        self.tokens = nn.Embedding(num_rows, dim)
        self.positions = nn.Embedding(max_seqlen, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, input_ids: Tensor, *, first_position: int = 0, positions: Tensor | None = None
    ) -> Tensor:
        """input_ids (batch, seqlen) int64 -> (batch, seqlen, dim), dtype of the tables.

        positions: int64 (seqlen,); None counts from first_position.
        """
        if positions is None:
            # A slice, not a look-up: its gradient needs no scatter.
            rows = self.positions.weight[first_position : first_position + input_ids.shape[1]]
        else:
            rows = self.positions(positions)
        return self.dropout(self.tokens(input_ids) + rows)


class MLP(nn.Module):
    """Linear to `hidden`, GELU, linear back to `dim`.

    Args:
        approximate: "tanh" (GPT-2) or "none", the exact GELU (BERT).
        fused: on a GPU, it is gelu_mlp of flash_kernels.fused, unless something else has taken the
            place of `up` or `down` (an adapter, a parametrization), or hooks them.
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        *,
        bias: bool = True,
        approximate: str = "tanh",
        fused: bool = True,
    ) -> None:
        super().__init__()
        self.approximate = approximate
        self.fused = fused
        self.up = nn.Linear(dim, hidden, bias=bias)
        self.down = nn.Linear(hidden, dim, bias=bias)

    def forward(self, x: Tensor, *, in_steps: bool = False) -> Tensor:
        """x (..., dim) -> the same.

        in_steps: where activations are computed again in the backward; see gelu_mlp.
        """
        is_plain = _is_plain(self.up, nn.Linear) and _is_plain(self.down, nn.Linear)
        if self.fused and is_plain and self.up.bias is not None and has_kernels(x):
            from flash_kernels.fused.mlp import gelu_mlp

            return gelu_mlp(
                x, self.up.weight, self.up.bias, self.down.weight, self.down.bias,
                approximate=self.approximate, in_steps=in_steps,
            )  # fmt: skip
        return self.down(F.gelu(self.up(x), approximate=self.approximate))


def _is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module does what its kind does and nothing more, as far as it says itself: hooks of
    all modules (register_module_forward_hook) are not looked for."""
    hooks = (
        module._forward_hooks, module._forward_pre_hooks, module._backward_hooks,
        module._backward_pre_hooks,
    )  # fmt: skip
    return type(module) is kind and not any(hooks) and "forward" not in vars(module)


def add_and_norm(
    x: Tensor, branch: Tensor | None, norm: nn.LayerNorm, dropout: nn.Dropout, *, fused: bool
) -> tuple[Tensor, Tensor]:
    """x + dropout(branch), and the norm of it.

    Args:
        x: (..., dim), the residual stream.
        branch: the same shape, what a sublayer adds to it; None adds nothing.
        fused: take the kernels of flash_kernels.fused where they pay (has_kernels) and nothing else
            has taken the place of norm or dropout or hooks them; their dropout draws other masks
            than torch's.
    """
    if branch is None:
        return x, norm(x)
    is_plain = _is_plain(norm, nn.LayerNorm) and _is_plain(dropout, nn.Dropout)
    if fused and is_plain and has_kernels(x):
        from flash_kernels.fused.residual_norm import residual_norm

        dropout_p = dropout.p if dropout.training else 0.0
        return residual_norm(x, branch, norm.weight, norm.bias, eps=norm.eps, dropout_p=dropout_p)
    x = x + dropout(branch)
    return x, norm(x)


class Block(Recomputing):
    """Pre-norm residual block: x += attention(norm1(x)), x += mlp(norm2(x)).

    A sum and the norm behind it are one step (add_and_norm), so a block leaves its last sum to the
    next block. Under autocast the sublayers return the low-precision dtype and the sum with a
    float32 x is float32: the residual stream keeps the precision of the embeddings.

    Args:
        dim, nheads, headdim, causal, attention, softmax_scale, layer, bias: see SelfAttention; bias
            also switches the biases of the MLP and of the norms.
        mlp_dim: hidden width of the MLP; None means 4 dim.
        attn_dropout: dropout on attention probabilities.
        resid_dropout: dropout on the output of each sublayer.
        fused: see add_and_norm and MLP.
    """

    def __init__(
        self,
        dim: int,
        nheads: int,
        *,
        headdim: int | None = None,
        mlp_dim: int | None = None,
        causal: bool,
        attn_dropout: float = 0.0,
        resid_dropout: float = 0.0,
        attention: Attention = auto_attention,
        bias: bool = True,
        softmax_scale: float | None = None,
        layer: int = 0,
        fused: bool = True,
    ) -> None:
        super().__init__()
        self.fused = fused
        self.norm1 = nn.LayerNorm(dim, bias=bias)
        self.attention = SelfAttention(
            dim,
            nheads,
            headdim=headdim,
            causal=causal,
            dropout=attn_dropout,
            attention=attention,
            bias=bias,
            softmax_scale=softmax_scale,
            layer=layer,
        )
        self.norm2 = nn.LayerNorm(dim, bias=bias)
        mlp_dim = 4 * dim if mlp_dim is None else mlp_dim
        self.mlp = MLP(dim, mlp_dim, bias=bias, fused=fused)
        self.dropout = nn.Dropout(resid_dropout)

    def compute(
        self,
        x: Tensor,
        branch: Tensor | None = None,
        *,
        kv_cache: KVCache | None = None,
        rotary: tuple[Tensor, Tensor] | None = None,
        lengths_k: Tensor | None = None,
        packing: Packing | None = None,
    ) -> tuple[Tensor, Tensor]:
        """x (batch, seqlen, dim) and what is still to be added to it, branch -> the same.

        Options as in SelfAttention.forward.
        """
        x, normed = add_and_norm(x, branch, self.norm1, self.dropout, fused=self.fused)
        attended = self.attention(
            normed, kv_cache=kv_cache, rotary=rotary, lengths_k=lengths_k, packing=packing
        )
        x, normed = add_and_norm(x, attended, self.norm2, self.dropout, fused=self.fused)
        return x, self.mlp(normed, in_steps=self.recompute != "none")


@torch.no_grad()
def init_normal(module: nn.Module, std: float) -> None:
    """Weights of linear layers and embeddings ~ N(0, std), biases 0, norms 1 and 0; in place."""
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, std=std)
        elif isinstance(part, nn.LayerNorm):
            nn.init.ones_(part.weight)
        if isinstance(part, nn.Linear | nn.LayerNorm) and part.bias is not None:
            nn.init.zeros_(part.bias)
