"""scripts/soak.py: kills what it starts until it ends by itself, and sees any difference."""

import sys

import pytest

from scripts.soak import compare, disturb

# Counts in a file up to 40, one every 20 ms, from where it was killed.
COUNTS = """
import sys, time
path = sys.argv[1]
number = int(open(path).read() or 0)
while number < 40:
    time.sleep(0.02)
    number += 1
    open(path, "w").write(str(number))
"""


def test_a_command_is_killed_until_it_may_end(tmp_path):
    path = tmp_path / "number"
    path.write_text("0")
    command = [sys.executable, "-c", COUNTS, str(path)]
    starts = disturb(command, kills=3, within=0.3, seed=0)
    assert len(starts) == 4 and path.read_text() == "40"
    assert {start["status"] for start in starts[:3]} == {-9, -15} and starts[3]["status"] == 0
    with pytest.raises(RuntimeError, match="ended by itself with status 3"):
        disturb([sys.executable, "-c", "raise SystemExit(3)"], kills=1, within=60.0, seed=0)


def rows(*losses, speed="100", peak=""):
    return [
        {"step": str(i), "tokens": str(100 * i), "seconds": str(2.0 * i), "tokens_per_s": speed}
        | {"train/loss": loss, "train/grad_norm": "1", "val/loss": "", "peak_gib": peak}
        for i, loss in enumerate(losses, 1)
    ]


def test_differences_are_counted():
    same = compare(rows("3", "2"), rows("3", "2"), 0.0)
    assert same["num_different"] == 0 and same["speed"] == 1.0 and same["memory_growth"] is None
    assert same["overhead"] == pytest.approx(0.5)  # 100 tokens take 1 s of the 2 s between rows
    assert compare(rows("3", "2"), rows("3", "2.02"), 0.0)["num_different"] == 1
    assert compare(rows("3", "2"), rows("3", "2.02"), 0.02)["num_different"] == 0
    assert compare(rows("3", "2"), rows("3"), 0.0)["num_different"] == 2  # a row, and a step
    assert compare(rows("3", "2"), rows("3", "2", speed="50"), 0.0)["speed"] == 0.5
    grown = rows("3", peak="1") + rows("3", "2", peak="1.5")[1:]
    assert compare(rows("3", "2"), grown, 0.0)["memory_growth"] == pytest.approx(0.5)
