"""Train one experiment with several attentions and hold their loss curves against each other.

    python -m scripts.compare_attention --experiments gpt2_1k gpt2_4k --steps 200 \
        --source novels.jsonl.xz
    python -m scripts.compare_attention --attentions flash sdpa reference --dropout 0 0.1 \
        --experiments gpt2_1k gpt2_4k --batch-tokens 32768 --micro-batch-tokens 16384 \
        --source novels.jsonl.xz

Same seed, data and initial weights. Training amplifies every difference of rounding, so flash and
SDPA run in several orders of their sums (the batch is split otherwise), and the distance between
them is held against that between SDPA and SDPA. The reference stores the score matrix: it runs
once, in the smallest micro-batches, which are the last order's.

With dropout another split of the batch, or SDPA, draws other masks; what their curves are apart is
the noise of the masks. Flash and the reference in the same micro-batches drop the same
probabilities, and are held against the rounding without dropout. These runs are not compiled, since
a compiler draws the masks outside attention in an order of its own.

The first run of flash and SDPA without dropout has its GPU to itself, and its speed is measured;
the others share the GPUs at the end.
"""

import argparse
import csv
import itertools
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from scripts.records import make_record, write_record
from scripts.trained_tables import loss_verdict

ATTENTIONS = ("flash", "sdpa", "reference")
DROPOUTS = ("model.embd_dropout", "model.resid_dropout", "model.attn_dropout")
_MOST_POINTS = 100  # of a curve in the record


class Run(NamedTuple):
    """One training. order: the batch is cut into 2^order times as many micro-batches."""

    experiment: str
    attention: str
    dropout_p: float
    order: int

    @property
    def label(self) -> str:
        """Its name among the runs of an experiment."""
        dropout = f"_dropout{self.dropout_p:g}" if self.dropout_p else ""
        return f"{self.attention}{dropout}" + (f"_order{self.order}" if self.order else "")

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"{self.experiment}_{self.label}"

    @property
    def is_timed(self) -> bool:
        return self.order == 0 and self.dropout_p == 0.0 and self.attention != "reference"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--experiments", nargs="+", default=["gpt2_1k", "gpt2_4k"])
    parser.add_argument("--attentions", nargs="+", choices=ATTENTIONS, default=["flash", "sdpa"])
    parser.add_argument("--dropout", nargs="+", type=float, default=[0.0], metavar="P")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--source", default="embedded", help="text to train on (data.source)")
    parser.add_argument("--batch-tokens", type=int, default=65536, help="tokens of a step")
    parser.add_argument("--micro-batch-tokens", type=int, default=65536)
    parser.add_argument("--orders", type=int, default=3, help="runs of flash and sdpa, 2 or more")
    parser.add_argument("--at-once", type=int, default=4, help="runs that share a GPU at the end")
    parser.add_argument("--gpus", type=int, default=1, help="GPUs to spread the experiments over")
    parser.add_argument("--runs-root", default="outputs/compare_attention")
    parser.add_argument("--out", help="default: scripts/results/ and the record's name")
    parser.add_argument("overrides", nargs="*", help="more overrides of train.py, key=value")
    args = parser.parse_args()
    if args.orders < 2:
        parser.error("--orders must be at least 2: SDPA is compared with itself")
    if args.gpus < 1 or args.at_once < 1:
        parser.error("--gpus and --at-once must be at least 1")
    if not {"flash", "sdpa"} <= set(args.attentions):
        parser.error("--attentions must have flash and sdpa, whose noise is the measure of all")
    if 0.0 not in args.dropout or not all(0.0 <= p < 1.0 for p in args.dropout):
        parser.error("--dropout must have 0, whose noise is that of rounding; the rest is below 1")
    args.out = args.out or f"scripts/results/{record_name(args)}.json"
    return args


def record_name(args: argparse.Namespace) -> str:
    return "compare_attention" + "_dropout" * (max(args.dropout) > 0.0)


def runs_of(args: argparse.Namespace, experiment: str) -> list[Run]:
    orders = {name: list(range(args.orders)) for name in args.attentions}
    if "reference" in orders:
        orders["reference"] = [args.orders - 1]
    return [
        Run(experiment, attention, dropout_p, order)
        for dropout_p in args.dropout
        for attention in args.attentions
        for order in orders[attention]
    ]


def overrides_of(args: argparse.Namespace, run: Run) -> list[str]:
    """What train.py is called with."""
    return [
        f"experiment={run.experiment}",
        f"attention={run.attention}",
        f"run_name={run.name}",
        f"runs_root={args.runs_root}",
        f"data.source={args.source}",
        f"data.batch_tokens={args.batch_tokens}",
        "data.val_fraction=0",
        f"task.micro_batch_tokens={args.micro_batch_tokens >> run.order}",
        f"trainer.max_steps={args.steps}",
        "task.warmup_fraction=0.1",
        "callbacks.checkpoints=null",
        "sample_prompt=null",
        *(f"{place}={run.dropout_p:g}" for place in DROPOUTS),
        *(["task.compile=false"] if run.dropout_p else []),
        *args.overrides,
    ]


def start(args: argparse.Namespace, run: Run, device: int) -> subprocess.Popen[bytes]:
    """One run in a process of its own."""
    command = [sys.executable, "train.py", *overrides_of(args, run)]
    print(f"== {run.name}: {' '.join(command[1:])}", flush=True)
    # The numbers of torch, which are those within what the caller may see.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    chosen = visible[device] if visible[0] else str(device)
    return subprocess.Popen(command, env={**os.environ, "CUDA_VISIBLE_DEVICES": chosen})


