"""Accuracies of classifiers, each beside its supervision, its data and its floor."""

from itertools import groupby
from operator import itemgetter
from typing import Any

from scripts.paper_numbers import TRAINING
from scripts.report_page import Block, Table
from scripts.svg_plot import Plot

CAPTION = (
    "A dense target says in training which curve each pixel is on: more than the Long Range Arena "
    "allows, and not what the paper's numbers, of labels alone, are of. The floor is what the "
    "positions of the two marked discs tell by themselves; in the balanced set they tell nothing. "
    "Intervals are 95 %, minutes those of training on one GPU with the stages before"
)


def accuracy_table(record: dict) -> tuple[list[str], list[list[str]]]:
    """Header and cells: a row a run, the balanced set beside the other test of the same weights."""
    rows = record["rows"]
    balanced = {_weights(row): row for row in rows if row.get("balanced")}
    shown = [row for row in rows if not row.get("balanced")]
    alone = {_weights(row) for row in shown}
    shown += [row for weights, row in balanced.items() if weights not in alone]
    cells = []
    for row in shown:
        other = balanced.get(_weights(row))
        cells.append(
            [
                row["task"],
                row.get("supervision", "-"),
                _data(row),
                row.get("attention", "-"),
                "-" if row is other else _accuracy(row),
                _percent(other["accuracy"], other.get("ci95")) if other else "-",
                "-" if row is other else _percent(row.get("floor"), row.get("floor_ci95")),
                f"{row['minutes']:.1f}" if row.get("minutes") is not None else "-",
            ]
        )
    header = ["task", "supervision", "images", "attention", "test accuracy", "balanced set"]
    return [*header, "floor", "minutes"], cells


def accuracy_blocks(record: dict) -> list[Block]:
    """The table of a record, with the paper's tables 3 and 6 beside it, and the curves."""
    header, cells = accuracy_table(record)
    names = dict.fromkeys(row["task"] for row in record["rows"])
    rows = [[*line, _paper(line[0])] for line in cells]
    blocks: list[Block] = [
        f"{CAPTION}{_note(record)}.",
        Table([*header, "paper, labels alone"], rows, "Accuracy"),
    ]
    for name in names:
        curves = {
            f"{row['run']}: {row.get('supervision', '-')}": [
                (step, 100 * value) for step, value in row["curve"]
            ]
            for row in record["rows"]
            if row["task"] == name and row.get("curve")
        }
        if curves:
            title = f"{name}: validation accuracy"
            blocks.append(Plot(title, "steps", "%", curves, from_zero=False, log_x=False))
    return blocks


def readme_title(record: dict) -> str:
    """What stands above the table in the README."""
    tasks = dict.fromkeys(row["task"] for row in record["rows"])
    paper = [f"{task} {number}" for task in tasks if (number := _paper(task)) != "-"]
    text = f"**Long-range classification.** {CAPTION}{_note(record)}."
    return text + (f" The paper, labels alone: {', '.join(paper)}." if paper else "")


def _note(record: dict) -> str:
    note = record.get("settings", {}).get("note")
    return f"; {note}" if note else ""


def _weights(row: dict[str, Any]) -> str:
    """The run that trained what a row measures."""
    trained = row.get("trained")
    return trained[-1]["run"] if trained else row.get("run", "")


def _data(row: dict[str, Any]) -> str:
    """The images that the stages of a run saw: "128 px, levels 6, 14"."""
    stages = row.get("trained", [])
    if not stages or not all(stage.get("size") for stage in stages):
        return "-"
    parts = []
    sets = [
        (stage["size"], level, distractors)
        for stage in stages
        for level, distractors, _ in [
            *stage.get("curriculum", []),
            (stage["level"], stage.get("num_distractors"), None),
        ]
    ]
    for (size, distractors), group in groupby(sets, itemgetter(0, 2)):
        levels = [str(level) for level in dict.fromkeys(level for _, level, _ in group)]
        text = f"{size} px, level{'s' * (len(levels) > 1)} {', '.join(levels)}"
        if distractors is not None:
            text += f" with {distractors or 'no'} distractors"
        parts.append(text)
    return "; then ".join(parts)


def _accuracy(row: dict[str, Any]) -> str:
    text = _percent(row["accuracy"], row.get("ci95"))
    if row.get("at_chance"):
        text += f", at chance after {row['steps']:,} steps"
    return text


def _percent(fraction: float | None, ci95: float | None) -> str:
    if fraction is None:
        return "-"
    return f"{100 * fraction:.2f}" + (f" +- {100 * ci95:.2f}" if ci95 else "") + " %"


def _paper(task: str) -> str:
    """The paper's accuracy, by the name of an experiment."""
    name = task.removeprefix("lra_")
    for table in ("table3", "table6"):
        for row in TRAINING[table]:
            title, _, system = row.name.partition(", ")
            plain = title.lower().replace("-", "")
            wanted = "block-sparse FlashAttention" if plain == "path256" else "FlashAttention"
            if plain == name and system == wanted:
                return f"{row.paper['accuracy, %']:.1f} %"
    return "-"
