"""Chains of long-range runs, several at once on one GPU, within a number of minutes.

    python -m scripts.long_range --minutes 8 --chains pathx path32
    python -m scripts.long_range --list

For GPUs that are lent for a short while: when the minutes are over, every run saves, stops and is
tested (that takes about a minute more). The same command another day goes on where it stopped. A
chain is a list of runs that start from each other's weights; its next run begins when one has made
its steps, reached its target or used up its minutes, and that one is then not gone back to. Outputs
of each run go to RUNS_ROOT/logs/RUN.log. With --pack each run becomes a RUN.tar as soon as it
ends, for `tar -xf` below RUNS_ROOT of another machine. The last of a chain that has trained, or one
that another chain starts from, holds its newest checkpoint; all hold what a record needs: python -m
scripts.record_runs.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path

from model.checkpoint import newest_intact, read_manifest
from model.results import RESULT_FILE
from scripts.long_range_chains import CHAINS, MEASURE, Stage

_LEAST_MINUTES = 0.25  # a run of less would do nothing but start
_STARTS = {chain.after for chain in CHAINS.values() if chain.after}  # of other chains


class Plan:
    """The chains of one call: where their runs lie, and until when they train.

    Args:
        args: of the command line.
        ends: time.time() when training ends.
    """

    def __init__(self, args: argparse.Namespace, ends: float) -> None:
        self.runs, self.data = Path(args.runs_root), args.data_root
        self.options, self.workers, self._ends = args.override, args.prepare_workers, ends
        self.logs = self.runs / "logs"
        self.pack_folder, self._most_mib = args.pack, args.pack_mib
        self.failed: list[str] = []
        self.is_over = threading.Event()
        self._processes: list[subprocess.Popen] = []

    def minutes_left(self) -> float:
        return max(0.0, (self._ends - time.time()) / 60)

    def prepare(self, sets: list[str]) -> None:
        """Generate images of later stages, which takes core-minutes, as long as there are chains.

        What is not finished is gone on with by the next process that wants it.
        """
        for arguments in sets:
            words = ["pathfinder", *arguments.split(), "--no-floor"]
            words += ["--workers", str(self.workers), "--root", self.data]
            # A session of its own: its workers end with it.
            process = self._start("scripts.prepare_data", words, "prepare", start_new_session=True)
            while process.poll() is None:
                if self.is_over.wait(1.0):
                    os.killpg(process.pid, signal.SIGTERM)
                    process.wait()
            if self.is_over.is_set():
                return

    def run_or_fail(self, name: str) -> None:
        """`run` in a thread: an error, such as a full disk, ends the chain and is not lost."""
        try:
            self.run(name)
        except Exception as error:
            self.failed.append(name)
            print(f"{name}: ended, {type(error).__name__}: {error}", flush=True)

    def run(self, name: str) -> None:
        """The stages of a chain that are not done yet, one after the other."""
        chain = CHAINS[name]
        before = chain.after
        trained = [stage for stage in chain.stages if not stage.measures]
        for stage in chain.stages:
            later = trained[trained.index(stage) + 1 :] if stage in trained else []
            if not any(self.has_weights(other.name) for other in later):
                may_go_on = (self._measure if stage.measures else self._train)(stage, before)
                is_packed = self.pack(stage.name) and self.has_weights(stage.name)
                if is_packed and not stage.measures:
                    # What is gone on with is safe: those before need their weights no more.
                    for other in trained[: trained.index(stage)]:
                        self.pack(other.name, has_weights=other.name in _STARTS)
                if not may_go_on:
                    return
            if not stage.measures:
                before = stage.name

    def has_weights(self, name: str) -> bool:
        return any(read_manifest(self.runs / name / "checkpoints"))

    def _train(self, stage: Stage, before: str | None) -> bool:
        """Whether the next stage may begin."""
        result = self._result(stage.name)
        if result and result["step"] >= result["max_steps"]:
            return True
        left = self.minutes_left()
        minutes = left if stage.minutes is None else min(left, stage.minutes)
        if minutes < _LEAST_MINUTES:
            print(f"{stage.name}: no time left for it", flush=True)
            return self.has_weights(stage.name)
        words = [*stage.options, *self.options, "resume=auto"]
        words += [f"callbacks.stop.minutes={minutes:.2f}"]
        return self._finish(stage.name, words, before)

    def _measure(self, stage: Stage, before: str | None) -> bool:
        """Test the weights of `before`, again where they were trained on since."""
        folder = self.runs / stage.name
        if before is None or not self.has_weights(before):
            return False
        done, weights = folder / RESULT_FILE, self.runs / before / RESULT_FILE
        if done.exists():
            if done.stat().st_mtime > weights.stat().st_mtime:
                return True
            shutil.rmtree(folder)  # it holds no weights
        return self._finish(stage.name, [*stage.options, *self.options, *MEASURE], before)

    def _finish(self, name: str, words: list[str], before: str | None) -> bool:
        words = [*words, f"run_name={name}", f"runs_root={self.runs}", f"data.root={self.data}"]
        words += [f"init_from={self.runs / before}"] if before else []
        if self.is_over.is_set():
            return False
        print(f"{name}: begins, {self.minutes_left():.1f} minutes left", flush=True)
        code = self._start("train", words, name).wait()
        result = self._result(name)
        if code or result is None:
            self.failed.append(name)
            last = (self.logs / f"{name}.log").read_text().splitlines()[-1:]
            print(f"{name}: failed, {' '.join(last) or f'exit status {code}'}", flush=True)
            return False
        for split in result["splits"].values():
            print(f"{name}: {split['line']}", flush=True)
        return True

    def stop(self) -> None:
        """End what still runs: trainings save first."""
        self.is_over.set()
        for process in self._processes:
            if process.poll() is None:
                process.terminate()

    def _start(
        self, module: str, words: list[str], log: str, *, start_new_session: bool = False
    ) -> subprocess.Popen:
        # One thread a process: several processes and their workers share the cores.
        environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONUNBUFFERED": "1"}
        with (self.logs / f"{log}.log").open("a") as file:
            command = [sys.executable, "-m", module, *words]
            process = subprocess.Popen(
                command,
                stdout=file,
                stderr=file,
                env=environment,
                start_new_session=start_new_session,
            )
        self._processes.append(process)
        return process

    def _result(self, name: str) -> dict | None:
        path = self.runs / name / RESULT_FILE
        return json.loads(path.read_text()) if path.exists() else None

    def pack(self, name: str, *, has_weights: bool = True) -> bool:
        """RUN.tar of a run, if there is one and tars are wanted: all its files but checkpoints, and
        has_weights the newest of those, which a run can go on from or start from.

        Whether there is such a tar now. Says so if it is left out because it would be larger than
        --pack-mib.
        """
        run, folder = self.runs / name, self.pack_folder
        if folder is None or not run.is_dir():
            return False
        kept = [path for path in run.iterdir() if path.name != "checkpoints"]
        if has_weights and (newest := newest_intact(run / "checkpoints")):
            kept += [newest, run / "checkpoints" / "manifest.json"]
        size = sum(path.stat().st_size for path in kept) / 2**20
        if size > self._most_mib:
            print(f"{name}: not packed, {size:.1f} MiB are more than {self._most_mib:g}")
            return False
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f".{name}.tar"
        with tarfile.open(partial, "w") as tar:
            for path in kept:
                tar.add(path, path.relative_to(self.runs))
        partial.replace(folder / f"{name}.tar")
        return True


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chains", nargs="+", default=["pathx"], metavar="CHAIN",
                        help="which to run at once (--list); default: pathx")  # fmt: skip
    parser.add_argument("--minutes", type=float, default=8.0, help="of training: %(default)s")
    parser.add_argument("--list", action="store_true", help="say what chains there are, and end")
    parser.add_argument("--runs-root", default="outputs/runs", help="default: %(default)s")
    parser.add_argument("--data-root", default="outputs/data", help="default: %(default)s")
    parser.add_argument("--pack", type=Path, metavar="FOLDER", help="make a RUN.tar of each run")
    parser.add_argument("--pack-mib", type=float, default=64.0,
                        help="leave out what is larger: %(default)s")  # fmt: skip
    parser.add_argument("--prepare-workers", type=int, default=6,
                        help="processes that generate later images: %(default)s")  # fmt: skip
    parser.add_argument("override", nargs="*", help="of every run, for instance task.compile=true")
    args = parser.parse_intermixed_args(arguments)
    # What follows the chains may be overrides, which argparse cannot tell from them.
    args.override += [word for word in args.chains if "=" in word]
    args.chains = [word for word in args.chains if "=" not in word]
    if unknown := [name for name in args.chains if name not in CHAINS]:
        parser.error(f"--chains must be of {', '.join(CHAINS)}, got {' '.join(unknown)}")
    if wrong := [word for word in args.override if "=" not in word]:
        parser.error(f"overrides have the form key=value, got {' '.join(wrong)}")
    if args.minutes <= 0:
        parser.error(f"--minutes must be positive, got {args.minutes:g}")
    return args


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    if args.list:
        for name, chain in CHAINS.items():
            print(f"{name:<14}{chain.about}: {', '.join(stage.name for stage in chain.stages)}")
        return 0
    plan = Plan(args, time.time() + 60 * args.minutes)
    for name in args.chains:
        after = CHAINS[name].after
        if after and not plan.has_weights(after):
            print(f"error: {name} starts from {after}, which is not in {plan.runs}: run its chain, "
                  "or unpack its tar there", file=sys.stderr)  # fmt: skip
            return 1
    plan.logs.mkdir(parents=True, exist_ok=True)
    sets = list(dict.fromkeys(words for name in args.chains for words in CHAINS[name].prepare))
    threads = [threading.Thread(target=plan.run_or_fail, args=(name,)) for name in args.chains]
    preparing = threading.Thread(target=plan.prepare, args=(sets,))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        for thread in [*threads, preparing]:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        plan.stop()
    preparing.join()
    return 1 if plan.failed else 0


if __name__ == "__main__":
    sys.exit(main())
