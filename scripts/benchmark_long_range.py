"""Milliseconds of a training step of the Long Range Arena's tasks, our attention beside torch's
(the speedups of the paper's table 3): python -m scripts.benchmark_long_range --help

A step is that of the experiments lra_* and pathx, their model and batch, on random tokens without
padding, in bf16 autocast on a GPU: forward, backward, optimizer; not compiled, as graphs do not
tell torch's kernels of attention apart. The attention alone differs; all take turns. SDPA's math
kernel, in bf16 throughout, is what the paper calls a Transformer; speedups over it are a geometric
mean of the five tasks.
"""

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import DictConfig
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from scripts.records import make_record, write_record
from scripts.report_page import Block
from scripts.report_page import Table as ReportTable
from scripts.training_contestants import CONFIGS

ARENA = ("lra_listops", "lra_text", "lra_retrieval", "lra_image", "lra_pathfinder")
TASKS = (*ARENA, "pathx")
BASELINE = "sdpa_math"


class Contestant(NamedTuple):
    title: str
    attention: str  # of configs/attention
    backend: SDPBackend | None = None  # of torch's
    paper: float | None = None  # speedup of table 3


CONTESTANTS = {
    "flash": Contestant("ours", "flash", paper=2.4),
    "block_sparse": Contestant("ours, block-sparse", "block_sparse", paper=2.8),
    "sdpa_math": Contestant("SDPA math", "sdpa", SDPBackend.MATH),
    "sdpa_flash2": Contestant("FlashAttention-2 (SDPA)", "sdpa", SDPBackend.FLASH_ATTENTION),
    "sdpa_cudnn": Contestant("cuDNN (SDPA)", "sdpa", SDPBackend.CUDNN_ATTENTION),
}


class Setting(NamedTuple):
    """What all contestants of a task have in common."""

    task: str
    overrides: tuple[str, ...] = ()  # of train.py


@contextlib.contextmanager
def chosen(backend: SDPBackend | None) -> Iterator[None]:
    """torch's attention by one of its kernels; the math one in the inputs' dtype, not float32."""
    if backend is None:
        yield
        return
    before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        with sdpa_kernel(backend):
            yield
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(before)


def configured(setting: Setting, attention: str) -> DictConfig:
    words = [f"experiment={setting.task}", f"attention={attention}", *setting.overrides]
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return compose("train", words)


