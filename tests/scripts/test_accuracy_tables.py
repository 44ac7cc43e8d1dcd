"""What a table of accuracies says of each: supervision, data, floor, whether it is above chance."""

import json

from scripts.accuracy_tables import accuracy_blocks, accuracy_table, readme_title
from scripts.render_results import RESULTS
from scripts.report_page import Table
from scripts.svg_plot import Plot
from scripts.trained_tables import results


def row(run, accuracy, *, stages=((128, 14),), weights=None, **more):
    trained = [{"run": f"before{i}", "size": s, "level": n} for i, (s, n) in enumerate(stages)]
    trained[-1]["run"] = weights or run
    base = {"task": "pathx", "run": run, "trained": trained, "supervision": "label", "level": 14}
    base |= {"attention": "non-zero pixels", "accuracy": accuracy, "ci95": 0.01, "steps": 1234}
    return {**base, "floor": 0.55, "floor_ci95": 0.007, "minutes": 4.25, "at_chance": False, **more}


def cells(*rows):
    return accuracy_table({"rows": list(rows)})[1]


def test_the_balanced_set_stands_beside_the_test_of_the_same_weights():
    stages = ((128, 6), (128, 14), (256, 14))
    rows = [
        row("a", 0.9, stages=stages, supervision="label and dense target"),
        row("b", 0.8, weights="a", balanced=True),
        row("c", 0.7, balanced=True),
    ]
    easy = row("d", 0.7)
    easy["trained"] = [
        {**s, "num_distractors": 0} for s in row("d", 0.7, stages=stages[:2])["trained"]
    ]
    easy["trained"].append({"run": "d", "size": 128, "level": 14})
    assert cells(easy)[0][2] == "128 px, levels 6, 14 with no distractors; then 128 px, level 14"
    easy["trained"] = [{"run": "d", "size": 32, "level": 14, "curriculum": [[3, 0, 9], [6, 0, 9]]}]
    assert cells(easy)[0][2] == "32 px, levels 3, 6 with no distractors; then 32 px, level 14"
    assert cells(*rows) == [
        ["pathx", "label and dense target", "128 px, levels 6, 14; then 256 px, level 14",
         "non-zero pixels", "90.00 +- 1.00 %", "80.00 +- 1.00 %", "55.00 +- 0.70 %", "4.2"],
        ["pathx", "label", "128 px, level 14", "non-zero pixels", "-", "70.00 +- 1.00 %", "-",
         "4.2"],
    ]  # fmt: skip


def test_what_learned_nothing_says_for_how_long():
    assert (
        cells(row("a", 0.5, at_chance=True))[0][4] == "50.00 +- 1.00 %, at chance after 1,234 steps"
    )


def test_the_caption_says_what_a_dense_target_is_and_what_the_paper_has():
    record = {"rows": [row("a", 0.9)], "settings": {"note": "two at once"}}
    title = readme_title(record)
    for words in ("more than the Long Range Arena allows", "; two at once.", "pathx 61.4 %"):
        assert words in title


def test_a_report_has_the_paper_beside_it_and_the_curves():
    """Tables 3 and 6: 61.4 % on Path-X, 63.1 % (block-sparse) on Path-256, 72.7 % on Pathfinder."""
    names = ("pathx", "path256", "lra_pathfinder", "lra_text", "other")
    rows = [row("a", 0.9, task=name, curve=[[10, 0.5], [20, 0.75]]) for name in names]
    _, table, *plots = accuracy_blocks({"rows": rows})
    assert isinstance(table, Table) and all(isinstance(plot, Plot) for plot in plots)
    paper = [line[-1] for line in table.rows]
    assert paper == ["61.4 %", "63.1 %", "72.7 %", "63.9 %", "-"] and len(plots) == len(names)
    assert plots[0].series == {"a: label": [(10, 50.0), (20, 75.0)]}


def verdict(**changes):
    found = results("table6", [{"rows": [row("a", 0.99, **changes)]}])
    return next(r.verdict for r in found if r.row.name == "Path-X, FlashAttention")


def test_only_labels_on_the_papers_data_count_as_its_result():
    assert verdict() == "better"
    for changes in (
        {"supervision": "label and dense target"},
        {"supervision": "label, after a dense target"},
        {"balanced": True},
        {"level": 6},
        {"stand_in": True},
    ):
        assert verdict(**changes).startswith("not run"), changes


def test_the_records_dense_results_are_no_reproduction():
    record = json.loads((RESULTS / "long_range_accuracy.json").read_text())
    dense = [r for r in record["rows"] if r["supervision"] != "label"]
    assert dense
    for table in ("table3", "table6"):
        assert all(r.verdict.startswith("not run") for r in results(table, [{"rows": dense}]))
