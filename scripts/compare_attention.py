"""Train one experiment with several attentions and hold their loss curves against each other.

    python -m scripts.compare_attention --experiments gpt2_1k gpt2_4k --steps 200 \
        --source novels.jsonl.xz --out scripts/results/compare_attention.json

Same seed, data and initial weights, dropout 0. Two SDPA runs that differ only in the order of
their sums (the batch is split otherwise) show how far curves drift apart by rounding alone;
flash must not drift further from SDPA than that. The runs that only show this drift share the GPU
at the end; the others have it to themselves, and their speed is measured.
"""

import argparse
import csv
import json
import statistics
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

from model.run import environment
from scripts.arguments import command_line

CONTROL = "sdpa_other_order"
NO_DROPOUT = ["model.embd_dropout=0", "model.resid_dropout=0", "model.attn_dropout=0"]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--experiments", nargs="+", default=["gpt2_1k", "gpt2_4k"])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--source", default="embedded", help="text to train on (data.source)")
    parser.add_argument("--batch-tokens", type=int, default=65536, help="tokens of a step")
    parser.add_argument("--micro-batch-tokens", type=int, default=65536)
    parser.add_argument("--runs-root", default="outputs/compare_attention")
    parser.add_argument("--out", default="scripts/results/compare_attention.json")
    parser.add_argument("overrides", nargs="*", help="more overrides of train.py, key=value")
    return parser.parse_args()


def variants(micro_batch_tokens: int) -> dict[str, tuple[str, int]]:
    """Name of a run -> attention and tokens of a micro-batch."""
    return {
        "flash": ("flash", micro_batch_tokens),
        "sdpa": ("sdpa", micro_batch_tokens),
        CONTROL: ("sdpa", micro_batch_tokens // 2),
    }


def start(args, experiment: str, name: str) -> subprocess.Popen:
    """One run in a process of its own."""
    attention, micro_batch_tokens = variants(args.micro_batch_tokens)[name]
    run_name = f"{experiment}_{name}"
    command = [
        sys.executable,
        "train.py",
        f"experiment={experiment}",
        f"attention={attention}",
        f"run_name={run_name}",
        f"runs_root={args.runs_root}",
        f"data.source={args.source}",
        f"data.batch_tokens={args.batch_tokens}",
        "data.val_fraction=0",
        f"task.micro_batch_tokens={micro_batch_tokens}",
        f"trainer.max_steps={args.steps}",
        "task.warmup_fraction=0.1",
        "callbacks.checkpoints=null",
        "sample_prompt=null",
        *NO_DROPOUT,
        *args.overrides,
    ]
    print(f"== {run_name}: {' '.join(command[1:])}", flush=True)
    return subprocess.Popen(command)


def finish(process: subprocess.Popen) -> None:
    if process.wait():
        sys.exit(f"a run failed with exit status {process.returncode}: {process.args}")


def read_rows(args, experiment: str, name: str) -> list[dict]:
    """metrics.csv of a run."""
    with (Path(args.runs_root) / f"{experiment}_{name}" / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def speed(rows: list[dict]) -> dict:
    """Medians over the intervals of the second half of a run, after compilation and warm-up."""
    timed = [row for row in rows if row["tokens_per_s"]]
    timed = timed[len(timed) // 2 :]
    keys = ("tokens_per_s", "mfu_full", "mfu_causal", "peak_gib")
    return {k: statistics.median(float(r[k]) for r in timed) for k in keys if timed[0][k]}


def distance(a: list[dict], b: list[dict]) -> dict:
    """How far two loss curves are apart, in nats."""
    gaps = [abs(float(x["train/loss"]) - float(y["train/loss"])) for x, y in zip(a, b, strict=True)]
    return {"mean_abs": statistics.fmean(gaps), "max_abs": max(gaps)}


def main() -> None:
    args = arguments()
    if Path(args.runs_root).exists():
        sys.exit(f"{args.runs_root} holds runs of another time; remove it or give --runs-root")
    for experiment in args.experiments:
        for name in ("flash", "sdpa"):
            finish(start(args, experiment, name))
    controls = [start(args, experiment, CONTROL) for experiment in args.experiments]
    for process in controls:
        finish(process)

    rows, curves = [], []
    for experiment in args.experiments:
        runs = {n: read_rows(args, experiment, n) for n in variants(args.micro_batch_tokens)}
        for name, table in runs.items():
            attention, micro = variants(args.micro_batch_tokens)[name]
            rows.append(
                {
                    "impl": "ours",
                    "model": experiment,
                    "run": name,
                    "attention": attention,
                    "micro_batch_tokens": micro,
                    "dropout_p": 0.0,
                    **(speed(table) if name != CONTROL else {}),
                    "first_loss": float(table[0]["train/loss"]),
                    "last_loss": float(table[-1]["train/loss"]),
                }
            )
        ours = distance(runs["flash"], runs["sdpa"])
        noise = distance(runs[CONTROL], runs["sdpa"])
        curves.append(
            {
                "model": experiment,
                "flash_to_sdpa": ours,
                "sdpa_to_sdpa_other_order": noise,
                "flash_within_noise": ours["mean_abs"] <= noise["mean_abs"],
            }
        )
    record = {
        "name": "compare_attention",
        "command": command_line("scripts.compare_attention", omit="--out"),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **environment(),
        "settings": {k: v for k, v in vars(args).items() if k not in ("out", "runs_root")},
        "rows": rows,
        "loss_curves": curves,
    }
    Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    Path(args.out).write_text(json.dumps(record, indent=1) + "\n")
    for row in rows:
        figures = " ".join(f"{k}={row[k]:.4g}" for k in row if isinstance(row[k], float))
        print(f"{row['model']} {row['run']}: {figures}")
    for curve in curves:
        print(json.dumps(curve))
    print(f"record: {args.out}")


if __name__ == "__main__":
    main()