class Racer:
    """A contestant's training, whose `step` returns the loss that nobody has waited for."""

    def __init__(self, name: str, setting: Setting, device: str) -> None:
        who = CONTESTANTS[name]
        cfg = configured(setting, who.attention)
        cfg.task.compile = False
        torch.manual_seed(0)
        self.task = instantiate(cfg.task).to(device).train()
        self.optimizer = self.task.configure_optimizers()
        self.batch_size, self.seqlen = cfg.data.batch_size, cfg.model.max_seqlen
        self.device, self._backend = device, who.backend
        towers = [2] * (cfg.model.num_towers == 2)
        generator = torch.Generator().manual_seed(1)
        shape = (self.batch_size, *towers, self.seqlen)
        ids = torch.randint(1, cfg.model.vocab_size, shape, generator=generator)
        labels = torch.randint(cfg.model.num_classes, (self.batch_size,), generator=generator)
        self._piece = {"input_ids": ids.to(device), "labels": labels.to(device), "lengths": None}

    def step(self) -> Tensor:
        is_cuda = self.device == "cuda"
        with chosen(self._backend):
            with torch.autocast(self.device, torch.bfloat16, enabled=is_cuda):
                loss = self.task.sums(self._piece)["loss"] / self.batch_size
            loss.backward()
        nn.utils.clip_grad_norm_(self.task.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def race(
    setting: Setting, names: Sequence[str], rounds: int, steps: int, device: str
) -> list[dict[str, Any]]:
    """A row for each contestant, medians over the rounds."""
    racers: dict[str, Racer] = {}
    rows: dict[str, dict[str, Any]] = {}
    for name in names:
        rows[name] = {"task": setting.task, "impl": name, "failure": None}
        racer: Racer | None = None
        try:
            racer = Racer(name, setting, device)
            for _ in range(3):  # compiles kernels, and allocates
                racer.step()
            rows[name] |= {"batch": racer.batch_size, "seqlen": racer.seqlen}
            rows[name]["peak_gib"] = _peak_gib(racer.step)
            racers[name] = racer
        except Exception as error:  # of any rival's: it is reported as its result
            cause = error.__cause__ or error  # hydra's errors are of another
            text = (str(cause).splitlines() or [""])[0]
            rows[name]["failure"] = f"{type(cause).__name__}: {text}"[:160]
            racer = None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    seconds: dict[str, list[float]] = {name: [] for name in racers}
    order = [*racers]
    for turn in range(rounds):
        first = turn % len(order) if order else 0
        for name in order[first:] + order[:first]:
            racers[name].step()
            _wait()
            begin = time.perf_counter()
            for _ in range(steps):
                racers[name].step()
            _wait()
            seconds[name].append((time.perf_counter() - begin) / steps)
    for name, times in seconds.items():
        rows[name]["ms"] = 1e3 * statistics.median(times)
    return [rows[name] for name in names]


def _peak_gib(step: Callable[[], object]) -> float | None:
    if not torch.cuda.is_available():
        return None
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated() / 2**30


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def speedups(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Contestant -> how many times faster than SDPA math, where both have all tasks of the arena
    that were measured."""
    times = {(r["task"], r["impl"]): r.get("ms") for r in rows if r["task"] in ARENA}
    tasks = list(dict.fromkeys(task for task, _ in times))
    found = {}
    for name in CONTESTANTS:
        pairs = [(times.get((task, BASELINE)), times.get((task, name))) for task in tasks]
        ratios = [base / own for base, own in pairs if base and own]
        if ratios and len(ratios) == len(tasks):
            found[name] = statistics.geometric_mean(ratios)
    return found


def speed_table(record: dict) -> tuple[list[str], list[list[str]]]:
    """(Header, rows): milliseconds of a step by task, then speedups and the paper's."""
    cells = {(r["task"], r["impl"]): r for r in record["rows"]}
    names = [name for name in CONTESTANTS if any(key[1] == name for key in cells)]
    lines = []
    for task in dict.fromkeys(key[0] for key in cells):
        found = [cells.get((task, name), {}) for name in names]
        size = next((f", {r['batch']} x {r['seqlen']:,}" for r in found if "seqlen" in r), "")
        times = [f"{r['ms']:.2f}" if r.get("ms") else "-" for r in found]
        lines.append([task + size, *times])
    ours = speedups(record["rows"])
    papers = [CONTESTANTS[name].paper for name in names]
    lines.append(["times faster", *(f"{ours[n]:.2f}" if n in ours else "-" for n in names)])
    lines.append(["the paper's (A100)", *(f"{paper:g}" if paper else "-" for paper in papers)])
    return ["ms a step", *(CONTESTANTS[name].title for name in names)], lines


def report_blocks(record: dict) -> list[Block]:
    header, lines = speed_table(record)
    return [ReportTable(header, lines, "Training steps of the Long Range Arena, medians")]


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", default=[*TASKS], choices=TASKS)
    parser.add_argument("--contestants", nargs="+", default=[*CONTESTANTS], choices=CONTESTANTS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="of a contestant in a round")
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmark_long_range.json"))
    args = parser.parse_args(given)
    if min(args.rounds, args.steps) < 1:
        parser.error("--rounds and --steps must be at least 1")
    return args


def main() -> None:
    args = arguments()
    if not torch.cuda.is_available():
        raise SystemExit("benchmark_long_range needs a GPU, none is visible")
    rows: list[dict[str, Any]] = []
    for task in track(args.tasks, "tasks"):
        rows += race(Setting(task), args.contestants, args.rounds, args.steps, "cuda")
        torch.cuda.empty_cache()
        settings = {k: v for k, v in vars(args).items() if k != "output"}
        record = make_record("benchmark_long_range", rows, settings, omit="--output")
        write_record(args.output, record)  # what is measured is kept
    header, lines = speed_table(record)
    table = Table(*header, title="long range")
    for line in lines:
        table.add_row(*line)
    console = Console(width=160)
    console.print(table)
    for row in rows:
        if row["failure"]:
            console.print(f"{row['impl']}, {row['task']}: {row['failure']}")
    print(f"record {args.output}")


if __name__ == "__main__":
    main()
