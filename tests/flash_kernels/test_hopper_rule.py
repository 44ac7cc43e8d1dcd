"""The rule that chooses the kernel family, on a pretended Hopper GPU."""

import warnings

import pytest
import torch

from flash_kernels import BlockMask
from flash_kernels.hopper import rule
from flash_kernels.portable.launch import Problem, WalkedMask


@pytest.fixture(autouse=True)
def hopper_gpu(monkeypatch):
    monkeypatch.setattr(rule, "_is_hopper", lambda device: True)


def blocks(size: int) -> WalkedMask:
    mask = BlockMask.from_dense(torch.ones(1, 1, dtype=torch.bool), size, size).restricted()
    return WalkedMask(mask.rows, mask.cols, mask.token_masks, size, size)


def problem(headdim=64, dtype=torch.bfloat16, seqlen_k=24, **options) -> Problem:
    q = torch.zeros(2, 16, 4, headdim, dtype=dtype)
    k = torch.zeros(2, seqlen_k, 2, headdim, dtype=dtype)
    return Problem(q, k, k, **{"softmax_scale": 0.1, **options})


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(window_right=0),
        dict(headdim=8),
        dict(headdim=72, dtype=torch.float16),
        dict(dropout_p=0.1, dropout_seed=torch.zeros(1, dtype=torch.int64)),
        dict(window_right=3),
        dict(window_left=8, window_right=0),  # query 0 stands at key 8
        dict(lengths_k=torch.zeros(2, dtype=torch.int32)),
        dict(blocks=blocks(128)),
    ],
)
def test_served(options, monkeypatch):
    assert rule.choose_family(problem(**options), "hopper", "forward") == "hopper"
    assert rule.choose_family(problem(**options), "portable", "forward") == "portable"
    monkeypatch.setattr(rule, "is_faster", lambda problem, direction: True)
    assert rule.choose_family(problem(**options), None, "forward") == "hopper"
    monkeypatch.setattr(rule, "is_faster", lambda problem, direction: False)
    assert rule.choose_family(problem(**options), None, "forward") == "portable"


@pytest.mark.parametrize(
    "options,words",
    [
        (dict(dtype=torch.float32), "float16 and bfloat16, got torch.float32"),
        (dict(headdim=136), "up to 128, got 136"),
        (dict(headdim=36), "multiples of 8 up to 128, got 36"),
        (dict(window_left=3), "some query sees the first key"),
        (dict(softcap=1.0), "does not serve softcap"),
        (dict(alibi_slopes=torch.zeros(4)), "or alibi_slopes"),
        (dict(blocks=blocks(64)), "128 or 256 rows and columns, got 64 x 64"),
        (dict(softmax_scale=0.0), "positive softmax_scale, got 0.0"),
        (dict(seqlen_k=0), "at least one key"),
    ],
)
def test_not_served(options, words, monkeypatch):
    with pytest.raises(NotImplementedError, match=words + '.*pass kernel="portable" or None'):
        rule.choose_family(problem(**options), "hopper", "forward")
    monkeypatch.setattr(rule, "is_faster", lambda problem, direction: True)
    assert rule.choose_family(problem(**options), None, "forward") == "portable"


def test_strides():
    fused = torch.zeros(2, 16, 3, 4, 64, dtype=torch.float16)
    assert all(rule.is_readable_by_tma(t) for t in fused.unbind(2))
    assert not rule.is_readable_by_tma(torch.zeros(2, 16, 4, 68, dtype=torch.float16)[..., :64])
    assert not rule.is_readable_by_tma(torch.zeros(2, 16, 4, 72, dtype=torch.float16)[..., 4:68])
    assert not rule.is_readable_by_tma(torch.zeros(2, 16, 1, 64).expand(2, 16, 4, 64))
    assert rule.is_packable(fused[:, :, 0], False)
    assert not rule.is_packable(torch.zeros(2, 20, 4, 64)[:, :16], False)
    # The stride of a dimension of size 1 is never used.
    strides = (3, 64, 5, 1)
    assert rule.is_readable_by_tma(torch.empty_strided((1, 16, 1, 64), strides, dtype=torch.half))


def test_unknown_triton_warns_once_and_takes_the_portable_kernels(monkeypatch):
    monkeypatch.setattr(rule, "is_served", lambda version: False)
    monkeypatch.setattr(rule, "is_faster", lambda problem, direction: True)
    rule._has_gluon.cache_clear()
    try:
        with pytest.warns(UserWarning, match="know Triton 3.6 to 3.9"):
            assert rule.choose_family(problem(), None, "forward") == "portable"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert rule.choose_family(problem(), None, "forward") == "portable"
        with pytest.raises(NotImplementedError, match="does not know Triton"):
            rule.choose_family(problem(), "hopper", "forward")
    finally:
        rule._has_gluon.cache_clear()


def test_deterministic_algorithms_take_the_portable_backward():
    call = problem(headdim=128)
    assert rule.choose_family(call, None, "backward") == "hopper"
    torch.use_deterministic_algorithms(True)
    try:
        assert rule.choose_family(call, None, "backward") == "portable"
        assert rule.choose_family(call, None, "forward") == "hopper"
        with pytest.raises(NotImplementedError, match="has no deterministic backward"):
            rule.choose_family(call, "hopper", "backward")
    finally:
        torch.use_deterministic_algorithms(False)


def test_what_was_measured_to_be_faster():
    dropout = dict(dropout_p=0.1, dropout_seed=torch.zeros(1, dtype=torch.int64))
    lengths = dict(lengths_k=torch.zeros(2, dtype=torch.int32))
    for options, forward, backward in (
        (dict(seqlen_k=256), "portable", "portable"),
        (dict(seqlen_k=512), "hopper", "hopper"),
        (dict(seqlen_k=512, window_right=0), "portable", "portable"),
        (dict(seqlen_k=1024, window_right=0), "portable", "hopper"),
        (dict(seqlen_k=2048, window_right=0), "hopper", "hopper"),
        (dict(seqlen_k=8192, **dropout), "portable", "hopper"),
        (dict(seqlen_k=1024, **lengths), "portable", "hopper"),
        (dict(seqlen_k=2048, **lengths), "hopper", "hopper"),
        (dict(seqlen_k=64, headdim=128), "hopper", "hopper"),
        (dict(seqlen_k=64, headdim=128, **lengths, **dropout), "portable", "hopper"),
        (dict(seqlen_k=8192, headdim=40), "hopper", "hopper"),
        (dict(seqlen_k=8192, headdim=32), "portable", "portable"),
        (dict(blocks=blocks(128)), "hopper", "hopper"),
    ):
        call = problem(**options)
        assert rule.choose_family(call, None, "forward") == forward, options
        assert rule.choose_family(call, None, "backward") == backward, options


def test_a_narrow_window_makes_short_rows():
    for window, direction, family in (
        (1000, "forward", "portable"),
        (1100, "forward", "hopper"),
        (1000, "backward", "portable"),
        (1100, "backward", "hopper"),
    ):
        q = torch.zeros(1, 8192, 2, 64, dtype=torch.bfloat16)
        call = Problem(q, q, q, softmax_scale=0.1, window_left=window, window_right=0)
        assert rule.choose_family(call, None, direction) == family, (window, direction)
