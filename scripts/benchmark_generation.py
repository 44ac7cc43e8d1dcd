"""Tokens a second of writing with GPT-2, ours beside transformers' generate:
python -m scripts.benchmark_generation --help

All have the same random weights in bf16 on a GPU (fp32 on a CPU), the same prompt of random tokens,
and take the likeliest token so many times; the end of a text is ignored. They take turns. A prompt
alone, with one token after it, is timed too: what is left are the other tokens' seconds. "agrees"
is the share of tokens up to the first that differs from ours: bf16 has ties.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from model.attention import auto_attention, sdpa_attention
from model.generation import generate
from model.gpt import GPT
from model.hf import config_to_hf, to_hf
from scripts.plan import SIZES
from scripts.records import make_record, write_record
from scripts.report_page import Block
from scripts.report_page import Table as ReportTable

# Continues a prompt (batch, seqlen) by so many tokens: (batch, seqlen + new).
Write = Callable[[Tensor, int], Tensor]

TITLES = {
    "ours": "ours",
    "ours_sdpa": "ours, SDPA",
    "hf_eager": "Hugging Face, eager",
    "hf_sdpa": "Hugging Face, SDPA",
    "hf_static": "Hugging Face, SDPA, static cache, compiled",
}


class Setting(NamedTuple):
    """What all contestants have in common."""

    model: str
    depth: int
    dim: int
    nheads: int
    prompt: int  # tokens
    new: int  # tokens after it
    batch: int


def build(name: str, setting: Setting, device: str) -> Write:
    """A contestant with the weights of seed 0."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    attention = sdpa_attention if name == "ours_sdpa" else auto_attention
    gpt = GPT(
        depth=setting.depth,
        dim=setting.dim,
        nheads=setting.nheads,
        max_seqlen=setting.prompt + setting.new,
        attention=attention,
    )
    if name.startswith("ours"):
        gpt = gpt.to(device, dtype).eval()
        return lambda ids, new: generate(gpt, ids, new, temperature=0.0)
    from transformers import GPT2Config, GPT2LMHeadModel

    options = config_to_hf(gpt.config) | {"bos_token_id": None, "eos_token_id": None}
    attention_name = "eager" if name == "hf_eager" else "sdpa"
    config = GPT2Config(**options, attn_implementation=attention_name)
    model = GPT2LMHeadModel(config)
    model.load_state_dict(to_hf(gpt.state_dict(), gpt.config), strict=False)
    model.tie_weights()
    model = model.to(device, dtype).eval()
    cache: dict[str, Any] = {"cache_implementation": "static"} if name == "hf_static" else {}

    def write(ids: Tensor, new: int) -> Tensor:
        return model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            pad_token_id=0,
            **cache,
        )

    return write


