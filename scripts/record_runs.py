"""A record of runs: what each came to, how long it took, how it was trained, its curve.

    python -m scripts.record_runs outputs/runs/path* --output long_range_accuracy.json

Read are run.json, config.yaml, metrics.csv and result.json of each folder, and of the runs that it
started from (init_from), whose minutes and steps count too: they must lie beside it or where
init_from says. A record holds runs of one kind: accuracies, perplexities or F1 scores.
"""

import argparse
import csv
import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import OmegaConf

from model.classification_task import accuracy_interval
from model.results import RESULT_FILE
from scripts.records import appended, make_record, read_earlier, write_record

# Of a command: places on a machine, and what does not change the result.
_LEFT_OUT = ("runs_root", "data.root", "resume", "callbacks.metrics.every_n_steps")
_KINDS = {  # class of the task -> what is recorded of its metrics
    "ClassificationTask": "accuracy",
    "MaskedLMTask": "accuracy",
    "CausalLMTask": "val_ppl",
    "DocumentTask": "micro_f1",
}


class RunFolder(NamedTuple):
    """What a run's folder holds.

    Attributes:
        folder: its place.
        facts: run.json of its newest start.
        config: config.yaml of that.
        rows: metrics.csv.
    """

    folder: Path
    facts: dict[str, Any]
    config: dict[str, Any]
    rows: list[dict[str, str]]

    @property
    def options(self) -> dict[str, str]:
        """The overrides of the command."""
        words = self.facts["command"].split()[1:]
        return dict(word.split("=", 1) for word in words if "=" in word)

    @property
    def is_trained(self) -> bool:
        """Not if every step was made at a rate of 0, to measure what it started from."""
        return any(float(row["lr"]) > 0 for row in self.rows if row["lr"])

    @property
    def steps(self) -> int:
        return int(self.rows[-1]["step"]) if self.is_trained else 0

    @property
    def seconds(self) -> float:
        """Of training, over all starts: the clock begins anew with each."""
        times = [float(row["seconds"]) for row in self.rows if row["seconds"]] if self.steps else []
        ends = [a for a, b in zip(times, [*times[1:], 0.0], strict=True) if b < a]
        return sum(ends)

    @property
    def kind(self) -> str:
        name = self.config["task"]["_target_"].rpartition(".")[2]
        if name not in _KINDS:
            raise ValueError(f"{self.folder} must be a run of {', '.join(_KINDS)}, got {name}")
        return _KINDS[name]


