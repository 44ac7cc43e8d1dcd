"""Classifier of long documents: a BERT or RoBERTa encoder, and for each label its own attention.

Source: Dai et al. 2022 (arXiv 2204.06683), whose hyperparameters FlashAttention's long-document
runs take (arXiv 2205.14135, table 5); the head is the label-wise attention of Mullenbach et al.
2018 (arXiv 1802.05695). Here the encoder sees a whole document at once, not segments of it.
Documents are packed: padding is neither computed nor seen.
"""

import torch
from torch import Tensor, nn

from model.attention import Attention, Packing, auto_attention
from model.bert import BERT

_HEADS = ("pooler", "mlm_head", "nsp_head")  # what BERT has and the encoder has not
_OWN = ("num_classes", "multi_label")


class LabelAttention(nn.Module):
    """A logit a label, from the tokens that the label attends to.

    With hidden states h of a document's tokens, label l has the weights a_l = softmax over tokens
    of (u_l . h), and the logit w_l . (sum of a_l h) + b_l.

    Args:
        dim: width of the hidden states.
        num_classes: number of labels.
    """

    def __init__(self, dim: int, num_classes: int) -> None:
        super().__init__()
        self.queries = nn.Linear(dim, num_classes, bias=False)
        self.outputs = nn.Linear(dim, num_classes, bias=False)
        self.bias = nn.Parameter(torch.zeros(num_classes))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.xavier_uniform_(self.queries.weight)
        nn.init.xavier_uniform_(self.outputs.weight)
        nn.init.zeros_(self.bias)

    def forward(self, hidden: Tensor, packing: Packing) -> Tensor:
        """hidden (total, dim), packed by document -> (batch, num_classes), float32."""
        total = len(hidden)
        sequence, slot = packing.sequence_ids(total), packing.positions(total)
        # The products come before the sum over tokens: no (batch, num_classes, dim) is made.
        scores, values = self.queries(hidden).float(), self.outputs(hidden).float()
        shape = (len(packing.cu_seqlens) - 1, packing.max_seqlen, scores.shape[1])
        scores = scores.new_full(shape, -torch.inf).index_put((sequence, slot), scores)
        values = values.new_zeros(shape).index_put((sequence, slot), values)
        return (scores.softmax(1) * values).sum(1) + self.bias


class DocumentClassifier(nn.Module):
    """Encoder and label-wise attention.

    Args:
        num_classes: number of labels.
        multi_label: each label is there or not (sigmoid), instead of one of them (softmax).
        vocab_size, max_seqlen, depth, dim, nheads, mlp_dim, num_segments, position_offset,
            norm_eps, resid_dropout, attn_dropout, attention, vocab_multiple: of the encoder, see
            model.bert.BERT. All tokens are of segment 0.

    Raises:
        ValueError: an option is out of its range.
    """

    def __init__(
        self,
        *,
        num_classes: int,
        multi_label: bool,
        vocab_size: int,
        max_seqlen: int,
        depth: int,
        dim: int,
        nheads: int,
        mlp_dim: int | None = None,
        num_segments: int = 1,
        position_offset: int = 0,
        norm_eps: float = 1e-12,
        resid_dropout: float = 0.1,
        attn_dropout: float = 0.1,
        attention: Attention = auto_attention,
        vocab_multiple: int = 64,
    ) -> None:
        super().__init__()
        if num_classes < 1:
            raise ValueError(f"num_classes must be at least 1, got {num_classes}")
        self.encoder = BERT(
            vocab_size=vocab_size,
            max_seqlen=max_seqlen,
            depth=depth,
            dim=dim,
            nheads=nheads,
            mlp_dim=mlp_dim,
            num_segments=num_segments,
            position_offset=position_offset,
            norm_eps=norm_eps,
            resid_dropout=resid_dropout,
            attn_dropout=attn_dropout,
            pooler=False,
            mlm_head=False,
            nsp_head=False,
            attention=attention,
            vocab_multiple=vocab_multiple,
        )
        self.head = LabelAttention(dim, num_classes)
        self.num_classes, self.multi_label = num_classes, multi_label
        self.max_seqlen = max_seqlen
        #: Constructor arguments but attention, as plain values.
        self.config = {k: v for k, v in self.encoder.config.items() if k not in _HEADS}
        self.config |= {"num_classes": num_classes, "multi_label": multi_label}

    @property
    def blocks(self) -> nn.ModuleList:
        return self.encoder.blocks

    def forward(self, input_ids: Tensor, packing: Packing) -> Tensor:
        """input_ids (total,) int64, packed by document -> logits (batch, num_classes), float32."""
        hidden = self.encoder.hidden(
            input_ids, cu_seqlens=packing.cu_seqlens, max_seqlen=packing.max_seqlen
        )
        return self.head(hidden, packing)

    def num_params(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def flops(self, *, tokens: float, pairs: float, samples: float) -> float:
        """FLOPs of training, forward and backward; see BERT.flops. The head is left out: it is
        2 num_classes of the 12 depth dim columns that multiply a token."""
        return self.encoder.flops(tokens=tokens, pairs=pairs, masked=0.0, samples=samples)


def encoder_part(config: dict, state: dict[str, Tensor]) -> tuple[dict, dict[str, Tensor]]:
    """(configuration, state dict) of the BERT inside a DocumentClassifier with these."""
    own = {name: value for name, value in config.items() if name not in _OWN}
    part = {
        name.removeprefix("encoder."): value
        for name, value in state.items()
        if name.startswith("encoder.")
    }
    return {**own, **dict.fromkeys(_HEADS, False)}, part
