"""Classification of long sequences: the loaders that the Long Range Arena's tasks and long
documents share.

A subclass says what one batch of given sample ids is (see data.long_range, data.long_documents);
the rest is data.stepped's.
"""

from __future__ import annotations

from functools import partial
from typing import Protocol, Required, TypedDict

import numpy as np
import torch
from torch.utils.data import DataLoader

from data.stepped import IGNORED_LABEL, Batch, MakeStep, SteppedData


class Examples(Protocol):
    """The examples of one set. Workers get a pickled copy.

    Attributes:
        fingerprint: equal for equal examples in equal order.
    """

    fingerprint: str

    def num_examples(self, split: str) -> int:
        """0 for a split that is not there."""

    def batch(self, split: str, ids: np.ndarray, *, positions: np.ndarray | None = None) -> Batch:
        """Examples `ids`, (n,) int64, of "train", "val" or "test".

        `positions` (n,) are those of training samples in the run, for random augmentation; None
        where nothing may be random.
        """


class LoadingOptions(TypedDict, total=False):
    """Options of ClassificationData that its subclasses hand on to it."""

    batch_size: Required[int]
    val_limit: int | None
    test_limit: int | None
    seed: int
    num_workers: int


class ClassificationData(SteppedData):
    """Training steps and held-out batches of labelled sequences.

    The train loader never ends and has no length. One item is this process's share of one optimizer
    step, batch_size / world_size examples: a dict of `input_ids`, (batch, seqlen) int64, or
    (batch, 2, seqlen) where an example is a pair; `labels`, (batch,) int64; `lengths`, (batch,) or
    (batch, 2) int64, real tokens at the start of each sequence. Subclasses may add entries. The
    order depends on `seed` alone: not on workers, processes or batch_size (but for a curriculum's
    end, which is stated in steps).

    The validation and test loaders give each example once over all processes, in order. All their
    batches have the same number of examples: what is missing at the end repeats the last one with
    label -100, so that correct answers must be summed and divided by the number of real labels.

    Args:
        seqlen: tokens of a sequence; shorter ones are padded.
        batch_size: examples of one optimizer step over all processes.
        val_batch_size: examples of one validation forward of one process.
        val_limit, test_limit: use only the first so many examples; None uses all.
        seed: of the order of samples.
        num_workers: processes that load training batches ahead; 0 loads in the training process.
    Raises:
        ValueError: numbers that are too small.
    """

    vocab_size: int
    num_classes: int
    multi_label: bool = False  # labels are (batch, num_classes) of 0 and 1 then

    def __init__(
        self,
        *,
        seqlen: int,
        batch_size: int,
        val_batch_size: int,
        val_limit: int | None = None,
        test_limit: int | None = None,
        seed: int = 1111,
        num_workers: int = 0,
    ) -> None:
        super().__init__(seed=seed, num_workers=num_workers)
        at_least_one: dict[str, int | None] = {
            "batch_size": batch_size,
            "val_batch_size": val_batch_size,
            "val_limit": val_limit,
            "test_limit": test_limit,
        }
        for name, value in at_least_one.items():
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.seqlen = seqlen
        self.batch_size = batch_size
        self.batch_tokens = batch_size * seqlen
        self._val_batch_size = val_batch_size
        self._limits = {"val": val_limit, "test": test_limit}
        self._examples: Examples | None = None

    def open_examples(self) -> Examples:
        """What `setup` opens, after `prepare_data` has made it. Subclasses say."""
        raise NotImplementedError

    @property
    def examples(self) -> Examples:
        """The prepared data; opened by `setup`."""
        if self._examples is None:
            raise RuntimeError("the data must be opened first: call prepare_data() and setup()")
        return self._examples

    @property
    def num_samples(self) -> int:
        """Examples of one epoch."""
        return self.examples.num_examples("train")

    def num_held_out(self, split: str) -> int:
        """Examples of "val" or "test" in use."""
        total, limit = self.examples.num_examples(split), self._limits[split]
        return total if limit is None else min(total, limit)

    @property
    def fingerprint(self) -> str:
        """Identifies examples and their order: equal ones continue each other's positions."""
        return f"{self.examples.fingerprint}-seqlen{self.seqlen}-seed{self._seed}"

    def setup(self, stage: str | None = None) -> None:
        """Open the data and check that the batch fits the processes."""
        world_size = self.world()[1]
        if self.batch_size % world_size:
            raise ValueError(
                f"batch_size must be a multiple of the number of processes, got {self.batch_size} "
                f"on {world_size}"
            )
        if self._examples is None:
            self._examples = self.open_examples()
        if self.num_samples < 1:
            raise ValueError("the training split must hold examples, got none: prepare some")

    def train_batch(self) -> MakeStep:
        return partial(_train_batch, self.examples)

    def val_dataloader(self) -> DataLoader | list[DataLoader]:
        """Empty if there is no validation split."""
        return self._held_out("val")

    def test_dataloader(self) -> DataLoader | list[DataLoader]:
        """Empty if there is no test split."""
        return self._held_out("test")

    def _held_out(self, split: str) -> DataLoader | list[DataLoader]:
        number = self.num_held_out(split)
        make = partial(_held_out_batch, self.examples, split, number)
        return self.held_out_loader(
            make, number, self._val_batch_size, num_workers=min(self._num_workers, 2)
        )


def _train_batch(examples: Examples, ids: np.ndarray, positions: np.ndarray) -> Batch:
    return examples.batch("train", ids, positions=positions)


def _held_out_batch(examples: Examples, split: str, number: int, ids: np.ndarray) -> Batch:
    """Filled up with the last example, unlabelled."""
    batch = examples.batch(split, np.minimum(ids, number - 1))
    batch["labels"][torch.from_numpy(ids >= number)] = IGNORED_LABEL
    return batch
