"""Causal language modelling: contiguous windows of a token store, in batches of whole steps.

Window w of the training split has inputs [w * seqlen, w * seqlen + seqlen) and labels one further:
windows do not overlap, and attention crosses document ends, as in the paper's data module
(end-of-text tokens mark them). Each epoch takes every window once; see data.order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from data.order import rank_sample_ids
from data.prepare import SPLIT_SEED, prepare, store_folder
from data.sources import open_source
from data.token_store import TokenStore, is_finished
from data.tokenizer import Tokenizer, load_tokenizer

IGNORED_LABEL = -100

Batch = dict[str, torch.Tensor]


class CausalLMData(lightning.LightningDataModule):
    """Training steps and held-out windows of one corpus.

    The train loader never ends and has no length. One item is this process's share of one optimizer
    step: `input_ids` and `labels`, each (batch_tokens / seqlen / world_size, seqlen) int64, labels
    already shifted. The order depends on `seed` alone: not on workers, processes or batch_tokens.

    The validation loader gives each held-out token as a label exactly once over all processes, in
    order. All its batches have the same shape: what is missing at the end is padding with label
    -100, so losses must be summed over labels and divided by their number, never averaged by batch.

    Args:
        source: "embedded", "hf:OWNER/NAME", the path of text files (see data.sources.open_source),
            or the folder of a finished token store.
        seqlen: tokens of a window.
        batch_tokens: tokens of one optimizer step over all processes; a multiple of seqlen.
        val_batch_tokens: tokens of one validation forward of one process; at least one window.
        val_tokens_limit: use only the first so many held-out tokens; None uses all.
        val_fraction, split_seed: how documents are held out, see data.prepare.prepare.
        tokenizer: "gpt2".
        text_field, source_config, source_split, source_revision: see data.sources.open_source.
        root: folder under which prepared stores are cached.
        seed: of the order of samples.
        num_workers: processes that load training batches ahead; 0 loads in the training process.
        prepare_workers: tokenizing processes; None chooses by the size of the source.
    Raises:
        ValueError: sizes that do not fit together, or an unknown tokenizer.
        FileNotFoundError: no such local source.
    """

    def __init__(
        self,
        *,
        source: str = "embedded",
        seqlen: int,
        batch_tokens: int,
        val_batch_tokens: int = 16384,
        val_tokens_limit: int | None = None,
        val_fraction: float | None = None,
        split_seed: int = SPLIT_SEED,
        tokenizer: str = "gpt2",
        text_field: str = "text",
        source_config: str | None = None,
        source_split: str = "train",
        source_revision: str | None = None,
        root: str = "outputs/data",
        seed: int = 1111,
        num_workers: int = 0,
        prepare_workers: int | None = None,
    ) -> None:
        super().__init__()
        if seqlen < 1:
            raise ValueError(f"seqlen must be at least 1, got {seqlen}")
        if batch_tokens < 1 or batch_tokens % seqlen:
            raise ValueError(
                f"batch_tokens must be a positive multiple of seqlen={seqlen}, got {batch_tokens}: "
                f"try {max(1, round(batch_tokens / seqlen)) * seqlen}"
            )
        if val_batch_tokens < 1:
            raise ValueError(f"val_batch_tokens must be at least 1, got {val_batch_tokens}")
        if val_tokens_limit is not None and val_tokens_limit < 1:
            raise ValueError(f"val_tokens_limit must be at least 1, got {val_tokens_limit}")
        if val_fraction is not None and not 0 <= val_fraction < 1:
            raise ValueError(f"val_fraction must be in [0, 1), got {val_fraction}")
        if num_workers < 0:
            raise ValueError(f"num_workers must not be negative, got {num_workers}")
        self.seqlen = seqlen
        self.batch_tokens = batch_tokens
        self.batch_size = batch_tokens // seqlen
        self.tokenizer: Tokenizer = load_tokenizer(tokenizer)
        self.vocab_size = self.tokenizer.vocab_size
        self._val_batch_size = max(1, val_batch_tokens // seqlen)
        self._val_tokens_limit = val_tokens_limit
        self._seed = seed
        self._num_workers = num_workers
        self._store: TokenStore | None = None
        self._start_position = 0
        self._start_step = 0
        self._resumed_fingerprint: str | None = None
        self._prepare_options: dict[str, Any] = {
            "tokenizer": self.tokenizer,
            "val_fraction": val_fraction,
            "split_seed": split_seed,
        }
        self._prepare_workers = prepare_workers
        if not source.startswith("hf:") and source != "embedded" and is_finished(source):
            self._source = None
            self._folder = Path(source)
        else:
            self._source = open_source(
                source,
                text_field=text_field,
                config=source_config,
                split=source_split,
                revision=source_revision,
            )
            self._folder = store_folder(root, self._source, **self._prepare_options)

    @property
    def store(self) -> TokenStore:
        """The prepared data; opened by `setup`."""
        if self._store is None:
            raise RuntimeError("the data must be opened first: call prepare_data() and setup()")
        return self._store

    @property
    def num_train_tokens(self) -> int:
        return self.store.train.num_tokens

    @property
    def num_val_tokens(self) -> int:
        """Held-out tokens in use, each of them a label once."""
        total = self.store.val.num_tokens
        return total if self._val_tokens_limit is None else min(total, self._val_tokens_limit)

    @property
    def num_samples(self) -> int:
        """Windows of one epoch; the last token is a label only."""
        return (self.num_train_tokens - 1) // self.seqlen

    @property
    def fingerprint(self) -> str:
        """Identifies tokens and their order: equal fingerprints continue each other's positions."""
        return f"{self.store.fingerprint}-seqlen{self.seqlen}-seed{self._seed}"

    @property
    def position(self) -> int:
        """Samples consumed by finished optimizer steps, over all processes and resumed runs."""
        step = self.trainer.global_step if self.trainer is not None else self._start_step
        # Lightning restores this state before global_step, and may ask for a loader in between.
        return self._start_position + max(0, step - self._start_step) * self.batch_size

    def prepare_data(self) -> None:
        """Make the store if it is missing. Called on one process of each machine."""
        if self._source is not None and not is_finished(self._folder):
            prepare(
                self._source, self._folder, workers=self._prepare_workers, **self._prepare_options
            )

    def setup(self, stage: str | None = None) -> None:
        """Open the store and check that the batch fits the processes and the data."""
        world_size = self._world()[1]
        if self.batch_size % world_size:
            raise ValueError(
                f"batch_tokens / seqlen must be a multiple of the number of processes, got "
                f"{self.batch_size} sequences on {world_size}: change batch_tokens"
            )
        if self._store is None:
            store = TokenStore(self._folder)
            if store.manifest["tokenizer"]["sha256"] != self.tokenizer.sha256:
                raise ValueError(
                    f"{self._folder} must be tokenized with {self.tokenizer.name!r}, got "
                    f"{store.manifest['tokenizer']['name']!r}: prepare it again"
                )
            self._store = store
        self._check_samples()

    def _check_samples(self) -> None:
        if self.num_samples < 1:
            raise ValueError(
                f"the training split must hold at least seqlen + 1 = {self.seqlen + 1} tokens, got "
                f"{self.num_train_tokens}: use more text or a smaller seqlen"
            )

    def sample_ids(self, step: int) -> np.ndarray:
        """Ids of the windows that optimizer step `step` (trainer.global_step before it) consumes.

        Returns:
            (batch_size,) int64, over all processes in rank order.
        """
        position = self._start_position + (step - self._start_step) * self.batch_size
        return rank_sample_ids(
            position,
            batch_size=self.batch_size,
            rank=0,
            world_size=1,
            seed=self._seed,
            num_samples=self.num_samples,
        )

    def train_dataloader(self) -> DataLoader:
        """Endless steps from `position` on.

        Raises:
            ValueError: the loaded state belongs to other tokens, another seqlen or another seed.
        """
        if self._resumed_fingerprint not in (None, self.fingerprint):
            raise ValueError(
                f"the checkpoint must be continued on the data that it was trained on, "
                f"{self._resumed_fingerprint}, got {self.fingerprint}: restore source, seqlen and "
                "seed, or start a new run from the weights alone"
            )
        rank, world_size = self._world()
        steps = self._train_steps(
            seqlen=self.seqlen,
            position=self.position,
            batch_size=self.batch_size,
            rank=rank,
            world_size=world_size,
            seed=self._seed,
        )
        return self._loader(steps, self._num_workers)

    def _train_steps(self, **options: Any) -> TrainSteps:
        return TrainSteps(self.store, **options)

    def val_dataloader(self) -> DataLoader | list[DataLoader]:
        """Empty if nothing is held out."""
        batches = self._val_batches(*self._world())
        return [] if batches is None else self._loader(batches, 0)

    def _val_batches(self, rank: int, world_size: int) -> Dataset | None:
        if not self.num_val_tokens:
            return None
        return _ValBatches(
            self.store,
            seqlen=self.seqlen,
            batch_size=self._val_batch_size,
            num_tokens=self.num_val_tokens,
            rank=rank,
            world_size=world_size,
        )

    def test_dataloader(self) -> DataLoader | list[DataLoader]:
        """The validation windows: the paper's code has no third split either."""
        return self.val_dataloader()

    def unigram_perplexity(self) -> float:
        """Perplexity, on the held-out tokens in use, of a unigram model of the training split."""
        val_ids = self.store.val.read(0, self.num_val_tokens)
        return unigram_perplexity(self.store.train_counts(), val_ids)

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


