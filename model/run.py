"""The run folder: its name, what it records about a run, and where a resume goes on."""

import json
import platform
import subprocess
import sys
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from model.checkpoint import newest_intact, refuse_damaged
from model.sharded import is_sharded, refuse_unsafe

RECORDED_PACKAGES = "flashtrain torch triton lightning numpy datasets tiktoken wandb".split()


@dataclass(frozen=True)
class Run:
    """A run: its folder, its id for W&B, the checkpoint to continue from (or None)."""

    folder: Path
    run_id: str
    ckpt_path: Path | None


def plan_run(
    name: str,
    root: str,
    *,
    resume: str | None = None,
    ckpt_path: str | None = None,
    shared_name: bool = False,
) -> Run:
    """Decide the folder of a run. Nothing is written yet.

    Args:
        name: of the run; a taken name gets the next free number (name-2, name-3, ...).
        root: folder of all runs.
        resume: "auto" continues the newest run of this name that has an intact checkpoint, and
            starts a new one where there is none.
        ckpt_path: continue from this file, in the folder of its run.
        shared_name: several processes decide at once and must agree: no numbering, so a taken name
            is an error unless the run is resumed.

    Raises:
        ValueError: resume is neither null nor auto, or both it and ckpt_path are given.
            ckpt_path is damaged or in no run, or shards hold more than tensors and plain values.
        FileNotFoundError: there is no file at ckpt_path.
        FileExistsError: the name is taken and shared_name is set.
    """
    if resume not in (None, "auto"):
        raise ValueError(f"resume must be null or auto, got {resume!r}")
    if ckpt_path is not None:
        if resume:
            raise ValueError("give resume=auto or ckpt_path=FILE, not both")
        path = Path(ckpt_path)
        if not path.is_file() and not is_sharded(path):
            raise FileNotFoundError(f"ckpt_path must be a checkpoint file, there is none at {path}")
        if path.resolve().parent.name != "checkpoints":
            raise ValueError(
                f"ckpt_path must lie in a run's checkpoints folder, got {path}; to start a new "
                "run from weights use init_from"
            )
        refuse_damaged(path)
        if is_sharded(path):
            refuse_unsafe(path)
        folder = path.resolve().parent.parent
        return Run(folder, _read_id(folder) or _new_id(name), path)
    taken = [folder for folder in _runs_of(name, Path(root)) if any(folder.iterdir())]
    if resume:
        for folder in reversed([Path(root) / name] if shared_name else taken):
            newest = newest_intact(folder / "checkpoints")
            if newest is not None:
                if is_sharded(newest):
                    refuse_unsafe(newest)
                return Run(folder, _read_id(folder) or _new_id(name), newest)
    folder = Path(root) / name
    if folder in taken and shared_name and any((folder / "checkpoints").glob("*.ckpt")):
        raise FileExistsError(
            f"{folder} already holds checkpoints; continue it with resume=auto or choose another "
            "run_name"
        )
    number = 2
    while not shared_name and folder in taken:
        folder = Path(root) / f"{name}-{number}"
        number += 1
    return Run(folder, _new_id(name), None)


def _runs_of(name: str, root: Path) -> list[Path]:
    """Existing folders of this name, in the order in which they were made."""
    numbered = {1: root / name}
    for folder in root.glob(f"{name}-*"):
        suffix = folder.name.removeprefix(f"{name}-")
        if suffix.isdigit() and int(suffix) > 1:
            numbered[int(suffix)] = folder
    return [numbered[n] for n in sorted(numbered) if numbered[n].is_dir()]


def _new_id(name: str) -> str:
    return f"{name}-{uuid.uuid4().hex[:8]}"


def _read_id(folder: Path) -> str | None:
    try:
        run_id = json.loads((folder / "run.json").read_text())["run_id"]
        return run_id if isinstance(run_id, str) else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def record_run(run: Run, config_yaml: str) -> None:
    """Write config.yaml (resolved) and run.json (id, command, versions, hardware) into the folder.

    A continued run keeps its first records: the ones of the new start get a number.
    """
    run.folder.mkdir(parents=True, exist_ok=True)
    facts = {
        "run_id": run.run_id,
        "command": " ".join(sys.argv),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "continued_from": str(run.ckpt_path) if run.ckpt_path else None,
        **environment(),
    }
    suffix, number = "", 1
    while (run.folder / f"run{suffix}.json").exists():
        number += 1
        suffix = f"-{number}"
    (run.folder / f"config{suffix}.yaml").write_text(config_yaml)
    (run.folder / f"run{suffix}.json").write_text(json.dumps(facts, indent=1) + "\n")


def environment() -> dict:
    """Versions, git revision and hardware: what a record needs so that others can repeat it."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "git_revision": _git("rev-parse", "HEAD"),
        "git_dirty": bool(_git("status", "--porcelain")),
        # torch's own version names the build too ("+cu130"), which its metadata may not.
        "versions": {
            "python": platform.python_version(),
            **_package_versions(),
            "torch": torch.__version__,
        },
        "hardware": {"gpus": gpus, "cuda": torch.version.cuda, "machine": platform.machine()},
    }


def _package_versions() -> dict[str, str]:
    versions = {}
    for package in RECORDED_PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def _git(*arguments: str) -> str | None:
    """Output of a git command in this source tree; None outside a checkout or without git."""
    try:
        done = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), *arguments],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
