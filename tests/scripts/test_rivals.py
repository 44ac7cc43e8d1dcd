import importlib.util
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from flash_kernels import reference
from scripts import rivals, timing
from scripts.rivals import IMPLEMENTATIONS, Memory, groups_that_fit, make, reason_of, why_not

ROOT = Path(__file__).parents[2]
SMALL = dict(batch=2, nheads=2, device="cpu")
GB = 10**9


@pytest.mark.parametrize(
    "impl,is_padded",
    [("pytorch", False), ("pytorch", True), ("sdpa_math", False), ("sdpa_math", True),
     ("sdpa_flash2", False), ("flex", False), ("flex", True)],
)  # fmt: skip
def test_exact_rivals_compute_the_same_attention(impl, is_padded, monkeypatch):
    """Of one seed, whichever the implementation; fp16 against float64."""

    def forward_alone(*leaves, block_mask):  # FlexAttention has no backward on a CPU
        return flex_attention(*(t.detach() for t in leaves), block_mask=block_mask)

    monkeypatch.setattr(rivals, "compiled_flex", lambda: forward_alone)
    function, leaves = make(impl, 256, False, is_padded, 3, **SMALL)
    out = function().transpose(1, 2)
    generator = torch.Generator().manual_seed(3)
    inputs = [torch.randn(2, 256, 2, 64, generator=generator).half() for _ in range(3)]
    inputs = [t.double().requires_grad_() for t in inputs]
    lengths = torch.randint(236, 257, (2,), generator=generator) if is_padded else None
    expected = reference.flash_attention(*inputs, lengths_k=lengths)
    torch.testing.assert_close(out.double(), expected, atol=2e-3, rtol=0)
    if impl == "flex":
        return
    dout = torch.randn(expected.shape, dtype=torch.float64)
    torch.testing.assert_close(
        [g.double() for g in torch.autograd.grad(out, leaves, dout.half())],
        list(torch.autograd.grad(expected, inputs, dout)),
        atol=5e-3, rtol=0,
    )  # fmt: skip


def test_the_papers_pytorch_computes_in_fp16_and_hides_later_keys():
    function, leaves = make("pytorch", 128, False, False, 0, **SMALL, causal=True)
    out = function()
    assert out.dtype == torch.float16
    expected = reference.flash_attention(*(t.double() for t in leaves), causal=True)
    torch.testing.assert_close(out.double(), expected.transpose(1, 2), atol=2e-3, rtol=0)


def test_the_papers_pytorch_drops_probabilities():
    """With equal values an output is the sum of the probabilities kept, over 1 - p."""
    function, leaves = make("pytorch", 256, True, True, 0, **SMALL)
    with torch.no_grad():
        leaves[2].fill_(1.0)
    torch.manual_seed(0)
    sums = function().float()
    assert sums.std() > 0.01 and sums.mean().item() == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("lengths", [[1, 128, 129], [384, 300, 256]])
def test_flex_padding_mask_is_that_of_flex_attentions_builder(lengths):
    lengths = torch.tensor(lengths)
    mask = rivals.flex_padding_mask(lengths, 384)
    expected = create_block_mask(lambda b, h, i, j: j < lengths[b], 3, None, 384, 384, device="cpu")
    assert mask.shape[0] == 3 and mask.seq_lengths == expected.seq_lengths
    torch.testing.assert_close(mask.to_dense(), expected.to_dense())
    for name in ("kv", "full_kv", "q", "full_q"):
        num, index = (getattr(mask, f"{name}_{what}") for what in ("num_blocks", "indices"))
        wanted, wanted_index = (
            getattr(expected, f"{name}_{what}") for what in ("num_blocks", "indices")
        )
        torch.testing.assert_close(num, wanted)
        counted = torch.arange(3) < num[..., None]
        assert (index[counted] == wanted_index[counted]).all()


def test_approximate_rivals_have_the_sizes_of_the_paper():
    """At 256 tokens an eighth is 32 keys; local attention and Performer run in fp32."""
    for impl, dtype in (
        ("local", torch.float32), ("linformer", torch.float16), ("performer", torch.float32),
    ):  # fmt: skip
        function, leaves = make(impl, 256, False, True, 0, **SMALL)
        out = function()
        assert out.shape == (2, 256, 2, 64) and out.dtype == dtype
        assert out.isfinite().all() and 0.01 < out.std() < 1
        assert all(g.any() for g in torch.autograd.grad(out.sum(), leaves))
        if impl == "linformer":
            assert [tuple(t.shape) for t in leaves[3:]] == [(32, 256)] * 2


