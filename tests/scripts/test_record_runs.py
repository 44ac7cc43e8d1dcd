"""Records of runs: from what train.py leaves, and from made-up folders of known numbers."""

import csv
import json
import sys

import pytest
import yaml

from scripts import record_runs
from scripts.record_runs import record_of, row_of
from scripts.report_sections import section_of

VERSIONS = {"torch": "2.11.0", "triton": "3.6.0"}


def make_run(root, name, *, seconds=(30.0, 60.0), lr=1e-3, dense=0.0, init_from=None, **data):
    """The folder of a Pathfinder classifier's run of 20 steps, 80 % right of 100 in the end."""
    folder = root / name
    folder.mkdir(parents=True)
    command = f"/somewhere/train.py experiment=pathx recipe=fast run_name={name} "
    command += f"runs_root={root} data.root=/somewhere/data resume=auto data.release=/home/me/lra"
    command += f" init_from={init_from}" if init_from else ""
    facts = {
        "command": command,
        "started": f"2026-01-0{len(name)}T00:00:00+00:00",
        "git_revision": "0123",
        "git_dirty": False,
        "versions": VERSIONS,
        "hardware": {"gpus": ["NVIDIA H200"], "cuda": "13.0", "machine": "x86_64"},
    }
    (folder / "run.json").write_text(json.dumps(facts))
    config = {
        "seed": 7,
        "run_name": name,
        "runs_root": str(root),
        "init_from": init_from,
        "task": {"_target_": "model.classification_task.ClassificationTask", "dense_weight": dense},
        "model": {"num_classes": 2, "image_size": 128, "foreground": True},
        "data": {"size": 128, "level": 14, "balanced": False, "foreground": True, **data},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    with (folder / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["step", "lr", "seconds", "samples_per_s", "val/accuracy"])
        writer.writeheader()
        for number, at in enumerate(seconds, 1):
            step = 20 * number // len(seconds)
            writer.writerow({"step": step, "lr": lr, "seconds": at, "samples_per_s": 10 * number,
                             "val/accuracy": 0.6})  # fmt: skip
    comparison = {"line": "marker-only floor", "numbers": {"floor": 0.55, "floor_ci95": 0.01}}
    test = {"checkpoint": "best-1.ckpt", "num_held_out": 100, "metrics": {"accuracy": 0.8},
            "line": "accuracy", "comparison": comparison}  # fmt: skip
    (folder / "result.json").write_text(json.dumps({"step": 20, "splits": {"test": test}}))
    return folder


def test_a_run_counts_what_it_started_from(tmp_path):
    """Two starts of the first run, of 40 and 60 s: the clock begins anew."""
    make_run(tmp_path, "a", seconds=(40.0, 30.0, 60.0), dense=1.0, level=6)
    make_run(tmp_path, "bb", init_from=f"{tmp_path}/a")
    last = make_run(tmp_path, "ccc", lr=0.0, init_from=f"{tmp_path}/bb/checkpoints/best-1.ckpt",
                    balanced=True)  # fmt: skip
    row = row_of(last)
    assert row["minutes"] == pytest.approx((40 + 60 + 60) / 60) and row["steps"] == 20 + 20
    stages = [(stage["run"], stage["level"], stage["minutes"]) for stage in row["trained"]]
    assert stages == [("a", 6, pytest.approx(100 / 60)), ("bb", 14, 1.0)]
    assert row["supervision"] == "label, after a dense target" and row["balanced"]
    assert row["curve"] == [] and row["samples_per_s"] is None, "it was only measured"
    assert row_of(tmp_path / "a")["supervision"] == "label and dense target"


def test_an_accuracy_has_its_interval_floor_and_curve(tmp_path):
    row = row_of(make_run(tmp_path, "a", background_up_to=96))
    assert row["ci95"] == pytest.approx(1.96 * (0.8 * 0.2 / 100) ** 0.5)
    assert (row["floor"], row["floor_ci95"]) == (0.55, 0.01)
    assert row["curve"] == [[10, 0.6], [20, 0.6]] and row["samples_per_s"] == 15
    assert (row["task"], row["recipe"], row["supervision"]) == ("pathx", "fast", "label")
    assert row["attention"] == "pixels above 96" and row["seed"] == 7 and not row["at_chance"]


@pytest.mark.parametrize("accuracy, is_at_chance", [(0.5, True), (0.59, True), (0.61, False)])
def test_an_interval_that_holds_a_guess_is_at_chance(tmp_path, accuracy, is_at_chance):
    """1.96 sqrt(0.24 / 100) is 0.096 at 0.59 and 0.61."""
    folder = make_run(tmp_path, "a")
    result = json.loads((folder / "result.json").read_text())
    result["splits"]["test"]["metrics"]["accuracy"] = accuracy
    (folder / "result.json").write_text(json.dumps(result))
    assert row_of(folder)["at_chance"] == is_at_chance


def test_commands_name_no_place_of_the_machine(tmp_path):
    make_run(tmp_path, "a")
    row = row_of(make_run(tmp_path, "bb", init_from=f"{tmp_path}/a"))
    assert row["command"] == (
        "python train.py experiment=pathx recipe=fast run_name=bb data.release=lra "
        "init_from=outputs/runs/a"
    )


def test_the_record_is_of_its_newest_run(tmp_path, monkeypatch):
    folders = [make_run(tmp_path, "bb"), make_run(tmp_path, "a")]
    monkeypatch.setattr(sys, "argv", ["x", "runs/a", "--note", "two at once", "--output=x.json"])
    record = record_of(folders, "mine", "two at once")
    assert record["date"].startswith("2026-01-02") and record["versions"] == VERSIONS
    assert record["command"] == "python -m scripts.record_runs runs/a --note 'two at once'"
    assert (record["name"], record["settings"]) == ("mine", {"note": "two at once"})


def drop(name):
    return lambda folder: (folder / name).unlink()


def empty(folder):
    (folder / "result.json").write_text('{"splits": {}}')


def other_parent(folder):
    config = yaml.safe_load((folder / "config.yaml").read_text())
    (folder / "config.yaml").write_text(yaml.safe_dump({**config, "init_from": "runs/gone"}))


def other_task(folder):
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config["task"]["_target_"] = "model.other.OtherTask"
    (folder / "config.yaml").write_text(yaml.safe_dump(config))


@pytest.mark.parametrize(
    "damage, words",
    [
        (drop("run.json"), "must be a run's folder, which has a run.json"),
        (drop("result.json"), "has no result.json, which a run writes when it ends: resume it"),
        (empty, "held nothing out"),
        (lambda folder: (folder / "metrics.csv").write_text("step,lr\n"), "no step in metrics.csv"),
        (other_parent, "started from runs/gone, which is not there"),
        (other_task, "must be a run of ClassificationTask, .* got OtherTask"),
    ],
)
def test_what_a_folder_lacks_is_one_line(tmp_path, monkeypatch, damage, words):
    folder = make_run(tmp_path, "a")
    damage(folder)
    monkeypatch.setattr(sys, "argv", ["x", str(folder), "--output", str(tmp_path / "x.json")])
    with pytest.raises(SystemExit, match=words) as stop:
        record_runs.main()
    assert str(stop.value).startswith("error: ") and "\n" not in str(stop.value)
    assert not (tmp_path / "x.json").exists()


def test_append_keeps_the_rows_of_other_runs(tmp_path, monkeypatch):
    record = tmp_path / "x.json"
    first, second = make_run(tmp_path, "a"), make_run(tmp_path, "bb")

    def record_again(*arguments):
        monkeypatch.setattr(sys, "argv", ["x", *map(str, arguments), "--output", str(record)])
        record_runs.main()
        return [row["run"] for row in json.loads(record.read_text())["rows"]]

    assert record_again(first, "--append") == ["a"]
    assert record_again(second, "--append") == ["a", "bb"]
    assert record_again(first, "--append") == ["bb", "a"]
    commands = json.loads(record.read_text())["command"].split(" && ")
    assert len(commands) == 2, "each once, in the order of their first time"
    assert str(first) in commands[0] and str(second) in commands[1]
    assert record_again(second) == ["bb"]


@pytest.mark.slow
def test_runs_of_train_become_records(workplace, monkeypatch):
    """Their rows are those that reports know; one record has one kind."""
    workplace.run("run_name=text", "trainer.max_steps=4", "trainer.val_check_interval=2")
    out = workplace.run("run_name=images", images=True)
    runs = workplace.folder / "outputs/runs"
    with pytest.raises(ValueError, match="one kind, got accuracy, val_ppl"):
        record_of([runs / "text", runs / "images"], "x")
    output = workplace.folder / "images.json"
    monkeypatch.setattr(sys, "argv", ["x", str(runs / "images"), "--output", str(output)])
    record_runs.main()
    row = json.loads(output.read_text())["rows"][0]
    assert f"{row['accuracy']:.2%} +- {row['ci95']:.2%} (95 %, 70 examples)" in out
    assert row["supervision"] == "label and dense target" and row["level"] == 6
    assert row["steps"] == 4 and row["minutes"] > 0 and [s for s, _ in row["curve"]] == [2, 4]
    text = record_of([runs / "text"], "text")
    assert text["rows"][0]["val_ppl"] == pytest.approx(text["rows"][0]["curve"][-1][1])
    assert text["rows"][0]["tokens"] == 4 * 256
    for record in (text, json.loads(output.read_text())):
        assert section_of(record).blocks
