"""Tokens a second of training GPT-2 or BERT, ours beside the recipes that a user would pick
instead: python -m scripts.benchmark_training --help

Each contestant is built in a process of its own; then all take turns, a few steps each, and give
back what memory they can between them. "trainer" is `python train.py` in ours' setting, with
loader, logging and the guard against bad steps; it runs alone, and its rate is that of its last
half. It is compared with as many steps of ours without a pause, as a GPU that is kept busy gets
warm and slower. Tokens of BERT are real ones, in sequences as long as English Wikipedia's
(scripts/bert_contestants.py).
"""

import argparse
import csv
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from model.bert import BERT, BERT_BASE, BERT_LARGE
from model.callbacks import peak_flops
from model.gpt import GPT
from scripts.bert_contestants import mean_work
from scripts.compare_attention import speed
from scripts.plan import SIZES
from scripts.records import appended, make_record, read_earlier, write_record
from scripts.training_contestants import (
    BERT_MODELS,
    CONTESTANTS,
    Setting,
    build_racer,
    configured,
    contestants_of,
    release_memory,
)
from scripts.training_tables import TITLES, TRAINER, render

BERT_SIZES = {"bert_base": BERT_BASE, "bert_large": BERT_LARGE}
_GPT_CONTEXTS, _BERT_CONTEXTS = (1024, 2048, 4096, 8192, 16384, 65536), (512,)
_TRAINER_STEPS = 60


def serve(pipe: Connection, name: str, setting: Setting) -> None:
    """A contestant's process: build, say so, then answer ("time", steps) with seconds a step,
    ("sustain", steps) with those of the last half and ("profile", count) with slowest_kernels."""
    try:
        racer = build_racer(name, setting)
        peak = peak_gib(racer.step)
    except Exception as error:  # of any rival's: it is reported as its result
        text = (str(error).splitlines() or [""])[0]
        pipe.send({"failure": f"{type(error).__name__}: {text}"[:160]})
        return
    release_memory()
    pipe.send({"micro_batch": racer.micro_batch, "peak_gib": peak, "failure": None})
    while True:
        wish, number = pipe.recv()
        racer.step()  # what it gave back comes again
        _wait()
        answer: dict[str, float] | float
        if wish == "profile":
            answer = slowest_kernels(racer.step, number)
        else:
            ahead = number // 2 if wish == "sustain" else 0
            for _ in range(ahead):
                racer.step()
            _wait()
            begin = time.perf_counter()
            for _ in range(number - ahead):
                racer.step()
            _wait()
            answer = (time.perf_counter() - begin) / (number - ahead)
        release_memory()
        pipe.send(answer)


def peak_gib(step: Callable[[], object]) -> float | None:
    """Of a step, not of the larger micro-batches that did not fit; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated() / 2**30


def ask(pipe: Connection, wish: str, number: int) -> Any:
    """What a contestant's process answers; None if it is no longer there."""
    try:
        pipe.send((wish, number))
        return pipe.recv()
    except (EOFError, ConnectionError):
        return None


