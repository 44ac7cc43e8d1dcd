"""Public functions of block-sparse attention (arXiv 2205.14135, section 3.3): only the blocks that
a BlockMask lists are loaded and computed, so time and traffic go with its density."""

from torch import Tensor

from .attention import Output, Seed, Window, attend, autocast, check_inputs
from .block_mask import BlockMask


def block_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_mask: BlockMask,
    *,
    causal: bool = False,
    window: Window = (None, None),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    lengths_k: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Seed = None,
    deterministic: bool = False,
    return_lse: bool = False,
    kernel: str | None = None,
    autotune: bool = False,
) -> Output:
    """flash_attention in which query i sees key j only where block_mask says so as well.

    Args:
        q: (batch, seqlen_q, nheads, headdim). k, v: (batch, seqlen_k, nheads_k, headdim).
        block_mask: on q's device, for 1 or batch sequences and 1 or nheads query heads. Its
            positions are absolute (query 0 and key 0 are in block 0), unlike causal and window,
            which align the last query with the last key. It may cover more rows or keys than the
            call has, not fewer. Blocks that causal, window or the lengths hide are skipped; the
            lists for that are made at the first call with these options and kept in the mask.
        The rest as in flash_attention. With lengths_k every listed block is masked element by
            element, which is slower than whole blocks.

    Returns:
        out (batch, seqlen_q, nheads, headdim); with return_lse also (batch, nheads, seqlen_q)
        float32. A query that sees no key gets zeros and -inf.

    Raises:
        As flash_attention, and ValueError if the mask covers fewer positions than the call has, is
        for another number of sequences or heads, or is on another device.
    """
    q, k, v = autocast(q, k, v)
    check_mask(block_mask, q, check_inputs(q, k, v, None, None))
    walked = block_mask.restricted(
        causal=causal, window=window, seqlen_q=q.shape[1], seqlen_k=k.shape[1],
        mask_all=lengths_k is not None,
    )  # fmt: skip
    out, lse = attend(
        q, k, v, None, None, None, None, causal, window, softmax_scale, softcap,
        alibi_slopes, lengths_k, dropout_p, dropout_seed, deterministic,
        kernel, autotune, walked,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def block_sparse_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_mask: BlockMask,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool = False,
    window: Window = (None, None),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    lengths_k: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Seed = None,
    deterministic: bool = False,
    return_lse: bool = False,
    kernel: str | None = None,
    autotune: bool = False,
) -> Output:
    """block_sparse_attention over packed sequences, as flash_attention_varlen.

    block_mask applies to each sequence from its own start; it must cover max_seqlen_q and
    max_seqlen_k. Every listed block is masked element by element, since the sequences end in
    different blocks.

    Args, Returns, Raises: as block_sparse_attention and flash_attention_varlen.
    """
    q, k, v = autocast(q, k, v)
    check_mask(block_mask, q, check_inputs(q, k, v, cu_seqlens_q, cu_seqlens_k))
    walked = block_mask.restricted(seqlen_q=max_seqlen_q, seqlen_k=max_seqlen_k, mask_all=True)
    out, lse = attend(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, window,
        softmax_scale, softcap, alibi_slopes, lengths_k, dropout_p, dropout_seed, deterministic,
        kernel, autotune, walked,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def check_mask(block_mask: BlockMask, q: Tensor, batch: int) -> None:
    if not isinstance(block_mask, BlockMask):
        raise ValueError(
            f"block_mask must be a BlockMask, got {type(block_mask).__name__}: make one with "
            "BlockMask.from_dense(blocks, block_m, block_n)"
        )
    mask_batch, mask_heads = block_mask.rows.bounds.shape[:2]
    nheads = q.shape[-2]
    if mask_batch not in (1, batch) or mask_heads not in (1, nheads):
        raise ValueError(
            f"block_mask must be for 1 or {batch} sequences and 1 or {nheads} query heads, "
            f"got {mask_batch} and {mask_heads}"
        )
    if block_mask.device != q.device:
        raise ValueError(
            f"block_mask must be on {q.device} like q, got {block_mask.device}: "
            "move it with block_mask.to(device)"
        )