def unigram_perplexity(train_counts: np.ndarray, val_ids: np.ndarray) -> float:
    """Perplexity of add-one smoothed training frequencies on held-out tokens.

    Args:
        train_counts: (vocab_size,) integers.
        val_ids: (num_tokens,) integers in [0, vocab_size).
    Returns:
        exp of the mean of -log((count + 1) / (total + vocab_size)).
    Raises:
        ValueError: there are no held-out tokens.
    """
    if not len(val_ids):
        raise ValueError("the held-out split must hold tokens, got none: set val_fraction above 0")
    total = int(train_counts.sum()) + len(train_counts)
    log_probs = np.log(train_counts + 1.0) - math.log(total)
    val_counts = np.bincount(val_ids, minlength=len(train_counts))
    return math.exp(-float(val_counts @ log_probs) / len(val_ids))


class TrainSteps(IterableDataset):
    """Endless: this process's share of one optimizer step after another."""

    def __init__(
        self,
        store: TokenStore,
        *,
        seqlen: int,
        position: int,
        batch_size: int,
        rank: int,
        world_size: int,
        seed: int,
    ) -> None:
        self._store = store
        self._seqlen = seqlen
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
            yield self._step(position)
            position += stride * self._batch_size

    def _step(self, position: int) -> Batch:
        split = self._store.train
        ids = rank_sample_ids(
            position,
            batch_size=self._batch_size,
            rank=self._rank,
            world_size=self._world_size,
            seed=self._seed,
            num_samples=(split.num_tokens - 1) // self._seqlen,
        )
        rows = [split.read(int(i) * self._seqlen, self._seqlen + 1) for i in ids]
        return _shifted(np.stack(rows))


