"""One page of all results: python -m scripts.report --help

    python -m scripts.report                                  outputs/report/report.html and .md
    python -m scripts.report --records outputs/reproduce      what this machine measured

It shows every record of a folder: tables beside the paper's numbers, plots, and how each was made.
The HTML page is one file that needs no network and no scripts; the Markdown has its plots beside
it.
"""

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

from scripts.paper_numbers import OVERVIEW
from scripts.render_results import RESULTS
from scripts.report_page import Section, Table, anchor, html_page, markdown_page
from scripts.report_sections import section_of, trained_section

TITLE = "FlashAttention, reproduced: the results"
_FIELDS = ("name", "command", "date", "hardware", "versions", "rows")


def read_records(folders: list[Path]) -> list[dict]:
    """All records, by name.

    Raises:
        ValueError: a file is no record.
        FileNotFoundError: there is none.
    """
    records = []
    for path in sorted(path for folder in folders for path in folder.glob("*.json")):
        try:
            record = json.loads(path.read_text())
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} must be JSON: {error}") from None
        missing = [field for field in _FIELDS if field not in record]
        if missing:
            raise ValueError(f"{path} must be a record with {', '.join(missing)}; remove the file")
        records.append(record)
    if not records:
        raise FileNotFoundError(
            f"there is no record (*.json) in {' or '.join(map(str, folders))}; measure something "
            "first: python -m scripts.reproduce --help"
        )
    return sorted(records, key=lambda record: record["name"])


def overview(records: list[dict]) -> Section:
    """The paper's tables and figures: which of them the records hold, and what runs the others."""
    rows = []
    for name, (what, command, sources) in OVERVIEW.items():
        found = next((r for r in records if r["name"] == f"reproduce_{name}"), None)
        other = next((r for r in records if r["name"] in sources), None)
        if found:
            verdicts = Counter(r["verdict"].split(":")[0] for r in found["rows"] if r["verdict"])
            state = ", ".join(f"{word} {number}" for word, number in verdicts.most_common())
        elif other:
            title = section_of(other).title
            state = f"[{title}](#{anchor(title)})"
        else:
            state = f"not run: `{command}`" if command else "not run: no experiment for it yet"
        rows.append([name.replace("table", "Table ").replace("figure", "Figure "), what, state])
    return Section("The paper, table by table", [Table(["", "what it measures", "here"], rows)])


def build(records: list[dict]) -> tuple[str, list[Section]]:
    """(The lead, the sections) of the report."""
    machines = sorted({gpu for record in records for gpu in record["hardware"]["gpus"]})
    dates = sorted(record["date"][:10] for record in records)
    lead = (
        f"{len(records)} records, {dates[0]} to {dates[-1]}, measured on "
        f"{', '.join(machines) or 'a CPU'}. Beside ours stand the numbers of the paper "
        "(FlashAttention, arXiv 2205.14135). Each section ends with the command that made it; "
        "this page comes from `python -m scripts.report`."
    )
    return lead, [overview(records), *map(section_of, records), trained_section(records)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--records", type=Path, nargs="+", default=[RESULTS], help="folders")
    parser.add_argument("--out", type=Path, default=Path("outputs/report"), help="%(default)s")
    args = parser.parse_args()
    try:
        lead, sections = build(read_records(args.records))
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    args.out.mkdir(parents=True, exist_ok=True)
    pages = {
        "report.html": html_page(TITLE, lead, sections),
        "report.md": markdown_page(TITLE, lead, sections, args.out / "plots"),
    }
    for name, text in pages.items():
        (args.out / name).write_text(text)
        print(f"{args.out / name}: {len(text) / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
