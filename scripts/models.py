"""A GPT that a command names, its tokenizer, and the precision that it computes in."""

from dataclasses import dataclass

import torch

from data.tokenizer import AnyTokenizer, load_tokenizer
from model.attention import auto_attention, sdpa_attention
from model.checkpoint import load_run
from model.gpt import GPT
from model.hf import load_gpt2
from scripts.arguments import fail, option

ATTENTIONS = {"auto": auto_attention, "sdpa": sdpa_attention}


@dataclass
class ModelOptions:
    run: str | None = option("a run: its name, folder or .ckpt file", default=None)
    hf: str | None = option("instead: a GPT-2 folder, hub id or .safetensors", default=None)
    which: str = option("checkpoint of the run: best or last", default="best")
    device: str = option("cpu, cuda or auto", default="auto")
    attention: str = option("auto (flash on GPUs) or sdpa", default="auto")
    dtype: str = option("float32, bfloat16 or auto (bfloat16 on GPUs)", default="auto")
    tokenizer: str = option("tokenizer that the model was trained with", default="gpt2")


def open_model(options: ModelOptions) -> tuple[GPT, AnyTokenizer, torch.autocast]:
    """The model in eval mode on its device, the tokenizer, and what to compute under.

    Raises:
        ValueError: an option is not one of its choices, the device is not there, or the vocabulary
            is another one than the tokenizer's.
        OSError: there is no such model.
    """
    if (options.run is None) == (options.hf is None):
        fail("give one of run=... and hf=...; see --help")
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
    attention = ATTENTIONS[options.attention]
    if options.hf is None:
        assert options.run is not None
        model, _ = load_run(options.run, which=options.which, device=device, attention=attention)
        assert isinstance(model, GPT)
    else:
        model = load_gpt2(options.hf, attention=attention).to(device).eval()
    if model.vocab_size != tokenizer.vocab_size:
        raise ValueError(
            f"the model's vocabulary must be the tokenizer's {tokenizer.vocab_size} tokens, got "
            f"{model.vocab_size}; pass the tokenizer it was trained with"
        )
    low_precision = options.dtype == "bfloat16" or (
        options.dtype == "auto" and device.startswith("cuda")
    )
    kind = torch.device(device).type
    return model, tokenizer, torch.autocast(kind, torch.bfloat16, enabled=low_precision)
