"""GPT-2 as published: pre-LayerNorm, tanh GELU, learned positions, tied embeddings, dropout.

Source: Radford et al. 2019 and the released weights; the layout of hf.py maps to them one to one.
What the training recipe of FlashAttention's authors adds is optional: scores divided by the layer's
number (inverse_layer_scale) and a padded vocabulary.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.attention import Attention, Packing, auto_attention
from model.block_sparse import layer_attention
from model.self_attention import KVCache
from model.transformer import Block, Embeddings, add_and_norm, check_sizes, init_normal

INIT_STD = 0.02


class GPT(nn.Module):
    """Decoder-only language model.

    Args:
        vocab_size: number of tokens, the width of the logits.
        max_seqlen: longest context (rows of the position table).
        depth: number of blocks.
        dim: width, a multiple of nheads.
        nheads: attention heads a block.
        embd_dropout, resid_dropout, attn_dropout: dropout on the embeddings, on the output of each
            sublayer, on the attention probabilities; each in [0, 1), active in training only.
        attention: function with flash_kernels.flash_attention's signature (model/attention.py).
        inverse_layer_scale: divide the scores of block i (from 0) by i + 1.
        bias: biases in linear layers and norms (GPT-2 has them).
        vocab_multiple: the embedding has vocab_size rows rounded up to a multiple of this. Padding
            rows start at zero, receive no gradient, and are sliced off the logits.
        fused: on a GPU, residual sums with dropout and the norms behind them, and the MLPs, are
            steps of flash_kernels.fused.
        residual_in_fp32: under autocast too, the sums between sublayers are float32. False keeps
            them in autocast's dtype, half the bytes, and rounds each.

    Raises:
        ValueError: a size is no positive integer, dim is no multiple of nheads, a dropout is
            outside [0, 1).
    """

    def __init__(
        self,
        *,
        vocab_size: int = 50257,
        max_seqlen: int = 1024,
        depth: int,
        dim: int,
        nheads: int,
        embd_dropout: float = 0.1,
        resid_dropout: float = 0.1,
        attn_dropout: float = 0.1,
        attention: Attention = auto_attention,
        inverse_layer_scale: bool = False,
        bias: bool = True,
        vocab_multiple: int = 128,
        fused: bool = True,
        residual_in_fp32: bool = True,
    ) -> None:
        super().__init__()
        sizes = {
            "vocab_size": vocab_size,
            "max_seqlen": max_seqlen,
            "depth": depth,
            "dim": dim,
            "nheads": nheads,
            "vocab_multiple": vocab_multiple,
        }
        dropouts = {
            "embd_dropout": embd_dropout,
            "resid_dropout": resid_dropout,
            "attn_dropout": attn_dropout,
        }
        check_sizes(sizes, dropouts)
        if dim % nheads != 0:
            raise ValueError(f"dim ({dim}) must be a multiple of nheads ({nheads})")
        #: Constructor arguments but attention and those that change only the rounding, fused and
        #: residual_in_fp32, as plain values: GPT(**config) is the same function.
        self.config: dict[str, Any] = {
            **sizes,
            **dropouts,
            "inverse_layer_scale": inverse_layer_scale,
        }
        self.config["bias"] = bias
        self.vocab_size = vocab_size
        self.max_seqlen = max_seqlen

        self.embeddings = Embeddings(
            vocab_size, max_seqlen, dim, vocab_multiple=vocab_multiple, dropout=embd_dropout
        )
        default_scale = (dim // nheads) ** -0.5
        self.blocks = nn.ModuleList(
            Block(
                dim,
                nheads,
                causal=True,
                attn_dropout=attn_dropout,
                resid_dropout=resid_dropout,
                attention=layer_attention(attention, layer),
                bias=bias,
                softmax_scale=default_scale / (layer + 1) if inverse_layer_scale else None,
                layer=layer,
                fused=fused,
            )
            for layer in range(depth)
        )
        self.fused, self.residual_in_fp32 = fused, residual_in_fp32
        self.resid_dropout = nn.Dropout(resid_dropout)  # on what the last block leaves to add
        self.norm = nn.LayerNorm(dim, bias=bias)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """N(0, 0.02), projections into the residual stream divided by sqrt(2 depth), biases 0."""
        init_normal(self, INIT_STD)
        residual_std = INIT_STD / (2 * len(self.blocks)) ** 0.5
        for block in self.blocks:
            assert isinstance(block, Block)
            nn.init.normal_(block.attention.out.weight, std=residual_std)
            nn.init.normal_(block.mlp.down.weight, std=residual_std)
        self.embeddings.tokens.weight[self.vocab_size :].zero_()

    def hidden(
        self,
        input_ids: Tensor,
        *,
        kv_cache: KVCache | None = None,
        positions: Tensor | None = None,
        seqlen: int | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """Final hidden states, after the last norm: what logits() projects.

        Args:
            input_ids: (batch, seqlen) int64, in [0, vocab_size).
            kv_cache: holds the tokens before input_ids and receives these.
            positions: (share,) int64, where input_ids (batch, share) lie in the sequences of which
                this process has a share (model.context_parallel); without a kv_cache.
            seqlen: tokens of these sequences; given with positions.
            cu_seqlens: int32 (batch, documents + 1), where documents start in each row, the last
                seqlen: none attends to another, and positions count from its start. A row may
                repeat seqlen, for the same shape whatever the number of documents. Without a
                kv_cache.

        Returns:
            (batch, seqlen, dim); under autocast float32, in training by the fused kernels its
            low-precision dtype.

        Raises:
            ValueError: input_ids is not 2-D, or reaches beyond max_seqlen positions.
        """
        if input_ids.dim() != 2:
            raise ValueError(f"input_ids must be (batch, seqlen), got {tuple(input_ids.shape)}")
        shape, packing = input_ids.shape, None
        seqlen = shape[1] if seqlen is None else seqlen
        first_position = 0 if kv_cache is None else kv_cache.length
        if first_position + seqlen > self.max_seqlen:
            raise ValueError(
                f"the context must be at most max_seqlen = {self.max_seqlen} tokens, got "
                f"{first_position + seqlen}; shorten it or build the model with a larger max_seqlen"
            )
        if cu_seqlens is not None:
            packing = pack_rows(cu_seqlens, seqlen)
            if positions is None:
                positions = torch.arange(seqlen, device=input_ids.device)
            positions = places(cu_seqlens, positions).flatten()
            input_ids = input_ids.reshape(1, -1)
        x = self.embeddings(input_ids, first_position=first_position, positions=positions)
        if not self.residual_in_fp32 and torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        branch: Any = None
        for block in self.blocks:
            x, branch = block(x, branch, kv_cache=kv_cache, packing=packing)
        if kv_cache is not None:
            kv_cache.advance(seqlen)
        # Before the norm: FSDP2 warns of a view as the result.
        x, branch = x.view(*shape, -1), branch.view(*shape, -1)
        # Without gradients plain: what is scored (model.evaluation) is then not rounded.
        fused = self.fused and torch.is_grad_enabled()
        return add_and_norm(x, branch, self.norm, self.resid_dropout, fused=fused)[1]

    @property
    def head_weight(self) -> Tensor:
        """(vocab_size rounded up, dim): the tied embedding, whose first vocab_size rows count."""
        return self.embeddings.tokens.weight

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden (..., dim) -> (..., vocab_size): a view that skips the padding columns.

        Under autocast the result has the low-precision dtype: a loss must cast it to float32.
        """
        return F.linear(hidden, self.head_weight)[..., : self.vocab_size]

    def forward(self, input_ids: Tensor, *, kv_cache: KVCache | None = None) -> Tensor:
        """input_ids (batch, seqlen) -> logits (batch, seqlen, vocab_size); see hidden, logits."""
        return self.logits(self.hidden(input_ids, kv_cache=kv_cache))

    def num_params(self, *, positions: bool = True) -> int:
        """Stored parameters: the tied head once, padding rows too, the position table if asked."""
        total = sum(p.numel() for p in self.parameters())
        return total if positions else total - self.embeddings.positions.weight.numel()

    def flops_per_token(self, seqlen: int) -> dict[str, float]:
        """FLOPs of one trained token (forward and backward), in the two conventions of MFU.

        "full" counts the whole score matrix, 6 N + 12 depth dim seqlen; "causal" the half that is
        needed, 6 N + 6 depth dim seqlen. N leaves out the position table, which multiplies nothing.
        """
        matmuls = 6 * self.num_params(positions=False)
        causal = 6 * self.config["depth"] * self.config["dim"] * seqlen
        return {"full": float(matmuls + 2 * causal), "causal": float(matmuls + causal)}


def pack_rows(cu_seqlens: Tensor, seqlen: int) -> Packing:
    """Rows of documents as one packed sequence.

    cu_seqlens: int32 (batch, documents + 1), within each row: starts at 0, ends at seqlen.
    """
    first = torch.arange(len(cu_seqlens), device=cu_seqlens.device, dtype=torch.int32) * seqlen
    starts = (cu_seqlens[:, :-1] + first[:, None]).flatten()
    return Packing(F.pad(starts, (0, 1), value=len(cu_seqlens) * seqlen), seqlen)


def places(cu_seqlens: Tensor, positions: Tensor) -> Tensor:
    """int64 (batch, n): where positions (n,) of each row are in their documents; cu_seqlens as in
    pack_rows."""
    of_rows = positions.expand(len(cu_seqlens), -1).contiguous()
    document = torch.searchsorted(cu_seqlens.contiguous(), of_rows.int(), right=True) - 1
    return of_rows - cu_seqlens.gather(1, document)
