"""Positions of tokens: learned, sinusoidal, learned by row and column, rotary in one dimension or
two.

Tokens of an image are its pixels, row by row: token i of an image of width w is at (i // w, i % w).
Rotary positions after Su et al. (arXiv 2104.09864), so that scores depend on the distance of two
tokens and not on their places; in two dimensions half the planes of a head turn with y and half
with x.
"""

import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional as F

#: How a learned table grows, see extend_positions.
EXTENSIONS = ("tile", "interpolate")
ROTARY = ("rotary", "rotary_2d")
POSITIONS = ("learned", "sinusoidal", "learned_2d", *ROTARY)


class Positions(nn.Module):
    """What is added to embeddings, or turns queries and keys.

    Args:
        kind: one of POSITIONS.
        seqlen: number of positions.
        dim: width of the embeddings.
        width: of the image, seqlen / height; None where tokens form no image.
        headdim: width of a head; for rotary a multiple of 2, for rotary_2d of 4.
        wavelengths: shortest and longest of those, in tokens or pixels. They are not scaled with
            the image: a model of small images reads larger ones.

    Raises:
        ValueError: another kind, a kind in two dimensions without an image, a headdim that is no
            such multiple, wavelengths that are not positive and rising.
    """

    table_fixed: Tensor
    frequencies: Tensor

    def __init__(
        self,
        kind: str,
        seqlen: int,
        dim: int,
        *,
        width: int | None = None,
        headdim: int,
        wavelengths: tuple[float, float] = (4.0, 256.0),
    ) -> None:
        super().__init__()
        if kind not in POSITIONS:
            raise ValueError(f"positions must be one of {', '.join(POSITIONS)}, got {kind!r}")
        if kind.endswith("_2d") and width is None:
            raise ValueError(f"positions={kind} needs an image: give image_size")
        self.kind = kind
        self.seqlen = seqlen
        self.width = seqlen if width is None else width
        self.wavelengths = tuple(wavelengths)
        if kind == "learned":
            self.table = nn.Embedding(seqlen, dim)
        elif kind == "learned_2d":
            self.rows = nn.Embedding(seqlen // self.width, dim)
            self.columns = nn.Embedding(self.width, dim)
        elif kind == "sinusoidal":
            self.register_buffer("table_fixed", sinusoids(seqlen, dim), persistent=False)
        else:
            shortest, longest = self.wavelengths
            unit = 4 if kind == "rotary_2d" else 2
            if headdim % unit:
                raise ValueError(
                    f"{kind} needs a headdim that is a multiple of {unit}, got {headdim}"
                )
            if not 0.0 < shortest <= longest:
                raise ValueError(
                    f"rotary wavelengths must be positive and rise, got {shortest} and {longest}"
                )
            steps = torch.linspace(0.0, 1.0, headdim // unit)
            waves = shortest * (longest / shortest) ** steps
            self.register_buffer("frequencies", 2.0 * math.pi / waves, persistent=False)

    def add(self, x: Tensor, index: Tensor | None) -> Tensor:
        """x (batch, seqlen, dim) plus what its positions add.

        Args:
            index: int64, broadcasts to (batch, seqlen); None stands for 0, 1, 2, ...
        """
        if self.kind in ROTARY:
            return x
        if self.kind == "learned_2d":
            return x + self._rows_and_columns(x.shape[1], index)
        table = self.table.weight if self.kind == "learned" else self.table_fixed
        # A slice, not a look-up: its gradient needs no scatter.
        return x + (table[: x.shape[1]] if index is None else table[index])

    def _rows_and_columns(self, seqlen: int, index: Tensor | None) -> Tensor:
        if index is not None:
            return self.rows.weight[index // self.width] + self.columns.weight[index % self.width]
        return (self.rows.weight[:, None] + self.columns.weight).flatten(0, 1)[:seqlen]

    def rotary(self, seqlen: int, index: Tensor | None) -> tuple[Tensor, Tensor] | None:
        """Cosines and sines for `rotate`, float32 (batch or 1, seqlen, 1, headdim / 2), or None.

        Args:
            index: as in `add`.
        """
        if self.kind not in ROTARY:
            return None
        if index is None:
            index = torch.arange(seqlen, device=self.frequencies.device)[None]
        places = [index]
        if self.kind == "rotary_2d":
            places = [index // self.width, index % self.width]
        angles = torch.cat([place.float()[..., None] * self.frequencies for place in places], -1)
        return angles.cos()[:, :, None], angles.sin()[:, :, None]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each plane (i, i + headdim / 2) of x by its angle.

    Args:
        x: (batch, seqlen, nheads, headdim), any floating dtype.
        cos, sin: broadcast to (batch, seqlen, nheads, headdim / 2), float32.

    Returns:
        As x; the products are in float32.
    """
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return turned.to(x.dtype)


def sinusoids(seqlen: int, dim: int) -> Tensor:
    """The table of Vaswani et al. (arXiv 1706.03762, section 3.5), (seqlen, dim) float32.

    Sines in the first half of the columns, cosines in the second.
    """
    half = -(-dim // 2)
    rates = torch.exp(torch.arange(half) * (-math.log(10_000.0) / max(half - 1, 1)))
    angles = torch.arange(seqlen)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)[:, :dim]


def resize_positions(table: Tensor, height: int, width: int, factor: int) -> Tensor:
    """Each position's vector repeated over a block of factor x factor pixels, not interpolated.

    So do FlashAttention's authors go from Path-64 to Path-X (arXiv 2205.14135, appendix E.3).

    Args:
        table: (height * width, dim), one row a pixel, row by row.
        height, width: of the old image.
        factor: how many times larger each side of the new image is.

    Returns:
        (height * factor * width * factor, dim).

    Raises:
        ValueError: the table has another number of rows, or factor is below 1.
    """
    if table.shape[0] != height * width:
        raise ValueError(
            f"the position table must have {height} x {width} rows, got {table.shape[0]}"
        )
    if factor < 1:
        raise ValueError(f"factor must be at least 1, got {factor}")
    grid = table.unflatten(0, (height, width))
    grid = grid.repeat_interleave(factor, dim=0).repeat_interleave(factor, dim=1)
    return grid.flatten(0, 1)


def extend_positions(table: Tensor, max_seqlen: int, how: str = "tile") -> Tensor:
    """A learned table of another length; a shorter one is the first rows, whatever `how`.

    Args:
        table: (seqlen, dim).
        max_seqlen: the new length.
        how: "tile" repeats the table from its start, as the paper's long-document models do: every
            position that existed keeps its vector, and short contexts their outputs.
            "interpolate" stretches it linearly, its ends kept: neighbours stay neighbours
            everywhere, and short contexts change.

    Returns:
        (max_seqlen, dim), dtype of the table.

    Raises:
        ValueError: another `how`.
    """
    if how not in EXTENSIONS:
        raise ValueError(f"extend_positions must be one of {', '.join(EXTENSIONS)}, got {how!r}")
    seqlen = len(table)
    if max_seqlen <= seqlen:
        return table[:max_seqlen]
    if how == "tile":
        return table.repeat(-(-max_seqlen // seqlen), 1)[:max_seqlen]
    columns = table.float().T[None]  # (1, dim, seqlen)
    stretched = F.interpolate(columns, max_seqlen, mode="linear", align_corners=True)
    return stretched[0].T.to(table.dtype)


@torch.no_grad()
def extend_in_place(table: Tensor, seqlen: int, max_seqlen: int, how: str = "tile") -> None:
    """Make the first max_seqlen rows of a table from its first seqlen ones; see extend_positions.

    Args:
        table: (at least max_seqlen, dim); what a process holds of it may be a shard (DTensor).
    """
    whole = table.full_tensor() if isinstance(table, DTensor) else table
    rows = extend_positions(whole[:seqlen], max_seqlen, how)
    whole = torch.cat([rows, whole[max_seqlen:]])
    if isinstance(table, DTensor):
        whole = distribute_tensor(whole, table.device_mesh, table.placements)
    table.copy_(whole)
