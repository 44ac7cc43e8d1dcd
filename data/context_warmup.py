"""Context warm-up: which context an optimizer step trains at, and which tokens it gets.

Windows and their order stay those of the final context, and every step has as many tokens: a stage
of a shorter context cuts the windows into pieces. One window after another would make batches of
neighbours, which resemble each other. So final / context steps share their windows, a round, and
each takes one piece of every window of the round; steps at the end of a stage that fill no round
cut their own windows whole. Each epoch has every token once, across the switches too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ContextWarmup:
    """The stages of a run. All is a function of the step: nothing has to be saved for a resume.

    Attributes:
        contexts: tokens of a sequence in each stage; they rise, each divides the last.
        first_steps: the optimizer step at which each stage begins, from 0; they rise.
    """

    contexts: tuple[int, ...]
    first_steps: tuple[int, ...]

    @classmethod
    def planned(
        cls, stages: Sequence[Sequence[float]], *, seqlen: int, max_steps: int | None
    ) -> ContextWarmup:
        """Stages as a configuration states them.

        Args:
            stages: [context, until] of each stage before the final one: it ends at the share
                `until` of the run's steps, which is that of its tokens.
            seqlen: the final context.
            max_steps: optimizer steps of the run.
        Raises:
            ValueError: the stages are no such list, or do not fit the run.
        """
        try:
            pairs = [(context, float(until)) for context, until in stages]
            is_whole = all(isinstance(context, int) for context, _ in pairs)
        except (TypeError, ValueError):
            is_whole = False
        if not is_whole or not pairs:
            raise ValueError(
                "context_warmup must be null or a list of [context, until], such as "
                f"[[1024, 0.7], [4096, 0.9]], got {stages}"
            )
        if max_steps is None or max_steps < 1:
            raise ValueError(f"context_warmup needs max_steps, the steps of the run: {max_steps}")
        contexts = (*(int(context) for context, _ in pairs), seqlen)
        shares = (0.0, *(until for _, until in pairs), 1.0)
        if contexts[0] < 1 or not _rises(contexts) or any(seqlen % c for c in contexts):
            raise ValueError(
                f"the contexts of context_warmup must rise and divide seqlen={seqlen}, got "
                f"{list(contexts[:-1])}"
            )
        if not _rises(shares):
            raise ValueError(
                "the shares of context_warmup, at which its stages end, must rise between 0 and 1, "
                f"got {list(shares[1:-1])}"
            )
        firsts = tuple(round(share * max_steps) for share in shares)
        if not _rises(firsts):
            raise ValueError(
                f"each stage of context_warmup must have a step, got stages that begin at the steps"
                f" {list(firsts[:-1])} of {max_steps}: train longer or leave out a stage"
            )
        return cls(contexts, firsts[:-1])

    def stage(self, step: int) -> int:
        """Number of the stage that optimizer step `step` is in."""
        return sum(step >= first for first in self.first_steps) - 1

    def seqlen(self, step: int) -> int:
        """Tokens of a sequence at optimizer step `step`."""
        return self.contexts[self.stage(step)]

    def cut(self, step: int) -> list[tuple[int, int]]:
        """What a step trains on.

        Returns:
            (s, piece), one for each piece of a window: in the order of the final context, piece
            `piece` of all windows of step s.
        """
        stage = self.stage(step)
        num_pieces = self.contexts[-1] // self.contexts[stage]
        if num_pieces == 1:
            return [(step, 0)]
        first, end = self.first_steps[stage : stage + 2]
        turn = (step - first) % num_pieces
        start = step - turn  # of the round
        if start + num_pieces > end:
            return [(step, piece) for piece in range(num_pieces)]
        return [(start + i, (i + turn) % num_pieces) for i in range(num_pieces)]


def _rises(numbers: Sequence[float]) -> bool:
    return all(a < b for a, b in zip(numbers, numbers[1:], strict=False))
