"""HBM bytes of GPU kernels by hardware counters: runs a program under Nsight Compute (ncu).

The program brackets what counts with torch.cuda.profiler, and launches `mark` between sections:
kernels are told apart by where they lie between the marks, whatever they are called.
"""

import csv
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import torch

from scripts.hbm_counts import Traffic

READ, WRITTEN = "dram__bytes_read.sum", "dram__bytes_write.sum"
_MARK = "spin_kernel"  # torch.cuda._sleep's
_PREFIXES = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


class Kernel(NamedTuple):
    """One launch and its traffic."""

    name: str
    traffic: Traffic


def find_ncu() -> str | None:
    """Nsight Compute's command, where it is installed."""
    return shutil.which("ncu") or next(map(str, Path("/usr/local/cuda/bin").glob("ncu")), None)


def mark() -> None:
    """Launch a kernel that ends a section."""
    torch.cuda._sleep(1)


def parse(text: str) -> list[Kernel]:
    """Kernels of `ncu --csv --page raw`, in the order of their launch.

    Around the CSV ncu writes lines that begin with "==". Below the header stands a row of units,
    and a number may have commas.

    Raises:
        ValueError: there is no CSV, or it lacks a counter or its numbers.
    """
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID",')), None)
    if start is None:
        raise ValueError(f"ncu must print a CSV with a header, it printed: {_reason(text)}")
    rows = list(csv.reader(line for line in lines[start:] if line.startswith('"')))
    header, units, *rows = rows
    for name in ("Kernel Name", READ, WRITTEN):
        if name not in header:
            raise ValueError(f"ncu's CSV must have a column {name}, it has {', '.join(header)}")
    kernels = []
    for row in rows:
        numbers = []
        for name in (READ, WRITTEN):
            at = header.index(name)
            try:
                numbers.append(float(row[at].replace(",", "")) * _bytes_of(units[at]))
            except ValueError:
                raise ValueError(
                    f"ncu must count {name} in bytes, got {row[at]!r} {units[at]!r} for "
                    f"{row[header.index('Kernel Name')]}"
                ) from None
        kernels.append(Kernel(row[header.index("Kernel Name")], Traffic(*numbers)))
    return kernels


def _bytes_of(unit: str) -> float:
    """ "byte" or "Mbyte" -> bytes."""
    if not unit.endswith("byte") or unit.removesuffix("byte") not in _PREFIXES:
        raise ValueError(unit)
    return _PREFIXES[unit.removesuffix("byte")]


def _reason(text: str) -> str:
    """The error among ncu's lines, or the last of them."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "ERROR" in line or "Error" in line]
    return (errors or lines or ["nothing"])[0 if errors else -1].lstrip("= ")[:200]


def sections(kernels: list[Kernel]) -> list[list[Kernel]]:
    """The kernels before each mark."""
    found: list[list[Kernel]] = [[]]
    for kernel in kernels:
        if _MARK in kernel.name:
            found.append([])
        else:
            found[-1].append(kernel)
    return found[:-1]


def profile(ncu: str, command: list[str], log: Path, timeout_s: float = 900) -> list[list[Kernel]]:
    """Run a program under ncu: the kernels of its sections.

    ncu empties the caches before each kernel, so that none finds in them what the one before it
    wrote. Clocks are left alone: bytes do not depend on them.

    Raises:
        RuntimeError: ncu cannot read the counters, or the program failed; one line says why.
    """
    call = [ncu, "--csv", "--page", "raw", "--print-units", "base"]
    call += ["--metrics", f"{READ},{WRITTEN}", "--clock-control", "none", "--cache-control", "all"]
    call += ["--profile-from-start", "off", "--log-file", str(log)]
    try:
        done = subprocess.run([*call, *command], capture_output=True, text=True, timeout=timeout_s)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(f"ncu did not run to its end: {str(error)[:200]}") from None
    text = log.read_text() if log.exists() else ""
    if done.returncode:
        said = text if "ERROR" in text or not done.stderr.strip() else done.stderr
        raise RuntimeError(f"ncu ended with {done.returncode}: {_reason(said)}")
    try:
        return sections(parse(text))
    except ValueError as error:
        raise RuntimeError(str(error)) from None
