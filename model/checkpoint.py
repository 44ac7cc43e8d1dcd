"""Checkpoints that are whole or absent: atomic writes, a hash manifest, and how to find one again.

A file is written under a temporary name in its own folder, flushed to disk and renamed; only then
does ``manifest.json`` list it with its SHA-256. A file that the manifest does not list, or whose
hash differs, is never loaded. Everything opens with ``weights_only=True``, and what a file says of
its model is held against its tensors before anything is built of it. Sharded checkpoints are
folders that are treated alike (model/sharded.py).
"""

import hashlib
import inspect
import json
import os
import re
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor

from model.bert import BERT
from model.gpt import GPT
from model.sharded import digest, is_sharded, load_whole
from model.state_dicts import POSITION_TABLE, strip_prefixes

MANIFEST = "manifest.json"
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]*\.ckpt")  # none leads out of the folder


class _HashingFile:
    """A file object for torch.save that hashes what passes through."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.sha256, self.num_bytes = file, hashlib.sha256(), 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        self.sha256.update(data)
        self.num_bytes += len(data)
        try:
            return self.file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self.file.flush()


def write_atomically(path: Path, write: Callable) -> None:
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
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_manifest(folder: Path) -> dict[str, dict]:
    """Checkpoint name -> {"step", "sha256", "bytes"}; empty where there is no manifest.

    A damaged one is made again, in memory and with a warning, from the files that are whole by the
    checksums which torch.save's archives have inside.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        _check_manifest(manifest)
        return manifest
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        warnings.warn(
            f"{folder / MANIFEST} is damaged ({type(error).__name__}): taking the checkpoints "
            "beside it that are whole by their own checksums",
            stacklevel=2,
        )
        return {path.name: entry for path in folder.glob("*.ckpt") if (entry := _entry(path))}


def _check_manifest(manifest: dict[str, dict]) -> None:
    for name, entry in manifest.items():
        if not _FILE_NAME.fullmatch(name):
            raise ValueError(f"file name {name!r}")
        numbers = (entry["step"], entry["bytes"])
        if not isinstance(entry["sha256"], str) or any(type(n) is not int for n in numbers):
            raise TypeError(name)


def _entry(path: Path) -> dict | None:
    """The manifest's entry of a checkpoint that is whole, as far as its archive tells."""
    step = re.search(r"-(\d+)\.ckpt", path.name)
    try:
        with zipfile.ZipFile(path) as archive:
            is_whole = archive.testzip() is None
    except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError, EOFError):
        return None
    if not step or not is_whole:
        return None
    return {"step": int(step[1]), "sha256": _sha256(path), "bytes": path.stat().st_size}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(folder: Path, manifest: dict[str, dict]) -> None:
    text = json.dumps(manifest, indent=1, sort_keys=True).encode()
    write_atomically(folder / MANIFEST, lambda file: file.write(text))


def is_intact(path: Path) -> bool:
    """Whether the manifest beside `path` lists it and its bytes have the listed hash."""
    entry = read_manifest(path.parent).get(path.name)
    if entry is not None and path.is_dir():
        return digest(path) == {key: entry[key] for key in ("bytes", "sha256")}
    if entry is None or not path.is_file() or path.stat().st_size != entry["bytes"]:
        return False
    return _sha256(path) == entry["sha256"]


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


def find_checkpoint(
    run: str | os.PathLike, which: str = "best", runs_root: str = "outputs/runs"
) -> Path:
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


def read_file(path: str | Path) -> dict:
    """What torch.save wrote, on the CPU: tensors and plain values, nothing else.

    Raises:
        ValueError: the file is damaged, holds other objects, or claims more memory than it has
            bytes.
    """
    with open(path, "rb") as file:
        try:
            # torch.save does not compress: a compressed entry is a bomb.
            if any(entry.compress_type for entry in zipfile.ZipFile(file).infolist()):
                raise ValueError("compressed entries")
            content = torch.load(path, map_location="cpu", weights_only=True)
        except MemoryError:
            raise
        except Exception as error:  # of the archive, the pickle or the tensors: any
            code = re.search(r"GLOBAL (\S+)", str(error))  # torch advises to run it all the same
            reason = f"it calls {code[1]}" if code else f"{type(error).__name__}: {error}"
            raise ValueError(
                f"{path} must be a checkpoint that opens with weights_only=True: it is damaged, or "
                f"holds more than tensors and plain values ({' '.join(reason.split())[:160]})"
            ) from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a checkpoint, it holds a {type(content).__name__}")
    return content


