"""Checkpoints that are whole or absent: atomic writes, a hash manifest, and how to find one again.

A file is written under a temporary name in its own folder, flushed to disk and renamed; only then
does ``manifest.json`` list it with its SHA-256. A file that the manifest does not list, or whose
hash differs, is never loaded. Everything opens with ``weights_only=True``. Sharded checkpoints are
folders that are treated alike (model/sharded.py).
"""

import hashlib
import json
import os
import signal
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor

from model.bert import BERT
from model.gpt import GPT
from model.hf import strip_prefixes
from model.sharded import digest, finish, is_sharded, link, load_whole, remove

MANIFEST = "manifest.json"
POSITION_TABLE = "embeddings.positions.weight"  # of GPT and BERT, in their state dicts


class _HashingFile:
    """A file object for torch.save that hashes what passes through."""

    def __init__(self, file):
        self.file, self.sha256, self.num_bytes = file, hashlib.sha256(), 0
        self.error: OSError | None = None

    def write(self, data) -> int:
        self.sha256.update(data)
        self.num_bytes += len(data)
        try:
            return self.file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self.file.flush()


def _write_atomically(path: Path, write: Callable) -> None:
    """Call write(file) on a temporary neighbour of `path`, flush it to disk, rename it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_manifest(folder: Path) -> dict[str, dict]:
    """Checkpoint name -> {"step", "sha256", "bytes"}; empty where there is no readable manifest."""
    try:
        return json.loads((folder / MANIFEST).read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return {}


def _write_manifest(folder: Path, manifest: dict[str, dict]) -> None:
    text = json.dumps(manifest, indent=1, sort_keys=True).encode()
    _write_atomically(folder / MANIFEST, lambda file: file.write(text))


def is_intact(path: Path) -> bool:
    """Whether the manifest beside `path` lists it and its bytes have the listed hash."""
    entry = read_manifest(path.parent).get(path.name)
    if entry is not None and path.is_dir():
        return digest(path) == {key: entry[key] for key in ("bytes", "sha256")}
    if entry is None or not path.is_file() or path.stat().st_size != entry["bytes"]:
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == entry["sha256"]


def refuse_damaged(path: Path) -> None:
    """Raise ValueError if the manifest beside `path` lists it with another hash."""
    if path.name in read_manifest(path.parent) and not is_intact(path):
        raise ValueError(
            f"{path} is damaged: its SHA-256 differs from {MANIFEST}; take another one"
        )


def newest_intact(folder: Path) -> Path | None:
    """The intact checkpoint of the highest step in `folder`, with a warning for each broken one."""
    manifest = read_manifest(folder)
    for name in sorted(manifest, key=lambda name: (manifest[name]["step"], name), reverse=True):
        if is_intact(folder / name):
            return folder / name
        warnings.warn(
            f"{folder / name} is damaged (size or SHA-256 differs from {MANIFEST}); "
            "trying the one before it",
            stacklevel=2,
        )
    return None


def newest_best(run: Path) -> Path | None:
    """The intact best checkpoint of a run folder, or None."""
    folder = run / "checkpoints"
    best = [name for name in read_manifest(folder) if name.startswith("best-")]
    return folder / max(best) if best and is_intact(folder / max(best)) else None


def find_checkpoint(run: str | Path, which: str = "best", runs_root: str = "outputs/runs") -> Path:
    """A checkpoint of a run.

    Args:
        run: a checkpoint file, a run folder, or the name of a run under `runs_root`.
        which: "best" (of the validations; the last where there was none) or "last".

    Raises:
        FileNotFoundError: there is no such run, or no intact checkpoint in it.
    """
    path = Path(run)
    if path.is_file() or is_sharded(path):
        refuse_damaged(path)
        return path
    if not path.is_dir():
        path = Path(runs_root) / run
    if not path.is_dir():
        raise FileNotFoundError(
            f"no run at {run} nor {path}; give a run folder, its name under {runs_root}, "
            "or a .ckpt file"
        )
    folder = path / "checkpoints"
    if which not in ("best", "last"):
        raise ValueError(f"which must be best or last, got {which!r}")
    best = [name for name in read_manifest(folder) if name.startswith("best-")]
    if which == "best" and best:
        if is_intact(folder / max(best)):
            return folder / max(best)
        warnings.warn(f"{folder / max(best)} is damaged; taking the last one", stacklevel=2)
    found = newest_intact(folder)
    if found is None:
        raise FileNotFoundError(f"{folder} holds no intact checkpoint; train the run further first")
    return found


def read_checkpoint(path: Path) -> tuple[str, dict, dict[str, Tensor]]:
    """What a checkpoint holds of its model, on the CPU.

    Returns:
        The model's kind ("GPT", "BERT", "classifier" or "document classifier"), its configuration,
        its state dict. In the middle of a context warm-up: those of a model of the context that it
        was trained at.
    """
    if is_sharded(path):
        checkpoint = load_whole(path)
    else:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    config = checkpoint.get("model_config")
    if config is None:
        raise ValueError(f"{path} must be a checkpoint of a run, it holds no model_config")
    # Each has an option that none behind it has.
    kinds = {
        "multi_label": "document classifier",
        "num_classes": "classifier",
        "num_segments": "BERT",
        "inverse_layer_scale": "GPT",
    }
    kind = next(kind for option, kind in kinds.items() if option in config)
    state = strip_prefixes(checkpoint["state_dict"])
    if (context := checkpoint.get("context")) is not None:
        config = {**config, "max_seqlen": context}
        state[POSITION_TABLE] = state[POSITION_TABLE][:context]
    return kind, config, state


def load_run(
    run: str | Path,
    which: str = "best",
    device: str | torch.device = "cpu",
    attention: Callable | None = None,
    *,
    kinds: tuple[str, ...] = ("GPT",),
) -> tuple[GPT | BERT, dict]:
    """The model of a run, in eval mode, and the configuration it was built from.

    Args:
        run, which: see find_checkpoint.
        device: where the weights go.
        attention: the attention function; None takes the model's default.
        kinds: of models that serve the caller, "GPT" and "BERT".

    Raises:
        ValueError: the checkpoint is of another model.
    """
    path = find_checkpoint(run, which)
    kind, config, state = read_checkpoint(path)
    if kind not in kinds:
        raise ValueError(f"{path} must hold a {' or '.join(kinds)}, it holds a {kind}")
    options = {} if attention is None else {"attention": attention}
    model = {"GPT": GPT, "BERT": BERT}[kind](**config, **options)
    model.load_state_dict(state)
    return model.to(device).eval(), config


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes one checkpoint file so that a crash leaves the old state or the new one.

    A file that cannot be written (a full disk) is a warning, not an error: rank 0 alone writes, and
    must meet the others at the barrier that follows. The manifest does not list such a file.
    """

    def save_checkpoint(self, checkpoint: dict, path, storage_options=None) -> None:
        path = Path(path)
        entry = {"step": checkpoint["global_step"]}

        def write(file) -> None:
            hashing = _HashingFile(file)
            try:
                torch.save(checkpoint, hashing)
            except RuntimeError:
                if hashing.error:  # torch hides what the file said, for instance that it is full
                    raise hashing.error from None
                raise
            entry["sha256"] = hashing.sha256.hexdigest()
            entry["bytes"] = hashing.num_bytes

        try:
            _write_atomically(path, write)
            _write_manifest(path.parent, read_manifest(path.parent) | {path.name: entry})
        except OSError as error:
            warnings.warn(
                f"checkpoint {path} was not saved ({error}); training goes on, older ones hold",
                stacklevel=2,
            )

    def load_checkpoint(self, path, map_location=None, weights_only: bool | None = True) -> dict:
        if is_sharded(Path(path)):  # of another run's strategy
            return load_whole(Path(path))
        return super().load_checkpoint(path, map_location or "cpu", weights_only=True)