def slowest_kernels(step: Callable[[], object], count: int) -> dict[str, float]:
    """Name -> milliseconds a step, of the `count` that take the most, and "all" (operators, where
    there is no GPU). Three steps are profiled."""
    has_gpu = torch.cuda.is_available()
    kind = torch.profiler.ProfilerActivity.CUDA if has_gpu else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[kind]) as profile:
        for _ in range(3):
            step()
        _wait()
    field = "self_device_time_total" if has_gpu else "self_cpu_time_total"
    times: Counter[str] = Counter()
    for event in profile.key_averages():
        times[event.key[:120]] += getattr(event, field) / 3000
    return {"all": sum(times.values()), **dict(times.most_common(count))}


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Contest:
    """The processes of contestants that are built, and what they said of themselves."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.facts: dict[str, dict] = {}
        self.pipes: dict[str, Connection] = {}
        self._processes: list[BaseProcess] = []

    def build(self, names: list[str]) -> None:
        """At once: compiling is work for the CPU. One that found too little memory beside the
        others is built again, alone."""
        started = {name: self._start(name) for name in names}
        for name, (pipe, process) in started.items():
            try:
                self.facts[name] = pipe.recv()
            except EOFError:
                process.join()
                self.facts[name] = {"failure": f"its process ended with {process.exitcode}"}
        whole = self.setting.tokens // self.setting.seqlen
        for name, (pipe, process) in started.items():
            if len(names) > 1 and self.facts[name].get("micro_batch") != whole:
                process.kill()
                process.join()
                self.build([name])
            elif self.facts[name]["failure"] is None:
                self.pipes[name] = pipe

    def _start(self, name: str) -> tuple[Connection, BaseProcess]:
        spawn = multiprocessing.get_context("spawn")
        pipe, far_end = spawn.Pipe()
        process = spawn.Process(target=serve, args=(far_end, name, self.setting), daemon=True)
        process.start()
        far_end.close()
        self._processes.append(process)
        return pipe, process

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def race(
    setting: Setting,
    names: list[str],
    rounds: int,
    steps: int,
    num_kernels: int = 0,
    at_once: int = 1,
    sustained_steps: int = 0,
) -> list[dict]:
    """A row for each contestant: medians over the rounds. `at_once` are built together; ours goes
    on for `sustained_steps` at the end."""
    contest = Contest(setting)
    try:
        groups = [names[i : i + at_once] for i in range(0, len(names), at_once)]
        for group in track(groups, f"{setting.model} {setting.seqlen}: building"):
            contest.build(group)
        facts, pipes = contest.facts, contest.pipes
        seconds: dict[str, list[float]] = {name: [] for name in pipes}
        for turn in range(rounds if pipes else 0):
            first = turn % len(pipes)
            for name in [*pipes][first:] + [*pipes][:first]:
                if name not in seconds:
                    continue
                answer = ask(pipes[name], "time", steps)
                if answer is None:
                    del seconds[name]
                    facts[name]["failure"] = "its process ended in a round: see its traceback"
                else:
                    seconds[name].append(answer)
        for name in seconds if num_kernels else ():
            facts[name]["kernels_ms"] = ask(pipes[name], "profile", num_kernels) or {}
        if sustained_steps and "ours" in seconds:
            lasting = ask(pipes["ours"], "sustain", sustained_steps)
            if lasting is None:
                facts["ours"]["failure"] = "its process ended in steps without a pause"
            else:
                facts["ours"]["sustained_tokens_per_s"] = setting.tokens / lasting
    finally:
        contest.close()
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    tokens = float(setting.tokens)
    if setting.model in BERT_MODELS:
        tokens = mean_work(setting.seqlen, setting.tokens)["tokens"]
    return [
        row_of(name, setting, facts[name], tokens / medians[name] if name in medians else None)
        for name in names
    ]


def run_trainer(setting: Setting) -> dict:
    """The row of `python train.py`, dropout 0."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "train.py", *configured(setting, 0.0, "auto"), "data=embedded",
            f"data.seqlen={setting.seqlen}", f"data.batch_tokens={setting.tokens}",
            "data.val_fraction=0", f"trainer.max_steps={_TRAINER_STEPS}", "sample_prompt=null",
            "callbacks.checkpoints=null", f"runs_root={folder}", "run_name=trainer",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            lines = (done.stderr or done.stdout).strip().splitlines()
            failure = lines[-1][:160] if lines else f"train.py ended with {done.returncode}"
            return row_of(TRAINER, setting, {"failure": failure}, None)
        with (Path(folder) / "trainer/metrics.csv").open(newline="") as file:
            found = speed(list(csv.DictReader(file)))
    facts = {"micro_batch": setting.tokens // setting.seqlen, "peak_gib": found.get("peak_gib")}
    return row_of(TRAINER, setting, {**facts, "failure": None}, found["tokens_per_s"])


def row_of(name: str, setting: Setting, facts: dict, tokens_per_s: float | None) -> dict:
    """Of the record; `facts` of `serve`."""
    row = {
        "impl": name,
        "model": setting.model,
        "seqlen": setting.seqlen,
        "tokens": setting.tokens,
        "dropout_p": CONTESTANTS[name].dropout_p if name in CONTESTANTS else 0.0,
        **facts,
        "tokens_per_s": tokens_per_s,
    }
    peak = peak_flops(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    if setting.model in BERT_MODELS:
        work = mean_work(setting.seqlen, setting.tokens)
        row["mean_length"] = work["tokens"] / work["samples"]
        if tokens_per_s:
            row["samples_per_s"] = tokens_per_s / row["mean_length"]
        if tokens_per_s and peak and setting.model in BERT_SIZES:
            with torch.device("meta"):
                depth, dim, nheads = BERT_SIZES[setting.model].values()
                flops = BERT(depth=depth, dim=dim, nheads=nheads).flops(**work)
            row["mfu_full"] = flops * tokens_per_s / (work["tokens"] * peak)
    elif tokens_per_s and peak and setting.model in SIZES:
        depth, dim, nheads = SIZES[setting.model]
        with torch.device("meta"):
            model = GPT(depth=depth, dim=dim, nheads=nheads, max_seqlen=setting.seqlen)
        for kind, flops in model.flops_per_token(setting.seqlen).items():
            row[f"mfu_{kind}"] = flops * tokens_per_s / peak
    return row


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", nargs="+", default=["gpt2_small"], choices=[*SIZES, *BERT_SIZES]
    )
    parser.add_argument(
        "--contexts",
        nargs="+",
        type=int,
        help=f"default: {_GPT_CONTEXTS}, of BERT {_BERT_CONTEXTS}",
    )
    parser.add_argument(
        "--contestants", nargs="+", choices=TITLES, help="default: all that train the model"
    )
    parser.add_argument(
        "--tokens", type=int, default=65536, help="of an optimizer step, BERT's padding counted"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="of a contestant in a round")
    parser.add_argument(
        "--build-at-once", type=int, default=3, help="contestants that compile beside each other"
    )
    parser.add_argument("--kernels", type=int, default=0, help="profile: the slowest so many")
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmark_training.json"))
    parser.add_argument(
        "--append",
        action="store_true",
        help="keep the settings that the record has and this run lacks",
    )
    parser.add_argument("overrides", nargs="*", help="of train.py for ours, key=value")
    args = parser.parse_args()
    for seqlen in args.contexts or (*_GPT_CONTEXTS, *_BERT_CONTEXTS):
        if seqlen < 1 or args.tokens % seqlen:
            parser.error(f"--tokens ({args.tokens}) must be a multiple of each context: {seqlen}")
    if min(args.rounds, args.steps, args.build_at_once) < 1:
        parser.error("--rounds, --steps and --build-at-once must be at least 1")
    return args


def main() -> None:
    args = arguments()
    if not torch.cuda.is_available():
        raise SystemExit("benchmark_training needs a GPU, none is visible")
    rows = []
    earlier = read_earlier(args.output, args.append)
    for model in args.models:
        known = contestants_of(model) + ([] if model in BERT_MODELS else [TRAINER])
        names = [name for name in args.contestants or known if name in known]
        for seqlen in args.contexts or (_BERT_CONTEXTS if model in BERT_MODELS else _GPT_CONTEXTS):
            setting = Setting(model, seqlen, args.tokens, overrides=tuple(args.overrides))
            racers = [name for name in names if name != TRAINER]
            sustained = _TRAINER_STEPS if TRAINER in names else 0
            rows += race(
                setting,
                racers,
                args.rounds,
                args.steps,
                args.kernels,
                args.build_at_once,
                sustained,
            )
            if TRAINER in names:
                rows.append(run_trainer(setting))
            settings = {k: v for k, v in vars(args).items() if k != "output"}
            record = make_record("benchmark_training", rows, settings, omit="--output")
            record = appended(earlier, record, itemgetter("model", "seqlen"))
            write_record(args.output, record)  # what is measured is kept
    render(record, Console(width=200))
    print(f"record {args.output}")


if __name__ == "__main__":
    main()
