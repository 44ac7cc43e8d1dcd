"""Which runs are compared, and what is said of their loss curves, by arithmetic."""

import csv
import json
import re
import sys
from pathlib import Path

import pytest

from scripts import compare_attention
from scripts.compare_attention import Run, compare, points, turns
from scripts.report_page import html_page
from scripts.report_sections import section_of
from scripts.svg_plot import Plot
from scripts.trained_tables import loss_verdict


def curve(*losses):
    return [{"step": str(i), "train/loss": str(loss)} for i, loss in enumerate(losses, 1)]


def test_the_distance_to_sdpa_is_held_against_that_between_sdpa_runs():
    sdpa = [curve(2.0, 1.0), curve(2.1, 1.2), curve(2.0, 1.1)]  # 0.15, 0.05 and 0.1 apart
    near = compare("gpt2_1k", {"flash": [curve(2.0, 1.1), curve(2.0, 1.0)], "sdpa": sdpa})
    assert sorted(near["sdpa_to_sdpa"]["mean_abs"]) == pytest.approx([0.05, 0.1, 0.15])
    assert sorted(near["flash_to_sdpa"]["mean_abs"]) == pytest.approx([0, 0, 0.05, 0.05, 0.1, 0.15])
    assert near["flash_to_sdpa"]["max_abs"] == pytest.approx(0.2)
    assert near["flash_minus_sdpa"] == pytest.approx(-0.5 / 12)
    assert near["flash_within_noise"]
    assert loss_verdict(near).endswith("within rounding. The mean of flash - SDPA is -0.0417.")

    far = compare("gpt2_1k", {"flash": [curve(2.0, 1.4), curve(2.4, 1.0)], "sdpa": sdpa})
    assert not far["flash_within_noise"]
    assert "not within rounding." in loss_verdict(far)


def test_with_dropout_flash_is_held_against_the_reference_and_rounding():
    """Masks make flash and SDPA 0.5 apart, SDPA and SDPA 0.4; in the last order flash is 0.01 from
    the reference, which has its masks, and rounding makes 0.02."""
    runs = {
        "flash": [curve(3.0, 2.0), curve(2.0, 1.0)],
        "sdpa": [curve(2.5, 1.5), curve(2.1, 1.1)],
        "reference": [curve(2.01, 1.01)],
    }
    found = compare("gpt2_1k", runs, 0.1, rounding=0.02)
    assert found["flash_to_reference"]["mean_abs"] == pytest.approx([0.01])
    assert found["sdpa_to_reference"]["mean_abs"] == pytest.approx([0.49, 0.09])
    assert found["reference_within_rounding"] and found["rounding"] == 0.02
    assert not found["flash_within_noise"]  # (0.5 + 0.9 + 0.5 + 0.1) / 4 against 0.4
    assert found["curves"]["flash"] == [(1, 2.0), (2, 1.0)], "those of the reference's order"
    text = loss_verdict(found)
    assert text.startswith(
        "gpt2_1k, dropout 0.1: flash and the reference, which drop the same probabilities, are "
        "0.0100 nats apart, where rounding alone makes up to 0.0200: within rounding. SDPA, with "
        "masks of its own, is 0.2900 from the reference."
    )
    assert "0.5000 nats from that of SDPA" in text and "not within the noise of the masks" in text
    wrong = compare("gpt2_1k", runs, 0.1, rounding=0.005)
    assert not wrong["reference_within_rounding"]
    # Without dropout all runs of flash count, 0.5 on average; two of flash can be 1 apart.
    plain = compare("gpt2_1k", runs)
    assert plain["flash_to_reference"]["mean_abs"] == pytest.approx([0.99, 0.01])
    assert plain["rounding"] == 1.0 and plain["reference_within_rounding"]
    assert "0.5000 from flash and 0.2900 from SDPA: within rounding." in loss_verdict(plain)


def test_long_curves_are_thinned_and_keep_their_end():
    kept = points(curve(*range(250)))
    assert len(kept) == 84 and kept[0] == (1, 0.0) and kept[-1] == (250, 249.0)


def arguments(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["compare_attention", *words])
    return compare_attention.arguments()


ALL = ["--attentions", "flash", "sdpa", "reference", "--dropout", "0", "0.1", "--orders", "2"]


def test_the_reference_runs_once_in_the_smallest_micro_batches_alone(monkeypatch):
    args = arguments(monkeypatch, *ALL, "--micro-batch-tokens", "4096")
    runs = compare_attention.runs_of(args, "gpt2_1k")
    assert [run.label for run in runs] == [
        "flash", "flash_order1", "sdpa", "sdpa_order1", "reference_order1",
        "flash_dropout0.1", "flash_dropout0.1_order1", "sdpa_dropout0.1", "sdpa_dropout0.1_order1",
        "reference_dropout0.1_order1",
    ]  # fmt: skip
    assert [[run.label for run in turn] for turn in turns(runs, 4)] == [
        ["flash"],
        ["sdpa"],
        ["flash_order1", "sdpa_order1", "flash_dropout0.1", "flash_dropout0.1_order1"],
        ["sdpa_dropout0.1", "sdpa_dropout0.1_order1"],
        ["reference_order1"],
        ["reference_dropout0.1_order1"],
    ]
    words = compare_attention.overrides_of(args, runs[-1])
    assert {"attention=reference", "model.attn_dropout=0.1", "task.compile=false",
            "task.micro_batch_tokens=2048"} <= set(words)  # fmt: skip
    words = compare_attention.overrides_of(args, runs[0])
    assert "model.attn_dropout=0" in words and "task.compile=false" not in words
    assert args.out == "scripts/results/compare_attention_dropout.json"


