"""BERT as published: post-LayerNorm, erf GELU, learned positions and segments, MLM and NSP heads.

Source: Devlin et al. 2019 (arXiv 1810.04805) and the released weights. RoBERTa (Liu et al. 2019,
arXiv 1907.11692) is the same network with positions counted from 2, one segment, no NSP head.

Two equal ways through the blocks: a padded batch (batch, seqlen) with lengths, and packed real
tokens (total,) with cu_seqlens, which spend nothing on padding. The MLM head computes the positions
that it is given, about 15 % of all.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.attention import Attention, Packing, auto_attention, packed_attention
from model.bert_layers import BertEmbeddings, MLMHead, PostNormBlock
from model.block_sparse import layer_attention
from model.transformer import check_sizes, init_normal

INIT_STD = 0.02
#: Constructor arguments of the published sizes.
BERT_BASE = {"depth": 12, "dim": 768, "nheads": 12}
BERT_LARGE = {"depth": 24, "dim": 1024, "nheads": 16}
#: What RoBERTa changes; two rows of its position table (514 in all) are never trained.
ROBERTA = {
    "vocab_size": 50265,
    "num_segments": 1,
    "position_offset": 2,
    "norm_eps": 1e-5,
    "nsp_head": False,
}


class BERT(nn.Module):
    """Bidirectional encoder with optional pooler, MLM and NSP heads.

    Args:
        vocab_size: number of tokens, the width of the MLM logits.
        max_seqlen: longest sequence.
        depth: number of blocks.
        dim: width, a multiple of nheads.
        nheads: attention heads a block.
        mlp_dim: width of the MLP; None is 4 dim.
        num_segments: rows of the segment table (2; RoBERTa has 1, added everywhere).
        position_offset: row of the position table of the first token (RoBERTa: padding id + 1).
        norm_eps: of every LayerNorm.
        resid_dropout: on the embeddings and on the output of each sublayer, in [0, 1).
        attn_dropout: on the attention probabilities, in [0, 1).
        pooler: tanh layer on the first token; the NSP head needs it.
        mlm_head, nsp_head: which heads exist.
        attention: function with flash_kernels.flash_attention's signature, lengths_k included;
            packed batches go through model.attention.packed_attention.
        vocab_multiple: the token table has vocab_size rows rounded up to a multiple of this.
            Padding rows start at zero, and are sliced off the logits.

    Raises:
        ValueError: a size is no positive integer, dim is no multiple of nheads, a dropout is
            outside [0, 1), or an NSP head without pooler.
    """

    def __init__(
        self,
        *,
        vocab_size: int = 30522,
        max_seqlen: int = 512,
        depth: int,
        dim: int,
        nheads: int,
        mlp_dim: int | None = None,
        num_segments: int = 2,
        position_offset: int = 0,
        norm_eps: float = 1e-12,
        resid_dropout: float = 0.1,
        attn_dropout: float = 0.1,
        pooler: bool = True,
        mlm_head: bool = True,
        nsp_head: bool = True,
        attention: Attention = auto_attention,
        vocab_multiple: int = 64,
    ) -> None:
        super().__init__()
        sizes = {
            "vocab_size": vocab_size,
            "max_seqlen": max_seqlen,
            "depth": depth,
            "dim": dim,
            "nheads": nheads,
            "mlp_dim": 4 * dim if mlp_dim is None else mlp_dim,
            "num_segments": num_segments,
            "vocab_multiple": vocab_multiple,
        }
        dropouts = {"resid_dropout": resid_dropout, "attn_dropout": attn_dropout}
        check_sizes(sizes, dropouts)
        if dim % nheads != 0:
            raise ValueError(f"dim ({dim}) must be a multiple of nheads ({nheads})")
        if position_offset < 0:
            raise ValueError(f"position_offset must not be negative, got {position_offset}")
        if nsp_head and not pooler:
            raise ValueError("nsp_head reads the pooler: set pooler=True or nsp_head=False")
        #: Constructor arguments but attention, as plain values: BERT(**config) is the same shape.
        self.config: dict[str, Any] = {**sizes, **dropouts, "position_offset": position_offset}
        self.config |= {"norm_eps": norm_eps, "pooler": pooler}
        self.config |= {"mlm_head": mlm_head, "nsp_head": nsp_head}
        self.vocab_size = vocab_size
        self.max_seqlen = max_seqlen
        self.attention = attention

        num_rows = -(-vocab_size // vocab_multiple) * vocab_multiple
        self.embeddings = BertEmbeddings(
            num_rows,
            max_seqlen,
            dim,
            num_segments=num_segments,
            position_offset=position_offset,
            norm_eps=norm_eps,
            dropout=resid_dropout,
        )
        self.blocks = nn.ModuleList(
            PostNormBlock(
                dim,
                nheads,
                self.config["mlp_dim"],
                norm_eps=norm_eps,
                resid_dropout=resid_dropout,
                attn_dropout=attn_dropout,
            )
            for _ in range(depth)
        )
        self.pooler = nn.Linear(dim, dim) if pooler else None
        self.mlm = MLMHead(num_rows, dim, norm_eps=norm_eps) if mlm_head else None
        self.nsp = nn.Linear(dim, 2) if nsp_head else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Weights N(0, 0.02), biases 0, norms 1 and 0, padding rows 0."""
        init_normal(self, INIT_STD)
        self.embeddings.tokens.weight[self.vocab_size :].zero_()
        if self.mlm is not None:
            self.mlm.bias.zero_()

    def hidden(
        self,
        input_ids: Tensor,
        *,
        segment_ids: Tensor | None = None,
        lengths: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> Tensor:
        """Final hidden states of a padded or a packed batch.

        Args:
            input_ids: int64 in [0, vocab_size): (batch, seqlen) padded at the right end, or packed
                (total,).
            segment_ids: int64, shape of input_ids; None is segment 0 everywhere.
            lengths: int32 or int64 (batch,), real tokens of each padded sequence; None is all.
            cu_seqlens: int32 (batch + 1,), where each packed sequence starts; the last is total.
            max_seqlen: at least the longest packed sequence.

        Returns:
            input_ids' shape + (dim,). Rows of padding tokens are meaningless.

        Raises:
            ValueError: the arguments fit neither way, or a sequence may exceed max_seqlen.
        """
        if input_ids.dim() == 2 and cu_seqlens is None and max_seqlen is None:
            longest, position_ids, packing = input_ids.shape[1], None, None
        elif (
            input_ids.dim() == 1
            and cu_seqlens is not None
            and max_seqlen is not None
            and lengths is None
        ):
            packing = Packing(cu_seqlens, max_seqlen)
            longest, position_ids = max_seqlen, packing.positions(len(input_ids))
        else:
            raise ValueError(
                "input_ids must be (batch, seqlen) without cu_seqlens and max_seqlen, or (total,) "
                f"with both and without lengths; got input_ids {tuple(input_ids.shape)}"
            )
        if longest > self.max_seqlen:
            raise ValueError(
                f"sequences must be at most max_seqlen = {self.max_seqlen} tokens, got {longest}; "
                "shorten them or build the model with a larger max_seqlen"
            )
        x = self.embeddings(input_ids, segment_ids, position_ids)
        for layer, block in enumerate(self.blocks):
            attention = layer_attention(self.attention, layer)
            if packing is None:
                x = block(x, partial(attention, lengths_k=lengths))
            else:
                x = block(x, partial(packed_attention, attention, packing=packing))
        return x

    def pooled(self, hidden: Tensor, *, cu_seqlens: Tensor | None = None) -> Tensor:
        """tanh of a linear layer on each sequence's first token: (batch, dim).

        hidden: as hidden() returned it; packed states need their cu_seqlens. An empty sequence gets
        another token's state.
        """
        if self.pooler is None:
            raise ValueError("the model must have a pooler: build it with pooler=True")
        if cu_seqlens is None:
            first = hidden[:, 0]
        else:
            first = hidden[cu_seqlens[:-1].long().clamp(max=len(hidden) - 1)]
        return torch.tanh(self.pooler(first))

    def nsp_logits(self, pooled: Tensor) -> Tensor:
        """pooled (batch, dim) -> (batch, 2): segment B follows A, or is random."""
        if self.nsp is None:
            raise ValueError("the model must have an NSP head: build it with nsp_head=True")
        return self.nsp(pooled)

    def mlm_states(self, hidden: Tensor, masked_positions: Tensor | None = None) -> Tensor:
        """What decoder() projects, of some positions or of all.

        Args:
            hidden: (..., dim).
            masked_positions: int64 (num_masked,), rows of hidden.flatten(0, -2).

        Returns:
            (num_masked, dim), or hidden's shape.
        """
        if self.mlm is None:
            raise ValueError("the model must have an MLM head: build it with mlm_head=True")
        if masked_positions is not None:
            hidden = hidden.flatten(0, -2)[masked_positions]
        return self.mlm(hidden)

    @property
    def head_weight(self) -> Tensor:
        """(vocab_size rounded up, dim): the tied embedding, whose first vocab_size rows count."""
        return self.embeddings.tokens.weight

    def decoder(self, states: Tensor) -> Tensor:
        """mlm_states (..., dim) -> logits (..., vocab_size), a view that skips padding columns."""
        assert self.mlm is not None
        return F.linear(states, self.head_weight, self.mlm.bias)[..., : self.vocab_size]

    def mlm_logits(self, hidden: Tensor, masked_positions: Tensor | None = None) -> Tensor:
        """decoder(mlm_states(...)). Under autocast in the low-precision dtype."""
        return self.decoder(self.mlm_states(hidden, masked_positions))

    def forward(self, input_ids: Tensor, **layout: Any) -> Tensor:
        """Final hidden states; see hidden()."""
        return self.hidden(input_ids, **layout)

    def num_params(self, *, positions: bool = True) -> int:
        """Stored parameters: the tied head once, padding rows too, the position table if asked."""
        total = sum(p.numel() for p in self.parameters())
        return total if positions else total - self.embeddings.positions.weight.numel()

    def flops(self, *, tokens: float, pairs: float, masked: float, samples: float) -> float:
        """FLOPs of training, forward and backward: 6 a weight and what it multiplies.

        Blocks multiply every token, the MLM head and its decoder the masked ones, pooler and NSP
        head one token a sample; embeddings multiply nothing. Attention is 12 dim a layer and pair.

        Args:
            tokens: real ones.
            pairs: query-key pairs, the sum of squared lengths.
            masked: tokens that are predicted.
            samples: sequences.
        """

        def weights(module: nn.Module | None) -> int:
            return 0 if module is None else sum(p.numel() for p in module.parameters())

        head = 0 if self.mlm is None else weights(self.mlm) + self.head_weight.numel()
        products = (
            tokens * weights(self.blocks)
            + masked * head
            + samples * (weights(self.pooler) + weights(self.nsp))
        )
        return 6.0 * products + 12.0 * self.config["depth"] * self.config["dim"] * pairs
