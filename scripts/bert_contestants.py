"""BERT's pre-training step for scripts.benchmark_training: ours on real tokens alone, ours padded,
and transformers' BertForPreTraining, which pads and computes the logits of every token.

All have the published dropout, both losses, AdamW, and the same random tokens in sequences whose
lengths are English Wikipedia's.
"""

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from data.masked_lm import collate
from data.masked_samples import Sample
from data.stepped import IGNORED_LABEL
from model.bert_loss import piece_of, with_host_counts

#: BERT's pre-training samples of English Wikipedia at 512 tokens, in thousands: of 1 to 32 tokens,
#: 33 to 64, ..., 481 to 511, and of 512. Mean 256. Sums of the histogram that Krell et al. (arXiv
#: 2107.02027, "Efficient sequence packing without cross-contamination") published with their code.
WIKIPEDIA_LENGTHS = (585, 2278, 1853, 1297, 1014, 841, 720, 629, 554, 496, 450, 410, 375, 347, 321,
                     292, 3815)  # fmt: skip
_BIN, _LONGEST = 32, 512
_VOCAB_SIZE, _MASK = 30522, 103
_FIRST_WORD = 999  # ids below it are special or unused
_MASK_FRACTION, _MAX_MASKED = 0.15, 76


def wikipedia_lengths(number: int, seqlen: int, draw: np.random.Generator) -> np.ndarray:
    """(number,) int64 in [4, seqlen]: uniform in a bin of WIKIPEDIA_LENGTHS, scaled if seqlen is
    not 512."""
    shares = np.array(WIKIPEDIA_LENGTHS) / sum(WIKIPEDIA_LENGTHS)
    bins = draw.choice(len(shares), size=number, p=shares)
    lengths = np.minimum(_BIN * bins + draw.integers(1, _BIN + 1, size=number), _LONGEST - 1)
    lengths[bins == len(shares) - 1] = _LONGEST
    return np.maximum(np.ceil(lengths * seqlen / _LONGEST).astype(np.int64), 4)


def random_sample(length: int, draw: np.random.Generator) -> Sample:
    """Two segments of random words, 15 % of them masked, a random next-sentence label."""
    ids = draw.integers(_FIRST_WORD, _VOCAB_SIZE, size=length)
    labels = np.full(length, IGNORED_LABEL)
    count = min(max(1, round(_MASK_FRACTION * length)), _MAX_MASKED)
    chosen = draw.permutation(length)[:count]
    labels[chosen] = ids[chosen]
    ids[chosen] = _MASK
    segments = (np.arange(length) >= draw.integers(1, length)).astype(np.int64)
    return Sample(ids, labels, segments, int(draw.integers(2)))


@functools.cache
def random_steps(seqlen: int, tokens: int, number: int = 2) -> tuple[tuple[Sample, ...], ...]:
    """The samples of so many optimizer steps, tokens / seqlen each: the same in every process."""
    draw = np.random.default_rng(1)
    return tuple(
        tuple(random_sample(n, draw) for n in wikipedia_lengths(tokens // seqlen, seqlen, draw))
        for _ in range(number)
    )


def mean_work(seqlen: int, tokens: int) -> dict[str, float]:
    """What model.bert.BERT.flops reads, of the mean step."""
    steps = random_steps(seqlen, tokens)
    lengths = [len(sample.input_ids) for step in steps for sample in step]
    masked = sum(int((s.labels != IGNORED_LABEL).sum()) for step in steps for s in step)
    work = {
        "tokens": sum(lengths),
        "pairs": sum(length**2 for length in lengths),
        "masked": masked,
        "samples": len(lengths),
    }
    return {name: value / len(steps) for name, value in work.items()}


def pieces(
    seqlen: int, tokens: int, micro_batch: int, packed: bool, device: str
) -> list[list[dict[str, Any]]]:
    """For each step its micro-batches, in the form of data.masked_lm, on the device, with the
    `num_masked` and `num_pairs` of the whole step.

    Args:
        micro_batch: sequences of each; divides those of a step.
    """
    found = []
    for step in random_steps(seqlen, tokens):
        batch = with_host_counts(collate([*step], seqlen=seqlen, pad=0, packed=packed))
        starts = range(0, len(step), micro_batch)
        counts = {"num_masked": len(batch["masked_positions"]), "num_pairs": len(step)}
        cut = [piece_of(batch, slice(i, i + micro_batch)) | counts for i in starts]
        found.append([{k: _moved(v, device) for k, v in piece.items()} for piece in cut])
    return found


def _moved(value: Any, device: str) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def hugging_face(shape: Any, attention: str, dropout_p: float) -> tuple[nn.Module, Optimizer]:
    """transformers' model of a shape of configs/model, and AdamW.

    Args:
        attention: "eager" or "sdpa".
    """
    from transformers import BertConfig, BertForPreTraining

    config = BertConfig(
        num_hidden_layers=shape.depth, hidden_size=shape.dim, num_attention_heads=shape.nheads,
        intermediate_size=4 * shape.dim, max_position_embeddings=shape.max_seqlen,
        vocab_size=_VOCAB_SIZE, hidden_dropout_prob=dropout_p,
        attention_probs_dropout_prob=dropout_p, attn_implementation=attention,
    )  # fmt: skip
    model = BertForPreTraining(config).train()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def hugging_face_inputs(piece: dict[str, Any]) -> dict[str, Tensor]:
    """A padded piece as BertForPreTraining's arguments."""
    ids = piece["input_ids"]
    places = torch.arange(ids.shape[1], device=ids.device)
    return {
        "input_ids": ids,
        "attention_mask": (places < piece["lengths"][:, None]).long(),
        "token_type_ids": piece["segment_ids"],
        "labels": piece["labels"],
        "next_sentence_label": piece["nsp_labels"],
    }