@pytest.mark.parametrize(
    "words, error",
    [(["--attentions", "flash", "reference"], "must have flash and sdpa"),
     (["--dropout", "0.1"], "--dropout must have 0"), (["--dropout", "0", "1"], "below 1"),
     (["--orders", "1"], "2 or more|at least 2"), (["--at-once", "0"], "at least 1")],
)  # fmt: skip
def test_wrong_arguments_are_one_line(monkeypatch, capsys, words, error):
    with pytest.raises(SystemExit):
        arguments(monkeypatch, *words)
    assert re.search(error, capsys.readouterr().err)


def test_a_record_has_every_run_and_makes_a_section_with_the_curves_overlaid(monkeypatch, tmp_path):
    """Stands in for the trainings: the loss is 3, 2, 1 and what the name of the run adds."""

    def train_together(args, lanes):
        for run in (run for lane in lanes for run in lane):
            folder = Path(args.runs_root) / run.name
            folder.mkdir(parents=True)
            shift = 0.01 * run.order + 0.1 * run.dropout_p * (run.attention == "sdpa")
            rows = [
                {"step": step, "train/loss": 4 - step + shift, "tokens_per_s": 1e5 * step,
                 "mfu_full": 0.5, "mfu_causal": "", "peak_gib": 7.5}
                for step in (1, 2, 3)
            ]  # fmt: skip
            with (folder / "metrics.csv").open("w", newline="") as file:
                writer = csv.DictWriter(file, rows[0])
                writer.writeheader()
                writer.writerows(rows)

    monkeypatch.setattr(compare_attention, "train_together", train_together)
    words = ["compare_attention", *ALL, "--experiments", "gpt2_1k", "--runs-root"]
    monkeypatch.setattr(sys, "argv", [*words, f"{tmp_path}/runs", "--out", f"{tmp_path}/out.json"])
    compare_attention.main()
    record = json.loads((tmp_path / "out.json").read_text())
    assert record["name"] == "compare_attention_dropout" and "--out" not in record["command"]
    assert [c["dropout_p"] for c in record["loss_curves"]] == [0.0, 0.1]
    timed = {row["run"]: row["tokens_per_s"] for row in record["rows"] if "tokens_per_s" in row}
    assert timed == {"flash": 2.5e5, "sdpa": 2.5e5} and len(record["rows"]) == 10
    with_dropout = record["loss_curves"][1]
    assert with_dropout["rounding"] == pytest.approx(0.01)
    assert with_dropout["flash_to_reference"]["mean_abs"] == [0.0]
    section = section_of(record)
    plots = [block for block in section.blocks if isinstance(block, Plot)]
    assert [list(plot.series) for plot in plots] == [["flash", "sdpa", "reference"]] * 2
    assert plots[1].title == "gpt2_1k, dropout 0.1: training loss"
    assert 'stroke-width="7"' in html_page("", "", [section]), "the lowest line is the widest"


def test_runs_of_other_times_are_not_mixed_in(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["compare_attention", "--runs-root", str(tmp_path)])
    with pytest.raises(SystemExit, match="holds runs of another time"):
        compare_attention.main()


def test_a_failed_run_ends_the_others(monkeypatch, tmp_path):
    class Process:
        args = ["train.py"]

        def __init__(self, code):
            self.returncode, self.is_ended = code, False

        def wait(self):
            return self.returncode

        def terminate(self):
            self.is_ended = True

    processes = [Process(3), Process(0)]
    waiting = iter(processes)
    monkeypatch.setattr(compare_attention, "start", lambda *_: next(waiting))
    run = Run("gpt2_1k", "flash", 0.0, 0)
    with pytest.raises(SystemExit, match="exit status 3"):
        compare_attention.train_together(arguments(monkeypatch), [[run, run]])
    assert processes[1].is_ended


@pytest.mark.slow
def test_trained_with_dropout_flash_and_the_reference_have_one_curve(workplace, monkeypatch):
    """Where both drop the same probabilities, and SDPA others."""
    args = arguments(monkeypatch, *ALL, "--steps", "3", "--batch-tokens", "128",
                     "--micro-batch-tokens", "128", "--source", f"{workplace.folder}/text",
                     "--runs-root", "outputs/runs")  # fmt: skip
    runs = [Run("quickstart", name, 0.2, 1) for name in args.attentions]
    small = ["optimizer.lr=1e-3", "callbacks.metrics.every_n_steps=1", "sample_tokens=0"]
    plans = [[*compare_attention.overrides_of(args, run), *small] for run in runs]
    for plan in plans:
        plan.remove("callbacks.checkpoints=null")  # the workplace sets a field of them
    workplace.run_several(*plans)
    flash, sdpa, reference = (
        [float(row["train/loss"]) for row in workplace.rows(run.name)] for run in runs
    )
    assert len(flash) == 3 and flash == pytest.approx(reference, abs=1e-4)
    assert sdpa != pytest.approx(reference, abs=1e-4)