def test_local_rival_sees_an_eighth_of_the_keys():
    """Radius 16 at 256 tokens: a change of key 100 reaches the outputs 84 to 116."""
    function, (_, _, v) = make("local", 256, False, False, 0, **SMALL)
    before = function().detach()
    with torch.no_grad():
        v[:, 100] += 1
    changed = (function() != before).any(-1).any(-1).all(0).nonzero().flatten()
    assert (changed[0], changed[-1], len(changed)) == (84, 116, 33)


@pytest.mark.parametrize(
    "impl,has_dropout,is_padded,words",
    [("flex", True, False, "FlexAttention has no dropout"),
     ("performer", True, True, "no probabilities to drop"),
     ("sdpa_flash2", False, True, "takes no mask")],
)  # fmt: skip
def test_what_a_rival_cannot_do_has_a_reason(impl, has_dropout, is_padded, words):
    assert words in why_not(impl, has_dropout, is_padded)
    with pytest.raises(NotImplementedError, match=words):
        make(impl, 128, has_dropout, is_padded, 0, **SMALL)


def test_every_rival_is_tried_where_nothing_forbids_it(monkeypatch):
    monkeypatch.setattr(rivals, "why_no_fa4", lambda: None)
    assert not any(why_not(impl, False, False) for impl in IMPLEMENTATIONS)
    served = {i for i in IMPLEMENTATIONS if why_not(i, True, True) is None}
    assert served == {
        "pytorch", "flash", "block_sparse", "sdpa_math", "sdpa_cudnn", "local", "linformer",
    }  # fmt: skip


@pytest.mark.parametrize(
    "source,why",
    [(None, "is not installed"), ("raise RuntimeError(1)", "cannot be imported: RuntimeError"),
     ("", None)],
)  # fmt: skip
def test_an_installation_that_does_not_work_is_none(source, why, tmp_path, monkeypatch):
    """In a process of its own that finds tmp_path's package, or none."""
    if importlib.util.find_spec("flash_attn"):
        pytest.skip("flash_attn is installed here")
    if source is not None:
        (tmp_path / "flash_attn").mkdir()
        (tmp_path / "flash_attn/cute.py").write_text(source)
    code = "from scripts.rivals import why_not; print(why_not('fa4', False, False))"
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == (f"flash_attn.cute {why}" if why else "None")


def test_groups_hold_what_fits():
    """Two sets of 10 and a peak of 30 make 50; with another of that size 70."""
    small, large = Memory(10, 30), Memory(40, 90)
    memories = {"a": small, "b": small, "c": large, "d": Memory(1, 2)}
    assert groups_that_fit(memories, 2, 72) == [["a", "b", "d"], ["c"]]
    assert groups_that_fit(memories, 2, 69) == [["a", "d"], ["b"], ["c"]]
    assert groups_that_fit(memories, 1, 1000) == [["a", "b", "c", "d"]]
    assert groups_that_fit({}, 1, 1000) == []


def test_failures_are_told_in_a_few_words():
    text = "CUDA out of memory. Tried to allocate 64.00 GiB. GPU 0 has a total capacity of 139 GiB"
    assert reason_of("pytorch", text) == "out of memory for another 64.00 GiB"
    warned = [
        "Flash attention kernel not used because: (Triggered internally at sdp_utils.cpp:940.)",
        "Flash attention has been runtime disabled. (Triggered internally at sdp_utils.cpp:78.)",
        "cuDNN attention kernel not used because: (Triggered internally at sdp_utils.cpp:942.)",
        "No cuDNN for this (Triggered internally at sdp_utils.cpp:99.)",
    ]
    error = "No available kernel. Aborting execution."
    assert reason_of("sdpa_cudnn", error, warned) == "No cuDNN for this"
    assert reason_of("sdpa_cudnn", error, []) == error
    assert reason_of("fa4", "") == "no reason given"


def test_memory_is_what_is_held_between_the_directions_and_the_peak(monkeypatch):
    allocated = iter([100, 130])
    for name, fake in (
        ("empty_cache", lambda: None), ("reset_peak_memory_stats", lambda: None),
        ("synchronize", lambda: None), ("memory_allocated", lambda: next(allocated)),
        ("max_memory_allocated", lambda: 170),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, fake)
    x = torch.ones(3, requires_grad=True)
    assert rivals.memory_of("flash", lambda seed: (lambda: 2 * x, [x])) == Memory(30, 70)


