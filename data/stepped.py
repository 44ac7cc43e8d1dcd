"""What all data modules share: endless training steps in a fixed order, held-out batches, and the
position that a checkpoint keeps. A module says what a batch of given sample ids is."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import lightning
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from data.order import rank_sample_ids

IGNORED_LABEL = -100

Batch = dict[str, Any]
# (ids, positions), both (n,) int64: sample ids, and their places in the run -> this process's batch
MakeStep = Callable[[np.ndarray, np.ndarray], Batch]
# places, (n,) int64 from 0 in order; those from the number of samples on are to be filled up
MakeHeldOut = Callable[[np.ndarray], Batch]


class Comparison(NamedTuple):
    """What must stand beside a result.

    Attributes:
        line: for people.
        numbers: those in it, by name; accuracies are fractions.
    """

    line: str
    numbers: dict[str, float]


class SteppedData(lightning.LightningDataModule):
    """Base of the data modules.

    A subclass has `seqlen` (of the longest samples), `batch_size` (samples of an optimizer step
    over all processes), `num_samples` and `fingerprint`, and says in `train_batch` what a batch is.
    The order depends on `seed` alone: not on workers, processes or batch_size.
    """

    seqlen: int
    batch_size: int
    #: Neighbouring ranks that get the same samples, to take a share of each (context parallelism).
    processes_per_sample: int = 1
    #: Where a resumed run goes on at the earliest: a roll-back leaves out the samples before it.
    first_position: int = 0

    def __init__(self, *, seed: int, num_workers: int) -> None:
        super().__init__()
        if num_workers < 0:
            raise ValueError(f"num_workers must not be negative, got {num_workers}")
        self._seed = seed
        self._num_workers = num_workers
        self._start_position = 0
        self._start_step = 0
        self._resumed_fingerprint: str | None = None

    def train_batch(self) -> MakeStep:
        """What makes a training batch; workers get a pickled copy."""
        raise NotImplementedError

    @property
    def num_samples(self) -> int:
        """Samples of one epoch."""
        raise NotImplementedError

    @property
    def fingerprint(self) -> str:
        """Identifies samples and their order: equal ones continue each other's positions."""
        raise NotImplementedError

    def num_held_out(self, split: str) -> int:
        """Samples, or tokens, of "val" or "test" in use; 0 for a split that is not there."""
        raise NotImplementedError

    def comparison(self, split: str) -> Comparison | None:
        """What must stand beside a result on "val" or "test"; None for nothing."""
        return None

    @property
    def curriculum_steps(self) -> int:
        """Optimizer steps at the start of a run whose samples are easier than those held out."""
        return 0

    @property
    def contexts(self) -> tuple[int, ...]:
        """Tokens of a training sequence, in each stage of the run."""
        return (self.seqlen,)

    @property
    def position(self) -> int:
        """Samples consumed by finished optimizer steps, over all processes and resumed runs."""
        step = self.trainer.global_step if self.trainer is not None else self._start_step
        # Lightning restores this state before global_step, and may ask for a loader in between.
        return self._start_position + max(0, step - self._start_step) * self.batch_size

    def sample_ids(self, step: int) -> np.ndarray:
        """Ids of the samples that optimizer step `step` (trainer.global_step before it) consumes.

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
            ValueError: the loaded state belongs to other data, settings or another seed.
        """
        if self._resumed_fingerprint not in (None, self.fingerprint):
            raise ValueError(
                f"the checkpoint must be continued on the data that it was trained on, "
                f"{self._resumed_fingerprint}, got {self.fingerprint}: restore the data's settings "
                "and seed, or start a new run from the weights alone"
            )
        rank, world_size = self.world()
        steps = TrainSteps(
            self.train_batch(),
            num_samples=self.num_samples,
            position=self.position,
            batch_size=self.batch_size,
            rank=rank,
            world_size=world_size,
            seed=self._seed,
        )
        return self.loader(steps, self._num_workers)

    def held_out_loader(
        self, make: MakeHeldOut, num_samples: int, batch_size: int, num_workers: int = 0
    ) -> DataLoader | list[DataLoader]:
        """Each of num_samples once over all processes, in order; empty if there is none."""
        if not num_samples:
            return []
        rank, world_size = self.world()
        return self.loader(HeldOut(make, num_samples, batch_size, rank, world_size), num_workers)

    def state_dict(self) -> dict[str, Any]:
        return {
            "position": self.position,
            "global_step": self.trainer.global_step if self.trainer is not None else 0,
            "fingerprint": self.fingerprint,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at the saved position; `train_dataloader` checks that the data are the same."""
        self._start_position = max(int(state_dict["position"]), self.first_position)
        self._start_step = int(state_dict["global_step"])
        self._resumed_fingerprint = state_dict["fingerprint"]

    def world(self) -> tuple[int, int]:
        """(rank, number of ranks) among those that get different samples."""
        if self.trainer is None:
            return 0, 1
        shared = self.processes_per_sample
        return self.trainer.global_rank // shared, self.trainer.world_size // shared

    def loader(self, dataset: Dataset, num_workers: int) -> DataLoader:
        on_cuda = self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"
        return DataLoader(
            dataset,
            batch_size=None,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            pin_memory=on_cuda,
            worker_init_fn=_outlive_a_signal,
            # Without its own generator a loader draws a seed from torch's global one.
            generator=torch.Generator().manual_seed(self._seed),
        )


def _outlive_a_signal(worker: int) -> None:
    """What stops a run is often sent to all its processes, and it still has a step to finish.

    A second signal ends the worker, as DataLoader's own clean-up may want.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, _: signal.signal(number, signal.SIG_DFL))


class TrainSteps(IterableDataset):
    """Endless: this process's share of one optimizer step after another."""

    def __init__(
        self,
        make: MakeStep,
        *,
        num_samples: int,
        position: int,
        batch_size: int,
        rank: int,
        world_size: int,
        seed: int,
    ) -> None:
        self._make = make
        self._position = position
        self._order = {
            "batch_size": batch_size,
            "rank": rank,
            "world_size": world_size,
            "seed": seed,
            "num_samples": num_samples,
        }

    def __iter__(self) -> Iterator[Batch]:
        # A DataLoader takes items from its workers in turn, so worker i makes every n-th step.
        worker = get_worker_info()
        first, stride = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        position = self._position + first * self._order["batch_size"]
        while True:
            ids = rank_sample_ids(position, **self._order)
            yield self._make(ids, position + self._order["rank"] * len(ids) + np.arange(len(ids)))
            position += stride * self._order["batch_size"]


class HeldOut(Dataset):
    """Samples 0 to num_samples - 1, each once; equally many batches of one size for each rank."""

    def __init__(
        self, make: MakeHeldOut, num_samples: int, batch_size: int, rank: int, world_size: int
    ) -> None:
        self._make = make
        # No larger than a rank's share: a small split is not padded up to a large batch.
        share = math.ceil(num_samples / world_size)
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
        return self._make(np.arange(first, first + self._batch_size))
