import pytest
import torch

from scripts.benchmark_fused import IMPLEMENTATIONS, STEPS, Sizes, make, speed_table
from scripts.report_sections import section_of

SIZES = Sizes(tokens=12, dim=16, vocab_size=50, num_rows=64)


@pytest.mark.parametrize("step", STEPS)
def test_ours_and_the_plain_one_compute_the_same(step):
    """In float32 and Triton's interpreter; of dropout the masks are others, the shapes the same."""
    found = []
    for impl in ("ours", "eager"):
        function, leaves = make(impl, step, SIZES, seed=3, device="cpu")
        outs = function()
        outs = outs if isinstance(outs, tuple) else (outs,)
        found.append((*outs, *torch.autograd.grad(outs, leaves, [o.sign() for o in outs])))
    for got, want in zip(*found, strict=True):
        assert got.shape == want.shape and got.dtype == want.dtype
        if not step.endswith("dropout"):
            # The plain loss counts padding rows as classes; their logits are about as large.
            if step != "linear_cross_entropy":
                torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)


def test_the_plain_loss_is_that_of_all_rows():
    full = SIZES._replace(vocab_size=64)
    losses = [make(impl, "linear_cross_entropy", full, 3, "cpu")[0]() for impl in ("ours", "eager")]
    torch.testing.assert_close(*losses)


def test_a_rival_without_a_step_says_so():
    with pytest.raises(NotImplementedError, match="liger-kernel has no bias_gelu"):
        make("liger", "bias_gelu", SIZES, 0, "cpu")


def test_table_and_report():
    rows = [
        {"step": "bias_gelu", "impl": impl, "direction": direction, "ms": ms, "failure": None}
        for impl in IMPLEMENTATIONS
        for direction, ms in (("forward", 0.25), ("backward", 0.5), ("both", 0.75))
    ]
    for row in rows[-3:]:
        row["ms"] = None
    record = {
        "name": "benchmark_fused",
        "command": "python -m scripts.benchmark_fused",
        "date": "2026-01-02T03:04:05+00:00",
        "hardware": {"gpus": ["NVIDIA H200"], "cuda": "13.0", "machine": "x86_64"},
        "versions": {"torch": "2.11.0", "triton": "3.6.0"},
        "settings": {},
        "rows": rows,
    }
    header, lines = speed_table(record)
    assert len(header) == 5
    whole = "0.250 / 0.500 / 0.750"
    assert lines == [["bias gelu", whole, whole, whole, "- / - / -"]]
    assert section_of(record).blocks
