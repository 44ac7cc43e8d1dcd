"""Memory, communication and speed of GPT training on machines that are not at hand.

    python -m scripts.plan model=gpt2_small,gpt2_xl seqlen=4096,65536 gpus=8,64 strategy=fsdp

A small model, to choose a configuration by, not to promise a speed. What it assumes:

Memory of a GPU. 16 bytes a parameter (float32 weight, gradient, two moments of Adam), divided over
the GPUs of a machine under FSDP2, and 2 for autocast's copy of the weights. 36 bytes times the
width a token and layer: the residual stream twice in float32, and in bf16 both norms' outputs, q, k
and v, the attention's output, and the MLP's hidden units before and after GELU. With task.recompute
24 (selective) or 4 (full) of them, and the rest for one layer at a time. 16 bytes times the width a
token behind the layers: the last norm's input and output, that in bf16, and its gradient, in bf16
and joined in float32. 4 bytes a logit of one chunk of the loss: bf16, and its gradient.

Time of a GPU. Matrix products and attention (its causal half) at two rates, solved from the two
contexts of scripts/results/compare_attention.json, so that they hold all else that a step does.

Bytes that a GPU sends in an optimizer step. DDP: 2 (P - 1) / P times the float32 gradients. FSDP2:
(s - 1) / s times the float32 weights in the forward and in the backward of every micro-batch, and
the gradients once; between machines, whose copies are replicas, an all-reduce of a shard. Context
parallelism by heads: q, k, v and out, and their gradients, in bf16; by ring: k and v around the
ring, in the backward their float32 gradients too.

Exposed time. Gradients hide behind the backward of the last micro-batch (two thirds of its time),
weights behind two thirds of every micro-batch, a ring's keys behind its attention, an all-to-all
behind nothing. A group within a machine has NVLink, a larger one the network.
"""

import dataclasses
import json
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from model.gpt import GPT
from scripts.arguments import fail, option, parse_arguments

SIZES = {  # depth, dim, nheads
    "gpt2_small": (12, 768, 12),
    "gpt2_medium": (24, 1024, 16),
    "gpt2_large": (36, 1280, 20),
    "gpt2_xl": (48, 1600, 25),
}
RECORD = Path(__file__).parent / "results/compare_attention.json"
GIB = 2.0**30
_KEPT = {"none": 36.0, "selective": 24.0, "full": 6.0}  # bytes, model/recompute.py
_LOSS_CHUNK = 8192  # tokens, as configs/task/causal_lm.yaml


@dataclasses.dataclass
class Options:
    model: str = option(f"comma-separated: {', '.join(SIZES)}", default="gpt2_small,gpt2_xl")
    seqlen: str = option("tokens, comma-separated", default="4096,65536,1048576")
    gpus: str = option("comma-separated", default="8,64,512")
    strategy: str = option("ddp or fsdp", default="fsdp")
    context: int | None = option(
        "processes that share a sequence; none: as many as it takes to fit", default=None
    )
    method: str = option("how they attend: heads or ring", default="ring")
    batch_tokens: int = option("of an optimizer step, at least a sequence a group", default=524288)
    micro_batch_tokens: int = option(
        "of a GPU at once, at most, and at least its share: halved until it fits", default=65536
    )
    recompute: str = option("in the backward: none, selective or full", default="none")
    memory_gib: float = option("of a GPU", default=139.0)
    peak_tflops: float = option("dense bf16, of a GPU", default=989.4)
    nvlink_gb_s: float = option("a GPU's, one direction", default=450.0)
    network_gb_s: float = option("a GPU's, one direction", default=50.0)
    gpus_per_machine: int = option("joined by NVLink", default=8)


