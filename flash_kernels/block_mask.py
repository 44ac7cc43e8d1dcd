"""BlockMask: which blocks of the score matrix block-sparse attention computes.

Section 3.3 of the FlashAttention paper (arXiv 2205.14135) skips the zero blocks of a mask. Here a
block is hidden, full (every token seen) or partial (a token mask applies), as in FlexAttention.
Memory is linear in the number of visible blocks and of distinct token masks.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import block_mask_checks as checks
from .block_lists import (
    BlockLists,
    Blocks,
    MaskFunction,
    evaluate_blocks,
    list_blocks,
    list_visible,
    restrict_blocks,
    sort_blocks,
)
from .block_mask_files import read_file, write_file
from .block_mask_flex import read_flex, write_flex
from .block_picture import draw_svg, draw_text

if TYPE_CHECKING:  # its import takes seconds: the compiler's
    from torch.nn.attention import flex_attention

_SIZES = ("seqlen_q", "seqlen_k", "block_m", "block_n")
# Results kept on a mask; a training loop with ever new lengths must not grow without bound.
_MAX_KEPT = 32


class BlockMask:
    """Visible blocks of the score matrix, block_m query rows by block_n key columns each.

    Positions are absolute: query i lies in block row i // block_m, key j in block column j //
    block_n, counted from the top left whatever the lengths. A mask is not changed once it is built.

    seqlen_q, seqlen_k: lengths that the mask was made for, in tokens
    block_m, block_n: multiples of 16 from 16 to 256
    mask_batch, mask_heads: 1 (shared), or the batch size and the number of query heads
    rows: BlockLists whose lines are block rows
    cols: the same blocks by block column (the transpose), for the gradients of keys and values
    token_masks: bool (num_patterns, block_m, block_n), True = seen, all different; positions past
        the lengths are False

    Use the constructors from_dense, from_function, from_flex, from_paper, or block_patterns.
    """

    def __init__(
        self,
        seqlen_q: int,
        seqlen_k: int,
        block_m: int,
        block_n: int,
        rows: BlockLists,
        cols: BlockLists,
        token_masks: Tensor,
    ) -> None:
        self.seqlen_q, self.seqlen_k = seqlen_q, seqlen_k
        self.block_m, self.block_n = block_m, block_n
        self.rows, self.cols = rows, cols
        self.token_masks = token_masks
        self._kept: dict[tuple, Any] = {}

    @classmethod
    def from_dense(
        cls,
        blocks: Tensor,
        block_m: int = 128,
        block_n: int = 128,
        *,
        seqlen_q: int | None = None,
        seqlen_k: int | None = None,
        token_mask: Tensor | None = None,
    ) -> "BlockMask":
        """From a matrix of blocks.

        Args:
            blocks: bool (rows, cols) or (1 or batch, 1 or nheads, rows, cols), True = visible.
            block_m, block_n: tokens of a block, multiples of 16 from 16 to 256.
            seqlen_q, seqlen_k: tokens; default rows * block_m and cols * block_n. The last block
                may reach past them.
            token_mask: bool (seqlen_q, seqlen_k) or (1 or batch, 1 or nheads, seqlen_q, seqlen_k):
                also hides tokens inside the visible blocks.

        Raises:
            ValueError: shapes, dtypes, devices or sizes disagree.
        """
        checks.check_block_sizes(block_m, block_n)
        blocks = checks.checked_matrix("blocks", blocks, "rows, cols")
        lengths = checks.checked_lengths(blocks, (seqlen_q, seqlen_k), (block_m, block_n))
        if token_mask is None:
            return cls.from_candidates(blocks, None, None, lengths, (block_m, block_n))
        token_mask = checks.checked_token_mask(token_mask, blocks, lengths)
        shape = torch.broadcast_shapes(blocks.shape[:2], token_mask.shape[:2])
        tokens = token_mask.expand(*shape, -1, -1)
        return cls.from_candidates(
            blocks.expand(*shape, -1, -1),
            lambda b, h, q_idx, k_idx: tokens[b, h, q_idx, k_idx],
            None,
            lengths,
            (block_m, block_n),
        )

    @classmethod
    def from_function(
        cls,
        fn: MaskFunction,
        seqlen_q: int,
        seqlen_k: int,
        *,
        block_m: int = 128,
        block_n: int = 128,
        batch: int | None = None,
        nheads: int | None = None,
        device: torch.device | str = "cpu",
    ) -> "BlockMask":
        """From a function of token positions, looked at everywhere, in bounded chunks of blocks.

        Args:
            fn: fn(b, h, q_idx, k_idx) -> bool, True = visible: FlexAttention's mask_mod. Its
                arguments are int64 tensors that broadcast to (blocks, block_m, block_n); it works
                on them element by element.
            seqlen_q, seqlen_k: tokens; fn never sees a position past them.
            block_m, block_n: tokens of a block, multiples of 16 from 16 to 256.
            batch, nheads: sizes of the mask where fn depends on b or h; None is one mask for all.
            device: where fn is called and the mask lies.

        Raises:
            ValueError: a size is wrong, or fn does not return bool of the broadcast shape.
        """
        checks.check_block_sizes(block_m, block_n)
        checks.check_lengths(seqlen_q, seqlen_k)
        checks.check_shared(batch, nheads)
        shape = (batch or 1, nheads or 1, -(-seqlen_q // block_m), -(-seqlen_k // block_n))
        blocks = torch.ones((), dtype=torch.bool, device=device).expand(shape)
        return cls.from_candidates(blocks, fn, None, (seqlen_q, seqlen_k), (block_m, block_n))

    @classmethod
    def from_flex(cls, flex_mask: "flex_attention.BlockMask") -> "BlockMask":
        """From torch.nn.attention.flex_attention.BlockMask.

        Its mask_mod is called once, on the tokens of its partial blocks, with index tensors as in
        from_function. Partial blocks that turn out full or hidden are stored as such.

        Raises:
            ValueError: its block size is not one of ours, or its mask_mod does not broadcast.
        """
        visible, is_full, fn, lengths, block_sizes = read_flex(flex_mask)
        checks.check_block_sizes(*block_sizes)
        checks.check_lengths(*lengths)
        return cls.from_candidates(visible, fn, is_full, lengths, block_sizes)

    @classmethod
    def from_paper(cls, blocks: Tensor) -> "BlockMask":
        """From the mask of the paper's code: 16 query rows by 256 key columns a block.

        blocks: bool or integers of 0 and 1, (seqlen / 16, seqlen / 256), one for all heads.
        """
        return cls.from_dense(checks.checked_ones_and_zeros(blocks), 16, 256)

    @classmethod
    def from_candidates(
        cls,
        visible: Tensor,
        fn: MaskFunction | None,
        is_full: Tensor | None,
        lengths: tuple[int, int],
        block_sizes: tuple[int, int],
    ) -> "BlockMask":
        """From blocks that may be visible, of which fn decides the tokens; all checked already.

        Args:
            visible: bool (mask_batch, mask_heads, rows, cols).
            fn: as in from_function; None keeps every block, full.
            is_full: bool of that shape, blocks that fn is not asked about; None asks about all.
            lengths: (seqlen_q, seqlen_k). block_sizes: (block_m, block_n).
        """
        if is_full is None:
            is_full = torch.tensor(fn is None, device=visible.device).expand_as(visible)
        blocks = list_visible(visible, is_full)
        mask_heads = visible.shape[1]
        blocks, token_masks = evaluate_blocks(fn, blocks, mask_heads, lengths, block_sizes)
        lists = sort_blocks(blocks, *visible.shape)
        return cls(*lengths, *block_sizes, *lists, token_masks)

    @property
    def mask_batch(self) -> int:
        return self.rows.bounds.shape[0]

    @property
    def mask_heads(self) -> int:
        return self.rows.bounds.shape[1]

    @property
    def num_rows(self) -> int:
        """Block rows."""
        return self.rows.bounds.shape[2]

    @property
    def num_cols(self) -> int:
        """Block columns."""
        return self.cols.bounds.shape[2]

    @property
    def num_blocks(self) -> int:
        """Visible blocks, over all batch entries and heads of the mask."""
        return self.rows.indices.shape[0]

    @property
    def density(self) -> float:
        """Visible blocks, partial or full, as a fraction of all blocks: work left to do.

        A partial block counts whole, because the kernels compute all of it.
        """
        total = self.mask_batch * self.mask_heads * self.num_rows * self.num_cols
        return self.num_blocks / max(total, 1)

    @property
    def device(self) -> torch.device:
        return self.rows.indices.device

    def restricted(
        self,
        *,
        causal: bool = False,
        window: tuple[int | None, int | None] = (None, None),
        seqlen_q: int | None = None,
        seqlen_k: int | None = None,
        per_row_tails: bool = True,
        mask_all: bool = False,
    ) -> "BlockMask":
        """The mask that a kernel walks in a call with these options; kept for the next call.

        Blocks that causal, window or the lengths hide altogether are gone. A block that they cut is
        partial, with pattern -1 if it has no token mask: the kernel applies the options themselves
        in every partial block. token_masks stay.

        Args:
            causal, window: as in flash_attention, aligned bottom-right: query i stands at key
                i + seqlen_k - seqlen_q.
            seqlen_q, seqlen_k: the lengths of the call, default those of the mask. The result has
                as many block rows and columns as they need. Between the mask's length and the end
                of its last block, tokens are visible in full blocks, hidden in token masks.
            per_row_tails: whether the end of the queries makes the last block row partial. Without,
                only the end of the keys does, for kernels that mask rows when they store.
            mask_all: every block is partial: for lengths that differ per sequence. Unless seqlen_k
                - seqlen_q is the same for all of them, leave causal and window to the kernel.

        Raises:
            ValueError: the mask does not cover the lengths, or the window is negative.
        """
        left, right = window[0], 0 if causal else window[1]
        checks.check_window(left, right)
        seqlen_q = self.seqlen_q if seqlen_q is None else seqlen_q
        seqlen_k = self.seqlen_k if seqlen_k is None else seqlen_k
        checks.check_covered("seqlen_q", seqlen_q, self.num_rows * self.block_m)
        checks.check_covered("seqlen_k", seqlen_k, self.num_cols * self.block_n)

        def restrict() -> BlockMask:
            blocks = restrict_blocks(
                list_blocks(self.rows),
                (self.block_m, self.block_n),
                (seqlen_q, seqlen_k),
                (left, right),
                per_row_tails,
            )
            if mask_all:
                blocks = blocks._replace(is_full=torch.zeros_like(blocks.is_full))
            return self._with(blocks, seqlen_q, seqlen_k)

        return self.kept((left, right, seqlen_q, seqlen_k, per_row_tails, mask_all), restrict)

    def kept(self, key: tuple, make: Callable[[], Any]) -> Any:
        """make(), and what it made before for this key; the last 32 results stay."""
        if key not in self._kept:
            if len(self._kept) >= _MAX_KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[key] = make()
        return self._kept[key]

    def _with(self, blocks: Blocks, seqlen_q: int, seqlen_k: int) -> "BlockMask":
        num_rows, num_cols = -(-seqlen_q // self.block_m), -(-seqlen_k // self.block_n)
        lists = sort_blocks(blocks, self.mask_batch, self.mask_heads, num_rows, num_cols)
        return BlockMask(seqlen_q, seqlen_k, self.block_m, self.block_n, *lists, self.token_masks)

    def to_dense(self) -> Tensor:
        """The visible blocks: bool (mask_batch, mask_heads, rows, cols)."""
        return self.to_patterns() != 0

    def to_patterns(self) -> Tensor:
        """int32 (mask_batch, mask_heads, rows, cols): 0 hidden, 1 without a token mask, 2 + its
        index in token_masks.
        """
        blocks = list_blocks(self.rows)
        return self._scatter(blocks, blocks.patterns + 2)

    def _scatter(self, blocks: Blocks, values: Tensor) -> Tensor:
        shape = (self.mask_batch, self.mask_heads, self.num_rows, self.num_cols)
        matrix = torch.zeros(shape, dtype=torch.int32, device=self.device)
        heads = matrix.view(shape[0] * shape[1], *shape[2:])
        heads[blocks.heads, blocks.rows, blocks.cols] = values
        return matrix

    def to_token_mask(self) -> Tensor:
        """bool (mask_batch, mask_heads, seqlen_q, seqlen_k), for tests and small sizes: memory is
        quadratic in the length.

        Of a restricted mask: its blocks and token masks; the options stay the caller's to apply.
        """
        tokens = self.pattern_masks()[self.to_patterns()].transpose(3, 4).flatten(4).flatten(2, 3)
        return tokens[:, :, : self.seqlen_q, : self.seqlen_k]

    def pattern_masks(self) -> Tensor:
        """bool (2 + num_patterns, block_m, block_n): what the values of to_patterns stand for."""
        ends = torch.zeros(2, self.block_m, self.block_n, dtype=torch.bool, device=self.device)
        ends[1] = True
        return torch.cat([ends, self.token_masks])

    def kinds(self) -> Tensor:
        """int32 (mask_batch, mask_heads, rows, cols): 0 hidden, 1 partial, 2 full."""
        blocks = list_blocks(self.rows)
        return self._scatter(blocks, 1 + blocks.is_full.int())

    def to_flex(self) -> "flex_attention.BlockMask":
        """torch.nn.attention.flex_attention.BlockMask with the same tokens visible.

        Its mask_mod looks up token_masks, so it works compiled and eager and for any mask; memory
        is FlexAttention's, quadratic in the number of block rows. Blocks cut by the end of the
        sequence are partial, as create_block_mask has them. Flex wants block sizes that are
        multiples of its kernels' tiles.
        """
        kinds = self.restricted().kinds()
        lengths = (self.seqlen_q, self.seqlen_k)
        return write_flex(kinds == 1, kinds == 2, self.to_patterns(), self.pattern_masks(), lengths)

    def plot(self, path: str | os.PathLike | None = None) -> str:
        """The blocks as an SVG picture, its text returned and, with a path, written there.

        One panel for each batch entry and head, at most 12; browsers and notebooks show it.
        """
        title = f"{self.seqlen_q} x {self.seqlen_k}, density {self.density:.4g}"
        svg = draw_svg(self.kinds(), title)
        if path is not None:
            Path(path).write_text(svg, encoding="utf-8")
        return svg

    def _repr_svg_(self) -> str:
        return self.plot()

    def save(self, path: str | os.PathLike) -> None:
        """Write a file for load. A crash leaves the old file or the new one, never half of one."""
        state = {"token_masks": self.token_masks, **self.rows._asdict()}
        state |= {name: getattr(self, name) for name in _SIZES}
        write_file(Path(path), state)

    @classmethod
    def load(cls, path: str | os.PathLike, device: torch.device | str = "cpu") -> "BlockMask":
        """Read a file that save wrote, onto a device. Only tensors and numbers are unpickled.

        Raises:
            ValueError: the file holds something else.
        """
        state = read_file(path, device)
        rows = BlockLists(*(state[name] for name in BlockLists._fields))
        sizes = {name: state[name] for name in _SIZES}
        mask = cls(**sizes, rows=rows, cols=rows, token_masks=state["token_masks"])
        return mask._with(list_blocks(rows), mask.seqlen_q, mask.seqlen_k)

    def to(self, device: torch.device | str) -> "BlockMask":
        """The mask on a device, itself if it is there already."""
        if self.rows.indices.to(device) is self.rows.indices:
            return self
        rows, cols = (BlockLists(*(t.to(device) for t in way)) for way in (self.rows, self.cols))
        return BlockMask(
            self.seqlen_q, self.seqlen_k, self.block_m, self.block_n, rows, cols,
            self.token_masks.to(device),
        )  # fmt: skip

    def __repr__(self) -> str:
        num_partial = int((self.rows.bounds[..., 1] - self.rows.bounds[..., 0]).sum())
        names = (*_SIZES, "mask_batch", "mask_heads", "num_blocks")
        sizes = ", ".join(f"{name}={getattr(self, name)}" for name in names)
        return (
            f"BlockMask({sizes}, num_partial={num_partial}, "
            f"num_patterns={self.token_masks.shape[0]}, density={self.density:.4g}, "
            f"device={self.device})"
        )

    def __str__(self) -> str:
        """__repr__ and a sketch of the first mask: · hidden, █ full, shades between."""
        return f"{self!r}\n{draw_text(self.kinds()[0, 0])}"
