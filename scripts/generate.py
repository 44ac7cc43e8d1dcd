"""Print text that a model writes.

    python -m scripts.generate run=NAME_OR_FOLDER_OR_CKPT prompt="Fellow citizens" [key=value ...]
    python -m scripts.generate hf=FOLDER_OR_HUB_ID prompt="Fellow citizens" [key=value ...]

The same arguments on the same machine print the same text. Speed goes to stderr.
"""

import sys
import time
from dataclasses import dataclass

import torch

from data.tokenizer import load_tokenizer
from model.attention import auto_attention, sdpa_attention
from model.checkpoint import load_run
from model.generation import generate
from model.gpt import GPT
from model.hf import load_gpt2
from scripts.arguments import fail, option, parse_arguments

ATTENTIONS = {"auto": auto_attention, "sdpa": sdpa_attention}


@dataclass
class Options:
    run: str | None = option("a run: its name, folder or .ckpt file", default=None)
    hf: str | None = option("instead: a GPT-2 folder, hub id or .safetensors", default=None)
    which: str = option("checkpoint of the run: best or last", default="best")
    prompt: str = option("start of the text; empty: after an end of text", default="")
    max_new_tokens: int = option("tokens to add, at most", default=100)
    num_samples: int = option("texts to write", default=1)
    temperature: float = option("divides the logits; 0: always the likeliest", default=0.8)
    top_k: int | None = option("sample among the k likeliest tokens", default=50)
    top_p: float | None = option("sample among tokens of this probability", default=None)
    stop: bool = option("end a sample at the end-of-text token", default=True)
    seed: int = option("decides the samples", default=0)
    device: str = option("cpu, cuda or auto", default="auto")
    attention: str = option("auto (flash on GPUs) or sdpa", default="auto")
    dtype: str = option("float32, bfloat16 or auto (bfloat16 on GPUs)", default="auto")
    tokenizer: str = option("tokenizer that the model was trained with", default="gpt2")


def load_model(options: Options, device: str) -> GPT:
    """The model that `run` or `hf` names, in eval mode on the device."""
    if (options.run is None) == (options.hf is None):
        fail("give one of run=... and hf=...; see --help")
    attention = ATTENTIONS[options.attention]
    if options.run is not None:
        return load_run(options.run, which=options.which, device=device, attention=attention)[0]
    return load_gpt2(options.hf, attention=attention).to(device).eval()


def sample(options: Options) -> list[str]:
    """The texts, prompt included."""
    if options.num_samples < 1:
        raise ValueError(f"num_samples must be at least 1, got {options.num_samples}")
    for name, choices in {
        "attention": tuple(ATTENTIONS),
        "dtype": ("auto", "float32", "bfloat16"),
    }.items():
        if getattr(options, name) not in choices:
            raise ValueError(
                f"{name} must be one of {', '.join(choices)}, got {getattr(options, name)!r}"
            )
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device={device} needs a GPU, there is none; use device=cpu")
    tokenizer = load_tokenizer(options.tokenizer)
    model = load_model(options, device)
    if model.vocab_size != tokenizer.vocab_size:
        raise ValueError(
            f"the model's vocabulary must be the tokenizer's {tokenizer.vocab_size} tokens, got "
            f"{model.vocab_size}; pass the tokenizer it was trained with"
        )
    ids = tokenizer.encode(options.prompt) or [tokenizer.eot]
    input_ids = torch.tensor([ids] * options.num_samples, device=device)
    low_precision = options.dtype == "bfloat16" or (
        options.dtype == "auto" and device.startswith("cuda")
    )
    start = time.perf_counter()
    with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=low_precision):
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


def _text(tokenizer, row: list[int], prompt_len: int, options: Options) -> str:
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
