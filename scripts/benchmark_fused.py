"""The steps around attention, fused and not: python -m scripts.benchmark_fused --help

Residual sum with dropout and LayerNorm, bias with GELU, the MLP around it, and the loss of a linear
layer, at GPT-2's sizes: our kernels (flash_kernels.fused) beside plain PyTorch, eager and compiled,
and liger-kernel where it is installed and has the step. Inputs in bf16, the residual stream,
weights and sums in float32, as autocast has them. The loss's gradients are made in its forward by
ours and liger's: "both" is what compares.
"""

import argparse
import functools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F

from flash_kernels.fused import bias_gelu, gelu_mlp, linear_cross_entropy, residual_norm
from scripts.records import make_record, write_record
from scripts.report_page import Block
from scripts.report_page import Table as ReportTable
from scripts.timing import DIRECTIONS, Made, time_in_turns

STEPS = ("residual_norm", "residual_norm_dropout", "bias_gelu", "gelu_mlp", "linear_cross_entropy")
IMPLEMENTATIONS = {
    "ours": "ours",
    "eager": "PyTorch, eager",
    "compiled": "PyTorch, compiled",
    "liger": "liger-kernel",
}
DROPOUT = 0.1
CHUNK = 8192
LOSS_TOKENS = 16384  # at most: rivals hold all logits, of two sets of inputs, until the backward


class Sizes(NamedTuple):
    tokens: int
    dim: int
    vocab_size: int
    num_rows: int  # of the embedding, padding with it


def plain_residual_norm(
    residual: Tensor, branch: Tensor, weight: Tensor, bias: Tensor, dropout_p: float = 0.0
) -> tuple[Tensor, Tensor]:
    total = residual + F.dropout(branch, dropout_p)
    return total, F.layer_norm(total, total.shape[-1:], weight, bias).to(branch.dtype)


def plain_bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias.to(x.dtype), approximate="tanh")


def plain_mlp(
    x: Tensor, up_weight: Tensor, up_bias: Tensor, down_weight: Tensor, down_bias: Tensor
) -> Tensor:
    hidden = F.gelu(F.linear(x, up_weight, up_bias), approximate="tanh")
    return F.linear(hidden, down_weight, down_bias)


def plain_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    logits = F.linear(hidden, weight.to(hidden.dtype))  # padding too, as is usual
    return F.cross_entropy(logits.float(), labels, reduction="sum")


@functools.cache
def compiled(function: Callable) -> Callable:
    torch._dynamo.config.recompile_limit = 64
    # A donated buffer is used up by one backward; here the same graph runs many.
    torch._functorch.config.donated_buffer = False
    return torch.compile(function, dynamic=False)


