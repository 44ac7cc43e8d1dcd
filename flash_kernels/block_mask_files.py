"""Files of a BlockMask: a dictionary of tensors and numbers, written whole or not at all."""

import os
from pathlib import Path

import torch


def write_file(path: Path, state: dict) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_file(path: str | os.PathLike, device: torch.device | str, expected_format: str) -> dict:
    state = torch.load(path, map_location=device, weights_only=True)
    found = state.get("format") if isinstance(state, dict) else type(state).__name__
    if found != expected_format:
        raise ValueError(
            f"{path} must hold a mask that BlockMask.save wrote ({expected_format!r}), got "
            f"{found!r}: save the mask again"
        )
    return state