def train_together(args: argparse.Namespace, lanes: list[list[Run]]) -> None:
    """The runs of each GPU, all at once; ends this program if one of them fails."""
    processes = [start(args, run, device) for device, lane in enumerate(lanes) for run in lane]
    for process in processes:
        if process.wait():
            for other in processes:
                other.terminate()
            sys.exit(f"a run failed with exit status {process.returncode}: {process.args!r}")


def turns(runs: list[Run], at_once: int) -> list[list[Run]]:
    """Of one GPU: what is timed alone, then several at once, then the large ones alone."""
    timed = [run for run in runs if run.is_timed]
    large = [run for run in runs if run.attention == "reference"]
    others = [run for run in runs if run not in timed and run not in large]
    together = [others[i : i + at_once] for i in range(0, len(others), at_once)]
    return [[run] for run in timed] + together + [[run] for run in large]


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


def compare(
    experiment: str,
    runs: dict[str, list[list[dict]]],
    dropout_p: float = 0.0,
    rounding: float | None = None,
) -> dict:
    """The distances between attentions, and verdicts on them.

    Flash is within the noise if its curves are on average no further from SDPA's than two of SDPA's
    can be from each other: by rounding, with dropout by their masks. The reference has the same
    masks as flash in the same micro-batches, and is held against rounding in any case: how far two
    runs of one attention without dropout can be apart.

    Args:
        runs: metrics of the runs of each attention, in the order of their orders.
        rounding: nats, with dropout: what compare() found without it.
    """
    between = list(itertools.product(runs["flash"], runs["sdpa"]))
    flash_to_sdpa = distances(between)
    sdpa_to_sdpa = distances(list(itertools.combinations(runs["sdpa"], 2)))
    flash_to_flash = distances(list(itertools.combinations(runs["flash"], 2)))
    if rounding is None:
        rounding = max(sdpa_to_sdpa["mean_abs"] + flash_to_flash["mean_abs"])
    found = {
        "model": experiment,
        "dropout_p": dropout_p,
        "rounding": rounding,
        "flash_to_sdpa": flash_to_sdpa,
        "sdpa_to_sdpa": sdpa_to_sdpa,
        "flash_to_flash": flash_to_flash,
        # Differences of rounding have no sign.
        "flash_minus_sdpa": statistics.fmean(gap for pair in between for gap in gaps(*pair)),
        "flash_within_noise": statistics.fmean(flash_to_sdpa["mean_abs"])
        <= max(sdpa_to_sdpa["mean_abs"]),
        "curves": {name: points(tables[-1]) for name, tables in runs.items()},
    }
    if "reference" in runs:
        reference = runs["reference"][-1]
        same_masks = runs["flash"] if dropout_p == 0.0 else runs["flash"][-1:]
        to_flash = distances([(table, reference) for table in same_masks])
        found |= {
            "flash_to_reference": to_flash,
            "sdpa_to_reference": distances([(table, reference) for table in runs["sdpa"]]),
            "reference_within_rounding": statistics.fmean(to_flash["mean_abs"]) <= rounding,
        }
    return found


def points(rows: list[dict]) -> list[tuple[int, float]]:
    """(step, training loss) for a plot: every n-th, the last one included."""
    stride = -(-len(rows) // _MOST_POINTS)
    return [(int(r["step"]), round(float(r["train/loss"]), 4)) for r in rows[::-1][::stride][::-1]]


def curves_of(args: argparse.Namespace, experiment: str) -> list[dict]:
    """compare() for each dropout, none first: its noise is what rounding makes."""
    found: list[dict] = []
    for dropout_p in sorted(args.dropout):
        runs: dict[str, list[list[dict]]] = {}
        for run in runs_of(args, experiment):
            if run.dropout_p == dropout_p:
                runs.setdefault(run.attention, []).append(read_rows(args, run.name))
        rounding = found[0]["rounding"] if found else None
        found.append(compare(experiment, runs, dropout_p, rounding))
    return found


def main() -> None:
    args = arguments()
    if Path(args.runs_root).exists():
        sys.exit(f"{args.runs_root} holds runs of another time; remove it or give --runs-root")
    lanes = [
        turns([run for e in args.experiments[i :: args.gpus] for run in runs_of(args, e)],
              args.at_once)
        for i in range(args.gpus)
    ]  # fmt: skip
    for turn in itertools.zip_longest(*lanes, fillvalue=[]):
        train_together(args, list(turn))

    rows, curves = [], []
    for experiment in args.experiments:
        for run in runs_of(args, experiment):
            table = read_rows(args, run.name)
            rows.append(
                {
                    "impl": "ours",
                    "model": experiment,
                    "run": run.label,
                    "attention": run.attention,
                    "micro_batch_tokens": args.micro_batch_tokens >> run.order,
                    "dropout_p": run.dropout_p,
                    **(speed(table) if run.is_timed else {}),
                    "first_loss": float(table[0]["train/loss"]),
                    "last_loss": float(table[-1]["train/loss"]),
                }
            )
        curves += curves_of(args, experiment)
    settings = {k: v for k, v in vars(args).items() if k not in ("out", "runs_root")}
    record = make_record(
        "compare_attention",
        rows,
        settings,
        omit="--out",
        name=record_name(args),
        loss_curves=curves,
    )
    write_record(args.out, record)
    for row in rows:
        figures = " ".join(f"{k}={row[k]:.4g}" for k in row if isinstance(row[k], float))
        print(f"{row['model']} {row['run']}: {figures}")
    for curve in curves:
        print(loss_verdict(curve))
    print(f"record: {args.out}")


if __name__ == "__main__":
    main()
