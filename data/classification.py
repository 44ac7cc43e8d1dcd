"""Classification of long sequences: the loaders that all tasks of the Long Range Arena share.

A subclass says what one batch of given sample ids is (see data.long_range); here are the order of
samples, their sharing among processes and workers, and the position that a checkpoint keeps, as in
data.causal_lm.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Protocol

import lightning
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from data.order import rank_sample_ids

IGNORED_LABEL = -100

Batch = dict[str, Any]


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


class ClassificationData(lightning.LightningDataModule):
    """Training steps and held-out batches of labelled sequences.

    The train loader never ends and has no length. One item is this process's share of one optimizer
    step, batch_size / world_size examples: a dict of `input_ids`, (batch, seqlen) int64, or
    (batch, 2, seqlen) where an example is a pair; `labels`, (batch,) int64; `lengths`, (batch,) or
    (batch, 2) int64, real tokens at the start of each sequence. Subclasses may add entries. The
    order depends on `seed` alone: not on workers, processes or batch_size.

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

    def __init__(
        self,
        *,
        seqlen: int,
        batch_size: int,
        val_batch_size: int,
        val_limit: int | None,
        test_limit: int | None,
        seed: int,
        num_workers: int,
    ) -> None:
        super().__init__()
        at_least_one = {"batch_size": batch_size, "val_batch_size": val_batch_size}
        at_least_one |= {"val_limit": val_limit, "test_limit": test_limit}
        for name, value in at_least_one.items():
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if num_workers < 0:
            raise ValueError(f"num_workers must not be negative, got {num_workers}")
        self.seqlen = seqlen
        self.batch_size = batch_size
        self.batch_tokens = batch_size * seqlen
        self._val_batch_size = val_batch_size
        self._limits = {"val": val_limit, "test": test_limit}
        self._seed = seed
        self._num_workers = num_workers
        self._examples: Examples | None = None
        self._start_position = 0
        self._start_step = 0
        self._resumed_fingerprint: str | None = None

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

    def comparison(self, split: str) -> str:
        """What must stand beside an accuracy on "val" or "test", one line; "" for nothing."""
        return ""

    @property
    def fingerprint(self) -> str:
        """Identifies examples and their order: equal ones continue each other's positions."""
        return f"{self.examples.fingerprint}-seqlen{self.seqlen}-seed{self._seed}"

    @property
    def position(self) -> int:
        """Samples consumed by finished optimizer steps, over all processes and resumed runs."""
        step = self.trainer.global_step if self.trainer is not None else self._start_step
        # Lightning restores this state before global_step, and may ask for a loader in between.
        return self._start_position + max(0, step - self._start_step) * self.batch_size

    def setup(self, stage: str | None = None) -> None:
        """Open the data and check that the batch fits the processes."""
        world_size = self._world()[1]
        if self.batch_size % world_size:
            raise ValueError(
                f"batch_size must be a multiple of the number of processes, got {self.batch_size} "
                f"on {world_size}"
            )
        if self._examples is None:
            self._examples = self.open_examples()
        if self.num_samples < 1:
            raise ValueError("the training split must hold examples, got none: prepare some")

    def sample_ids(self, step: int) -> np.ndarray:
        """Ids of the examples that optimizer step `step` (trainer.global_step before it) consumes.

        Returns:
            (batch_size,) int64, over all processes in rank order.
        """
        return rank_sample_ids(
            self._start_position + (step - self._start_step) * self.batch_size,
            batch_size=self.batch_size,
            rank=0,
            world_size=1,
            seed=self._seed,
            num_samples=self.num_samples,
        )

    def train_dataloader(self) -> DataLoader:
        """Endless steps from `position` on.

        Raises:
            ValueError: the loaded state belongs to other examples, another seqlen or another seed.
        """
        if self._resumed_fingerprint not in (None, self.fingerprint):
            raise ValueError(
                f"the checkpoint must be continued on the data that it was trained on, "
                f"{self._resumed_fingerprint}, got {self.fingerprint}: restore the settings of the "
                "data, or start a new run from the weights alone"
            )
        steps = _TrainSteps(
            self.examples, self.position, self.batch_size, *self._world(), self._seed
        )
        return self._loader(steps, self._num_workers)

    def val_dataloader(self) -> DataLoader | list[DataLoader]:
        """Empty if there is no validation split."""
        return self._held_out("val")

    def test_dataloader(self) -> DataLoader | list[DataLoader]:
        """Empty if there is no test split."""
        return self._held_out("test")

    def state_dict(self) -> dict[str, Any]:
        return {
            "position": self.position,
            "global_step": self.trainer.global_step if self.trainer is not None else 0,
            "fingerprint": self.fingerprint,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at the saved position; `train_dataloader` checks that the data are the same."""
        self._start_position = int(state_dict["position"])
        self._start_step = int(state_dict["global_step"])
        self._resumed_fingerprint = state_dict["fingerprint"]

    def _held_out(self, split: str) -> DataLoader | list[DataLoader]:
        number = self.num_held_out(split)
        if not number:
            return []
        return self._loader(
            _HeldOut(self.examples, split, number, self._val_batch_size, *self._world()),
            min(self._num_workers, 2),
        )

    def _world(self) -> tuple[int, int]:
        if self.trainer is None:
            return 0, 1
        return self.trainer.global_rank, self.trainer.world_size

    def _loader(self, dataset: Dataset, num_workers: int) -> DataLoader:
        on_cuda = self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"
        return DataLoader(
            dataset,
            batch_size=None,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            pin_memory=on_cuda,
            # Without its own generator a loader draws a seed from torch's global one.
            generator=torch.Generator().manual_seed(self._seed),
        )


class _TrainSteps(IterableDataset):
    """Endless: this process's share of one optimizer step after another."""

    def __init__(
        self,
        examples: Examples,
        position: int,
        batch_size: int,
        rank: int,
        world_size: int,
        seed: int,
    ) -> None:
        self._examples = examples
        self._position = position
        self._batch_size = batch_size
        self._rank = rank
        self._world_size = world_size
        self._seed = seed

    def __iter__(self) -> Iterator[Batch]:
        # A DataLoader takes items from its workers in turn, so worker i makes every n-th step.
        worker = get_worker_info()
        first, stride = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        position = self._position + first * self._batch_size
        while True:
            ids = rank_sample_ids(
                position,
                batch_size=self._batch_size,
                rank=self._rank,
                world_size=self._world_size,
                seed=self._seed,
                num_samples=self._examples.num_examples("train"),
            )
            positions = position + self._rank * len(ids) + np.arange(len(ids))
            yield self._examples.batch("train", ids, positions=positions)
            position += stride * self._batch_size


class _HeldOut(Dataset):
    """The first examples of a split, each once; equally many batches per rank."""

    def __init__(
        self,
        examples: Examples,
        split: str,
        number: int,
        batch_size: int,
        rank: int,
        world_size: int,
    ) -> None:
        self._examples = examples
        self._split = split
        self._number = number
        share = math.ceil(number / world_size)
        self._batch_size = min(batch_size, share)
        self._num_batches = math.ceil(share / self._batch_size)
        self._rank = rank
        self._world_size = world_size

    def __len__(self) -> int:
        return self._num_batches

    def __getitem__(self, index: int) -> Batch:
        if not 0 <= index < len(self):
            raise IndexError(index)
        first = (index * self._world_size + self._rank) * self._batch_size
        ids = np.arange(first, first + self._batch_size)
        batch = self._examples.batch(self._split, np.minimum(ids, self._number - 1))
        batch["labels"][torch.from_numpy(ids >= self._number)] = IGNORED_LABEL
        return batch
