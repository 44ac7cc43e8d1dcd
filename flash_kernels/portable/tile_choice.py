"""Tile sizes by kernel, GPU family, head dim and dtype: a table, so that no call waits for a
search.

`scripts/tune_attention.py` measures candidates and checks their numbers; the rows below are its
winners where the GPU was at hand and fit the shared memory (tests compile them) elsewhere. Nothing
here depends on the lengths or the batch size.
"""

import functools
from typing import NamedTuple

import torch


class Tile(NamedTuple):
    block_m: int  # query rows
    block_n: int  # keys
    num_warps: int
    num_stages: int


# Shared memory of one block, KiB.
SHARED_MEMORY_KIB = {"hopper": 227, "blackwell": 227, "ampere": 163, "small": 99, "amd": 64}

# (kernel, family) -> tiles for head dims up to 64, 128 and 256, 16-bit inputs.
_HALF = {
    ("forward", "hopper"): (Tile(64, 64, 4, 3), Tile(128, 64, 8, 3), Tile(128, 64, 8, 2)),
    ("forward", "blackwell"): (Tile(128, 128, 8, 3), Tile(128, 64, 8, 3), Tile(128, 64, 8, 2)),
    ("forward", "ampere"): (Tile(128, 64, 4, 3), Tile(128, 64, 8, 3), Tile(64, 32, 4, 2)),
    ("forward", "small"): (Tile(128, 64, 4, 2), Tile(128, 32, 8, 2), Tile(64, 32, 8, 1)),
    ("forward", "amd"): (Tile(128, 64, 4, 1), Tile(128, 64, 4, 1), Tile(64, 32, 8, 1)),
    ("dk_dv", "hopper"): (Tile(64, 64, 4, 3), Tile(32, 64, 4, 4), Tile(32, 64, 8, 2)),
    ("dk_dv", "blackwell"): (Tile(64, 128, 8, 3), Tile(64, 128, 8, 2), Tile(32, 64, 8, 2)),
    ("dk_dv", "ampere"): (Tile(64, 128, 8, 2), Tile(64, 64, 8, 2), Tile(32, 64, 8, 1)),
    ("dk_dv", "small"): (Tile(64, 64, 4, 2), Tile(64, 64, 8, 2), Tile(16, 32, 4, 1)),
    ("dk_dv", "amd"): (Tile(32, 64, 4, 1), Tile(32, 64, 4, 1), Tile(16, 32, 4, 1)),
    ("dq", "hopper"): (Tile(64, 64, 4, 3), Tile(128, 64, 8, 3), Tile(64, 32, 8, 2)),
    ("dq", "blackwell"): (Tile(128, 64, 4, 3), Tile(128, 64, 8, 3), Tile(64, 32, 8, 2)),
    ("dq", "ampere"): (Tile(128, 64, 8, 2), Tile(128, 32, 8, 2), Tile(64, 32, 8, 1)),
    ("dq", "small"): (Tile(64, 64, 4, 2), Tile(64, 32, 4, 1), Tile(32, 16, 4, 1)),
    ("dq", "amd"): (Tile(64, 32, 4, 1), Tile(64, 32, 4, 1), Tile(32, 16, 4, 1)),
}
# With dropout, where its registers make another tile better.
_HALF_DROPOUT = {
    ("forward", "hopper"): (Tile(64, 64, 4, 3), Tile(64, 64, 4, 3), Tile(128, 64, 8, 2)),
    ("dk_dv", "hopper"): (Tile(64, 64, 4, 3), Tile(32, 64, 4, 3), Tile(32, 64, 8, 2)),
    ("dq", "hopper"): (Tile(64, 64, 4, 3), Tile(128, 64, 8, 3), Tile(64, 32, 8, 2)),
}
# float32 with IEEE products runs on the FMA units: small tiles, every family alike.
_SINGLE = {
    "forward": (Tile(64, 32, 8, 1), Tile(32, 16, 8, 1), Tile(16, 16, 8, 1)),
    "dk_dv": (Tile(32, 32, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
    "dq": (Tile(32, 32, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
}
# The interpreter's time goes by tiles, not by elements.
_INTERPRETER = Tile(32, 32, 4, 1)

# What use_tiles sets, by kernel.
overrides: dict[str, Tile] = {}


class use_tiles:
    """Context manager for tests and tuning: `with use_tiles(forward=Tile(...), dk_dv=..., dq=...)`.

    Process-wide, because the backward of a CUDA graph node runs on a thread of the autograd engine.
    """

    def __init__(self, **tiles: Tile) -> None:
        unknown = set(tiles) - set(_SINGLE)
        if unknown:
            raise ValueError(f"kernels must be among {sorted(_SINGLE)}, got {sorted(unknown)}")
        self._tiles = tiles

    def __enter__(self) -> None:
        self._before = dict(overrides)
        overrides.update(self._tiles)

    def __exit__(self, *_: object) -> None:
        overrides.clear()
        overrides.update(self._before)


@functools.cache
def gpu_family(device: torch.device) -> str:
    """Row of the table for this device; "interpreter" for CPU tensors."""
    if device.type == "cpu":
        return "interpreter"
    if torch.version.hip:
        return "amd"
    return family_of_capability(*torch.cuda.get_device_capability(device))


def family_of_capability(major: int, minor: int) -> str:
    """Compute capability to family; what is not listed has at least 99 KiB from 8.6 on."""
    return {
        (9, 0): "hopper",
        (10, 0): "blackwell",
        (10, 3): "blackwell",
        (8, 0): "ampere",
        (8, 7): "ampere",
    }.get((major, minor), "small")


def table_tile(
    kernel: str, family: str, headdim: int, dtype: torch.dtype, has_dropout: bool = False
) -> Tile:
    """The default of `kernel` ("forward", "dk_dv" or "dq")."""
    if family == "interpreter":
        return _INTERPRETER
    column = 0 if headdim <= 64 else 1 if headdim <= 128 else 2
    if dtype == torch.float32:
        return _SINGLE[kernel][column]
    if has_dropout and (kernel, family) in _HALF_DROPOUT:
        return _HALF_DROPOUT[kernel, family][column]
    return _HALF[kernel, family][column]
