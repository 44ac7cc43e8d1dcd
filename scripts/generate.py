"""Print text that a model writes.

    python -m scripts.generate run=NAME_OR_FOLDER_OR_CKPT prompt="Fellow citizens" [key=value ...]
    python -m scripts.generate hf=FOLDER_OR_HUB_ID prompt="Fellow citizens" [key=value ...]

The same arguments on the same machine print the same text. Speed goes to stderr.
"""

import sys
import time
from dataclasses import dataclass

import torch

from data.tokenizer import AnyTokenizer
from model.generation import generate
from scripts.arguments import fail, option, parse_arguments
from scripts.models import ModelOptions, open_model


@dataclass
class Options(ModelOptions):
    prompt: str = option("start of the text; empty: after an end of text", default="")
    max_new_tokens: int = option("tokens to add, at most", default=100)
    num_samples: int = option("texts to write", default=1)
    temperature: float = option("divides the logits; 0: always the likeliest", default=0.8)
    top_k: int | None = option("sample among the k likeliest tokens", default=50)
    top_p: float | None = option("sample among tokens of this probability", default=None)
    stop: bool = option("end a sample at the end-of-text token", default=True)
    seed: int = option("decides the samples", default=0)


def sample(options: Options) -> list[str]:
    """The texts, prompt included."""
    if options.num_samples < 1:
        raise ValueError(f"num_samples must be at least 1, got {options.num_samples}")
    model, tokenizer, autocast = open_model(options)
    device = model.head_weight.device
    ids = tokenizer.encode(options.prompt) or [tokenizer.eot]
    input_ids = torch.tensor([ids] * options.num_samples, device=device)
    start = time.perf_counter()
    with autocast:
        out = generate(
            model,
            input_ids,
            options.max_new_tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            eos_id=tokenizer.eot if options.stop else None,
            generator=torch.Generator(device).manual_seed(options.seed),
        ).tolist()  # waits for the device
    seconds = time.perf_counter() - start
    num_new = options.num_samples * (len(out[0]) - len(ids))
    print(f"{num_new} tokens, {num_new / seconds:.1f} tokens/s", file=sys.stderr)
    return [_text(tokenizer, row, len(ids), options) for row in out]


def _text(tokenizer: AnyTokenizer, row: list[int], prompt_len: int, options: Options) -> str:
    """Prompt as given, then what the model wrote, up to its end-of-text token."""
    new = row[prompt_len:]
    if options.stop and tokenizer.eot in new:
        new = new[: new.index(tokenizer.eot)]
    return options.prompt + tokenizer.decode(new)


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse_arguments(Options, arguments, __doc__)
    try:
        texts = sample(options)
    except (ValueError, OSError) as error:
        fail(str(error))
    print("\n\n---\n\n".join(texts))


if __name__ == "__main__":
    main()
