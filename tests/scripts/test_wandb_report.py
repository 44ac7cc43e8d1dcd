"""The W&B report and sweep: files that name what runs log, and options that train.py takes."""

import json
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir
from wandb.sdk.launch.sweeps.utils import create_sweep_command_args

import train
from model.loggers import COLUMNS
from model.wandb_logger import chart_name
from scripts import wandb_report

ROOT = Path(__file__).parents[2]


def test_every_chart_shows_what_a_run_logs():
    logged = {chart_name(column) for column in COLUMNS}
    shown = [m for part in wandb_report.PARTS for c in part.charts for m in c.metrics]
    assert len(shown) == len(set(shown)) and set(shown) <= logged
    assert {"val/loss", "speed/mfu_full", "memory/peak_gib"} <= set(shown)


def test_files_are_written_without_a_network(tmp_path, capsys):
    wandb_report.main([f"out={tmp_path}/report", "entity=me", "title=Long contexts"])
    assert "nothing was sent" in capsys.readouterr().out
    described = json.loads((tmp_path / "report/report.json").read_text())
    assert described["x_axis"] == "tokens" and described["title"] == "Long contexts"
    assert described["parts"][0]["charts"][1]["metrics"] == ["val/loss"]
    text = (tmp_path / "report/report.md").read_text()
    assert text.startswith("# Long contexts") and "me/flashtrain" in text
    assert "`speed/mfu_full`, `speed/mfu_causal`" in text and "`samples/text`" in text


class Recorder:
    """Stands for both modules of wandb_workspaces: whatever is called is (name, options)."""

    def __getattr__(self, name):
        return lambda *args, **options: (name, *args, options)


def test_the_report_has_a_grid_a_part_over_tokens():
    options = wandb_report.Options(entity="me")
    *_, report = wandb_report.make_report(options, Recorder())
    grids = [block[-1] for block in report["blocks"] if block[0] == "PanelGrid"]
    assert len(grids) == len(wandb_report.PARTS)
    lines = [panel[-1] for g in grids for panel in g["panels"] if panel[0] == "LinePlot"]
    assert lines and all(line["x"] == "tokens" for line in lines)
    *_, workspace = wandb_report.make_workspace(options, Recorder(), Recorder())
    titles = [section[-1]["name"] for section in workspace["sections"]]
    assert titles == [part.title for part in wandb_report.PARTS]


def test_wandbs_own_package_takes_the_report_and_the_view():
    """Not only a stand-in for it. Sending, which needs an account, is left out."""
    wr = pytest.importorskip("wandb_workspaces.reports.v2")
    ws = pytest.importorskip("wandb_workspaces.workspaces")
    options = wandb_report.Options(entity="me")
    report = wandb_report.make_report(options, wr)
    grids = [block for block in report.blocks if isinstance(block, wr.PanelGrid)]
    assert [len(grid.panels) for grid in grids] == [len(p.charts) for p in wandb_report.PARTS]
    assert grids[0].panels[1].title == "Held-out loss" and report.project == "flashtrain"
    workspace = wandb_report.make_workspace(options, ws, wr)
    assert [section.name for section in workspace.sections] == [p.title for p in wandb_report.PARTS]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["send=page"], "send must be none, report or workspace, got 'page'"),
        (["send=report"], "send needs entity=NAME"),
        (["send=report", "entity=me"], "pip install wandb-workspaces"),
    ],
)
def test_what_cannot_be_sent_is_said_in_one_line(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(wandb_report.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        wandb_report.main(arguments)
    assert message in capsys.readouterr().err


def test_members_of_the_sweep_are_runs_of_train_py():
    sweep = yaml.safe_load((ROOT / "scripts/wandb_sweep.yaml").read_text())
    assert sweep["metric"] == {"name": "val/loss", "goal": "minimize"}
    chosen = {
        name: {"value": options["values"][0] if "values" in options else options["min"]}
        for name, options in sweep["parameters"].items()
    }
    # What W&B's agent makes of a member's parameters.
    arguments = create_sweep_command_args({"args": chosen})["args_no_hyphens"]
    fixed = [word for word in sweep["command"] if not word.startswith("${")]
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        cfg = compose("train", fixed + arguments)
    train.check_options(cfg)
    assert cfg.logger.wandb.mode == "auto" and cfg.optimizer.lr == 0.001
    assert cfg.task.warmup_fraction == 0.01 and cfg.run_name == "sweep"