def read_run(folder: Path) -> RunFolder:
    """The files of a run but its result.

    Raises:
        ValueError: one is missing or holds nothing.
    """
    for name in ("run.json", "config.yaml", "metrics.csv"):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} must be a run's folder, which has a {name}")
    starts = {1: ("run.json", "config.yaml")}
    for path in folder.glob("run-*.json"):
        if number := re.fullmatch(r"run-(\d+)\.json", path.name):
            starts[int(number[1])] = (path.name, f"config-{number[1]}.yaml")
    facts, config = starts[max(starts)]
    with (folder / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    if not rows:
        raise ValueError(f"{folder} has no step in metrics.csv: train it, or leave it out")
    about = json.loads((folder / facts).read_text())
    options: Any = OmegaConf.to_container(OmegaConf.load(folder / config))
    return RunFolder(folder, about, options, rows)


def lineage(run: RunFolder) -> list[RunFolder]:
    """The run behind those that it started from, the oldest first.

    Raises:
        ValueError: of a classifier, whose supervision is theirs too, one is not there.
    """
    source = run.config.get("init_from")
    if not source:
        return [run]
    path = Path(source)
    path = path.parent.parent if path.suffix == ".ckpt" else path
    for folder in (run.folder.parent / path.name, path):
        if (folder / "run.json").is_file() and folder.resolve() != run.folder.resolve():
            return [*lineage(read_run(folder)), run]
    if run.config["task"]["_target_"].endswith("ClassificationTask"):
        raise ValueError(
            f"{run.folder} started from {source}, which is not there: how that was supervised must "
            f"be known; put its folder into {run.folder.parent}"
        )
    return [run]


def row_of(folder: Path) -> dict[str, Any]:
    """The row of a run.

    Raises:
        ValueError: a file is missing, or nothing was held out.
    """
    run = read_run(folder)
    if not (folder / RESULT_FILE).is_file():
        raise ValueError(
            f"{folder} has no {RESULT_FILE}, which a run writes when it ends: resume it, or leave "
            "it out"
        )
    splits = json.loads((folder / RESULT_FILE).read_text())["splits"]
    if not splits:
        raise ValueError(f"{folder} held nothing out: there is no result to record")
    name = "test" if "test" in splits else "val"
    result = splits[name]
    trained = [earlier for earlier in lineage(run) if earlier.is_trained]
    comparison = result["comparison"] or {"line": "", "numbers": {}}
    base = {
        "task": _experiment(run),
        "run": folder.name,
        "split": name,
        "num_held_out": result["num_held_out"],
        "checkpoint": result["checkpoint"],
        "comparison": comparison["line"] or None,
        "stand_in": "stand-in data" in comparison["line"],
        "minutes": sum(r.seconds for r in trained) / 60,
        "steps": sum(r.steps for r in trained),
        "trained": [_stage(r) for r in trained],
        "seed": run.config["seed"],
        "command": clean_command(run),
        "date": run.facts["started"],
        "gpus": run.facts["hardware"]["gpus"],
        "versions": run.facts["versions"],
    }
    make = {"accuracy": _accuracy, "val_ppl": _perplexity, "micro_f1": _f1}[run.kind]
    return {**base, **make(run, trained, result, comparison["numbers"])}


def _accuracy(
    run: RunFolder, trained: list[RunFolder], result: dict, numbers: dict
) -> dict[str, Any]:
    row = {
        "accuracy": result["metrics"]["accuracy"],
        "floor": numbers.get("floor", numbers.get("constant_accuracy")),
        "curve": _curve(run, "step", "val/accuracy"),
        "samples_per_s": _rate(run),
    }
    if not run.config["task"]["_target_"].endswith("ClassificationTask"):
        return row
    data, model = run.config["data"], run.config["model"]
    ci95 = accuracy_interval(row["accuracy"], result["num_held_out"])
    return {
        **row,
        "ci95": ci95,
        "floor_ci95": numbers.get("floor_ci95"),
        "at_chance": row["accuracy"] - ci95 <= 1 / model["num_classes"],
        "recipe": run.options.get("recipe", "paper"),
        "supervision": _supervision([*trained, run]),
        "size": data.get("size"),
        "level": data.get("level"),
        "balanced": data.get("balanced", False),
        "attention": _attention(data, model),
    }


def _perplexity(
    run: RunFolder, trained: list[RunFolder], result: dict, numbers: dict
) -> dict[str, Any]:
    warmup = run.config["data"].get("context_warmup")
    tokens = [int(float(row["tokens"])) for row in run.rows if row["tokens"]]
    return {
        "model": _experiment(run),
        "seqlen": run.config["data"]["seqlen"],
        "schedule": "throughout" if not warmup else f"{warmup}",
        "tokens": max(tokens, default=0),
        "val_ppl": result["metrics"]["ppl"],
        "unigram_perplexity": numbers.get("unigram_perplexity"),
        "seconds": run.seconds,
        "curve": _curve(run, "tokens", "val/ppl"),
    }


def _f1(run: RunFolder, trained: list[RunFolder], result: dict, numbers: dict) -> dict[str, Any]:
    return {
        "micro_f1": result["metrics"]["micro_f1"],
        "macro_f1": result["metrics"]["macro_f1"],
        "constant_micro_f1": numbers.get("constant_micro_f1"),
    }


def _experiment(run: RunFolder) -> str:
    if "~experiment" in run.facts["command"].split():
        return run.config["run_name"]
    return run.options.get("experiment", "quickstart")


def _stage(run: RunFolder) -> dict[str, Any]:
    """What tells one stage of a curriculum from another."""
    data = run.config["data"]
    names = ("size", "level", "num_distractors", "background_up_to", "curriculum", "num_train",
             "batch_size")  # fmt: skip
    return {
        "run": run.folder.name,
        **{name: data[name] for name in names if data.get(name) is not None},
        "steps": run.steps,
        "minutes": run.seconds / 60,
    }


def _supervision(runs: list[RunFolder]) -> str:
    """Of the last run; labels alone only if no run before it saw more."""
    dense = [bool(run.config["task"].get("dense_weight")) for run in runs]
    if dense[-1]:
        return "label and dense target"
    return "label, after a dense target" if any(dense) else "label"


def _attention(data: dict, model: dict) -> str:
    """Which pixels or tokens see each other when the result is measured."""
    if not model.get("foreground"):
        return "all tokens" if model.get("image_size") is None else "all pixels"
    if not data.get("foreground"):
        return "all pixels, black ones masked"
    above = data.get("background_up_to")
    return f"pixels above {above}" if above else "non-zero pixels"


def _curve(run: RunFolder, x: str, y: str) -> list[list[float]]:
    if not run.is_trained:
        return []
    return [[int(float(row[x])), float(row[y])] for row in run.rows if row.get(y)]


def _rate(run: RunFolder) -> float | None:
    rates = [float(row["samples_per_s"]) for row in run.rows if row.get("samples_per_s")]
    return statistics.median(rates) if rates and run.is_trained else None


def clean_command(run: RunFolder) -> str:
    """As one would repeat it: runs under outputs/runs, and no place of this machine."""
    words = ["python", "train.py"]
    for word in run.facts["command"].split()[1:]:
        key, equals, value = word.partition("=")
        if key in _LEFT_OUT:
            continue
        if key == "init_from" and Path(value).parent == Path(run.config["runs_root"]):
            value = f"outputs/runs/{Path(value).name}"
        elif value.startswith(("/", "~", "..")):
            value = Path(value).name
        words.append(f"{key}{equals}{value}")
    return " ".join(words)


def record_of(folders: list[Path], name: str, note: str | None = None) -> dict:
    """The record of some runs, dated as the newest of them and with its versions and hardware.

    Args:
        note: what is true of all of them, for instance what else the GPU did.
    Raises:
        ValueError: what a folder lacks, or runs of several kinds.
    """
    runs = [read_run(folder) for folder in folders]
    kinds = sorted({run.kind for run in runs})
    if len(kinds) > 1:
        raise ValueError(f"a record holds runs of one kind, got {', '.join(kinds)}: make several")
    rows = [row_of(folder) for folder in folders]
    newest = max(runs, key=lambda run: run.facts["started"]).facts
    where = {key: newest[key] for key in ("git_revision", "git_dirty", "versions", "hardware")}
    settings = {"note": note} if note else {}
    record = make_record("record_runs", rows, settings, omit="--output", name=name, where=where)
    return {**record, "date": newest["started"]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN_FOLDER")
    parser.add_argument("--output", type=Path, required=True, help="the record, X.json")
    parser.add_argument("--note", help="what is true of all runs, for instance: four at once")
    parser.add_argument(
        "--append", action="store_true", help="keep the rows of other runs that the record has"
    )
    args = parser.parse_args()
    try:
        record = record_of(args.runs, args.output.stem, args.note)
        earlier = read_earlier(args.output, args.append, of_this_machine=False)
        record = appended(earlier, record, key=lambda row: row["run"])
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    write_record(args.output, record)
    print(f"{args.output}: {len(record['rows'])} runs")


if __name__ == "__main__":
    main()
