"""Files of a BlockMask: a dictionary of tensors and numbers, written whole or not at all."""

import os
from pathlib import Path

import torch

_FORMAT = "flash_kernels.BlockMask 1"


def _check_state(path: str | os.PathLike, state: dict) -> None:
    """Raise ValueError for lists that reach out of the mask: kernels follow them unchecked."""
    try:
        num_rows = -(-state["seqlen_q"] // state["block_m"])
        num_cols = -(-state["seqlen_k"] // state["block_n"])
        bounds, indices, patterns = state["bounds"], state["indices"], state["patterns"]
        token_masks = state["token_masks"]
        flat = bounds.flatten(0, 2)
        edges = torch.cat([flat[:, 0], flat[-1:, 2]])
        is_sound = (
            bounds.shape[2:] == (num_rows, 3)
            and indices.shape == patterns.shape == (int(edges[-1]),)
            and {bounds.dtype, indices.dtype, patterns.dtype} == {torch.int32}
            and token_masks.dtype == torch.bool
            and token_masks.shape[1:] == (state["block_m"], state["block_n"])
            and int(edges[0]) == 0
            and bool((flat[:, 2] == edges[1:]).all() and (flat.diff(dim=1) >= 0).all())
            and bool(((indices >= 0) & (indices < num_cols)).all())
            and bool(((patterns >= -1) & (patterns < len(token_masks))).all())
        )
    except (KeyError, TypeError, AttributeError, IndexError, RuntimeError, ZeroDivisionError):
        is_sound = False
    if not is_sound:
        raise ValueError(f"{path} holds a mask that contradicts itself: save it again")


def write_file(path: Path, state: dict) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            torch.save({"format": _FORMAT, **state}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_file(path: str | os.PathLike, device: torch.device | str) -> dict:
    try:
        state = torch.load(path, map_location=device, weights_only=True)
    except OSError:
        raise
    except Exception as error:  # of the archive, the pickle or the tensors: any
        raise ValueError(
            f"{path} is damaged, or no file of a mask ({error}): save it again"
        ) from error
    found = state.get("format") if isinstance(state, dict) else type(state).__name__
    if found != _FORMAT:
        raise ValueError(
            f"{path} must hold a mask that BlockMask.save wrote ({_FORMAT!r}), got "
            f"{found!r}: save the mask again"
        )
    _check_state(path, state)
    return state
