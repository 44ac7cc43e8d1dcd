"""Records: what a script measured, with all that others need to repeat it, as JSON."""

import json
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from model.run import environment


def make_record(
    script: str,
    rows: list[dict],
    settings: dict,
    *,
    omit: str,
    name: str | None = None,
    where: dict | None = None,
    **more: Any,
) -> dict:
    """A record of the running command.

    Args:
        script: its name in scripts/.
        rows: what was measured.
        settings: what it was measured with.
        omit: the option that says where the record goes.
        name: of the record; default the script's.
        where: environment() of when it began; default as of now.
        more: other entries.
    """
    return {
        "name": name or script,
        "command": command_line(f"scripts.{script}", omit),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **(where or environment()),
        "settings": settings,
        **more,
        "rows": rows,
    }


def write_record(path: str | Path, record: dict) -> None:
    """Write a file, making its folder."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


def command_line(module: str, omit: str) -> str:
    """The running command as a user would repeat it, without the option `omit` and its value (the
    place of a record says nothing of what it holds)."""
    kept = sys.argv[1:]
    if omit in kept:
        at = kept.index(omit)
        kept = kept[:at] + kept[at + 2 :]
    kept = [argument for argument in kept if not argument.startswith(f"{omit}=")]
    return shlex.join(["python", "-m", module, *kept])
