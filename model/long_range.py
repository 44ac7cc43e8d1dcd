"""Classifier of long sequences and images: the Transformer of the Long Range Arena, and more.

Pre-norm blocks over tokens or pixels, pooling, a small head; two towers with shared weights for
pairs of documents. Shapes, initial values and heads follow the arena's code (Tay et al., arXiv
2011.04006). Beyond it: rotary positions in two dimensions, attention among the non-zero pixels of
an image alone, and a head that classifies every pixel.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.attention import Attention, Packing, auto_attention
from model.block_sparse import BlockSparseAttention, layer_attention
from model.positions import ROTARY, Positions
from model.transformer import Block, add_and_norm, check_sizes

EMBEDDINGS = ("token", "pixel")
POOLINGS = ("mean", "max", "cls")


class ClassifierOutput(NamedTuple):
    """Attributes:
    logits: (batch, num_classes).
    dense_logits: (batch, seqlen, num_dense_classes), or of packed pixels (num_foreground,
        num_dense_classes); None without a dense head.
    """

    logits: Tensor
    dense_logits: Tensor | None


class LongRangeClassifier(nn.Module):
    """Bidirectional Transformer that gives a sequence, a pair of them or an image a class.

    Args:
        vocab_size: number of tokens, or of grey values.
        num_classes: number of classes.
        max_seqlen: longest sequence; of an image, image_size ** 2.
        image_size: height and width where tokens are the pixels of a square image, row by row.
        depth, dim, nheads: blocks, width, heads a block.
        headdim: width of a head; None means dim / nheads.
        mlp_dim: hidden width of the MLPs and of the head; None means 4 dim.
        embedding: "token", a vector a value; "pixel", linear in value / (vocab_size - 1).
        positions: "learned", "sinusoidal", "learned_2d", "rotary" or "rotary_2d" (model.positions).
        rotary_wavelengths: shortest and longest of the last two, in tokens or pixels.
        nearness: of those, at least 0: where the biases of queries and keys start, so that
            attention does near by. The score of a pair then has nearness ** 2 / sqrt(headdim) times
            the sum of all planes' cosines of their distance, the largest for a token and itself.
        pooling: "mean" or "max" of real tokens, or "cls", a learned token before all others.
        num_towers: 2 for pairs: the head sees both, their product and their difference.
        foreground: pixels of value 0 are padding, as in the arena's own model: neither seen nor
            pooled. They are left out where the batch packs the others; without, they are computed
            behind the others and masked, with the same result.
        num_dense_classes: classes of the head over every pixel; 0 for no such head.
        embd_dropout, resid_dropout, attn_dropout: as in model.gpt.GPT.
        attention: function with flash_kernels.flash_attention's signature (model/attention.py).

    Raises:
        ValueError: options that are out of range or do not fit together.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        num_classes: int,
        max_seqlen: int,
        image_size: int | None = None,
        depth: int,
        dim: int,
        nheads: int,
        headdim: int | None = None,
        mlp_dim: int | None = None,
        embedding: str = "token",
        positions: str = "learned",
        rotary_wavelengths: tuple[float, float] = (4.0, 256.0),
        nearness: float = 0.0,
        pooling: str = "mean",
        num_towers: int = 1,
        foreground: bool = False,
        num_dense_classes: int = 0,
        embd_dropout: float = 0.0,
        resid_dropout: float = 0.0,
        attn_dropout: float = 0.0,
        attention: Attention = auto_attention,
    ) -> None:
        super().__init__()
        #: Constructor arguments but attention, as plain values.
        self.config: dict[str, Any] = {
            "vocab_size": vocab_size,
            "num_classes": num_classes,
            "max_seqlen": max_seqlen,
            "image_size": image_size,
            "depth": depth,
            "dim": dim,
            "nheads": nheads,
            "headdim": headdim,
            "mlp_dim": mlp_dim,
            "embedding": embedding,
            "positions": positions,
            "rotary_wavelengths": list(rotary_wavelengths),
            "nearness": nearness,
            "pooling": pooling,
            "num_towers": num_towers,
            "foreground": foreground,
            "num_dense_classes": num_dense_classes,
            "embd_dropout": embd_dropout,
            "resid_dropout": resid_dropout,
            "attn_dropout": attn_dropout,
        }
        _check(self.config)
        if foreground and isinstance(attention, BlockSparseAttention):
            raise ValueError(
                "a block pattern is laid out for all pixels: use foreground=false with "
                "attention=block_sparse"
            )
        self.vocab_size, self.num_classes = vocab_size, num_classes
        self.max_seqlen, self.image_size = max_seqlen, image_size
        self.pooling, self.num_towers, self.foreground = pooling, num_towers, foreground
        hidden = 4 * dim if mlp_dim is None else mlp_dim
        is_pixel = embedding == "pixel"
        self.embedding = nn.Linear(1, dim) if is_pixel else nn.Embedding(vocab_size, dim)
        self.positions = Positions(
            positions,
            max_seqlen,
            dim,
            width=image_size,
            headdim=dim // nheads if headdim is None else headdim,
            wavelengths=rotary_wavelengths,
        )
        self.cls = nn.Embedding(1, dim) if pooling == "cls" else None
        self.dropout = nn.Dropout(embd_dropout)
        self.blocks = nn.ModuleList(
            Block(
                dim,
                nheads,
                headdim=headdim,
                mlp_dim=mlp_dim,
                causal=False,
                attn_dropout=attn_dropout,
                resid_dropout=resid_dropout,
                attention=layer_attention(attention, layer),
                layer=layer,
                fused=False,  # small models wait for the host, not for memory
            )
            for layer in range(depth)
        )
        self.resid_dropout = nn.Dropout(resid_dropout)  # on what the last block leaves to add
        self.norm = nn.LayerNorm(dim)
        widths = [dim, hidden] if num_towers == 1 else [4 * dim, hidden, hidden // 2]
        layers = []
        for before, after in zip(widths, widths[1:], strict=False):
            layers += [nn.Linear(before, after), nn.ReLU()]
        self.head = nn.Sequential(*layers, nn.Linear(widths[-1], num_classes))
        self.dense_head = nn.Linear(dim, num_dense_classes) if num_dense_classes else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """As the arena's: Xavier-uniform matrices, biases 0, tokens N(0, 1), positions N(0, 0.02).

        Table sizes do not matter to the scale, unlike in PyTorch's defaults.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
            elif isinstance(module, nn.LayerNorm):
                module.reset_parameters()
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        nn.init.normal_(self.embedding.weight)
        if isinstance(self.embedding, nn.Linear):
            # Else all values are multiples of one vector, which the first norm makes equal.
            nn.init.normal_(self.embedding.bias)
        for block in self.blocks:
            assert isinstance(block, Block)
            biases = block.attention.qkv.bias.view(3, block.attention.nheads, -1)
            biases[:2, :, : biases.shape[-1] // 2] = self.config["nearness"]

    def forward(
        self,
        input_ids: Tensor,
        lengths: Tensor | None = None,
        *,
        foreground: Tensor | None = None,
        packing: Packing | None = None,
    ) -> ClassifierOutput:
        """Classify a batch.

        Args:
            input_ids: (batch, seqlen) int64, or (batch, 2, seqlen) for two towers.
            lengths: (batch,) or (batch, 2) integers, real tokens at the start of each sequence;
                None where all are. An image has no padding: ignored.
            foreground: (num_foreground,) int64, where input_ids.view(-1) is not 0, in order.
            packing: of the foreground, by image.

        Raises:
            ValueError: shapes that the model was not built for, or a packed foreground for a model
                that attends to all pixels.
        """
        expected = 2 if self.num_towers == 1 else 3
        if input_ids.dim() != expected or (expected == 3 and input_ids.shape[1] != 2):
            shape = "(batch, seqlen)" if expected == 2 else "(batch, 2, seqlen)"
            raise ValueError(f"input_ids must be {shape}, got {tuple(input_ids.shape)}")
        seqlen = input_ids.shape[-1]
        if seqlen > self.max_seqlen or (self.image_size and seqlen != self.max_seqlen):
            raise ValueError(
                f"the model reads {'' if self.image_size else 'at most '}{self.max_seqlen} tokens, "
                f"got {seqlen}: change model.max_seqlen or the data"
            )
        if packing is not None:
            if not self.foreground:
                raise ValueError("a packed foreground needs a model with foreground=true")
            if foreground is None:
                raise ValueError("a packed foreground needs `foreground`, the places of its pixels")
            hidden = self._packed_hidden(input_ids, foreground, packing)
            pooled = self._pool_packed(hidden, packing)
        elif self.foreground:
            hidden, pooled = self._masked_hidden(input_ids)
        else:
            if self.image_size is not None:
                lengths = None
            elif lengths is not None:
                lengths = lengths.flatten()
            hidden = self._hidden(input_ids.reshape(-1, seqlen), None, lengths)
            pooled = self._pool(hidden, lengths)
            if self.cls is not None:
                hidden = hidden[:, 1:]
        if self.num_towers == 2:
            one, two = pooled.unflatten(0, (-1, 2)).unbind(1)
            pooled = torch.cat([one, two, one * two, one - two], dim=-1)
        dense = None if self.dense_head is None else self.dense_head(hidden)
        return ClassifierOutput(self.head(pooled), dense)

    def _embed(self, values: Tensor, index: Tensor | None) -> Tensor:
        if isinstance(self.embedding, nn.Linear):
            values = values[..., None].to(self.embedding.weight.dtype) / (self.vocab_size - 1)
        return self.positions.add(self.embedding(values), index)

    def _hidden(self, values: Tensor, index: Tensor | None, lengths: Tensor | None) -> Tensor:
        """Final hidden states of values (batch, seqlen) at positions index; a CLS token first."""
        x = self._embed(values, index)
        rotary = self.positions.rotary(values.shape[1], index)
        if self.cls is not None:
            x = torch.cat([self.cls.weight.expand(len(x), 1, -1), x], dim=1)
            lengths = None if lengths is None else lengths + 1
            if rotary is not None:  # the CLS token is not turned
                rotary = (
                    F.pad(rotary[0], (0, 0, 0, 0, 1, 0), value=1.0),
                    F.pad(rotary[1], (0, 0, 0, 0, 1, 0)),
                )
        x = self.dropout(x)
        return self._run(x, rotary=rotary, lengths_k=lengths)

    def _run(self, x: Tensor, **options: Any) -> Tensor:
        """x (batch, seqlen, dim) through the blocks and the last norm."""
        branch = None
        for block in self.blocks:
            x, branch = block(x, branch, **options)
        return add_and_norm(x, branch, self.norm, self.resid_dropout, fused=False)[1]

    def _masked_hidden(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """All pixels, the non-zero ones first: a key mask is then a length, which kernels serve."""
        order = (input_ids == 0).to(torch.uint8).argsort(dim=1, stable=True)
        lengths = (input_ids != 0).sum(1)
        hidden = self._hidden(input_ids.gather(1, order), order, lengths)
        pooled = self._pool(hidden, lengths)
        back = order.argsort(dim=1)[..., None].expand_as(hidden)
        return hidden.gather(1, back), pooled

    def _packed_hidden(self, input_ids: Tensor, foreground: Tensor, packing: Packing) -> Tensor:
        """Hidden states of the packed foreground, (num_foreground, dim)."""
        values = input_ids.flatten()[foreground][None]
        index = (foreground % input_ids.shape[1])[None]
        x = self.dropout(self._embed(values, index))
        rotary = self.positions.rotary(values.shape[1], index)
        return self._run(x, rotary=rotary, packing=packing)[0]

    def _pool(self, hidden: Tensor, lengths: Tensor | None) -> Tensor:
        if self.pooling == "cls":
            return hidden[:, 0]
        if lengths is None:
            return hidden.mean(1) if self.pooling == "mean" else hidden.amax(1)
        is_real = (torch.arange(hidden.shape[1], device=hidden.device) < lengths[:, None])[
            ..., None
        ]
        if self.pooling == "max":
            return hidden.masked_fill(~is_real, float("-inf")).amax(1)
        return (hidden * is_real).sum(1) / lengths.clamp(min=1)[:, None]

    def _pool_packed(self, hidden: Tensor, packing: Packing) -> Tensor:
        lengths = packing.lengths.long()
        # unsafe: lengths that do not add up are not looked for, which would wait for the device.
        return torch.segment_reduce(
            hidden.float(), self.pooling, lengths=lengths, axis=0, unsafe=True
        )

    def num_params(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self, seqlen: int) -> dict[str, float]:
        """FLOPs of one trained pixel, forward and backward, as model.gpt.GPT's "full".

        Empty where padding or background is skipped: how many tokens count is then the data's.
        """
        if self.image_size is None or self.foreground:
            return {}
        linear = [m for b in self.blocks for m in b.modules() if isinstance(m, nn.Linear)]
        block = self.blocks[0]
        assert isinstance(block, Block)
        width = block.attention.out.in_features
        attention = 12 * len(self.blocks) * width * seqlen
        return {"full": float(6 * sum(m.weight.numel() for m in linear) + attention)}


def _check(config: dict) -> None:
    """Raise ValueError for the first option of LongRangeClassifier that cannot be."""
    sizes = ["vocab_size", "num_classes", "max_seqlen", "depth", "dim", "nheads"]
    sizes += [n for n in ("image_size", "headdim", "mlp_dim") if config[n] is not None]
    dropouts = ("embd_dropout", "resid_dropout", "attn_dropout")
    check_sizes({n: config[n] for n in sizes}, {n: config[n] for n in dropouts})
    for name, choices in (("embedding", EMBEDDINGS), ("pooling", POOLINGS)):
        if config[name] not in choices:
            raise ValueError(f"{name} must be one of {', '.join(choices)}, got {config[name]!r}")
    if config["num_towers"] not in (1, 2):
        raise ValueError(f"num_towers must be 1 or 2, got {config['num_towers']}")
    if config["nearness"] < 0 or (config["nearness"] and config["positions"] not in ROTARY):
        raise ValueError(
            f"nearness must be at least 0, and 0 without rotary positions, got "
            f"{config['nearness']} with {config['positions']}"
        )
    size = config["image_size"]
    if size is not None and size**2 != config["max_seqlen"]:
        raise ValueError(
            f"max_seqlen must be image_size ** 2 = {size**2}, got {config['max_seqlen']}"
        )
    if config["foreground"] and (size is None or config["pooling"] == "cls"):
        raise ValueError("foreground needs an image_size and mean or max pooling")
    if config["num_dense_classes"] and config["num_towers"] == 2:
        raise ValueError("a dense head needs one tower, got num_towers=2")
    if size is not None and config["num_towers"] == 2:
        raise ValueError("two towers read texts, not images: leave image_size out")
