"""ListOps: nested lists of digits whose value is a digit (Nangia and Bowman, arXiv 1804.06028).

The Long Range Arena's variant (arXiv 2011.04006, section 2.2): trees of up to ten levels, two to
ten arguments, operators MIN, MAX, MED (median, fraction dropped) and SM (sum modulo 10), between
500 and 2000 symbols. `[MAX 2 9 [MIN 4 7 ] 0 ]` is 9.

Sample `index` of a split is a pure function of (VERSION, settings, seed, split, index). Two samples
of 500 symbols are never equal in practice, so that none is looked for twice.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import multiprocessing
import os
import random
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

VERSION = 1  # raise when any sample changes
OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
SYMBOLS = ("<pad>", *"0123456789", *OPERATORS, "]")  # by token id
PAD = 0
CLOSE = SYMBOLS.index("]")
NUM_EXAMPLES = {"train": 96_000, "val": 2_000, "test": 2_000}  # as the Long Range Arena's
_PART_SAMPLES = 1000  # of one task of a worker, about a second
_ID_OF = {symbol: i for i, symbol in enumerate(SYMBOLS)}
_FIRST_OPERATOR = 11
_OPERATOR_PROBABILITY = 0.25


@dataclasses.dataclass(frozen=True)
class ListOpsSpec:
    """Which set of expressions.

    Attributes:
        min_length, max_length: a sample has more and fewer symbols than these, respectively.
        max_depth: levels of a tree; on the last one there are digits only.
        max_args: of an operator, from 2.
        seed: of everything.
    Raises:
        ValueError: no tree can fit.
    """

    min_length: int = 500
    max_length: int = 2000
    max_depth: int = 10
    max_args: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_args < 2 or self.max_depth < 2:
            raise ValueError(
                f"max_args and max_depth must be at least 2, got {self.max_args}, {self.max_depth}"
            )
        if not 0 <= self.min_length < self.max_length - 1:
            raise ValueError(
                f"lengths must leave room between them, got {self.min_length}, {self.max_length}"
            )


def make_listops(spec: ListOpsSpec, split: str, index: int) -> tuple[np.ndarray, int]:
    """One sample: token ids, (length,) uint8, no padding, and the expression's value.

    Raises:
        ValueError: an unknown split, or a negative index.
    """
    if split not in NUM_EXAMPLES:
        raise ValueError(f"split must be one of {[*NUM_EXAMPLES]}, got {split!r}")
    if index < 0:
        raise ValueError(f"index must not be negative, got {index}")
    settings = dataclasses.astuple(spec)
    name = f"listops {VERSION} {settings} {split} {index}".encode()
    # Of Python's generator only random() is used: that sequence never changes with its version.
    uniform = random.Random(int.from_bytes(hashlib.sha256(name).digest(), "little")).random
    while True:
        tokens: list[int] = []
        if _grow(tokens, 1, spec, uniform) and len(tokens) > spec.min_length:
            return np.array(tokens, dtype=np.uint8), evaluate(tokens)


def listops_examples(
    spec: ListOpsSpec, split: str, number: int, *, workers: int | None = None
) -> Iterator[tuple[np.ndarray, int]]:
    """The first `number` samples of a split, in order: the same for any number of workers.

    Args:
        workers: processes; None is one a core, below 2 works in this one. A sample takes 1 ms.
    """
    starts = range(0, number, _PART_SAMPLES)
    parts = [range(start, min(start + _PART_SAMPLES, number)) for start in starts]
    if workers is None:
        workers = min(len(os.sched_getaffinity(0)), len(parts))
    if workers < 2:
        for index in range(number):
            yield make_listops(spec, split, index)
        return
    # Not forked: the parent may hold threads and a CUDA context.
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        try:
            for made in pool.map(partial(_make_part, spec, split), parts):
                yield from made
        except BaseException:  # among them that no more samples are wanted
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _make_part(spec: ListOpsSpec, split: str, part: range) -> list[tuple[np.ndarray, int]]:
    return [make_listops(spec, split, index) for index in part]


def evaluate(tokens: list[int] | np.ndarray) -> int:
    """The value of an expression of token ids, in [0, 10).

    Raises:
        ValueError: it is not one well-formed expression.
    """
    stack: list[tuple[int, list[int]]] = [(-1, [])]
    for token in np.asarray(tokens).tolist():
        if _FIRST_OPERATOR <= token < CLOSE:
            stack.append((token - _FIRST_OPERATOR, []))
        elif token == CLOSE and len(stack) > 1 and stack[-1][1]:
            operator, values = stack.pop()
            stack[-1][1].append(_apply(OPERATORS[operator], values))
        elif 1 <= token < _FIRST_OPERATOR:
            stack[-1][1].append(token - 1)
        else:
            raise ValueError(f"an expression must be well-formed, got token {token} out of place")
    if len(stack) != 1 or len(stack[0][1]) != 1:
        raise ValueError("an expression must be closed and be one value")
    return stack[0][1][0]


def encode(source: str) -> np.ndarray:
    """Token ids, (length,) uint8, of the release's text, with or without its parentheses.

    Raises:
        ValueError: an unknown symbol.
    """
    symbols = [s for s in source.split() if s not in ("(", ")")]
    try:
        return np.array([_ID_OF[symbol] for symbol in symbols], dtype=np.uint8)
    except KeyError as error:
        raise ValueError(f"ListOps has the symbols {SYMBOLS[1:]}, got {error}") from error


def decode(tokens: np.ndarray) -> str:
    """The expression as text, without parentheses; `encode` reads it back."""
    return " ".join(SYMBOLS[token] for token in np.asarray(tokens).tolist() if token != PAD)


def _grow(tokens: list[int], depth: int, spec: ListOpsSpec, uniform: Callable[[], float]) -> bool:
    """Append a random tree. False: it got too long, `tokens` are useless."""
    if depth >= spec.max_depth or uniform() > _OPERATOR_PROBABILITY:
        tokens.append(1 + int(10 * uniform()))
        return True
    num_args = 2 + int((spec.max_args - 1) * uniform())
    place = len(tokens)
    tokens.append(0)
    for _ in range(num_args):
        if not _grow(tokens, depth + 1, spec, uniform) or len(tokens) >= spec.max_length:
            return False
    tokens[place] = _FIRST_OPERATOR + int(len(OPERATORS) * uniform())
    tokens.append(CLOSE)
    return len(tokens) < spec.max_length


def _apply(operator: str, values: list[int]) -> int:
    if operator == "[MIN":
        return min(values)
    if operator == "[MAX":
        return max(values)
    if operator == "[SM":
        return sum(values) % 10
    middle = sorted(values)
    return (middle[(len(middle) - 1) // 2] + middle[len(middle) // 2]) // 2
