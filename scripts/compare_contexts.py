"""Perplexity against context (the paper's table 4) at a size of your choice: GPT-2 small trained on
equal tokens at each context, throughout and with a warm-up of the context.

    python -m scripts.compare_contexts --source novels.jsonl.xz --tokens 87e6
    python -m scripts.compare_contexts --source novels.jsonl.xz --warmup 1024:0.5 --print

Each held-out token is a target once at every context, in windows that do not overlap. The shortest
and the longest context are trained with every seed, the others with the first. A comparison that
was stopped continues with the run that it was at.
"""

import argparse
import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from scripts.records import make_record, write_record


class Plan(NamedTuple):
    """One run."""

    seqlen: int
    stages: tuple[tuple[int, float], ...]  # of a context warm-up; none: seqlen throughout
    seed: int

    @property
    def name(self) -> str:
        return f"{self.seqlen}{'_warmup' * bool(self.stages)}_seed{self.seed}"

    @property
    def schedule(self) -> str:
        if not self.stages:
            return "throughout"
        return ", ".join([f"{c} to {until:.0%}" for c, until in self.stages] + [str(self.seqlen)])


def stage(text: str) -> tuple[int, float]:
    """CONTEXT:UNTIL, such as 1024:0.7."""
    context, _, until = text.partition(":")
    return int(context), float(until)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--source", default="embedded", help="text to train on (data.source)")
    parser.add_argument("--tokens", type=float, default=87e6, help="of each run, about")
    parser.add_argument("--batch-tokens", type=int, default=131072, help="of a step")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384])
    parser.add_argument(
        "--warmup", type=stage, nargs="+", default=[(1024, 0.7), (4096, 0.9)],
        help="stages CONTEXT:UNTIL; a run has those below its own context",
    )  # fmt: skip
    parser.add_argument("--seeds", type=int, nargs="+", default=[1111, 1112, 1113])
    parser.add_argument("--experiment", default="gpt2_1k", help="what the runs are variants of")
    parser.add_argument("--runs-root", default="outputs/compare_contexts")
    parser.add_argument("--out", default="outputs/compare_contexts.json")
    parser.add_argument("--print", action="store_true", help="the commands, and run nothing")
    parser.add_argument("overrides", nargs="*", help="more overrides of train.py, key=value")
    return parser.parse_args()


def plans(contexts: list[int], warmup: list[tuple[int, float]], seeds: list[int]) -> list[Plan]:
    """Every run, the shortest context first."""
    contexts = sorted(contexts)
    found = []
    for seqlen in contexts:
        stages = tuple((context, until) for context, until in warmup if context < seqlen)
        for seed in seeds if seqlen in (contexts[0], contexts[-1]) else seeds[:1]:
            found += [Plan(seqlen, (), seed)] + [Plan(seqlen, stages, seed)] * bool(stages)
    return found


def command(args: argparse.Namespace, plan: Plan) -> list[str]:
    """The arguments of train.py for a run."""
    steps = num_steps(args)
    stages = ",".join(f"[{context},{until}]" for context, until in plan.stages)
    return [
        f"experiment={args.experiment}",
        "data=text",
        f"data.source={args.source}",
        f"data.seqlen={plan.seqlen}",
        f"data.context_warmup={f'[{stages}]' if stages else 'null'}",
        f"data.batch_tokens={args.batch_tokens}",
        f"trainer.max_steps={steps}",
        f"trainer.val_check_interval={max(1, steps // 10)}",
        f"seed={plan.seed}",
        f"run_name={plan.name}",
        f"runs_root={args.runs_root}",
        "callbacks.checkpoints=null",
        "sample_prompt=null",
        *args.overrides,
    ]


def num_steps(args: argparse.Namespace) -> int:
    """Optimizer steps of each run."""
    return max(1, round(args.tokens / args.batch_tokens))


def read_result(args: argparse.Namespace, plan: Plan) -> dict | None:
    """The row of a finished run; None of one that is not.

    Raises:
        ValueError: the folder holds a run with other settings.
    """
    folder = Path(args.runs_root) / plan.name
    if not (folder / "metrics.csv").exists():
        return None
    made_by = json.loads((folder / "run.json").read_text())["command"]
    if not made_by.endswith(" ".join(command(args, plan))):
        raise ValueError(f"{folder} holds a run with other settings; give another --runs-root")
    with (folder / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    last = rows[-1] if rows else {}
    if not last or int(last["step"]) != num_steps(args) or not last["val/ppl"]:
        return None
    ppl = float(last["val/ppl"])
    return {
        "model": args.experiment,
        "seqlen": plan.seqlen,
        "schedule": plan.schedule,
        "tokens": int(float(last["tokens"])),
        "seed": plan.seed,
        "val_ppl": ppl,
        "same_target_ppl": ppl,  # every context predicts all held-out tokens
        "seconds": float(last["seconds"]),
        "curve": [
            [int(float(row["tokens"])), float(row["val/ppl"])] for row in rows if row["val/ppl"]
        ],
    }


def main() -> None:
    args = arguments()
    todo = plans(args.contexts, args.warmup, args.seeds)
    if args.print:
        for plan in todo:
            print("python train.py " + " ".join(command(args, plan)))
        return
    try:
        found = [read_result(args, plan) for plan in todo]
    except ValueError as error:
        sys.exit(f"error: {error}")
    rows = []
    for number, (plan, row) in enumerate(zip(todo, found, strict=True), 1):
        if row is None:
            print(f"== run {number} of {len(todo)}: {plan.name}, {plan.schedule}", flush=True)
            shutil.rmtree(Path(args.runs_root) / plan.name, ignore_errors=True)
            done = subprocess.run([sys.executable, "train.py", *command(args, plan)])
            row = read_result(args, plan)
            if done.returncode or row is None:
                sys.exit(f"run {plan.name} came to no result, exit status {done.returncode}")
        rows.append(row)
        write(args, rows)
    for row in rows:
        print(f"{row['seqlen']:>6} {row['schedule']:<32} seed {row['seed']}: {row['val_ppl']:.2f}")
    print(f"record: {args.out}")


def write(args: argparse.Namespace, rows: list[dict]) -> None:
    keep = ("source", "tokens", "batch_tokens", "contexts", "warmup", "seeds", "overrides")
    settings = {key: vars(args)[key] for key in keep}
    write_record(args.out, make_record("compare_contexts", rows, settings, omit="--out"))


if __name__ == "__main__":
    main()
