"""Where metrics go on every machine: a CSV file that survives a resume."""

import contextlib
import csv
import os
import warnings
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

COLUMNS = (
    "step tokens epoch seconds train/loss train/ppl train/grad_norm lr tokens_per_s mfu_full "
    "mfu_causal peak_gib val/loss val/ppl train/accuracy train/dense_loss val/accuracy "
    "val/dense_loss samples_per_s train/mlm_loss train/nsp_loss train/nsp_accuracy val/mlm_loss "
    "val/nsp_loss val/nsp_accuracy context train/micro_f1 train/macro_f1 val/micro_f1 val/macro_f1"
).split()


class CsvLogger(Logger):
    """Appends one row a logged step to ``<save_dir>/metrics.csv``; a resume goes on below it.

    Rows that cannot be written, to a full disk for instance, wait for the next save; it warns.

    Args:
        save_dir: the run folder.
    """

    def __init__(self, *, save_dir: str) -> None:
        super().__init__()
        self.path = Path(save_dir) / "metrics.csv"
        self._rows: dict[int, dict] = {}  # logged and not yet in the file
        self._last: tuple[dict, int] | None = None  # the row at the end of the file, its offset

    name = property(lambda self: "csv")
    version = property(lambda self: "")

    @rank_zero_only
    def log_hyperparams(self, params: Any = None, *args: Any, **kwargs: Any) -> None:
        """The run folder's config.yaml already holds them."""

    @rank_zero_only
    def log_metrics(self, metrics: dict, step: int) -> None:
        unknown = sorted(set(metrics) - set(COLUMNS))
        if unknown:
            raise ValueError(f"metrics.csv has no column for {unknown}; add them to COLUMNS")
        if step not in self._rows and self._last and self._last[0]["step"] == step:
            self._rows[step] = dict(self._last[0])  # save() writes this row again, complete
        self._rows.setdefault(step, {"step": step}).update(metrics)

    @rank_zero_only
    def forget_after(self, step: int) -> None:
        """Drop rows of steps after `step`, which a resumed run will do again."""
        if not self.path.exists():
            return
        with self.path.open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if int(row["step"]) <= step]
        part = self.path.with_suffix(".csv.part")
        with part.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows({key: row.get(key, "") for key in COLUMNS} for row in rows)
        os.replace(part, self.path)

    @rank_zero_only
    def save(self) -> None:
        if not self._rows:
            return
        size = None
        try:
            size = self.path.stat().st_size if self.path.exists() else 0
            self._write()
            self._rows.clear()
        except OSError as error:  # a full disk, a folder that went away: the rows wait
            warnings.warn(f"{self.path} cannot be written ({error}); will retry", stacklevel=2)
            if self._last and self._last[0]["step"] in self._rows:
                size = self._last[1]  # a row that was being written anew, which waits too
            self._last = None
            if size is not None:
                with contextlib.suppress(OSError):
                    os.truncate(self.path, size)

    def _write(self) -> None:
        if self._last is None and self.path.exists():
            self._find_last()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        last = self._last
        with self.path.open("a", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            if file.tell() == 0:
                writer.writeheader()
            for step, row in sorted(self._rows.items()):
                if last and last[0]["step"] == step:
                    file.truncate(last[1])
                file.seek(0, os.SEEK_END)
                last = (row, file.tell())
                writer.writerow({key: _text(value) for key, value in row.items()})
        self._last = last

    def _find_last(self) -> None:
        """Take up the last row of an existing file, which may still get its validation metrics."""
        lines = self.path.read_bytes().splitlines(keepends=True)
        if len(lines) < 2:
            return
        row: dict[str, Any] = dict(
            zip(COLUMNS, next(csv.reader([lines[-1].decode()])), strict=True)
        )
        row["step"] = int(row["step"])
        self._last = (row, self.path.stat().st_size - len(lines[-1]))
        if row["step"] in self._rows:
            self._rows[row["step"]] = row | self._rows[row["step"]]

    @rank_zero_only
    def finalize(self, status: str) -> None:
        self.save()


def _text(value: object) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value)
