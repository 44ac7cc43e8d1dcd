"""Sharded checkpoints: folders that every process of FSDP2 writes its part of, and read as one.

trainer=fsdp with trainer.strategy.save_distributed_checkpoint=true writes them (torch.distributed.
checkpoint), so that no process ever holds the whole model. FSDP2 on any number of processes takes
its new shards from them; whoever wants whole tensors (one process, DDP, generation, evaluation)
gets a checkpoint as from a single file.
"""

import enum
import hashlib
import io
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, filesystem, metadata
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

META = "meta.pt"  # what is no weight and no optimizer state, by Lightning's strategy


def is_sharded(path: Path) -> bool:
    return path.is_dir() and (path / META).is_file()


def _member(owner: Any, name: str) -> enum.Enum:
    """What getattr may do here: Python 3.11.0 to 3.11.3 pickle the members of enums by it."""
    if not isinstance(owner, type(enum.Enum)):
        raise ValueError(f"it takes {name!r} of {owner!r}")
    return owner[name]


class _MetadataUnpickler(pickle.Unpickler):
    """Of torch.distributed.checkpoint's index, which torch opens with pickle alone: nothing but its
    own classes and values of torch."""

    _OTHERS = {
        ("collections", "OrderedDict"),
        ("pathlib", "PosixPath"),
        ("pathlib._local", "PosixPath"),
        ("torch", "Size"),
        ("torch", "device"),
        ("torch.serialization", "_get_layout"),
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if (module, name) in self._OTHERS:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        for home in (metadata, filesystem):
            found = getattr(home, name, None) if module == home.__name__ else None
            if isinstance(found, type) and found.__module__ == module:
                return found
        raise ValueError(f"it calls {module}.{name}")


def refuse_unsafe(folder: Path) -> None:
    """Raise ValueError unless reading the folder builds tensors and plain values alone.

    torch.distributed.checkpoint unpickles its index and whatever is no tensor without asking.
    """
    try:
        with (folder / ".metadata").open("rb") as file:
            index = _MetadataUnpickler(file).load()
        for key, place in index.storage_data.items():
            name = place.relative_path
            if name != Path(name).name:
                raise ValueError(f"a shard at {name!r}")
            if isinstance(index.state_dict_metadata[key.fqn], metadata.BytesStorageMetadata):
                with (folder / name).open("rb") as file:
                    file.seek(place.offset)
                    content = io.BytesIO(file.read(place.length))
                torch.load(content, map_location="cpu", weights_only=True)
    except Exception as error:  # of the pickle or what it builds: any
        raise ValueError(
            f"{folder} must be a sharded checkpoint of tensors and plain values: it is damaged, or "
            f"holds more ({' '.join(str(error).split())[:160]})"
        ) from error


def digest(folder: Path) -> dict[str, Any]:
    """Size and SHA-256 of a folder's files, as a manifest keeps them."""
    sha256, num_bytes = hashlib.sha256(), 0
    for path in sorted(folder.iterdir()):
        with path.open("rb") as file:
            of_file = hashlib.file_digest(file, "sha256").hexdigest()
        sha256.update(f"{path.name} {of_file}\n".encode())
        num_bytes += path.stat().st_size
    return {"bytes": num_bytes, "sha256": sha256.hexdigest()}


def finish(part: Path, path: Path) -> dict[str, Any]:
    """Flush a written folder to disk, give it its name; returns its digest."""
    for file in part.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    entry = digest(part)
    remove(path)
    os.replace(part, path)
    return entry


def remove(path: Path) -> None:
    """Delete a checkpoint of either kind, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def link(path: Path, name: Path) -> None:
    """The same bytes under a second name, for either kind; a copy where there are no links."""
    remove(name)
    if path.is_dir():
        shutil.copytree(path, name, copy_function=_link_file)
    else:
        _link_file(path, name)


def _link_file(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without links
        part = Path(f"{target}.part")
        with part.open("wb") as file, open(source, "rb") as original:
            shutil.copyfileobj(original, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, target)


def load_whole(folder: Path) -> dict[str, Any]:
    """What a single file of the same checkpoint holds, on the CPU.

    Raises:
        ValueError: of refuse_unsafe.
    """
    refuse_unsafe(folder)
    checkpoint = torch.load(folder / META, map_location="cpu", weights_only=True)
    state: dict[str, Any] = {}
    _load_state_dict(
        state,
        storage_reader=FileSystemReader(folder),
        planner=_EmptyStateDictLoadPlanner(),
        no_dist=True,
    )
    checkpoint["state_dict"] = state.pop("state_dict")
    number = {name: i for i, name in enumerate(checkpoint["parameter_names"])}
    checkpoint["optimizer_states"] = []
    for index in range(len(state)):
        optimizer = state[f"optimizer_{index}"]
        for group in optimizer["param_groups"]:
            group["params"] = [number[name] for name in group["params"]]
        optimizer["state"] = {number[name]: e for name, e in optimizer["state"].items()}
        checkpoint["optimizer_states"].append(optimizer)
    return checkpoint