@pytest.mark.parametrize(
    "error,words",
    [(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has"),
      "out of memory for another 2.00 GiB"),
     (RuntimeError("No available kernel."), "no such shape"),
     (AssertionError("headdim must be 128"), "no such shape")],
)  # fmt: skip
def test_a_rival_that_cannot_run_costs_no_other_row(error, words, monkeypatch):
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 0)

    def function():
        warnings.warn("cuDNN attention kernel not used because: (Triggered at x)", stacklevel=1)
        warnings.warn("no such shape (Triggered at x)", stacklevel=1)
        raise error

    assert rivals.memory_of("sdpa_cudnn", lambda seed: (function, [])) == words


def test_runtime_row_has_times_and_reasons(monkeypatch):
    turns = []

    def time_in_turns(makers, num_sets):
        turns.append((list(makers), num_sets))
        failed = {"linformer": "CUDA out of memory. Tried to allocate 2.00 GiB."}
        times = {(n, d): t for n in makers for d, t in (("forward", 1.0), ("backward", 2.5))}
        return {k: t for k, t in times.items() if k[0] not in failed}, failed

    def memory_of(impl, maker):
        assert maker.args[:4] == (impl, seqlen, True, False)
        return "out of memory" if impl == "sdpa_math" else Memory(20 * GB, 40 * GB)

    monkeypatch.setattr(rivals, "time_in_turns", time_in_turns)
    monkeypatch.setattr(rivals, "memory_of", memory_of)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (100 * GB, 140 * GB))
    for seqlen, num_sets in ((2048, 2), (4096, 1)):
        turns.clear()
        names = ("pytorch", "flash", "sdpa_math", "flex", "linformer")
        row = rivals.measure_runtime(seqlen, (True, False), names)
        assert row["flash"] == {"forward": 1.0, "backward": 2.5, "both": 3.5}
        assert row["failures"] == {
            "sdpa_math": "out of memory",
            "flex": "FlexAttention has no dropout",
            "linformer": "out of memory for another 2.00 GiB",
        }
        assert all(row[name]["both"] is None for name in row["failures"])
        # 90 of the 100 GB: 40 of the largest while it runs, and sets of 20.
        groups = {2: [["pytorch"], ["flash"], ["linformer"]], 1: [["pytorch", "flash"]]}[num_sets]
        groups += [["linformer"]] * (num_sets == 1)
        assert row["groups"] == groups and turns == [(group, num_sets) for group in groups]


def test_memory_row_is_measured_once_the_libraries_have_their_workspaces(monkeypatch):
    asked = []

    def memory_of(impl, maker):
        asked.append((impl, maker.args[1]))
        if impl == "pytorch" and maker.args[1] > 128:
            return "out of memory for another 64.00 GiB"
        return Memory(GB, 2 * GB)

    monkeypatch.setattr(rivals, "memory_of", memory_of)
    row = rivals.measure_memory(16384, ("pytorch", "flash"))
    assert asked == [(i, n) for i in ("pytorch", "flash") for n in (128, 16384)]
    assert row["flash"] == 2000.0 and row["pytorch"] is None
    assert row["failures"] == {"pytorch": "out of memory for another 64.00 GiB"}


def test_estimate_counts_the_work_that_is_served():
    """Ours at 65,536 tokens: 9 * 3.5 * 4 * 16 * 8 * 65536^2 * 64 FLOPs at 350 TFLOP/s, and 2 s."""
    flops = 9 * 3.5 * 4 * 16 * 8 * 65536**2 * 64
    minutes = rivals.estimated_minutes([65536], (True, True), ["flash", "sdpa_flash2", "flex"])
    assert minutes == pytest.approx((flops / 350e12 + 2) / 60)
    assert rivals.estimated_minutes([65536], (False, False), ["pytorch"]) == pytest.approx(2 / 60)


class FakeEvent:
    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        pass

    def elapsed_time(self, other):
        return 150.0 / 8  # a turn of this length is repeated 8 times


def test_many_contenders_are_held_four_at_a_time(monkeypatch):
    """What keeps the GPU busy lasts about 3 ms, in which a host queues four of them."""
    order = []
    for name, fake in (("Event", FakeEvent), ("synchronize", lambda: None)):
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: order.append("hold"))

    def maker(name, seed):
        x = torch.ones(1, requires_grad=True)

        def function():
            order.append((name, seed))
            return 2 * x

        return function, [x]

    names = "abcdef"
    makers = {n: (lambda seed, n=n: maker(n, seed)) for n in names}
    times, failures = timing.time_in_turns(makers, num_sets=1)
    assert not failures and set(times.values()) == {150.0 / 8}
    assert {seed for entry in order if entry != "hold" for seed in entry[1:]} == {0}
    start = order.index("hold")
    turn = order[start : start + 8]
    assert [e if e == "hold" else e[0] for e in turn] == ["hold", *"abcd", "hold", *"ef"]