class _ValBatches(Dataset):
    """The first tokens of the held-out split as labels, each once; equally many batches per rank.

    An end-of-text token stands before the first one, so that it too is predicted.
    """

    def __init__(
        self,
        store: TokenStore,
        *,
        seqlen: int,
        batch_size: int,
        num_tokens: int,
        rank: int,
        world_size: int,
    ) -> None:
        self._store = store
        self._seqlen = seqlen
        self._num_tokens = num_tokens
        self._num_windows = math.ceil(num_tokens / seqlen)
        # No larger than a rank's share: a small split is not padded up to a large batch.
        share = math.ceil(self._num_windows / world_size)
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
        rows = [self._window(w) for w in range(first, first + self._batch_size)]
        inputs, labels = zip(*rows, strict=True)
        return {
            "input_ids": torch.from_numpy(np.stack(inputs)),
            "labels": torch.from_numpy(np.stack(labels)),
        }

    def _window(self, window: int) -> tuple[np.ndarray, np.ndarray]:
        inputs = np.full(self._seqlen, self._store.eot, dtype=np.int64)
        labels = np.full(self._seqlen, IGNORED_LABEL, dtype=np.int64)
        start = window * self._seqlen
        length = min(self._seqlen, self._num_tokens - start)
        if length > 0:
            labels[:length] = self._store.val.read(start, length)
            before = max(start - 1, 0)
            inputs[before - (start - 1) : length] = self._store.val.read(
                before, start + length - 1 - before
            )
        return inputs, labels


def _shifted(rows: np.ndarray) -> Batch:
    """Inputs and labels of rows of seqlen + 1 tokens."""
    return {
        "input_ids": torch.from_numpy(rows[:, :-1].copy()),
        "labels": torch.from_numpy(rows[:, 1:].copy()),
    }
