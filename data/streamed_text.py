"""Causal language modelling on text that the disk has no room for: windows of a token stream.

A shard of the stream (data.token_stream) is to the order of samples what an epoch is elsewhere:
shard after shard, in each of them every window once, in an order that depends on the seed and the
shard's number. Where the source ends it begins anew, perhaps in the middle of a shard.
"""

from __future__ import annotations

import socket
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data.causal_lm import CausalLMData
from data.prepare import PAPER_VAL_FRACTION, SPLIT_SEED
from data.shard_maker import ShardMaker, ShardReader
from data.stepped import Batch, MakeStep
from data.token_stream import NUM_SHARDS, Mark, Marks, StreamPlan, prepare_head


class StreamedTextData(CausalLMData):
    """Training steps from a source that is tokenized while they are made.

    As CausalLMData, with `num_samples` windows in a shard. Held-out documents are those that come
    before the end of the first shard; later ones that would be are left out, so that no duplicate
    of a held-out document is trained on. A run continues anywhere: a shard that is gone is made
    again from its place in the source, which checkpoints hold. Each machine has shards of its own;
    its first process has the process that makes them.

    Args:
        stream_tokens: of the stream that are on disk at a time, at most. A third of them is a
            shard, which holds a batch at least.
        val_fraction: of the documents; None is 0.0005.
        prepare_workers: tokenizing processes; None is one for every two cores.
        others: see CausalLMData.
    Raises:
        ValueError: as CausalLMData, or the source is a prepared store.
    """

    def __init__(
        self,
        *,
        source: str,
        seqlen: int,
        batch_tokens: int,
        stream_tokens: int = 300_000_000,
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
        super().__init__(
            source=source,
            seqlen=seqlen,
            batch_tokens=batch_tokens,
            val_batch_tokens=val_batch_tokens,
            val_tokens_limit=val_tokens_limit,
            val_fraction=val_fraction,
            split_seed=split_seed,
            tokenizer=tokenizer,
            text_field=text_field,
            source_config=source_config,
            source_split=source_split,
            source_revision=source_revision,
            root=root,
            seed=seed,
            num_workers=num_workers,
            prepare_workers=prepare_workers,
        )
        if self._source is None:
            raise ValueError(f"{source} is prepared already: use data=text data.source={source}")
        self._num_samples = stream_tokens // NUM_SHARDS // seqlen
        if self._num_samples < self.batch_size:
            raise ValueError(
                f"stream_tokens must be at least {NUM_SHARDS} times batch_tokens={batch_tokens}, "
                f"got {stream_tokens}"
            )
        self._plan = StreamPlan(
            self._source,
            tokenizer,
            self._num_samples * seqlen,
            PAPER_VAL_FRACTION if val_fraction is None else val_fraction,
            split_seed,
            prepare_workers,
        )
        name = f"{self._source.name}-stream-{self._plan.key()}-{socket.gethostname()}"
        self._folder = Path(root) / name
        self._maker: ShardMaker | None = None
        self._resumed_mark: tuple[int, Mark] | None = None

    @property
    def num_train_tokens(self) -> int:
        """Of a shard."""
        return self._num_samples * self.seqlen

    @property
    def num_samples(self) -> int:
        """Windows of a shard."""
        return self._num_samples

    @property
    def fingerprint(self) -> str:
        return f"{super().fingerprint}-stream{self._num_samples}"

    def sample_ids(self, step: int) -> np.ndarray:
        """As SteppedData; window i starts at token i * seqlen of the stream."""
        first = self._start_position + (step - self._start_step) * self.batch_size
        shards = (first + np.arange(self.batch_size)) // self._num_samples
        return super().sample_ids(step) + shards * self._num_samples

    def prepare_data(self) -> None:
        prepare_head(self._plan, self._folder)

    def train_batch(self) -> MakeStep:
        reader = ShardReader(self._folder, self.vocab_size, self.num_train_tokens)
        return partial(streamed_batch, reader, self.seqlen)

    def train_dataloader(self) -> Any:
        loader = super().train_dataloader()
        if self.trainer is None or self.trainer.local_rank == 0:
            self.teardown("fit")
            first = self._shard()
            resumed = self._resumed_mark
            mark = resumed[1] if resumed is not None and resumed[0] == first else None
            self._maker = ShardMaker(self._plan, self._folder, first, mark)
        return loader

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self._maker is not None:
            self._maker.need(self._shard())
        return batch

    def teardown(self, stage: str) -> None:
        """End the process that makes shards; the loaders of this one wait in vain from here on."""
        if self._maker is not None:
            self._maker.stop()
            self._maker = None

    def state_dict(self) -> dict[str, Any]:
        shard = self._shard()
        mark = Marks(self._folder).places.get(shard)
        return {**super().state_dict(), "mark": None if mark is None else [shard, list(mark)]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if state_dict.get("mark") is not None:
            shard, mark = state_dict["mark"]
            self._resumed_mark = int(shard), Mark(*map(int, mark))

    def _shard(self) -> int:
        """The shard that the next step begins in."""
        return self.position // self._num_samples


def streamed_batch(
    reader: ShardReader, seqlen: int, ids: np.ndarray, positions: np.ndarray
) -> Batch:
    """Inputs and labels of windows `ids` of the shards that `positions` are in, (n, seqlen)."""
    shards = positions // (reader.shard_tokens // seqlen)
    rows = np.stack(
        [
            reader.read(int(shard), int(i) * seqlen, seqlen + 1)
            for shard, i in zip(shards, ids, strict=True)
        ]
    )
    return {
        "input_ids": torch.from_numpy(rows[:, :-1].copy()),
        "labels": torch.from_numpy(rows[:, 1:].copy()),
    }
