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


def test_show_says_why_a_row_has_no_verdict():
    """Table 11 has Linformer's times, 8.29 / 1.60 = 5.18 at 1K, and none of cuDNN's."""
    times = {"pytorch": 10.0, "flash": 2.0, "linformer": 2.0, "sdpa_cudnn": 1.0, "flex": None}
    rows = [
        {"seqlen": 1024, "failures": {"flex": "FlexAttention has no dropout"}},
        {"seqlen": 16384, "failures": {"pytorch": "out of memory for another 64.00 GiB"}},
    ]
    for row in rows:
        times["pytorch"] = None if "pytorch" in row["failures"] else 10.0
        row.update({i: {"both": t} for i, t in times.items()})
    console = Console(file=io.StringIO(), width=150)
    verdicts = reproduce.show("table11", rows, console)
    found = {(v["seqlen"], v["impl"]): v for v in verdicts}
    assert [v["impl"] for v in verdicts[:5]] == ["pytorch", "flash", "sdpa_cudnn", "flex",
                                                 "linformer"]  # fmt: skip
    linformer = found[1024, "linformer"]
    assert linformer["paper_ratio"] == pytest.approx(8.29 / 1.60) and linformer["here_ratio"] == 5
    assert linformer["verdict"] == "reproduced"
    assert found[1024, "flex"]["verdict"] == "not run: FlexAttention has no dropout"
    cudnn = found[1024, "sdpa_cudnn"]
    assert (cudnn["paper"], cudnn["paper_ratio"], cudnn["here_ratio"]) == (None, None, 10.0)
    assert cudnn["verdict"] == "no number of the paper's to compare with"
    out_of_memory = "out of memory for another 64.00 GiB"
    assert found[16384, "pytorch"]["verdict"] == f"not run: {out_of_memory}"
    assert found[16384, "flash"]["verdict"] == f"no ratio: PyTorch's {out_of_memory}"
    lines = console.file.getvalue().splitlines()
    cells = [[c.strip() for c in line.split("\u2502")[1:-1]] for line in lines if "cuDNN" in line]
    assert cells[0][:6] == ["1,024", "cuDNN (SDPA)", "-", "1", "-", "10"]


WHERE = {"hardware": {"gpus": ["NVIDIA H200"]}, "versions": {}, "git_revision": "abc"}


@pytest.fixture
def measured(monkeypatch):
    """(seqlen, options, implementations) of every row that is measured; no GPU."""
    asked = []

    def measure_runtime(seqlen, options, implementations, **shape):
        asked.append((seqlen, options, tuple(implementations)))
        if len(asked) == getattr(measure_runtime, "stop_at", None):
            raise KeyboardInterrupt
        times = dict(forward=1.0, backward=2.0, both=3.0)
        return {"seqlen": seqlen, "failures": {}, **dict.fromkeys(implementations, times)}

    compiled = []
    monkeypatch.setattr(reproduce, "environment", lambda: WHERE)
    monkeypatch.setattr(reproduce, "measure_runtime", measure_runtime)
    monkeypatch.setattr(reproduce, "compile_flex", lambda *args: compiled.append(args[0]))
    asked_and = type("Measured", (), dict(asked=asked, compiled=compiled, fake=measure_runtime))
    return asked_and


def run(name, folder, implementations=("pytorch", "flash")):
    console = Console(file=io.StringIO(), width=150)
    reproduce.measure(name, folder / f"{name}.json", True, console, implementations)
    return json.loads((folder / f"{name}.json").read_text())


def test_a_stopped_measurement_continues_where_it_was(measured, tmp_path):
    measured.fake.stop_at = 3
    with pytest.raises(KeyboardInterrupt):
        run("table9", tmp_path)
    record = run("table9", tmp_path)
    assert [seqlen for seqlen, _, _ in measured.asked] == [128, 256, 512, 512, 1024, 2048]
    assert measured.compiled == [[128, 256, 512, 1024, 2048], [512, 1024, 2048]]
    assert [row["seqlen"] for row in record["measured"]] == [128, 256, 512, 1024, 2048]
    assert len(record["rows"]) == 10 and record["settings"]["dtype"] == "float16"


def test_the_three_tables_of_a_case_share_their_measurement(measured, tmp_path):
    forward = run("table9", tmp_path)
    both = run("table11", tmp_path)
    assert len(measured.asked) == 5 and both["measured"] == forward["measured"]
    assert {r["here"] for r in forward["rows"]} == {1.0} and {r["here"] for r in both["rows"]} == {
        3.0
    }
    assert both["name"] == "reproduce_table11"
    run("table12", tmp_path)  # another case
    assert len(measured.asked) == 10 and measured.asked[-1][1] == (False, True)


def test_a_rival_that_is_added_is_measured_beside_those_before(measured, tmp_path):
    run("table9", tmp_path)
    record = run("table9", tmp_path, ("pytorch", "sdpa_cudnn"))
    assert [names for _, _, names in measured.asked] == [("pytorch", "flash")] * 5 + [
        ("pytorch", "flash", "sdpa_cudnn")
    ] * 5
    assert [row["impl"] for row in record["rows"][:3]] == ["pytorch", "flash", "sdpa_cudnn"]
    run("table9", tmp_path, ("flash",))
    assert len(measured.asked) == 10


def test_the_row_with_most_rivals_is_the_one_that_is_shared(measured, tmp_path):
    names = ("pytorch", "flash", "sdpa_cudnn")
    run("table9", tmp_path)
    run("table10", tmp_path, names)
    assert len(measured.asked) == 10
    record = run("table9", tmp_path, names)
    assert len(measured.asked) == 10
    assert [row["impl"] for row in record["rows"][:3]] == list(names)


def test_another_revision_measures_anew(measured, tmp_path, monkeypatch):
    run("table9", tmp_path)
    monkeypatch.setattr(reproduce, "environment", lambda: {**WHERE, "git_revision": "def"})
    run("table9", tmp_path)
    assert len(measured.asked) == 10


def test_help_has_an_estimate_of_every_case():
    lines = reproduce.estimates().splitlines()
    assert len(lines) == 6
    for line, first in zip(lines[1:5], (9, 12, 15, 18), strict=True):
        names, minutes = line.strip().split(" together ")
        assert names == f"table{first}, table{first + 1}, table{first + 2}"
        full, quick = map(int, minutes.split(" / "))
        assert 1 <= quick < full <= 10


def test_implementations_are_of_the_attention_tables():
    command = [sys.executable, "-m", "scripts.reproduce", "table4", "--implementations", "flash"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "not of table4" in done.stderr


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
