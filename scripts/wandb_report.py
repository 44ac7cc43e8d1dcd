"""The W&B report of a project, written to files and, where asked, made on W&B.

    python -m scripts.wandb_report                        files only: needs no network, no account
    python -m scripts.wandb_report entity=ME send=report  makes a draft report in ME/flashtrain
    python -m scripts.wandb_report entity=ME send=workspace  ... or a saved view of the workspace

report.json lists the sections, charts and metrics, which are those that logger=wandb logs;
report.md holds the text and the charts' settings for a report made by hand (in W&B's editor a page
of Markdown can be pasted). W&B reads neither file: only `send` makes a report there, which takes
`pip install wandb-workspaces` and a network.
"""

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

from model.wandb_logger import X_AXIS
from scripts.arguments import fail, option, parse_arguments


class Chart(NamedTuple):
    """Lines over tokens; of an empty `metrics`, a table or pictures under `media`."""

    title: str
    metrics: tuple[str, ...] = ()
    media: str = ""
    log_y: bool = False


class Part(NamedTuple):
    """A section of the report."""

    title: str
    text: str
    charts: tuple[Chart, ...]


PARTS = (
    Part(
        "Learning",
        "Loss and perplexity over tokens, so that runs with other batches and contexts compare. "
        "Held-out values are means over all held-out tokens, at the final context.",
        (
            Chart("Training loss", ("train/loss",)),
            Chart("Held-out loss", ("val/loss",)),
            Chart("Held-out perplexity", ("val/ppl",), log_y=True),
            Chart("Held-out accuracy and F1", ("val/accuracy", "val/micro_f1", "val/macro_f1")),
        ),
    ),
    Part(
        "Stability",
        "The gradient's norm is the one before clipping.",
        (
            Chart("Gradient norm", ("optimizer/grad_norm",), log_y=True),
            Chart("Learning rate", ("optimizer/lr",)),
            Chart("Context", ("progress/context",)),
        ),
    ),
    Part(
        "Speed and memory",
        "MFU is of the dense bf16 peak, in both conventions: full counts the whole attention "
        "square, causal its half. Speed leaves out validation and checkpoints. On the CPU there "
        "is neither MFU nor memory.",
        (
            Chart("MFU", ("speed/mfu_full", "speed/mfu_causal")),
            Chart("Tokens a second", ("speed/tokens_per_s",)),
            Chart("Peak GPU memory, GiB", ("memory/peak_gib",)),
            Chart("Seconds of this start", ("progress/seconds",)),
        ),
    ),
    Part(
        "Samples and attention",
        "What a GPT writes after each validation, and the blocks that block-sparse attention "
        "computes. Neither is there for every run.",
        (Chart("Samples", media="samples/text"), Chart("Block masks", media="attention/*")),
    ),
)


@dataclasses.dataclass
class Options:
    out: str = option("folder of report.json and report.md", default="outputs/wandb_report")
    project: str = option("W&B's project, logger.wandb.project", default="flashtrain")
    entity: str | None = option("owner of the project; send needs it", default=None)
    title: str = option("of the report", default="Training runs")
    send: str = option("none, report or workspace: what to make on W&B", default="none")


def as_json(options: Options) -> dict:
    """What report.json holds."""
    parts = [{**part._asdict(), "charts": [c._asdict() for c in part.charts]} for part in PARTS]
    return {
        "title": options.title,
        "project": options.project,
        "entity": options.entity,
        "x_axis": X_AXIS,
        "parts": parts,
        "read_by": "people and scripts; W&B itself takes no file, see send= of this script",
    }


def as_markdown(options: Options) -> str:
    """The report's text; where a chart goes, what it shows."""
    owner = options.entity or "OWNER"
    lines = [f"# {options.title}", "", f"Runs of `{owner}/{options.project}`.", ""]
    for part in PARTS:
        lines += [f"## {part.title}", "", part.text, ""]
        for chart in part.charts:
            if chart.media:
                what = f"panel of the key `{chart.media}`"
            else:
                what = f"line plot, x `{X_AXIS}`, y " + ", ".join(f"`{m}`" for m in chart.metrics)
                what += ", logarithmic" * chart.log_y
            lines.append(f"- **{chart.title}**: {what}")
        lines.append("")
    return "\n".join(lines)


def panels(part: Part, wr: Any) -> list:
    """The charts of a section as panels of wandb_workspaces.reports.v2."""
    made = []
    for chart in part.charts:
        if chart.metrics:
            made.append(
                wr.LinePlot(
                    title=chart.title, x=X_AXIS, y=list(chart.metrics), log_y=chart.log_y or None
                )
            )
        elif chart.media.startswith("samples/"):
            made.append(wr.WeavePanelSummaryTable(table_name=chart.media))
        else:  # a media panel takes keys, not patterns: those of the builders' names
            from model.block_sparse import PATTERNS

            keys = [chart.media.replace("*", name) for name in PATTERNS]
            made.append(wr.MediaBrowser(title=chart.title, media_keys=keys))
    return made


def make_report(options: Options, wr: Any) -> Any:
    """A report of wandb_workspaces, not saved yet."""
    blocks = [wr.TableOfContents()]
    for part in PARTS:
        runs = wr.Runset(entity=options.entity, project=options.project)
        grid = wr.PanelGrid(runsets=[runs], panels=panels(part, wr))
        blocks += [wr.H1(part.title), wr.P(part.text), grid]
    return wr.Report(
        entity=options.entity, project=options.project, title=options.title, blocks=blocks
    )


def make_workspace(options: Options, ws: Any, wr: Any) -> Any:
    """A view of the project's workspace, not saved yet."""
    sections = [
        ws.Section(name=part.title, panels=panels(part, wr), is_open=True) for part in PARTS
    ]
    return ws.Workspace(
        entity=options.entity, project=options.project, name=options.title, sections=sections
    )


def send(options: Options) -> None:
    import wandb_workspaces.reports.v2 as wr
    import wandb_workspaces.workspaces as ws

    if options.send == "report":
        made = make_report(options, wr)
    else:
        made = make_workspace(options, ws, wr)
    try:
        made.save()
    except Exception as error:  # of the network, the account or the service
        fail(f"W&B did not take the {options.send}: {' '.join(str(error).split())[:300]}")
    print(f"{options.send}: {made.url}")


def main(arguments: list[str]) -> None:
    options = parse_arguments(Options, arguments, __doc__)
    if options.send not in ("none", "report", "workspace"):
        fail(f"send must be none, report or workspace, got {options.send!r}")
    if options.send != "none":
        if not options.entity:
            fail("send needs entity=NAME, the owner of the project on W&B")
        if importlib.util.find_spec("wandb_workspaces") is None:
            fail("send needs wandb-workspaces: pip install wandb-workspaces")
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(as_json(options), indent=1) + "\n")
    (folder / "report.md").write_text(as_markdown(options))
    print(f"{folder}/report.json and {folder}/report.md written; nothing was sent to W&B yet")
    if options.send != "none":
        send(options)


if __name__ == "__main__":
    main(sys.argv[1:])
