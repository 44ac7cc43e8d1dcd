"""Train one experiment with several attentions and hold their loss curves against each other.

    python -m scripts.compare_attention --experiments gpt2_1k gpt2_4k --steps 200 \
        --source novels.jsonl.xz --out scripts/results/compare_attention.json

Same seed, data and initial weights, dropout 0. Training amplifies every difference of rounding, so
each attention runs in several orders of its sums (the batch is split otherwise), and the distance
between flash and SDPA is held against that between SDPA and SDPA. The first run of each attention
has its GPU to itself, and its speed is measured; the others share the GPUs at the end.
"""

import argparse
import csv
import itertools
import os
import statistics
import subprocess
import sys
from pathlib import Path

from scripts.records import make_record, write_record
from scripts.trained_tables import loss_verdict

ATTENTIONS = ("flash", "sdpa")
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
    parser.add_argument("--orders", type=int, default=3, help="runs of each attention, 2 or more")
    parser.add_argument("--gpus", type=int, default=1, help="GPUs to spread the experiments over")
    parser.add_argument("--runs-root", default="outputs/compare_attention")
    parser.add_argument("--out", default="scripts/results/compare_attention.json")
    parser.add_argument("overrides", nargs="*", help="more overrides of train.py, key=value")
    args = parser.parse_args()
    if args.orders < 2:
        parser.error("--orders must be at least 2: SDPA is compared with itself")
    if args.gpus < 1:
        parser.error("--gpus must be at least 1")
    return args


def name_of(experiment: str, attention: str, order: int) -> str:
    """Of a run. order: the batch is cut into 2^order times as many micro-batches."""
    return f"{experiment}_{attention}" + (f"_order{order}" if order else "")


def start(
    args: argparse.Namespace, experiment: str, attention: str, order: int, device: int
) -> subprocess.Popen[bytes]:
    """One run in a process of its own."""
    run_name = name_of(experiment, attention, order)
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
        f"task.micro_batch_tokens={args.micro_batch_tokens >> order}",
        f"trainer.max_steps={args.steps}",
        "task.warmup_fraction=0.1",
        "callbacks.checkpoints=null",
        "sample_prompt=null",
        *NO_DROPOUT,
        *args.overrides,
    ]
    print(f"== {run_name}: {' '.join(command[1:])}", flush=True)
    # The numbers of torch, which are those within what the caller may see.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    chosen = visible[device] if visible[0] else str(device)
    return subprocess.Popen(command, env={**os.environ, "CUDA_VISIBLE_DEVICES": chosen})


def finish(process: subprocess.Popen[bytes]) -> None:
    if process.wait():
        sys.exit(f"a run failed with exit status {process.returncode}: {process.args!r}")


def read_rows(args: argparse.Namespace, name: str) -> list[dict]:
    """metrics.csv of a run."""
    with (Path(args.runs_root) / name / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def speed(rows: list[dict]) -> dict:
    """Medians over the intervals of the second half of a run, after compilation and warm-up."""
    timed = [row for row in rows if row["tokens_per_s"]]
    timed = timed[len(timed) // 2 :]
    keys = ("tokens_per_s", "mfu_full", "mfu_causal", "peak_gib")
    return {k: statistics.median(float(r[k]) for r in timed) for k in keys if timed[0][k]}


def gaps(a: list[dict], b: list[dict]) -> list[float]:
    """Between two loss curves, nats at each step: a - b."""
    return [float(x["train/loss"]) - float(y["train/loss"]) for x, y in zip(a, b, strict=True)]


def distances(pairs: list[tuple[list[dict], list[dict]]]) -> dict:
    """How far the loss curves of each pair are apart, in nats: the mean distance of each pair, and
    the largest of all at one step."""
    found = [[abs(gap) for gap in gaps(a, b)] for a, b in pairs]
    return {
        "mean_abs": [statistics.fmean(pair) for pair in found],
        "max_abs": max(max(pair) for pair in found),
    }


def compare(experiment: str, runs: dict[str, list[list[dict]]]) -> dict:
    """The verdict: flash is within the noise if its curves are on average no further from SDPA's
    than two of SDPA's can be from each other."""
    between = list(itertools.product(runs["flash"], runs["sdpa"]))
    flash_to_sdpa = distances(between)
    sdpa_to_sdpa = distances(list(itertools.combinations(runs["sdpa"], 2)))
    return {
        "model": experiment,
        "flash_to_sdpa": flash_to_sdpa,
        "sdpa_to_sdpa": sdpa_to_sdpa,
        "flash_to_flash": distances(list(itertools.combinations(runs["flash"], 2))),
        # Differences of rounding have no sign.
        "flash_minus_sdpa": statistics.fmean(gap for pair in between for gap in gaps(*pair)),
        "flash_within_noise": statistics.fmean(flash_to_sdpa["mean_abs"])
        <= max(sdpa_to_sdpa["mean_abs"]),
    }


def main() -> None:
    args = arguments()
    if Path(args.runs_root).exists():
        sys.exit(f"{args.runs_root} holds runs of another time; remove it or give --runs-root")
    lanes = [args.experiments[i :: args.gpus] for i in range(args.gpus)]
    for turn in itertools.zip_longest(*lanes):
        for attention in ATTENTIONS:
            for process in [start(args, e, attention, 0, i) for i, e in enumerate(turn) if e]:
                finish(process)
    others = [
        start(args, experiment, attention, order, device)
        for device, lane in enumerate(lanes)
        for experiment in lane
        for attention in ATTENTIONS
        for order in range(1, args.orders)
    ]
    for process in others:
        finish(process)

    rows, curves = [], []
    for experiment in args.experiments:
        runs = {}
        for attention in ATTENTIONS:
            names = [name_of(experiment, attention, order) for order in range(args.orders)]
            runs[attention] = [read_rows(args, name) for name in names]
            for order, table in enumerate(runs[attention]):
                rows.append(
                    {
                        "impl": "ours",
                        "model": experiment,
                        "run": names[order].removeprefix(f"{experiment}_"),
                        "attention": attention,
                        "micro_batch_tokens": args.micro_batch_tokens >> order,
                        "dropout_p": 0.0,
                        **(speed(table) if order == 0 else {}),
                        "first_loss": float(table[0]["train/loss"]),
                        "last_loss": float(table[-1]["train/loss"]),
                    }
                )
        curves.append(compare(experiment, runs))
    settings = {k: v for k, v in vars(args).items() if k not in ("out", "runs_root")}
    record = make_record("compare_attention", rows, settings, omit="--out", loss_curves=curves)
    write_record(args.out, record)
    for row in rows:
        figures = " ".join(f"{k}={row[k]:.4g}" for k in row if isinstance(row[k], float))
        print(f"{row['model']} {row['run']}: {figures}")
    for curve in curves:
        print(loss_verdict(curve))
    print(f"record: {args.out}")


if __name__ == "__main__":
    main()
