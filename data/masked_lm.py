"""Masked language modelling: sentence pairs or single spans of a token store, masked in the loader.

Stores are tokenized with BERT's WordPiece, whose special ids the samples need (data/wordpiece.py).
"""

from __future__ import annotations

from functools import partial
from typing import Unpack

import numpy as np
import torch
from torch.utils.data import DataLoader

from data.causal_lm import CausalLMData, CorpusOptions
from data.masked_samples import MaskedOptions, MaskedSamples, Sample
from data.order import permute
from data.stepped import IGNORED_LABEL, Batch, Comparison, MakeStep
from data.wordpiece import BERT_UNCASED, WordPiece

_VAL_SEED = 0  # the held-out examples and their masks are the same in every run


class MaskedLMData(CausalLMData):
    """Training steps and held-out examples of one corpus, for BERT.

    Order, positions, resuming and processes are as in CausalLMData; a sample is a window of one
    document (data.masked_samples), its pair and masks a function of seed, epoch and window alone.
    One item of the train loader is this process's share of one optimizer step. Its sequences, n =
    batch_tokens / seqlen / world_size, are

    * padded: input_ids, labels, segment_ids (n, seqlen) int64, lengths (n,) int32; or
    * packed: input_ids, labels, segment_ids (total,) int64, cu_seqlens (n + 1,) int32, max_seqlen
      int, seqlen whatever the batch holds;

    with nsp_labels (n,) int64: 0 where segment B follows A, 1 where it is random. Labels are -100
    where there is no loss: outside the chosen tokens; NSP labels without sentence pairs.

    The validation loader gives fixed examples, each once over all processes: held-out windows in an
    order and with masks that no seed changes. All its batches hold the same number of sequences:
    what is missing at the end is single padding tokens without labels, so losses must be summed
    over labels and divided by their number.

    Args:
        corpus: see CausalLMData; batch_tokens count padding, and seed is also that of pairs and of
            masks.
        packed: which of the two forms batches have.
        sentence_pairs: pairs with NSP labels (BERT), or single spans (RoBERTa).
        mask_fraction: of a sample's tokens, in (0, 1).
        max_masked: most predicted tokens of a sample; None is no bound.
        short_fraction: share of samples cut to a random length, in [0, 1].
        val_samples_limit: use only so many held-out examples; None uses all.
    Raises:
        ValueError: sizes that do not fit together.
        FileNotFoundError: no such local source.
    """

    tokenizer: WordPiece

    def __init__(
        self,
        *,
        val_samples_limit: int | None = None,
        packed: bool = True,
        sentence_pairs: bool = True,
        mask_fraction: float = 0.15,
        max_masked: int | None = None,
        short_fraction: float = 0.1,
        **corpus: Unpack[CorpusOptions],
    ) -> None:
        super().__init__(tokenizer=BERT_UNCASED, **corpus)
        if self.seqlen < 5:
            raise ValueError(f"seqlen must be at least 5, [CLS] A [SEP] B [SEP], got {self.seqlen}")
        if not 0.0 < mask_fraction < 1.0:
            raise ValueError(f"mask_fraction must be in (0, 1), got {mask_fraction}")
        if not 0.0 <= short_fraction <= 1.0:
            raise ValueError(f"short_fraction must be in [0, 1], got {short_fraction}")
        for name, limit in (("max_masked", max_masked), ("val_samples_limit", val_samples_limit)):
            if limit is not None and limit < 1:
                raise ValueError(f"{name} must be at least 1, got {limit}")
        self._options = MaskedOptions(
            self.seqlen, mask_fraction, max_masked, sentence_pairs, short_fraction
        )
        self._packed = packed
        self.sentence_pairs = sentence_pairs
        self._val_samples_limit = val_samples_limit
        self._made: dict[str, MaskedSamples] = {}

    def samples(self, split: str) -> MaskedSamples:
        """The samples of "train" or "val"; the data must be opened."""
        if split not in self._made:
            self._made[split] = MaskedSamples(
                getattr(self.store, split),
                self._options,
                special=self.tokenizer.special,
                sentence_ends=self.tokenizer.sentence_ends,
                vocab_size=self.vocab_size,
                seed=self._seed if split == "train" else _VAL_SEED,
                name=split,
            )
        return self._made[split]

    @property
    def num_samples(self) -> int:
        """Samples of one epoch."""
        return len(self.samples("train"))

    @property
    def num_val_samples(self) -> int:
        """Held-out examples in use."""
        total = len(self.samples("val"))
        return total if self._val_samples_limit is None else min(total, self._val_samples_limit)

    def num_held_out(self, split: str) -> int:
        """Examples of "val": there is no third split."""
        return self.num_val_samples if split == "val" else 0

    def comparison(self, split: str) -> Comparison | None:
        accuracy = self.constant_accuracy()
        line = f"the commonest token everywhere: {accuracy:.2%}"
        return Comparison(line, {"constant_accuracy": accuracy})

    def constant_accuracy(self) -> float:
        """Share of the held-out text that the training text's commonest token makes up.

        Special tokens, which are never predicted, count in neither.
        """
        special = np.array(self.tokenizer.special)
        counts = self.store.train_counts().copy()
        counts[special] = 0
        ids = self.store.val.read(0, self.num_val_tokens)
        return float((ids[~np.isin(ids, special)] == counts.argmax()).mean())

    @property
    def fingerprint(self) -> str:
        """As CausalLMData's, with what else the samples depend on."""
        options = self._options
        return (
            f"{super().fingerprint}-mask{options.mask_fraction}-max{options.max_masked}"
            f"-pairs{int(options.sentence_pairs)}-short{options.short_fraction}"
        )

    def _check_samples(self) -> None:
        if self.num_samples < 1:
            raise ValueError(
                "the training split must hold a document of at least 2 tokens, got "
                f"{self.num_train_tokens} tokens: use more text"
            )

    @property
    def _form(self) -> dict[str, int | bool]:
        """The options of collate."""
        pad = self.tokenizer.special.pad
        return {"seqlen": self.seqlen, "pad": pad, "packed": self._packed}

    def train_batch(self) -> MakeStep:
        return partial(masked_batch, self.samples("train"), self._form)

    def val_dataloader(self) -> DataLoader | list[DataLoader]:
        """Empty if nothing is held out."""
        number = self.num_val_samples
        make = partial(held_out_batch, self.samples("val"), self._form, number)
        return self.held_out_loader(make, number, self._val_batch_size)