def _check_config(path: Path, config: dict, state: dict[str, Tensor] | None) -> None:
    """Refuse a configuration that is not of plain values, or not of these tensors."""
    plain = (int, float, bool, str, type(None))
    if not isinstance(state, dict) or not all(isinstance(v, Tensor) for v in state.values()):
        raise ValueError(f"{path} must hold a state dict of tensors")
    for name, value in config.items() if isinstance(config, dict) else [("model_config", None)]:
        values = value if isinstance(value, list | tuple) else [value]
        if not str(name).isidentifier() or name[:1] == "_" or name == "attention":
            raise ValueError(f"{path} must hold options of a model in model_config, got {name!r}")
        if not all(isinstance(v, plain) for v in values):
            raise ValueError(f"{path} must hold plain values in model_config, got {name}={value!r}")
    found = (re.search(r"\bblocks\.(\d+)\.", name) for name in state)
    blocks = {match[1] for match in found if match}
    if blocks and "depth" in config and config["depth"] != len(blocks):
        raise ValueError(f"{path} holds {len(blocks)} blocks, its model_config {config['depth']}")
    for name, tensor in state.items():
        if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise ValueError(f"{path} holds {name} as {tuple(tensor.shape)}, more than its bytes")


def read_checkpoint(path: Path) -> tuple[str, dict, dict[str, Tensor]]:
    """What a checkpoint holds of its model, on the CPU.

    Returns:
        The model's kind ("GPT", "BERT", "classifier" or "document classifier"), its configuration,
        its state dict. In the middle of a context warm-up: those of a model of the context that it
        was trained at.
    """
    checkpoint = load_whole(path) if is_sharded(path) else read_file(path)
    config = checkpoint.get("model_config")
    if config is None:
        raise ValueError(f"{path} must be a checkpoint of a run, it holds no model_config")
    _check_config(path, config, checkpoint.get("state_dict"))
    # Each has an option that none behind it has.
    kinds = {
        "multi_label": "document classifier",
        "num_classes": "classifier",
        "num_segments": "BERT",
        "inverse_layer_scale": "GPT",
    }
    kind = next((kind for option, kind in kinds.items() if option in config), None)
    if kind is None:
        raise ValueError(f"{path} must hold a model of ours; its options are {', '.join(config)}")
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
    build = {"GPT": GPT, "BERT": BERT}[kind]
    if unknown := sorted(set(config) - set(inspect.signature(build).parameters)):
        raise ValueError(f"{path} has options that a {kind} has not: {', '.join(unknown)}")
    with torch.device("meta"):  # no memory before the shapes are known to be the file's
        model = build(**config, **options)
    try:
        model.load_state_dict(state, assign=True)
    except RuntimeError as error:
        raise ValueError(f"{path} contradicts itself: {' '.join(str(error).split())}") from error
    return model.to(device).eval(), config


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes one checkpoint file so that a crash leaves the old state or the new one.

    A file that cannot be written (a full disk), or whose weights are not finite, is a warning and
    not an error: rank 0 alone writes, and must meet the others at the barrier that follows. The
    manifest does not list such a file.
    """

    def save_checkpoint(
        self, checkpoint: dict, path: str | os.PathLike, storage_options: Any = None
    ) -> None:
        path = Path(path)
        entry = {"step": checkpoint["global_step"]}
        if bad := not_finite(checkpoint.get("state_dict", {})):
            warn_unsaved(path, f"NaN or infinity in {', '.join(bad[:3])}")
            return

        def write(file: IO[bytes]) -> None:
            hashing = _HashingFile(file)
            try:
                torch.save(checkpoint, hashing)  # type: ignore[arg-type]  # write is all it calls
            except RuntimeError:
                if hashing.error:  # torch hides what the file said, for instance that it is full
                    raise hashing.error from None
                raise
            entry["sha256"] = hashing.sha256.hexdigest()
            entry["bytes"] = hashing.num_bytes

        try:
            write_atomically(path, write)
            write_manifest(path.parent, read_manifest(path.parent) | {path.name: entry})
        except OSError as error:
            warn_unsaved(path, str(error))

    def load_checkpoint(
        self, path: str | os.PathLike, map_location: Any = None, weights_only: bool | None = True
    ) -> dict:
        if is_sharded(Path(path)):  # of another run's strategy
            return load_whole(Path(path))
        return read_file(Path(path))


def warn_unsaved(path: Path, reason: str) -> None:
    warnings.warn(
        f"checkpoint {path} was not saved ({reason}); training goes on, older ones hold",
        stacklevel=3,
    )


def not_finite(state: dict[str, Tensor]) -> list[str]:
    """Names of the floating-point tensors that hold a NaN or an infinity."""
    names = [name for name, value in state.items() if value.is_floating_point()]
    if not names:
        return []
    is_finite = torch.stack([state[name].isfinite().all() for name in names]).tolist()
    return [name for name, good in zip(names, is_finite, strict=True) if not good]
