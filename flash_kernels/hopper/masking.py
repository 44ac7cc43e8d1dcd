"""The mask of the Hopper forward and backward."""

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
