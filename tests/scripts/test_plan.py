"""The plan's arithmetic, and its memory against what one GPU took."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import plan

ROOT = Path(__file__).parents[2]
RECORD = json.loads(plan.RECORD.read_text())


MEASURED = [row for row in RECORD["rows"] if "peak_gib" in row]
TOKENS = RECORD["settings"]["batch_tokens"]


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: f"{row['model']}-{row['run']}")
def test_memory_is_within_5_percent_of_what_was_measured(row):
    seqlen = 1024 * int(row["model"].removeprefix("gpt2_").removesuffix("k"))
    case = plan.Case("gpt2_small", seqlen, 1, "ddp", batch_tokens=TOKENS)
    memory = sum(plan.memory_bytes(case, plan.make_model("gpt2_small", seqlen)).values())
    assert memory / plan.GIB == pytest.approx(row["peak_gib"], rel=0.05)


def test_recomputing_keeps_less():
    """Of 12 layers: 36 bytes times the width a token and layer, or 24, or 4 and one whole layer;
    16 behind them."""
    model, case = plan.make_model("gpt2_small", 1024), plan.Case("gpt2_small", 1024, 1, "ddp")
    bytes_of = {
        how: plan.memory_bytes(dataclasses.replace(case, recompute=how), model)["activations"]
        / (768 * 65536)
        for how in ("none", "selective", "full")
    }
    assert bytes_of == {"none": 36 * 12 + 16, "selective": 24 * 12 + 28, "full": 6 * 12 + 46}


def test_rates_give_the_measured_speed_back():
    speeds = plan.rates(RECORD)
    rows = [row for row in MEASURED if row["run"] == "flash"]
    for row, seqlen in zip(rows, (1024, 4096), strict=True):
        case = plan.Case("gpt2_small", seqlen, 1, "ddp", batch_tokens=TOKENS)
        seconds = plan.step_seconds(case, plan.make_model("gpt2_small", seqlen), speeds, 1.0, 1.0)
        assert seconds["exposed"] == 0.0
        assert case.tokens / seconds["compute"] == pytest.approx(row["tokens_per_s"])


def test_what_is_sent():
    model = plan.make_model("gpt2_small", 4096)
    full = 4.0 * model.num_params()
    ddp = plan.sent_bytes(plan.Case("gpt2_small", 4096, 8, "ddp"), model)
    assert ddp == {"gradients": 2 * 7 / 8 * full, "weights": 0.0, "context": 0.0}
    # 16 GPUs on two machines: a reduce-scatter on each, then an all-reduce of an eighth over both.
    case = plan.Case("gpt2_small", 4096, 16, "fsdp", batch_tokens=16 * 4096 * 2)
    fsdp = plan.sent_bytes(case, model)
    assert case.num_micro_batches == 1
    assert fsdp["gradients"] == pytest.approx(7 / 8 * full + 2 * (full / 8) / 2)
    assert fsdp["weights"] == pytest.approx(2 * 7 / 8 * full)
    # Four processes a sequence: 1,024 tokens of 768 in 12 layers are one tensor of a step.
    heads, ring = (
        plan.sent_bytes(
            plan.Case("gpt2_small", 4096, 4, "ddp", 4, method, batch_tokens=4096), model
        )["context"]
        for method in ("heads", "ring")
    )
    tensor = 1024 * 768 * 12
    assert heads == 8 * 2 * tensor * 3 / 4
    assert ring == 4 * 2 * tensor * 3 + 2 * 4 * tensor * 4


def test_a_case_is_cut_until_it_fits():
    model = plan.make_model("gpt2_xl", 65536)
    case = plan.Case("gpt2_xl", 65536, 64, micro_batch_tokens=262144, batch_tokens=2**24)
    assert case.micro_tokens == 262144
    fitted = plan.fit(case, model, 139 * plan.GIB, may_share=True)
    assert (fitted.context, fitted.micro_tokens) == (2, 32768)
    assert sum(plan.memory_bytes(fitted, model).values()) <= 139 * plan.GIB
    alone = plan.fit(case, model, 139 * plan.GIB, may_share=False)
    assert (alone.context, alone.micro_tokens) == (1, 65536)


def test_command_and_its_errors():
    def run(*arguments):
        command = [sys.executable, "-m", "scripts.plan", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    done = run("model=gpt2_small", "seqlen=4096", "gpus=8", "strategy=ddp")
    assert done.returncode == 0 and "524,288" in done.stdout, done.stderr
    done = run("model=gpt3")
    assert done.returncode == 2 and "model must be of gpt2_small" in done.stderr