def seconds_of(write: Write, ids: Tensor, new: int) -> float:
    _wait()
    begin = time.perf_counter()
    write(ids, new)
    _wait()
    return time.perf_counter() - begin


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def race(setting: Setting, names: list[str], rounds: int, device: str) -> list[dict]:
    """A row for each contestant, medians over the rounds."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 50257, (setting.batch, setting.prompt), generator=generator).to(device)
    writers: dict[str, Write] = {}
    facts: dict[str, dict] = {}
    ours: Tensor | None = None
    for name in names:
        try:
            writers[name] = build(name, setting, device)
            for new in (1, setting.new):  # compiles, and fills caches
                out = writers[name](ids, new)
        except Exception as error:  # of any rival's: it is reported as its result
            writers.pop(name, None)
            text = (str(error).splitlines() or [""])[0]
            facts[name] = {"failure": f"{type(error).__name__}: {text}"[:160]}
            continue
        if out.shape != (setting.batch, setting.prompt + setting.new):
            raise ValueError(f"{name} must write {setting.new} tokens, its result has {out.shape}")
        ours = out if ours is None else ours
        same = (out == ours)[:, setting.prompt :].long().cumprod(1)
        facts[name] = {"failure": None, "agrees": same.float().mean().item()}
    found: dict[str, dict[int, list[float]]] = {n: {1: [], setting.new: []} for n in writers}
    for turn in range(rounds):
        first = turn % len(writers) if writers else 0
        for name in [*writers][first:] + [*writers][:first]:
            for new, seconds in found[name].items():
                seconds.append(seconds_of(writers[name], ids, new))
    return [row_of(name, setting, facts[name], found.get(name)) for name in names]


def row_of(name: str, setting: Setting, facts: dict, found: dict[int, list[float]] | None) -> dict:
    """Of the record; `found` has the seconds of writing one token, and all."""
    row = {"impl": name, "model": setting.model, "prompt": setting.prompt, "new": setting.new,
           "batch": setting.batch, **facts}  # fmt: skip
    if found:
        prompt, whole = (statistics.median(found[new]) for new in (1, setting.new))
        row |= {
            "prompt_ms": 1e3 * prompt,
            "tokens_per_s": setting.batch * setting.new / whole,
            "decoded_per_s": setting.batch * (setting.new - 1) / max(whole - prompt, 1e-9),
        }
    return row


def speed_table(record: dict) -> tuple[list[str], list[list[str]]]:
    """(Header, rows): of each contestant tokens a second, and milliseconds of the prompt."""
    cells = {(r["model"], r["prompt"], r["batch"], r["impl"]): r for r in record["rows"]}
    names = [name for name in TITLES if any(key[3] == name for key in cells)]
    header = ["tokens/s after the prompt (prompt, ms)", *(TITLES[name] for name in names)]
    lines = []
    for model, prompt, batch in dict.fromkeys(key[:3] for key in cells):
        line = [f"{model}, prompt {prompt:,}, batch {batch}"]
        for name in names:
            row = cells.get((model, prompt, batch, name), {})
            rate = row.get("decoded_per_s")
            line.append(f"{rate:,.0f} ({row['prompt_ms']:.1f})" if rate else "-")
        lines.append(line)
    return header, lines


def report_blocks(record: dict) -> list[Block]:
    header, lines = speed_table(record)
    return [ReportTable(header, lines, "Writing with GPT-2, medians")]


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["gpt2_small"], choices=SIZES)
    parser.add_argument("--prompts", nargs="+", type=int, default=[1024, 16384], help="tokens")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--new", type=int, default=128, help="tokens after a prompt, at least 2")
    parser.add_argument("--contestants", nargs="+", default=[*TITLES], choices=TITLES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmark_generation.json"))
    args = parser.parse_args(given)
    if args.new < 2 or min(args.rounds, *args.prompts, *args.batches) < 1:
        parser.error("--new must be at least 2, --rounds, --prompts and --batches at least 1")
    return args


def main() -> None:
    args = arguments()
    if not torch.cuda.is_available():
        raise SystemExit("benchmark_generation needs a GPU, none is visible")
    rows: list[dict] = []
    for model in args.models:
        for prompt in args.prompts:
            for batch in args.batches:
                setting = Setting(model, *SIZES[model], prompt, args.new, batch)
                rows += race(setting, args.contestants, args.rounds, "cuda")
                torch.compiler.reset()
                torch.cuda.empty_cache()
                settings = {k: v for k, v in vars(args).items() if k != "output"}
                record = make_record("benchmark_generation", rows, settings, omit="--output")
                write_record(args.output, record)  # what is measured is kept
    header, lines = speed_table(record)
    table = Table(*header, title="generation")
    for line in lines:
        table.add_row(*line)
    console = Console(width=200)
    console.print(table)
    for row in rows:
        if row["failure"]:
            console.print(f"{row['impl']}, prompt {row['prompt']}: {row['failure']}")
    print(f"record {args.output}")


if __name__ == "__main__":
    main()