@dataclasses.dataclass(frozen=True)
class Case:
    """One row: what is trained and on what."""

    model: str
    seqlen: int
    gpus: int
    strategy: str = "fsdp"
    context: int = 1
    method: str = "ring"
    batch_tokens: int = 524288
    micro_batch_tokens: int = 65536
    gpus_per_machine: int = 8
    recompute: str = "none"

    @property
    def share(self) -> int:
        """Tokens of a sequence on one GPU."""
        return self.seqlen // self.context

    @property
    def tokens(self) -> int:
        """Tokens that a GPU works on in an optimizer step: whole shares, at least one."""
        groups = self.gpus // self.context
        return max(1, round(self.batch_tokens / (groups * self.seqlen))) * self.share

    @property
    def micro_tokens(self) -> int:
        return min(self.tokens, max(self.micro_batch_tokens // self.share, 1) * self.share)

    @property
    def num_micro_batches(self) -> int:
        return -(-self.tokens // self.micro_tokens)

    @property
    def shards(self) -> int:
        return min(self.gpus, self.gpus_per_machine) if self.strategy == "fsdp" else 1


def make_model(name: str, seqlen: int) -> GPT:
    """On the meta device: shapes without memory."""
    depth, dim, nheads = SIZES[name]
    with torch.device("meta"):
        return GPT(depth=depth, dim=dim, nheads=nheads, max_seqlen=seqlen)


def memory_bytes(case: Case, model: GPT) -> dict[str, float]:
    """What fills a GPU: "state", "activations", "loss"."""
    depth, dim, _ = SIZES[case.model]
    params = model.num_params()
    block = sum(p.numel() for p in model.blocks[0].parameters())
    kept = _KEPT[case.recompute]
    gathered = 2 * 4.0 * block if case.shards > 1 else 0.0  # this block and the next one
    return {
        "state": 16.0 * params / case.shards + 2.0 * params + gathered,
        "activations": (kept * depth + _KEPT["none"] - kept + 16.0) * dim * case.micro_tokens,
        "loss": 4.0 * len(model.head_weight) * min(_LOSS_CHUNK, case.micro_tokens),
    }


def sent_bytes(case: Case, model: GPT) -> dict[str, float]:
    """What a GPU sends in an optimizer step: "gradients", "weights", "context"."""
    depth, dim, _ = SIZES[case.model]
    full = 4.0 * model.num_params()
    shards, replicas = case.shards, case.gpus // case.shards
    within = (shards - 1) / shards
    gradients = full * within + 2 * (full / shards) * (replicas - 1) / replicas
    others = case.context - 1
    tensor = case.tokens * dim * depth  # elements of one of q, k, v, out in a step
    if case.method == "heads":
        context = 8 * 2.0 * tensor * others / case.context
    else:
        # forward: k, v; backward: k, v, and dk, dv, which make the last step home
        context = 4 * 2.0 * tensor * others + (2 * 4.0 * tensor * case.context if others else 0.0)
    weights = 2 * full * within * case.num_micro_batches
    return {"gradients": gradients, "weights": weights, "context": context}


def rates(record: dict) -> tuple[float, float]:
    """FLOP/s of everything but attention and of causal attention, from two contexts' tokens/s."""
    rows = [row for row in record["rows"] if row["run"] == "flash"][:2]
    equations, seconds = [], []
    for row in rows:
        seqlen = 1024 * int(row["model"].removeprefix("gpt2_").removesuffix("k"))
        flops = make_model("gpt2_small", seqlen).flops_per_token(seqlen)
        attention = flops["full"] - flops["causal"]  # the half that is computed
        equations.append([flops["causal"] - attention, attention])
        seconds.append(1.0 / row["tokens_per_s"])
    inverse = torch.linalg.solve(
        torch.tensor(equations, dtype=torch.float64), torch.tensor(seconds, dtype=torch.float64)
    )
    products, attention = (1.0 / inverse).tolist()
    return products, attention


def step_seconds(
    case: Case, model: GPT, speeds: tuple[float, float], nvlink: float, network: float
) -> dict[str, float]:
    """ "compute" and what of communication it does not hide, "exposed"; bytes/s of the links."""
    flops = model.flops_per_token(case.seqlen)
    causal_attention = flops["full"] - flops["causal"]
    attention = case.tokens * causal_attention / speeds[1]
    compute = attention + case.tokens * (flops["causal"] - causal_attention) / speeds[0]

    def link(size: int) -> float:
        return nvlink if size <= case.gpus_per_machine else network

    sent = sent_bytes(case, model)
    context = sent["context"] / link(case.context)
    hidden = attention if case.method == "ring" else 0.0
    exposed = max(0.0, context - hidden)
    last = compute / case.num_micro_batches
    exposed += max(0.0, sent["gradients"] / link(case.gpus) - 2 / 3 * last)
    exposed += max(0.0, sent["weights"] / link(case.shards) - 2 / 3 * compute)
    return {"compute": compute, "exposed": exposed}


def fit(case: Case, model: GPT, memory: float, *, may_share: bool) -> Case:
    """With half the micro-batch, down to one share, and then, if it may, with twice the processes a
    sequence, until it fits in `memory` bytes or nothing is left to try."""
    while sum(memory_bytes(case, model).values()) > memory:
        if case.micro_tokens > case.share:
            case = dataclasses.replace(case, micro_batch_tokens=case.micro_tokens // 2)
        elif may_share and case.context * 2 <= case.gpus:
            case = dataclasses.replace(case, context=case.context * 2)
        else:
            break
    return case


def main() -> None:
    options = parse_arguments(Options, sys.argv[1:], __doc__)
    names = options.model.split(",")
    if unknown := set(names) - SIZES.keys():
        fail(f"model must be of {', '.join(SIZES)}, got {', '.join(sorted(unknown))}")
    if options.strategy not in ("ddp", "fsdp") or options.method not in ("heads", "ring"):
        fail("strategy must be ddp or fsdp, and method heads or ring")
    if options.recompute not in _KEPT:
        fail(f"recompute must be {' or '.join(_KEPT)}, got {options.recompute!r}")
    try:
        seqlens, counts = (
            [int(n) for n in text.split(",")] for text in (options.seqlen, options.gpus)
        )
    except ValueError:
        fail(f"seqlen and gpus must be integers, got {options.seqlen!r} and {options.gpus!r}")
    if min(*seqlens, *counts) < 1:
        fail("seqlen and gpus must be positive")
    record = json.loads(RECORD.read_text())
    speeds = rates(record)
    table = Table(
        "model", "context", "GPUs", "share a sequence", "tokens a step", "at once", "memory, GiB",
        "sent a step, GB", "tokens/s", "MFU full / causal",
    )  # fmt: skip
    for name in names:
        for seqlen in seqlens:
            model = make_model(name, seqlen)
            for gpus in counts:
                case = Case(
                    name, seqlen, gpus, options.strategy, options.context or 1, options.method,
                    options.batch_tokens, options.micro_batch_tokens, options.gpus_per_machine,
                    options.recompute,
                )  # fmt: skip
                if gpus % case.context or seqlen % case.context:
                    fail(f"context={case.context} must divide gpus={gpus} and seqlen={seqlen}")
                may_share = options.context is None
                case = fit(case, model, options.memory_gib * GIB, may_share=may_share)
                table.add_row(*_cells(case, model, speeds, options))
    console = Console(width=140)
    console.print(table)
    console.print(
        f"Rates of {record['hardware']['gpus'][0]}, {record['date'][:10]}: matrix products and all "
        f"else {speeds[0] / 1e12:.0f} TFLOP/s, causal attention {speeds[1] / 1e12:.0f}."
    )


def _cells(case: Case, model: GPT, speeds: tuple[float, float], options: Options) -> list[str]:
    memory = sum(memory_bytes(case, model).values()) / GIB
    seconds = step_seconds(
        case, model, speeds, options.nvlink_gb_s * 1e9, options.network_gb_s * 1e9
    )
    rate = case.tokens / sum(seconds.values())  # of one GPU
    mfu = [
        f"{flops * rate / options.peak_tflops / 1e12:.0%}"
        for flops in model.flops_per_token(case.seqlen).values()
    ]
    fits = "" if memory <= options.memory_gib else " (too much)"
    return [
        case.model, f"{case.seqlen:,}", str(case.gpus), str(case.context),
        f"{case.tokens * case.gpus:,}", f"{case.micro_tokens:,}", f"{memory:.1f}{fits}",
        f"{sum(sent_bytes(case, model).values()) / 1e9:.1f}", f"{rate * case.gpus:,.0f}",
        " / ".join(mfu),
    ]  # fmt: skip


if __name__ == "__main__":
    main()
