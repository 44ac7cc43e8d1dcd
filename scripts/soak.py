"""Kill a run at random, let it resume, and compare it with one that was left alone.

    python -m scripts.soak --kills 10 --within 90 experiment=gpt2_1k trainer.max_steps=1500
    python -m scripts.soak --kills 2 --within 15 trainer=cpu trainer.max_steps=60   # on a laptop

Everything behind the options is train.py's. SIGKILL and SIGTERM take turns, each sent to all
processes of the run at a random time within --within seconds of a start: while it starts, trains,
validates or saves. The run passes if its losses are those of the undisturbed one, at every
step and exactly unless --tolerance says otherwise, its memory is flat and its speed the same.
"""

import argparse
import csv
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

from scripts.records import make_record, write_record

_LOSSES = ("train/loss", "train/grad_norm", "val/loss")
# What a run ends with if it was told to: SIGTERM is -15 where training had not begun.
_KILLED = {-signal.SIGKILL, -signal.SIGTERM, 143}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=10, help="default: %(default)s")
    parser.add_argument("--within", type=float, default=90.0, help="seconds; default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the times; default: %(default)s")
    parser.add_argument("--tolerance", type=float, default=0.0, help="relative, of a loss: 0")
    parser.add_argument("--speed", type=float, default=0.02, help="allowed loss: %(default)s")
    parser.add_argument("--runs-root", default="outputs/soak", help="default: %(default)s")
    parser.add_argument("--out", default="outputs/soak.json", help="default: %(default)s")
    parser.add_argument("overrides", nargs="*", help="of train.py")
    return parser.parse_intermixed_args()


def run(command: list[str], kill_at: float | None = None, number: int = signal.SIGKILL) -> int:
    """Exit status of a command, whose processes are all sent a signal after kill_at seconds."""
    process = subprocess.Popen(command, start_new_session=True)
    try:
        return process.wait(kill_at)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, number)
        return process.wait()
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise


def disturb(command: list[str], kills: int, within: float, seed: int) -> list[dict]:
    """Run a command until it ends by itself, killed at random before.

    Returns:
        For each start how long it ran, in seconds, and its exit status.
    Raises:
        RuntimeError: it ended with an error of its own.
    """
    draw = random.Random(seed)
    starts: list[dict] = []
    while not starts or starts[-1]["status"] != 0:
        number = (signal.SIGKILL, signal.SIGTERM)[len(starts) % 2]
        kill_at = draw.uniform(0.0, within) if len(starts) < kills else None
        began = time.monotonic()
        status = run(command, kill_at, number)
        starts.append({"seconds": round(time.monotonic() - began, 1), "status": status})
        print(f"start {len(starts)}: {starts[-1]['seconds']} s, status {status}", flush=True)
        if status and (kill_at is None or status not in _KILLED):
            raise RuntimeError(f"the run ended by itself with status {status}: see its output")
    return starts


def read_rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def compare(whole: list[dict], cut: list[dict], tolerance: float) -> dict:
    """Rows of metrics.csv of the undisturbed run and the killed one.

    Returns:
        steps, num_different (steps whose losses differ by more than the tolerance, or are not
        there), worst (largest relative difference), tokens_per_s of both (medians), speed (their
        ratio), memory_growth (of the last start's peak over its first, None on a CPU), overhead
        (share of the undisturbed run's time that is no training: validation and checkpoints).
    """
    found = {row["step"]: row for row in cut}
    worst, different = 0.0, abs(len(cut) - len(whole))
    for row in whole:
        other = found.get(row["step"], {})
        pairs = [(row[name], other.get(name, "")) for name in _LOSSES]
        if any(bool(a) != bool(b) for a, b in pairs):
            different += 1
            continue
        errors = [abs(float(a) - float(b)) / max(abs(float(a)), 1e-12) for a, b in pairs if a]
        worst = max([worst, *errors])
        different += any(error > tolerance for error in errors)
    speeds = [
        statistics.median([float(r["tokens_per_s"]) for r in rows if r["tokens_per_s"]])
        for rows in (whole, cut)
    ]
    peaks = [float(row["peak_gib"]) for row in cut if row["peak_gib"]]
    intervals = [row for row in whole if row["tokens_per_s"] and row["seconds"]]
    tokens = [0.0, *(float(row["tokens"]) for row in intervals)]
    training = sum(
        (end - begin) / float(row["tokens_per_s"])
        for begin, end, row in zip(tokens, tokens[1:], intervals, strict=False)
    )
    return {
        "steps": len(whole),
        "num_different": different,
        "worst": worst,
        "tokens_per_s": speeds,
        "speed": speeds[1] / speeds[0],
        "memory_growth": peaks[-1] / min(peaks) - 1.0 if peaks else None,
        "overhead": max(0.0, 1.0 - training / float(intervals[-1]["seconds"])),
    }


def main() -> None:
    args = arguments()
    shutil.rmtree(args.runs_root, ignore_errors=True)
    command = [sys.executable, "train.py", *args.overrides, f"runs_root={args.runs_root}"]
    command += ["sample_prompt=null"]
    if status := run([*command, "run_name=undisturbed"]):
        sys.exit(f"error: the undisturbed run ended with status {status}")
    killed = [*command, "run_name=killed", "resume=auto"]
    try:
        starts = disturb(killed, args.kills, args.within, args.seed)
    except RuntimeError as error:
        sys.exit(f"error: {error}")
    whole, cut = (read_rows(Path(args.runs_root) / name) for name in ("undisturbed", "killed"))
    result = compare(whole, cut, args.tolerance)
    settings = {key: value for key, value in vars(args).items() if key != "out"}
    write_record(args.out, make_record("soak", [result], settings, omit="--out", starts=starts))
    for name, value in result.items():
        print(f"{name:14} {value}")
    growth = result["memory_growth"] or 0.0
    is_fast = result["speed"] >= 1.0 - args.speed
    if result["num_different"] or growth > args.speed or not is_fast:
        sys.exit("the killed run is not like the undisturbed one")
    print(f"passed: {len(starts)} starts; record: {args.out}")


if __name__ == "__main__":
    main()
