"""Records: what a script measured, with all that others need to repeat it, as JSON."""

import json
import shlex
import sys
from collections.abc import Callable, Collection
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


def read_earlier(path: Path, append: bool, *, of_this_machine: bool = True) -> dict | None:
    """The record that a run adds to: that of `path`, if it is to append and there is one.

    Raises:
        SystemExit: rows of this machine would stand among those of other hardware, or of another
            torch or triton, under one name.
    """
    if not append or not path.exists():
        return None
    earlier: dict = json.loads(path.read_text())
    here = environment()
    pairs = [("hardware", earlier["hardware"], here["hardware"])]
    pairs += [(n, earlier["versions"].get(n), here["versions"].get(n)) for n in ("torch", "triton")]
    for name, before, now in pairs if of_this_machine else ():
        if before != now:
            raise SystemExit(
                f"error: --append needs the {name} of {path}, {before}, got {now}: give another "
                "--output"
            )
    return earlier


def appended(
    earlier: dict | None,
    record: dict,
    key: Callable[[dict], Any],
    unfinished: Collection[Any] = (),
) -> dict:
    """`record` behind those rows of an earlier one whose key it has not, with the commands of both
    and lists of their settings joined; date, revision and the rest are the newer's.

    Args:
        key: alike for rows that are compared with each other: they stay of one run.
        unfinished: keys of which rows are still to come: the earlier ones stay until then.
    """
    if earlier is None:
        return record
    waiting = {key(row) for row in earlier["rows"]} & set(unfinished)
    rows = [row for row in record["rows"] if key(row) not in waiting]
    new = {key(row) for row in rows}
    kept = [row for row in earlier["rows"] if key(row) not in new]
    commands = [*earlier["command"].split(" && "), record["command"]]
    settings = {**earlier["settings"], **record["settings"]}
    for name, value in settings.items():
        before = earlier["settings"].get(name)
        if isinstance(value, list) and isinstance(before, list):
            settings[name] = [*before, *(item for item in value if item not in before)]
    return {
        **record,
        "command": " && ".join(dict.fromkeys(commands)),
        "settings": settings,
        "rows": kept + rows,
    }


def command_line(module: str, omit: str) -> str:
    """The running command as a user would repeat it, without the option `omit` and its value (the
    place of a record says nothing of what it holds)."""
    kept = sys.argv[1:]
    if omit in kept:
        at = kept.index(omit)
        kept = kept[:at] + kept[at + 2 :]
    kept = [argument for argument in kept if not argument.startswith(f"{omit}=")]
    return shlex.join(["python", "-m", module, *kept])
