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

    approximate: "tanh" (GPT-2) or "none", the exact GELU (BERT).
    """

    def __init__(
        self, dim: int, hidden: int, *, bias: bool = True, approximate: str = "tanh"
    ) -> None:
        super().__init__()
        self.approximate = approximate
        self.up = nn.Linear(dim, hidden, bias=bias)
        self.down = nn.Linear(hidden, dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate=self.approximate))


class Block(Recomputing):
    """Pre-norm residual block: x += attention(norm1(x)), x += mlp(norm2(x)).

    Under autocast the sublayers return the low-precision dtype and the sum with a float32 x is
    float32: the residual stream keeps the precision of the embeddings.

    Args:
        dim, nheads, headdim, causal, attention, softmax_scale, layer, bias: see SelfAttention; bias
            also switches the biases of the MLP and of the norms.
        mlp_dim: hidden width of the MLP; None means 4 dim.
        attn_dropout: dropout on attention probabilities.
        resid_dropout: dropout on the output of each sublayer.
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
    ) -> None:
        super().__init__()
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
        self.mlp = MLP(dim, 4 * dim if mlp_dim is None else mlp_dim, bias=bias)
        self.dropout = nn.Dropout(resid_dropout)

    def compute(
        self,
        x: Tensor,
        *,
        kv_cache: KVCache | None = None,
        rotary: tuple[Tensor, Tensor] | None = None,
        lengths_k: Tensor | None = None,
        packing: Packing | None = None,
    ) -> Tensor:
        """x (batch, seqlen, dim) -> (batch, seqlen, dim); options as in SelfAttention.forward."""
        attended = self.attention(
            self.norm1(x), kv_cache=kv_cache, rotary=rotary, lengths_k=lengths_k, packing=packing
        )
        x = x + self.dropout(attended)
        return x + self.dropout(self.mlp(self.norm2(x)))


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
