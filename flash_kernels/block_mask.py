"""BlockMask: which blocks of the score matrix block-sparse attention computes.

Section 3.3 of the FlashAttention paper (arXiv 2205.14135) skips the zero blocks of a mask. Here a
block is hidden, full (every token seen) or partial (a token mask applies), as in FlexAttention.
Memory is linear in the number of visible blocks and of distinct token masks.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from .block_lists import BlockLists, Blocks, evaluate_blocks, list_blocks, sort_blocks

__all__ = ["BlockLists", "BlockMask"]

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
_FORMAT = "flash_kernels.BlockMask 1"
# Restrictions kept on a mask; a training loop with ever new lengths must not grow without bound.
_MAX_RESTRICTIONS = 32


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
        self._restrictions: dict[tuple, BlockMask] = {}

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
        check_block_sizes(block_m, block_n)
        blocks = _checked_matrix("blocks", blocks, "rows, cols")
        num_rows, num_cols = blocks.shape[2:]
        seqlen_q = num_rows * block_m if seqlen_q is None else seqlen_q
        seqlen_k = num_cols * block_n if seqlen_k is None else seqlen_k
        check_lengths(seqlen_q, seqlen_k)
        expected = (-(-seqlen_q // block_m), -(-seqlen_k // block_n))
        if (num_rows, num_cols) != expected:
            raise ValueError(
                f"blocks must have {expected[0]} rows and {expected[1]} columns of {block_m} x "
                f"{block_n} to cover {seqlen_q} queries and {seqlen_k} keys, got {num_rows} and "
                f"{num_cols}: change seqlen_q, seqlen_k or the block size"
            )
        if token_mask is None:
            return cls._build(blocks, None, None, (seqlen_q, seqlen_k), (block_m, block_n))

        token_mask = _checked_matrix("token_mask", token_mask, "seqlen_q, seqlen_k")
        if token_mask.shape[2:] != (seqlen_q, seqlen_k):
            raise ValueError(
                f"token_mask must end in (seqlen_q, seqlen_k) = {(seqlen_q, seqlen_k)}, "
                f"got shape {tuple(token_mask.shape)}"
            )
        if token_mask.device != blocks.device:
            raise ValueError(
                f"token_mask must be on {blocks.device} like blocks, got {token_mask.device}"
            )
        for name, a, b in zip(("batch", "nheads"), blocks.shape, token_mask.shape, strict=False):
            if a != b and 1 not in (a, b):
                raise ValueError(f"blocks and token_mask must have the same {name}, got {a}, {b}")
        shape = torch.broadcast_shapes(blocks.shape[:2], token_mask.shape[:2])
        tokens = token_mask.expand(*shape, -1, -1)
        return cls._build(
            blocks.expand(*shape, -1, -1),
            lambda b, h, q_idx, k_idx: tokens[b, h, q_idx, k_idx],
            None,
            (seqlen_q, seqlen_k),
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
        check_block_sizes(block_m, block_n)
        check_lengths(seqlen_q, seqlen_k)
        for name, size in (("batch", batch), ("nheads", nheads)):
            if size is not None and size < 1:
                raise ValueError(f"{name} must be at least 1, None for one mask, got {size}")
        shape = (batch or 1, nheads or 1, -(-seqlen_q // block_m), -(-seqlen_k // block_n))
        blocks = torch.ones((), dtype=torch.bool, device=device).expand(shape)
        return cls._build(blocks, fn, None, (seqlen_q, seqlen_k), (block_m, block_n))

    @classmethod
    def from_paper(cls, blocks: Tensor) -> "BlockMask":
        """From the mask of the paper's code: 16 query rows by 256 key columns a block.

        blocks: bool or integers of 0 and 1, (seqlen / 16, seqlen / 256), one for all heads.
        """
        if blocks.dtype != torch.bool:
            if blocks.is_floating_point() or not bool(((blocks == 0) | (blocks == 1)).all()):
                raise ValueError(
                    f"blocks must be bool or integers of 0 and 1, got {blocks.dtype}: compare with "
                    "blocks != 0"
                )
            blocks = blocks != 0
        return cls.from_dense(blocks, 16, 256)

    @classmethod
    def _build(
        cls,
        visible: Tensor,
        fn: MaskFunction | None,
        is_full: Tensor | None,
        lengths: tuple[int, int],
        block_sizes: tuple[int, int],
    ) -> "BlockMask":
        """From visible blocks, bool (mask_batch, mask_heads, rows, cols), that fn refines.

        fn is not asked about the blocks of is_full, of the same shape; without fn all are full.
        """
        mask_batch, mask_heads, num_rows, num_cols = visible.shape
        b, h, rows, cols = visible.nonzero().unbind(-1)
        patterns = torch.full_like(rows, -1, dtype=torch.int32)
        if is_full is None:
            full = torch.full_like(rows, fn is None, dtype=torch.bool)
        else:
            full = is_full[b, h, rows, cols]
        blocks = Blocks(b * mask_heads + h, rows, cols, patterns, full)
        token_masks = torch.zeros(0, *block_sizes, dtype=torch.bool, device=visible.device)
        if fn is not None:
            blocks, token_masks = evaluate_blocks(fn, blocks, mask_heads, lengths, block_sizes)
        lists = sort_blocks(blocks, mask_batch, mask_heads, num_rows, num_cols)
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
            mask_all: every block is partial: for lengths that differ per sequence. causal and
                window then belong to the kernel alone, as their alignment differs too.

        Raises:
            ValueError: the mask does not cover the lengths, or the window is negative.
        """
        left, right = window
        right = 0 if causal else right
        if min(left or 0, right or 0) < 0:
            raise ValueError(f"window must hold numbers of keys or None, got {window}")
        seqlen_q = self.seqlen_q if seqlen_q is None else seqlen_q
        seqlen_k = self.seqlen_k if seqlen_k is None else seqlen_k
        for name, length, covered in (
            ("seqlen_q", seqlen_q, self.num_rows * self.block_m),
            ("seqlen_k", seqlen_k, self.num_cols * self.block_n),
        ):
            if not 0 <= length <= covered:
                raise ValueError(
                    f"{name} must be at most {covered}, which the blocks of the mask cover, "
                    f"got {length}: build the mask for the longest sequence"
                )
        key = (left, right, seqlen_q, seqlen_k, per_row_tails, mask_all)
        if key not in self._restrictions:
            if len(self._restrictions) >= _MAX_RESTRICTIONS:
                del self._restrictions[next(iter(self._restrictions))]
            self._restrictions[key] = self._restrict(*key)
        return self._restrictions[key]

    def _restrict(
        self,
        left: int | None,
        right: int | None,
        seqlen_q: int,
        seqlen_k: int,
        per_row_tails: bool,
        mask_all: bool,
    ) -> "BlockMask":
        blocks = list_blocks(self.rows)
        first_q, first_k = blocks.rows * self.block_m, blocks.cols * self.block_n
        last_q = (first_q + self.block_m).clamp(max=seqlen_q) - 1
        last_k = (first_k + self.block_n).clamp(max=seqlen_k) - 1
        keep = (first_q < seqlen_q) & (first_k < seqlen_k)
        is_whole = last_k - first_k == self.block_n - 1
        if per_row_tails:
            is_whole &= last_q - first_q == self.block_m - 1
        # Distances of keys from their query's diagonal; a block has all between these two.
        lowest = first_k - last_q - (seqlen_k - seqlen_q)
        highest = last_k - first_q - (seqlen_k - seqlen_q)
        if right is not None:
            keep &= lowest <= right
            is_whole &= highest <= right
        if left is not None:
            keep &= highest >= -left
            is_whole &= lowest >= -left
        is_full = torch.zeros_like(is_whole) if mask_all else blocks.is_full & is_whole
        num_rows, num_cols = -(-seqlen_q // self.block_m), -(-seqlen_k // self.block_n)
        lists = sort_blocks(
            blocks._replace(is_full=is_full).select(keep),
            self.mask_batch, self.mask_heads, num_rows, num_cols,
        )  # fmt: skip
        return BlockMask(seqlen_q, seqlen_k, self.block_m, self.block_n, *lists, self.token_masks)

    def to_dense(self) -> Tensor:
        """The visible blocks: bool (mask_batch, mask_heads, rows, cols)."""
        return self.to_patterns() != 0

    def to_patterns(self) -> Tensor:
        """int32 (mask_batch, mask_heads, rows, cols): 0 hidden, 1 without a token mask, 2 + its
        index in token_masks.
        """
        blocks = list_blocks(self.rows)
        shape = (self.mask_batch, self.mask_heads, self.num_rows, self.num_cols)
        patterns = torch.zeros(shape, dtype=torch.int32, device=self.device)
        heads = patterns.view(-1, self.num_rows, self.num_cols)
        heads[blocks.heads, blocks.rows, blocks.cols] = blocks.patterns + 2
        return patterns

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

    def to(self, device: torch.device | str) -> "BlockMask":
        """The mask on a device, itself if it is there already."""
        device = torch.device(device)
        if device == self.device:
            return self
        rows, cols = (
            BlockLists(*(t.to(device) for t in lists)) for lists in (self.rows, self.cols)
        )
        return BlockMask(
            self.seqlen_q, self.seqlen_k, self.block_m, self.block_n, rows, cols,
            self.token_masks.to(device),
        )  # fmt: skip

    def __repr__(self) -> str:
        num_partial = int((self.rows.bounds[..., 1] - self.rows.bounds[..., 0]).sum())
        return (
            f"BlockMask(seqlen_q={self.seqlen_q}, seqlen_k={self.seqlen_k}, "
            f"block_m={self.block_m}, block_n={self.block_n}, mask_batch={self.mask_batch}, "
            f"mask_heads={self.mask_heads}, num_blocks={self.num_blocks}, "
            f"num_partial={num_partial}, num_patterns={self.token_masks.shape[0]}, "
            f"density={self.density:.4g}, device={self.device})"
        )


def check_block_sizes(block_m: int, block_n: int) -> None:
    for name, size in (("block_m", block_m), ("block_n", block_n)):
        if not 16 <= size <= 256 or size % 16 != 0:
            raise ValueError(
                f"{name} must be a multiple of 16 from 16 to 256, got {size}: "
                "choose another block size"
            )


def check_lengths(seqlen_q: int, seqlen_k: int) -> None:
    for name, length in (("seqlen_q", seqlen_q), ("seqlen_k", seqlen_k)):
        if length < 1:
            raise ValueError(f"{name} must be at least 1, got {length}")


def _checked_matrix(name: str, matrix: Tensor, dims: str) -> Tensor:
    """bool, with batch and heads in front."""
    if matrix.dtype != torch.bool:
        raise ValueError(f"{name} must be bool, got {matrix.dtype}: compare, as in {name} != 0")
    if matrix.dim() not in (2, 4) or matrix.numel() == 0:
        raise ValueError(
            f"{name} must be ({dims}) or (1 or batch, 1 or nheads, {dims}) and not empty, "
            f"got shape {tuple(matrix.shape)}"
        )
    return matrix if matrix.dim() == 4 else matrix[None, None]
