"""A curriculum: the first steps of a run come from easier sets than the rest and the held-out data.

All is a function of the position in the run: nothing has to be saved for a resume, and every number
of processes and workers sees the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from data.classification import Batch, Examples


class Rung(NamedTuple):
    """One easier set of Pathfinder images.

    Attributes:
        level: paddles a snake.
        num_distractors: short snakes to try for; None is the reference's number.
        steps: optimizer steps that it lasts, at least 1.
    """

    level: int
    num_distractors: int | None
    steps: int


def read_rungs(stated: Sequence[Sequence[int]] | None) -> tuple[Rung, ...]:
    """Rungs as a configuration states them; none for null.

    Raises:
        ValueError: it is no such list.
    """
    try:
        rungs = tuple(Rung(*row) for row in stated or ())
        numbers = [number for rung in rungs for number in rung if number is not None]
        is_whole = all(type(number) is int for number in numbers)
        is_whole = is_whole and all(rung.level and (rung.steps or 0) >= 1 for rung in rungs)
    except TypeError:
        is_whole = False
    if not is_whole:
        raise ValueError(
            "curriculum must be null or a list of [level, num_distractors, optimizer steps], such "
            f"as [[3, 0, 200], [6, null, 400]], got {stated}"
        )
    return rungs


class CurriculumExamples:
    """Examples whose training batches come from easier ones at first.

    Attributes:
        ends: the position, in samples, at which each easier set ends.
        plan: equal for equal easier examples in equal places.

    Args:
        easier: (steps that it lasts, examples), in their order. An image stands for all samples
            whose id leaves the same remainder when divided by the number of its set.
        last: what comes then; the held-out examples are its own.
        batch_size: samples of an optimizer step over all processes.
    """

    def __init__(
        self, easier: Sequence[tuple[int, Examples]], last: Examples, batch_size: int
    ) -> None:
        self._sets = [*(examples for _, examples in easier), last]
        steps = [steps for steps, _ in easier]
        self.ends = np.cumsum(steps) * batch_size
        self.fingerprint = last.fingerprint
        self._last = last
        identity = [[examples.fingerprint for _, examples in easier], self.ends.tolist()]
        self.plan = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:12]

    def num_examples(self, split: str) -> int:
        return self._last.num_examples(split)

    def batch(self, split: str, ids: np.ndarray, *, positions: np.ndarray | None = None) -> Batch:
        if positions is None:
            return self._last.batch(split, ids)
        examples = self._sets[np.searchsorted(self.ends, positions[0], side="right")]
        return examples.batch(split, ids % examples.num_examples(split), positions=positions)
