"""The masks of the Hopper forward and backward."""

from .gluon_api import gl, jit


@jit
def hide(scores, bounds, BEFORE: gl.constexpr):
    """-inf in row i of scores [ROWS, COLUMNS] from column bounds[i] on, or BEFORE it.

    The columns are taken as [COLUMNS / 8, 8]: a thread holds the same columns of every group of 8,
    so that it compares few numbers of its own with constants, instead of COLUMNS / 4 numbers that
    each take an instruction and a register.
    """
    ROWS: gl.constexpr = scores.shape[0]
    COLUMNS: gl.constexpr = scores.shape[1]
    LAYOUT: gl.constexpr = scores.type.layout
    grouped = scores.reshape([ROWS, COLUMNS // 8, 8])
    GROUPED: gl.constexpr = grouped.type.layout
    groups = gl.arange(0, COLUMNS // 8, gl.SliceLayout(0, gl.SliceLayout(2, GROUPED))) * 8
    groups = groups.expand_dims(0).expand_dims(2)
    within = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, GROUPED)))
    bounds = gl.convert_layout(bounds, gl.SliceLayout(1, gl.SliceLayout(2, GROUPED)))
    bounds = bounds.expand_dims(1).expand_dims(2) - within.expand_dims(0).expand_dims(1)
    if BEFORE:
        grouped = gl.where(groups >= bounds, grouped, float("-inf"))
    else:
        grouped = gl.where(groups < bounds, grouped, float("-inf"))
    return gl.convert_layout(grouped.reshape([ROWS, COLUMNS]), LAYOUT, assert_trivial=True)


@jit
def hide_tokens(scores, lists, position, line, SUB: gl.constexpr, LINES: gl.constexpr):
    """-inf where the token mask of the tile at `position` of a block mask's lists is zero.

    scores: [ROWS, COLUMNS], from line `line` of their block on. SUB tiles lie in the block side by
    side; it has LINES lines of SUB * COLUMNS tokens, bits of int32 words (pack_tokens of
    token_words.py).
    """
    ROWS: gl.constexpr = scores.shape[0]
    COLUMNS: gl.constexpr = scores.shape[1]
    LAYOUT: gl.constexpr = scores.type.layout
    LINE_WORDS: gl.constexpr = SUB * COLUMNS // 32
    grouped = scores.reshape([ROWS, COLUMNS // 32, 32])
    GROUPED: gl.constexpr = grouped.type.layout
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, gl.SliceLayout(2, GROUPED)))
    groups = gl.arange(0, COLUMNS // 32, gl.SliceLayout(0, gl.SliceLayout(2, GROUPED)))
    within = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, GROUPED)))
    pattern = gl.load(lists[2] + position // SUB)
    words_ptr = lists[3] + gl.maximum(pattern, 0).to(gl.int64) * (LINES * LINE_WORDS)
    words_ptr += line * LINE_WORDS + (position % SUB) * (COLUMNS // 32)
    offsets = rows.expand_dims(1) * LINE_WORDS + groups.expand_dims(0)
    # A block that only the lengths or a window cut has no token mask: all bits set.
    words = gl.load(words_ptr + offsets, mask=offsets * 0 + pattern >= 0, other=-1)
    bits = (words.expand_dims(2) >> within.expand_dims(0).expand_dims(1)) & 1
    grouped = gl.where(bits != 0, grouped, float("-inf"))
    return gl.convert_layout(grouped.reshape([ROWS, COLUMNS]), LAYOUT, assert_trivial=True)