def make(impl: str, step: str, sizes: Sizes, seed: int, device: str = "cuda") -> Made:
    """A step of one implementation on random inputs.

    Raises:
        ImportError: liger-kernel is not installed.
        NotImplementedError: it has no such step.
    """
    generator = torch.Generator(device).manual_seed(seed)
    low = torch.bfloat16 if device == "cuda" else torch.float32

    def tensor(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
        values = torch.randn(shape, generator=generator, device=device) * scale
        return values.to(dtype).requires_grad_()

    tokens, dim = sizes.tokens, sizes.dim
    leaves: list[Tensor]
    if step.startswith("residual_norm"):
        dropout_p = DROPOUT if step.endswith("dropout") else 0.0
        leaves = [tensor(tokens, dim), tensor(tokens, dim, dtype=low), tensor(dim), tensor(dim)]
        ours: Callable = partial(_under_autocast, residual_norm, dropout_p=dropout_p)
        plain: Callable = partial(plain_residual_norm, dropout_p=dropout_p)
    elif step == "bias_gelu":
        leaves = [tensor(tokens, 4 * dim, dtype=low), tensor(4 * dim)]
        ours, plain = partial(bias_gelu, approximate="tanh"), plain_bias_gelu
    elif step == "gelu_mlp":
        weights = [tensor(4 * dim, dim, scale=dim**-0.5), tensor(4 * dim)]
        weights += [tensor(dim, 4 * dim, scale=0.5 * dim**-0.5), tensor(dim)]
        leaves = [tensor(tokens, dim, dtype=low), *weights]
        ours, plain = (partial(_under_autocast, function) for function in (gelu_mlp, plain_mlp))
    else:
        labels = torch.randint(sizes.vocab_size, (tokens,), generator=generator, device=device)
        hidden, weight = leaves = [tensor(tokens, dim, dtype=low), tensor(sizes.num_rows, dim)]
        if impl == "liger":
            return _liger_loss(hidden, weight, labels), leaves
        ours = partial(
            linear_cross_entropy, labels=labels, vocab_size=sizes.vocab_size, chunk_tokens=CHUNK
        )
        plain = partial(plain_loss, labels=labels)
    if impl == "liger":
        raise NotImplementedError(f"liger-kernel has no {step}")
    if impl == "ours":
        function = ours
    else:
        function = plain if impl == "eager" else compiled(plain)
    return (lambda: function(*leaves)), leaves


def _under_autocast(function: Callable, *inputs: Tensor, **options: Any) -> Any:
    device = inputs[0].device.type
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        return function(*inputs, **options)


def _liger_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Callable[[], Tensor]:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss(reduction="sum")
    return lambda: loss(weight.to(hidden.dtype), hidden, labels)


def measure(sizes: Sizes, steps: list[str]) -> list[dict]:
    """A row for each step, implementation and direction, and "both"."""
    rows = []
    for step in track(steps, "fused steps"):
        case = sizes
        if step == "linear_cross_entropy":
            case = sizes._replace(tokens=min(sizes.tokens, LOSS_TOKENS))
        times, failures = time_in_turns({i: partial(make, i, step, case) for i in IMPLEMENTATIONS})
        for impl in IMPLEMENTATIONS:
            parts = [times.get((impl, direction)) for direction in DIRECTIONS]
            total = parts[0] + parts[1] if parts[0] and parts[1] else None
            for direction, ms in zip((*DIRECTIONS, "both"), (*parts, total), strict=True):
                rows.append(
                    {
                        "step": step,
                        "impl": impl,
                        "direction": direction,
                        "ms": ms,
                        "failure": failures.get(impl),
                        **case._asdict(),
                    }
                )
    return rows


def speed_table(record: dict) -> tuple[list[str], list[list[str]]]:
    """Header and cells: milliseconds forward / backward / both."""
    cells: dict[str, dict[str, list[str]]] = {}
    for row in record["rows"]:
        text = "-" if row["ms"] is None else f"{row['ms']:.3f}"
        cells.setdefault(row["step"], {}).setdefault(row["impl"], []).append(text)
    header = ["ms, forward / backward / both", *IMPLEMENTATIONS.values()]
    lines = [
        [step.replace("_", " "), *(" / ".join(found[impl]) for impl in IMPLEMENTATIONS)]
        for step, found in cells.items()
    ]
    return header, lines


def report_blocks(record: dict) -> list[Block]:
    return [ReportTable(*speed_table(record), "The steps around attention")]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=[*STEPS])
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--dim", type=int, default=768)
    parser.add_argument("--vocab-size", type=int, default=50257)
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmark_fused.json"))
    args = parser.parse_args()
    if min(args.tokens, args.dim, args.vocab_size) < 1:
        parser.error("--tokens, --dim and --vocab-size must be positive")
    if not torch.cuda.is_available():
        raise SystemExit("benchmark_fused needs a GPU, none is visible")
    sizes = Sizes(args.tokens, args.dim, args.vocab_size, -(-args.vocab_size // 128) * 128)
    settings = {k: v for k, v in vars(args).items() if k != "output"}
    rows = measure(sizes, args.steps)
    record = make_record("benchmark_fused", rows, settings, omit="--output")
    write_record(args.output, record)
    header, lines = speed_table(record)
    table = Table(*header, title="fused steps")
    for line in lines:
        table.add_row(*line)
    Console(width=160).print(table)
    for step, impl, why in dict.fromkeys((r["step"], r["impl"], r["failure"]) for r in rows):
        if why:
            print(f"{impl}, {step}: {why}")
    print(f"record {args.output}")


if __name__ == "__main__":
    main()
