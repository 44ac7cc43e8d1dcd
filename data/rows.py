"""Rows of a published data set: from the hub, or from the same rows in local files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data.text_files import read_rows

Row = tuple[str, dict[str, Any]]  # where it stands, for errors, and its fields


def open_rows(source: str, *, hub: str, config: str | None = None, split: str) -> Iterator[Row]:
    """Rows in their order.

    Args:
        source: "hf" for the hub, or a .jsonl (also .gz, .xz, .zst) or .parquet file.
        hub, config, split: what the hub calls them: OWNER/NAME, its configuration, its split.
    Raises:
        FileNotFoundError: no such file.
        ConnectionError: the hub cannot be reached.
        ValueError: the file is damaged or of another kind.
    """
    if source == "hf":
        yield from _hub_rows(hub, config, split)
        return
    path = Path(source).expanduser()
    if not path.is_file():
        raise FileNotFoundError(
            f"source must be hf or a .jsonl or .parquet file with the rows of {hub}, got {source!r}"
        )
    yield from read_rows(path)


def _hub_rows(hub: str, config: str | None, split: str) -> Iterator[Row]:
    import datasets

    try:
        rows = datasets.load_dataset(hub, config, split=split)
    except (OSError, RuntimeError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ConnectionError(
            f"hf:{hub} cannot be loaded ({error}): connect this machine to the network, or give "
            f"source=FILE, a .jsonl or .parquet file with the rows of its {split} split"
        ) from error
    for number, row in enumerate(rows):
        yield f"hf:{hub}, {split} row {number}", row


def field(row: Row, name: str, *kinds: type) -> Any:
    """The field `name` of a row, of one of `kinds`.

    Raises:
        ValueError: it is absent or of another type.
    """
    place, values = row
    if name not in values:
        raise ValueError(f"{place} must have the field {name!r}, got {sorted(map(str, values))}")
    value = values[name]
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise ValueError(f"{place} must hold {wanted} in {name!r}, got {value!r:.60}")
    return value
