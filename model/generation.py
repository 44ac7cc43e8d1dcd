"""Sampling from a GPT: greedy, temperature, top-k, top-p, with a KV cache."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from model.gpt import GPT
from model.self_attention import KVCache


@torch.no_grad()
def generate(
    model: GPT,
    input_ids: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eos_id: int | None = None,
    generator: torch.Generator | None = None,
    use_cache: bool = True,
    on_token: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """Continue each row of input_ids.

    Beyond max_seqlen tokens the context is the text from context_start() on: half of it is
    forgotten at once, because a learned position cannot slide in the cache.

    Args:
        model: used in eval mode, its mode is restored.
        input_ids: (batch, seqlen >= 1) int64, on the model's device; rows have one length.
        max_new_tokens: tokens to add.
        temperature: divides the logits; 0 takes the likeliest token (greedy).
        top_k: sample among the k likeliest tokens.
        top_p: sample among the fewest likeliest tokens whose probabilities reach top_p.
        eos_id: a row that has drawn this token is filled with it; the end of all rows stops.
        generator: on the model's device; default torch's global one.
        use_cache: False computes the whole context for every token (slow; the same text).
        on_token: receives each step's tokens (batch,), for streaming.

    Returns:
        (batch, seqlen + new) int64: the prompt and at most max_new_tokens after it.

    Raises:
        ValueError: an argument is out of range, or input_ids holds an id outside the vocabulary.
    """
    _check_arguments(model, input_ids, max_new_tokens, temperature, top_k, top_p)
    batch, seqlen = input_ids.shape
    tokens = input_ids.new_empty(batch, seqlen + max_new_tokens)
    tokens[:, :seqlen] = input_ids
    finished = torch.zeros(batch, dtype=torch.bool, device=input_ids.device)
    cache = KVCache(min(model.max_seqlen, tokens.shape[1])) if use_cache else None
    cached_start = 0
    was_training = model.training
    model.eval()
    try:
        for end in range(seqlen, seqlen + max_new_tokens):
            start = context_start(end, model.max_seqlen)
            if cache is not None:
                if start != cached_start:
                    cache.reset()
                    cached_start = start
                start += cache.length
            hidden = model.hidden(tokens[:, start:end], kv_cache=cache)
            logits = model.logits(hidden[:, -1])
            chosen = _choose(logits, temperature, top_k, top_p, generator)
            if eos_id is not None:
                chosen = chosen.masked_fill(finished, eos_id)
                finished |= chosen == eos_id
            tokens[:, end] = chosen
            if on_token is not None:
                on_token(chosen)
            if eos_id is not None and finished.all():
                return tokens[:, : end + 1]
    finally:
        model.train(was_training)
    return tokens


def sample_text(
    model: GPT,
    tokenizer: Any,
    prompt: str,
    num_tokens: int,
    *,
    seed: int,
    num_samples: int = 1,
) -> list[str]:
    """Texts that continue a prompt, drawn at temperature 0.8 from the 50 likeliest tokens.

    Args:
        tokenizer: with encode(text) -> ids and decode(ids) -> text.
        seed: of a generator of its own.
    """
    device = model.head_weight.device
    ids = torch.tensor([tokenizer.encode(prompt)] * num_samples, device=device)
    rng = torch.Generator(device).manual_seed(seed)
    ids = generate(model, ids, num_tokens, temperature=0.8, top_k=50, generator=rng)
    return [tokenizer.decode(row.tolist()) for row in ids]


def context_start(num_tokens: int, max_seqlen: int) -> int:
    """First token that the model sees when it continues a text of num_tokens.

    0 while the text fits; then it moves in strides of half of max_seqlen (rounded up), so that a
    cache is refilled once a stride: max_seqlen 4 gives 0 0 0 0 2 2 4 4 6 6 for 1 to 10 tokens.
    """
    stride = max_seqlen - max_seqlen // 2
    return -(-max(num_tokens - max_seqlen, 0) // stride) * stride


def _choose(
    logits: Tensor,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    generator: torch.Generator | None,
) -> Tensor:
    """One token per row of logits (batch, vocab_size) -> (batch,) int64."""
    if temperature == 0.0:
        return logits.argmax(-1)
    logits = logits.float() / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        smallest_kept = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < smallest_kept, -torch.inf)
    if top_p is not None and top_p < 1.0:
        ordered, order = logits.sort(descending=True)
        probs = ordered.softmax(-1)
        # A token stays while those before it have not reached top_p: the likeliest always does.
        keep_ordered = probs.cumsum(-1) - probs < top_p
        keep = torch.zeros_like(keep_ordered).scatter(-1, order, keep_ordered)
        logits = logits.masked_fill(~keep, -torch.inf)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1)


def _check_arguments(
    model: GPT,
    input_ids: Tensor,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
) -> None:
    if input_ids.dim() != 2 or input_ids.shape[1] < 1:
        raise ValueError(
            f"input_ids must be (batch, seqlen) with a token to start from, got "
            f"{tuple(input_ids.shape)}; start from the end-of-text token if there is no prompt"
        )
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must be at least 0, got {max_new_tokens}")
    if not temperature >= 0.0:
        raise ValueError(f"temperature must be at least 0, got {temperature}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be at least 1, got {top_k}")
    if top_p is not None and not 0.0 < top_p <= 1.0:
        raise ValueError(f"top_p must be in (0, 1], got {top_p}")
    low, high = input_ids.aminmax()
    if low < 0 or high >= model.vocab_size:
        raise ValueError(
            f"input_ids must be in [0, {model.vocab_size}), got {int(low)} to {int(high)}; use the "
            "tokenizer that the model was trained with"
        )