def masked_batch(
    samples: MaskedSamples, form: dict, ids: np.ndarray, positions: np.ndarray
) -> Batch:
    """Samples `ids`, masked as the epoch that their position is in asks."""
    epochs = positions // len(samples)
    rows = [samples.sample(int(i), int(epoch)) for i, epoch in zip(ids, epochs, strict=True)]
    return collate(rows, **form)


def held_out_batch(samples: MaskedSamples, form: dict, number: int, places: np.ndarray) -> Batch:
    """Held-out examples, filled up with single padding tokens without labels."""
    real = places[places < number]
    # A limit takes examples from the whole split, not its first documents.
    ids = permute(real, seed=_VAL_SEED, epoch=0, num_samples=len(samples))
    rows = [samples.sample(int(sample_id), 0) for sample_id in ids]
    nothing = np.full(1, IGNORED_LABEL)
    filler = Sample(np.full(1, form["pad"]), nothing, np.zeros(1, np.int64), IGNORED_LABEL)
    return collate(rows + [filler] * (len(places) - len(real)), **form)


def collate(rows: list[Sample], *, seqlen: int, pad: int, packed: bool) -> Batch:
    """Samples as one batch; see MaskedLMData.

    Args:
        rows: at least one, of at most seqlen tokens each.
        pad: id after the end of a padded sequence.
    """
    lengths = np.array([len(row.input_ids) for row in rows])
    batch: Batch = {}
    for key, filler in (("input_ids", pad), ("labels", IGNORED_LABEL), ("segment_ids", 0)):
        arrays = [getattr(row, key) for row in rows]
        if packed:
            joined = np.concatenate(arrays)
        else:
            joined = np.full((len(rows), seqlen), filler, dtype=np.int64)
            for line, array in zip(joined, arrays, strict=True):
                line[: len(array)] = array
        batch[key] = torch.from_numpy(joined)
    if packed:
        cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        batch |= {"cu_seqlens": torch.from_numpy(cu_seqlens), "max_seqlen": seqlen}
    else:
        batch["lengths"] = torch.from_numpy(lengths.astype(np.int32))
    batch["nsp_labels"] = torch.tensor([row.nsp_label for row in rows])
    return batch
