"""What a run came to, beside what it must be compared with: said, and kept as data."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from model.checkpoint import write_atomically
from model.task import TrainingTask, say

RESULT_FILE = "result.json"


def say_result(
    split: str,
    checkpoint: str | None,
    metrics: Mapping[str, Tensor | float],
    data: Any,
    task: TrainingTask,
) -> dict[str, Any]:
    """Say what the task makes of the metrics, and under it what must stand beside them.

    Args:
        split: "val" or "test".
        checkpoint: name of the file whose weights were measured; None means the last step's.
        metrics: of the trainer, those of the split as "val/loss", ...
        data: a data.stepped.SteppedData.

    Returns:
        The same as plain values: checkpoint, num_held_out (examples, or tokens), metrics (None
        where one is not finite), line, comparison (line and numbers, or None). Of the first process
        alone: others get an empty one.
    """
    of_split = f"{split}/"
    values = {
        key.removeprefix(of_split): float(value)
        for key, value in metrics.items()
        if key.startswith(of_split)
    }
    if rank_zero_only.rank != 0:
        return {}
    name = "validation" if split == "val" else f"test, {checkpoint or 'last step'}"
    line = task.result(name, values, data.num_held_out(split))
    comparison = data.comparison(split)
    say(line)
    if comparison:
        say(f"  {comparison.line}")
    return {
        "checkpoint": checkpoint,
        "num_held_out": data.num_held_out(split),
        "metrics": {key: x if math.isfinite(x) else None for key, x in values.items()},
        "line": line,
        "comparison": comparison and comparison._asdict(),
    }


@rank_zero_only
def write_result(folder: Path, **result: Any) -> None:
    """Write result.json into a run's folder, atomically; that of an earlier start is replaced."""
    payload = json.dumps(result, indent=1, allow_nan=False) + "\n"
    write_atomically(folder / RESULT_FILE, lambda file: file.write(payload.encode()))
