"""Public function for decoding: new queries over a key-value cache, without gradients."""

import torch
from torch import Tensor

from .attention import Output, Window, check_options, check_qkv, check_slopes


def flash_attention_with_kv_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_lengths: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    causal: bool = True,
    window: Window = (None, None),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_lse: bool = False,
    num_splits: int | None = None,
) -> Output:
    """Attention of q over the tokens in the cache and those in k, v, which are appended in place.

    Sequence b uses rows 0 ... cache_lengths[b] + seqlen_new - 1 of the caches; its last query
    stands at the last of them (bottom-right alignment on the length in use, unlike lengths_k of
    flash_attention). cache_lengths itself is not changed. Nothing depends on its values on the
    host, so a CUDA graph can replay the call.

    Args:
        q: (batch, seqlen_q, nheads, headdim), fp16, bf16 or fp32.
        k_cache, v_cache: (batch, capacity, nheads_k, headdim), dtype and device of q, last stride
            1.
        cache_lengths: int32 or int64 (batch,): tokens already in the cache. cache_lengths[b] +
            seqlen_new must not exceed capacity: checked in the interpreter, asserted on the device
                on a GPU.
        k, v: (batch, seqlen_new, nheads_k, headdim), or None to append nothing.
        causal, window, softmax_scale, softcap, alibi_slopes, return_lse: as in flash_attention.
        num_splits: ranges that the keys are cut into; None chooses by the number of
            multiprocessors.

    Returns:
        out (batch, seqlen_q, nheads, headdim), with return_lse also (batch, nheads, seqlen_q)
        float32.

    Raises:
        ValueError: shapes, dtypes, devices or options disagree, or an input requires gradients.
    """
    check_qkv(q, k_cache, v_cache, 4, "(batch, seqlen, nheads, headdim)")
    batch, capacity = q.shape[0], k_cache.shape[1]
    if k_cache.shape[0] != batch:
        raise ValueError(
            f"q and k_cache must have the same batch size, got {batch} and {k_cache.shape[0]}"
        )
    if (k is None) != (v is None):
        raise ValueError("k and v must be given together, got one of them: pass both or neither")
    seqlen_new = 0
    if k is not None and v is not None:
        check_qkv(q, k, v, 4, "(batch, seqlen, nheads, headdim)")
        seqlen_new = k.shape[1]
        if k.shape[0] != batch or k.shape[2] != k_cache.shape[2]:
            raise ValueError(
                "k must have the batch size and nheads_k of k_cache, "
                f"got {tuple(k.shape)} and {tuple(k_cache.shape)}"
            )
    if torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (q, k_cache, v_cache, k, v)
    ):
        raise ValueError(
            "flash_attention_with_kv_cache has no backward, got inputs that require gradients: "
            "call it under torch.no_grad(), or use flash_attention"
        )
    if cache_lengths.dtype not in (torch.int32, torch.int64) or cache_lengths.shape != (batch,):
        raise ValueError(
            f"cache_lengths must be int32 or int64 of shape ({batch},), "
            f"got {cache_lengths.dtype} {tuple(cache_lengths.shape)}"
        )
    if cache_lengths.device != q.device:
        raise ValueError(f"cache_lengths must be on {q.device} like q, got {cache_lengths.device}")
    check_options(0.0, softcap, window)
    if num_splits is not None and not 1 <= num_splits <= 64:
        raise ValueError(f"num_splits must be between 1 and 64, or None, got {num_splits}")
    if alibi_slopes is not None:
        check_slopes(alibi_slopes, q, batch)
        alibi_slopes = alibi_slopes.detach().contiguous()
    if softmax_scale is None:
        softmax_scale = q.shape[-1] ** -0.5
    cache_lengths = cache_lengths.contiguous()
    torch.ops.flash_kernels.check_cache_lengths(cache_lengths, capacity - seqlen_new)
    out, lse = torch.ops.flash_kernels.attention_decode(
        q, k_cache, v_cache, cache_lengths, k, v, alibi_slopes, softmax_scale, softcap, window[0],
        0 if causal else window[1], num_splits,
    )  # fmt: skip
    return (out, lse) if return_lse else out
