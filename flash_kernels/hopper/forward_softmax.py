"""What the Hopper forward does with a tile of scores: masks, online softmax, keys of dropout."""

from .forward_producer import tile_at
from .gluon_api import gl, jit
from .masking import hide, hide_tokens


@jit
def online_softmax(
    scores, row_max, row_sum, seen, lists, start, index, scale_log2, BLOCK_N: gl.constexpr,
    SUB: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_TOKENS: gl.constexpr, MASK_M: gl.constexpr,
    MASKED: gl.constexpr,
):  # fmt: skip
    """Online softmax in base 2: (probabilities, row_max, row_sum, decay of what came before).

    seen: (begin and end of the keys that each row sees; positions before `full` and from `left` on
    hold tiles that they cut; the first row in its block of the mask). Without MASKED none is cut.
    """
    starts, limits, full, left, mask_line = seen
    if MASKED:
        if index < full:
            tile = tile_at(lists, start, index, SUB)
            scores = hide(scores, limits - tile * BLOCK_N, BEFORE=False)
            if HAS_LEFT and SUB > 0:
                scores = hide(scores, starts - tile * BLOCK_N, BEFORE=True)
            if HAS_TOKENS:
                scores = hide_tokens(scores, lists, start + index, mask_line, SUB, MASK_M)
        if HAS_LEFT and SUB == 0:
            if index >= left:
                scores = hide(scores, starts - (start - index) * BLOCK_N, BEFORE=True)
    # The scale is positive, so it commutes with the maximum and folds into one multiply-add.
    new_max = gl.maximum(row_max, gl.max(scores, 1) * scale_log2)
    if MASKED:
        # A row that has seen nothing yet: any finite number keeps -inf - max from being NaN.
        finite_max = gl.where(new_max == float("-inf"), 0.0, new_max)
    else:
        finite_max = new_max
    probs = gl.exp2(scores * scale_log2 - finite_max[:, None])
    decay = gl.exp2(row_max - finite_max)
    row_sum = row_sum * decay + gl.sum(probs, 1)
    return probs, new_max, row_sum, decay


@jit
def load_column_keys(
    column_keys_ptr, lists, start, index, keys_end, LAYOUT: gl.constexpr, BLOCK_N: gl.constexpr,
    SUB: gl.constexpr, HAS_DROPOUT: gl.constexpr,
):  # fmt: skip
    """Dropout keys of a tile's columns [BLOCK_N]; without dropout anything, which nothing uses.

    A block mask lists tiles behind the end of a short packed sequence, where any keys serve.
    """
    cols = gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT))
    if HAS_DROPOUT:
        begin = tile_at(lists, start, index, SUB) * BLOCK_N
        if SUB > 0:
            begin = gl.minimum(begin, gl.maximum(keys_end - 1, 0))
        return gl.load(column_keys_ptr + begin + cols)
    else:
        return cols
