"""Layers of BERT: embeddings with segments and LayerNorm, post-LayerNorm block, MLM head."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.recompute import Recomputing
from model.transformer import MLP


class BertEmbeddings(nn.Module):
    """Token + position + segment embeddings, LayerNorm, dropout.

    Args: see BERT; num_rows are the rows of the token table, padding included.
    """

    def __init__(
        self,
        num_rows: int,
        max_seqlen: int,
        dim: int,
        *,
        num_segments: int,
        position_offset: int,
        norm_eps: float,
        dropout: float,
    ) -> None:
        super().__init__()
        self.position_offset = position_offset
        self.tokens = nn.Embedding(num_rows, dim)
        self.positions = nn.Embedding(position_offset + max_seqlen, dim)
        self.segments = nn.Embedding(num_segments, dim)
        self.norm = nn.LayerNorm(dim, eps=norm_eps)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, input_ids: Tensor, segment_ids: Tensor | None, position_ids: Tensor | None
    ) -> Tensor:
        """input_ids (..., seqlen) -> (..., seqlen, dim); segments default to 0, positions to a
        count from 0."""
        if position_ids is None:
            # A slice, not a look-up: its gradient needs no scatter.
            end = self.position_offset + input_ids.shape[-1]
            positions = self.positions.weight[self.position_offset : end]
        else:
            positions = self.positions(position_ids + self.position_offset)
        if segment_ids is None:
            segments = self.segments.weight[0]
        else:
            segments = self.segments(segment_ids)
        return self.dropout(self.norm(self.tokens(input_ids) + segments + positions))


class PostNormBlock(Recomputing):
    """x = norm1(x + attention(x)), x = norm2(x + mlp(x)): BERT's residual block.

    Args: see BERT.
    """

    def __init__(
        self,
        dim: int,
        nheads: int,
        mlp_dim: int,
        *,
        norm_eps: float,
        resid_dropout: float,
        attn_dropout: float,
    ) -> None:
        super().__init__()
        self.nheads = nheads
        self.attn_dropout = attn_dropout
        self.qkv = nn.Linear(dim, 3 * dim)  # rows: q, k, v; heads contiguous in each
        self.out = nn.Linear(dim, dim)
        self.norm1 = nn.LayerNorm(dim, eps=norm_eps)
        self.mlp = MLP(dim, mlp_dim, approximate="none")
        self.norm2 = nn.LayerNorm(dim, eps=norm_eps)
        self.dropout = nn.Dropout(resid_dropout)

    def compute(self, x: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        """x (..., dim) -> (..., dim).

        attend: attention(q, k, v, dropout_p=...) on (..., nheads, headdim), lengths bound to it.
        """
        q, k, v = self.qkv(x).unflatten(-1, (3, self.nheads, -1)).unbind(-3)
        attended = attend(q, k, v, dropout_p=self.attn_dropout if self.training else 0.0)
        x = self.norm1(x + self.dropout(self.out(attended.flatten(-2))))
        return self.norm2(x + self.dropout(self.mlp(x)))


class MLMHead(nn.Module):
    """Linear, erf GELU, LayerNorm; the decoder is the token table plus this bias.

    Args: see BERT; num_rows are the rows of the token table.
    """

    def __init__(self, num_rows: int, dim: int, *, norm_eps: float) -> None:
        super().__init__()
        self.transform = nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim, eps=norm_eps)
        self.bias = nn.Parameter(torch.zeros(num_rows))

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden (..., dim) -> what the decoder multiplies, (..., dim)."""
        return self.norm(F.gelu(self.transform(hidden)))