class Checkpoints(Checkpoint):
    """Saves every N steps, at every best validation and at the end.

    The task's `best_metric` says what is best: the lowest loss or the highest accuracy.

    A save that falls on a validation step waits for the validation, so that a resume finds it done.
    A save that fails (a full disk) is reported and training goes on: older checkpoints stay whole.
    In a run of one process Ctrl-C ends training after the step under way, with a checkpoint.

    Args:
        folder: the run's ``checkpoints`` folder.
        every_n_steps: optimizer steps between saves.
        keep_last: how many of those to keep (at least 2 lets a resume survive a damaged newest).
    """

    def __init__(self, *, folder: str, every_n_steps: int = 1000, keep_last: int = 2):
        if every_n_steps < 1 or keep_last < 1:
            raise ValueError(
                "every_n_steps and keep_last must be at least 1, "
                f"got {every_n_steps} and {keep_last}"
            )
        self.folder = Path(folder)
        self.every_n_steps = every_n_steps
        self.keep_last = keep_last
        self.best_loss = float("inf")  # or minus what is the better the larger
        self._saved_step = -1
        self._restore_interrupt = lambda: None

    def state_dict(self) -> dict:
        return {"best_loss": self.best_loss}

    def load_state_dict(self, state: dict) -> None:
        self.best_loss = state["best_loss"]

    def on_train_start(self, trainer: Trainer, task: LightningModule) -> None:
        self._saved_step = trainer.global_step
        if trainer.world_size == 1 and threading.current_thread() is threading.main_thread():
            self._stop_on_interrupt(trainer)
        if trainer.is_global_zero:
            # Later steps are done again; the next resume must not find the old ones.
            manifest = read_manifest(self.folder)
            self._drop(manifest, [n for n in manifest if manifest[n]["step"] > self._saved_step])

    def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx) -> None:
        step = trainer.global_step
        if step % self.every_n_steps == 0 and not _validates_at(trainer, step):
            self.save(trainer)

    def on_validation_end(self, trainer: Trainer, task: LightningModule) -> None:
        if trainer.state.fn != "fit":
            return
        metric, is_larger_better = task.best_metric
        loss = float(trainer.callback_metrics[metric]) * (-1 if is_larger_better else 1)
        best = loss < self.best_loss
        if best:
            self.best_loss = loss
        if best or trainer.global_step % self.every_n_steps == 0:
            self.save(trainer, best=best)

    def _stop_on_interrupt(self, trainer: Trainer) -> None:
        before = signal.getsignal(signal.SIGINT)

        def stop(signum, frame) -> None:
            print("\nstopping after this step, with a checkpoint; Ctrl-C again stops at once")
            trainer.should_stop = True
            signal.signal(signal.SIGINT, before)

        signal.signal(signal.SIGINT, stop)
        self._restore_interrupt = lambda: signal.signal(signal.SIGINT, before)

    def teardown(self, trainer: Trainer, task: LightningModule, stage: str) -> None:
        self._restore_interrupt()

    def on_train_end(self, trainer: Trainer, task: LightningModule) -> None:
        if self._saved_step != trainer.global_step:
            self.save(trainer)

    def save(self, trainer: Trainer, best: bool = False) -> None:
        """Write step-N.ckpt, name it best-N.ckpt too if it is, remove what is too old.

        Metrics up to this step are written out before: a resume continues below them.
        """
        step = trainer.global_step
        path = self.folder / f"step-{step:08d}.ckpt"
        clocks = [c for c in trainer.callbacks if hasattr(c, "pause_clock")]
        for clock in clocks:
            clock.pause_clock(trainer.lightning_module)
        if getattr(trainer.strategy, "_save_distributed_checkpoint", False):
            self._save_shards(trainer, path)
        else:
            trainer.save_checkpoint(path)
        self._saved_step = step
        if trainer.is_global_zero and path.name in read_manifest(self.folder):
            self._tidy(path, best)
        for logger in [logger for logger in trainer.loggers if hasattr(logger, "checkpoint_saved")]:
            logger.checkpoint_saved()
        for clock in clocks:
            clock.resume_clock()

    def _save_shards(self, trainer: Trainer, path: Path) -> None:
        """All processes write into a folder of a temporary name; the first one then renames it."""
        part = path.with_name(path.name + ".part")
        if trainer.is_global_zero:
            remove(part)
        trainer.strategy.barrier()
        trainer.save_checkpoint(part)
        if trainer.is_global_zero:
            entry = {"step": trainer.global_step, **finish(part, path)}
            _sync_folder(self.folder)
            _write_manifest(self.folder, read_manifest(self.folder) | {path.name: entry})
        trainer.strategy.barrier()  # no one looks for it earlier

    def _tidy(self, path: Path, best: bool) -> None:
        manifest = read_manifest(self.folder)
        old = sorted(name for name in manifest if name.startswith("step-"))[: -self.keep_last]
        if best:
            old += [name for name in manifest if name.startswith("best-")]
            name = path.name.replace("step-", "best-")
            link(path, self.folder / name)
            manifest[name] = manifest[path.name]
            old = [other for other in old if other != name]
        self._drop(manifest, old)

    def _drop(self, manifest: dict[str, dict], names: list[str]) -> None:
        for name in names:
            del manifest[name]
        if manifest or names:
            _write_manifest(self.folder, manifest)
        for name in names:
            remove(self.folder / name)


def _validates_at(trainer: Trainer, step: int) -> bool:
    interval = trainer.val_check_batch
    has_batches = trainer.enable_validation and sum(trainer.num_val_batches) > 0
    return bool(has_batches and interval and step % interval == 0)
