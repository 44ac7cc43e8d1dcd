import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from scripts import fmha_table, paper_numbers, reproduce

ROOT = Path(__file__).parents[2]
TABLE7 = ("forward", "backward", "both")


def test_tables_are_the_twelve_of_the_paper():
    assert list(paper_numbers.RUNTIME_TABLES) == [f"table{i}" for i in range(9, 21)]
    assert paper_numbers.RUNTIME_TABLES["table9"] == ((True, True), "forward")
    assert paper_numbers.RUNTIME_TABLES["table20"] == ((False, False), "both")
    for directions in paper_numbers.RUNTIME_MS.values():
        for table in directions.values():
            for row in table.values():
                assert len(row) == len(paper_numbers.SEQLENS)
                printed = [n for n in row if n is not None]
                # Tables 9 to 20 print times that grow with the length from 2K on.
                assert printed[4:] == sorted(printed[4:])


def test_combined_times_of_flash_are_the_sum_of_both_directions():
    """Within 15 %, the spread of the paper's own tables: a mistyped digit would stand out."""
    for directions in paper_numbers.RUNTIME_MS.values():
        for at in range(3, 10):
            forward, backward, both = (
                directions[d]["flash"][at] for d in ("forward", "backward", "both")
            )
            assert both == pytest.approx(forward + backward, rel=0.15)


@pytest.mark.parametrize(
    "ours,paper,word",
    [(3.0, 2.0, "better"), (2.1, 2.0, "reproduced"), (1.85, 2.0, "reproduced"),
     (1.5, 2.0, "worse"), (None, 2.0, "not measured"), (2.0, None, "no ratio in the paper")],
)  # fmt: skip
def test_verdict(ours, paper, word):
    assert paper_numbers.verdict(ours, paper).startswith(word)


def test_show_compares_ratios_with_the_paper():
    """At 1K the paper's combined times with dropout and padding: 8.29 / 2.55 = 3.25."""
    times = {"pytorch": 10.0, "flash": 2.0, "block_sparse": 1.0}
    row = {"seqlen": 1024, **{i: {"both": t} for i, t in times.items()}}
    verdicts = reproduce.show("table11", [row], Console(file=io.StringIO(), width=150))
    flash = verdicts[1]
    assert flash["impl"] == "flash" and flash["here_ratio"] == 5.0
    assert flash["paper_ratio"] == pytest.approx(3.25, abs=0.01) and flash["verdict"] == "better"


def test_figures_compare_the_factor_over_pytorch():
    """Figure 2: 41.7 / 7.3 = 5.71; of figure 1 the paper prints the factor 7.6 alone."""
    times = {"pytorch": {"forward": 8.0, "both": 12.0}, "flash": {"forward": 1.0, "both": 2.0}}
    console = Console(file=io.StringIO(), width=150)
    for name, ratio, here, word in (
        ("figure1", 7.6, 8.0, "reproduced"),
        ("figure2", 5.71, 6.0, "reproduced"),
    ):
        flash = reproduce.show(name, [{"seqlen": 1024, **times}], console)[1]
        assert flash["paper_ratio"] == pytest.approx(ratio, abs=0.01)
        assert (flash["here_ratio"], flash["verdict"]) == (here, word)


def fmha_times(seqlen, flash=0.2):
    times = dict(forward=flash, backward=2 * flash, both=3 * flash)
    return {"seqlen": seqlen, "failures": {}, "flash": times, "pytorch": times}


def test_table7_has_the_papers_numbers_and_no_fmha_here(tmp_path, monkeypatch):
    """At 512 tokens FMHA's forward takes 1.14 ms on an A100; an H200 has 989.4 / 312 its peak."""
    where = {"hardware": {"gpus": ["NVIDIA H200"]}, "versions": {}, "git_revision": None}
    shapes = []

    def measure_runtime(seqlen, options, names, **shape):
        shapes.append((seqlen, options, shape))
        return fmha_times(seqlen)

    monkeypatch.setattr(reproduce, "environment", lambda: where)
    monkeypatch.setattr(reproduce, "measure_runtime", measure_runtime)
    path = tmp_path / "table7.json"
    reproduce.measure("table7", path, False, Console(file=io.StringIO(), width=150))
    assert shapes == [(n, (True, True), dict(batch=64, nheads=16)) for n in (128, 256, 512)]
    record = json.loads(path.read_text())
    assert (record["settings"]["batch"], record["settings"]["headdim"]) == (64, 64)
    rows = {(r["seqlen"], r["direction"], r["impl"]): r for r in record["rows"]}
    assert len(rows) == 27
    fmha = rows[512, "forward", "fmha"]
    assert (fmha["paper"], fmha["here"]) == (1.14, None)
    assert fmha["verdict"].startswith("not available: FMHA is built from Apex's source")
    flash = rows[512, "forward", "flash"]
    assert flash["paper_ratio"] == pytest.approx(1.14 / 0.81)
    assert flash["here_ratio"] == pytest.approx(1.14 / (989.4 / 312) / 0.2)
    assert flash["verdict"] == "better: FMHA's time scaled by the GPUs' peaks"
    assert rows[128, "both", "flash"]["verdict"].startswith("worse: ")


def test_table7_without_a_peak_has_no_verdict():
    rows = fmha_table.table_rows([fmha_times(128)], "Some GPU 9000")
    flash = next(r for r in rows if r["impl"] == "flash")
    assert flash["verdict"] == "no verdict: the peak of Some GPU 9000 is not known"


def test_combined_times_of_table7_are_the_sum_of_both_directions():
    for impl in ("fmha", "flash"):
        for at in range(3):
            forward, backward, both = (paper_numbers.FMHA_MS[d][impl][at] for d in TABLE7)
            assert both == pytest.approx(forward + backward, abs=0.011)


def test_training_tables_name_their_commands():
    command = [sys.executable, "-m", "scripts.reproduce", "table4"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "python train.py experiment=gpt2_4k trainer=ddp" in done.stdout
    assert "python -m scripts.compare_contexts" in done.stdout
