"""Causal language modelling: contiguous windows of a token store, in batches of whole steps.

Window w of the training split has inputs [w * seqlen, w * seqlen + seqlen) and labels one further:
windows do not overlap, and attention crosses document ends, as in the paper's data module
(end-of-text tokens mark them). Each epoch takes every window once; see data.order. Where the
context grows during the run, the windows are those of the final one; see data.context_warmup.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any, Required, TypedDict

import numpy as np
import torch
from torch.utils.data import DataLoader

from data.context_warmup import ContextWarmup
from data.order import sample_ids
from data.prepare import SPLIT_SEED, prepare, store_folder
from data.sources import open_source
from data.stepped import IGNORED_LABEL, Batch, Comparison, MakeStep, SteppedData
from data.token_store import TokenStore, is_finished
from data.tokenizer import AnyTokenizer, load_tokenizer


class CorpusOptions(TypedDict, total=False):
    """Options of CausalLMData that its subclasses hand on to it."""

    source: str
    seqlen: Required[int]
    batch_tokens: Required[int]
    val_batch_tokens: int
    val_fraction: float | None
    split_seed: int
    text_field: str
    source_config: str | None
    source_split: str
    source_revision: str | None
    root: str
    seed: int
    num_workers: int
    prepare_workers: int | None


class CausalLMData(SteppedData):
    """Training steps and held-out windows of one corpus.

    The train loader never ends and has no length. One item is this process's share of one optimizer
    step: `input_ids` and `labels`, each (batch_tokens / seqlen / processes, seqlen) int64, labels
    already shifted. Processes that share their samples (processes_per_sample) count as one. The
    order depends on `seed` alone: not on workers, processes or batch_tokens.
    In a stage of context_warmup sequences are shorter, and as many more.

    The validation loader gives each held-out token as a label exactly once over all processes, in
    order. All its batches have the same shape: what is missing at the end is padding with label
    -100, so losses must be summed over labels and divided by their number, never averaged by batch.

    Args:
        source: "embedded", "hf:OWNER/NAME", the path of text files (see data.sources.open_source),
            or the folder of a finished token store.
        seqlen: tokens of a window.
        batch_tokens: tokens of one optimizer step over all processes; a multiple of seqlen.
        context_warmup: [context, until] of each stage before that of seqlen, for instance
            [[1024, 0.7]]: 1,024 tokens for the first 70 % of the run. None: seqlen throughout.
        max_steps: optimizer steps of the run, which the shares of context_warmup are of.
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
        context_warmup: list | None = None,
        max_steps: int | None = None,
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
        super().__init__(seed=seed, num_workers=num_workers)
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
        self._warmup = None
        if context_warmup is not None:
            self._warmup = ContextWarmup.planned(context_warmup, seqlen=seqlen, max_steps=max_steps)
        self.seqlen = seqlen
        self.batch_tokens = batch_tokens
        self.batch_size = batch_tokens // seqlen
        self.tokenizer: AnyTokenizer = load_tokenizer(tokenizer)
        self.vocab_size = self.tokenizer.vocab_size
        self._val_batch_size = max(1, val_batch_tokens // seqlen)
        self._val_tokens_limit = val_tokens_limit
        self._store: TokenStore | None = None
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

    def num_held_out(self, split: str) -> int:
        """Tokens of "val": there is no third split."""
        return self.num_val_tokens if split == "val" else 0

    def comparison(self, split: str) -> Comparison | None:
        perplexity = self.unigram_perplexity()
        return Comparison(f"unigram model: {perplexity:.2f}", {"unigram_perplexity": perplexity})

    @property
    def num_samples(self) -> int:
        """Windows of one epoch; the last token is a label only."""
        return (self.num_train_tokens - 1) // self.seqlen

    @property
    def fingerprint(self) -> str:
        """Identifies tokens and their order: equal fingerprints continue each other's positions.

        A step of a warm-up has other tokens where the stages or the batch are other ones.
        """
        order = f"{self.store.fingerprint}-seqlen{self.seqlen}-seed{self._seed}"
        if self._warmup is None or self.position >= self._warmup.first_steps[-1] * self.batch_size:
            return order
        stages = zip(self._warmup.contexts, self._warmup.first_steps, strict=True)
        plan = "-".join(f"{context}from{first}" for context, first in stages)
        return f"{order}-batch{self.batch_size}-{plan}"

    @property
    def contexts(self) -> tuple[int, ...]:
        return super().contexts if self._warmup is None else self._warmup.contexts

    def prepare_data(self) -> None:
        """Make the store if it is missing. Called on one process of each machine."""
        if self._source is not None and not is_finished(self._folder):
            prepare(
                self._source, self._folder, workers=self._prepare_workers, **self._prepare_options
            )

    def setup(self, stage: str | None = None) -> None:
        """Open the store and check that the batch fits the processes and the data."""
        world_size = self.world()[1]
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

    def train_batch(self) -> MakeStep:
        if self._warmup is None:
            return partial(next_token_batch, self.store, self.seqlen)
        return partial(
            warmup_batch,
            self.store,
            self._warmup,
            batch_size=self.batch_size,
            seed=self._seed,
            num_samples=self.num_samples,
        )

    def val_dataloader(self) -> DataLoader | list[DataLoader]:
        """Empty if nothing is held out."""
        num_windows = math.ceil(self.num_val_tokens / self.seqlen)
        make = partial(held_out_batch, self.store, self.seqlen, self.num_val_tokens)
        return self.held_out_loader(make, num_windows, self._val_batch_size)

    def test_dataloader(self) -> DataLoader | list[DataLoader]:
        """The validation windows: the paper's code has no third split either."""
        return self.val_dataloader()

    def unigram_perplexity(self) -> float:
        """Perplexity, on the held-out tokens in use, of a unigram model of the training split."""
        val_ids = self.store.val.read(0, self.num_val_tokens)
        return unigram_perplexity(self.store.train_counts(), val_ids)


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


def next_token_batch(
    store: TokenStore, seqlen: int, ids: np.ndarray, positions: np.ndarray
) -> Batch:
    """Inputs and labels of windows `ids` of the training split, each (n, seqlen)."""
    return _sequences(store, seqlen, [int(i) * seqlen for i in ids])


def warmup_batch(
    store: TokenStore,
    warmup: ContextWarmup,
    ids: np.ndarray,
    positions: np.ndarray,
    *,
    batch_size: int,
    seed: int,
    num_samples: int,
) -> Batch:
    """As next_token_batch, at the context of the step that `positions` are in: the same places of
    the batches that `warmup.cut` names, one piece of each window."""
    step, place = divmod(int(positions[0]), batch_size)
    seqlen, starts = warmup.seqlen(step), []
    for other, piece in warmup.cut(step):
        if other != step:
            start = other * batch_size + place
            windows = sample_ids(start, len(ids), seed=seed, num_samples=num_samples)
        else:
            windows = ids
        starts += [int(w) * warmup.contexts[-1] + piece * seqlen for w in windows]
    return _sequences(store, seqlen, starts)


def _sequences(store: TokenStore, seqlen: int, starts: list[int]) -> Batch:
    """Inputs and labels of seqlen tokens from each of `starts` on, (n, seqlen)."""
    rows = np.stack([store.train.read(start, seqlen + 1) for start in starts])
    return {
        "input_ids": torch.from_numpy(rows[:, :-1].copy()),
        "labels": torch.from_numpy(rows[:, 1:].copy()),
    }


def held_out_batch(store: TokenStore, seqlen: int, num_tokens: int, windows: np.ndarray) -> Batch:
    """Windows of the first num_tokens held-out tokens, which are the labels.

    An end-of-text token stands before the first one, so that it too is predicted. What lies behind
    the last one, whole windows too, has no labels.
    """
    inputs = np.full((len(windows), seqlen), store.eot, dtype=np.int64)
    labels = np.full((len(windows), seqlen), IGNORED_LABEL, dtype=np.int64)
    for row, window in enumerate(windows):
        start = int(window) * seqlen
        length = min(seqlen, num_tokens - start)
        if length > 0:
            labels[row, :length] = store.val.read(start, length)
            before = max(start - 1, 0)
            inputs[row, before - (start - 1) : length] = store.val.read(
                before, start + length - 1 - before
            )
    return {"input_ids": torch.from_numpy(inputs), "labels": torch.from_numpy(labels)}
