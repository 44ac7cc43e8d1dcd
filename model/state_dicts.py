"""State dicts of GPT and BERT: names without what wrappers add, shapes, rows of the two tables."""

import torch
from torch import Tensor

from model.positions import extend_positions

TOKEN_TABLE = "embeddings.tokens.weight"
POSITION_TABLE = "embeddings.positions.weight"
# What wrappers put before a key: torch.compile, DDP, a LightningModule, GPT2LMHeadModel.
_PREFIXES = ("_orig_mod.", "module.", "model.", "transformer.")


def strip_prefixes(
    state: dict[str, Tensor], prefixes: tuple[str, ...] = _PREFIXES
) -> dict[str, Tensor]:
    """The state dict without the prefixes that wrappers put before its keys.

    Raises:
        ValueError: two keys become one.
    """
    stripped = {}
    for key, value in state.items():
        short = key
        while prefix := next((p for p in prefixes if short.startswith(p)), None):
            short = short.removeprefix(prefix)
        if short in stripped:
            raise ValueError(f"{key} and another key both mean {short}; keep one of them")
        stripped[short] = value
    return stripped


def check_keys(found: dict[str, Tensor], shapes: dict[str, tuple[int, ...]], what: str) -> None:
    """Raise one ValueError that names every missing, unexpected and misshapen tensor."""
    wrong = [f"missing {key} {shape}" for key, shape in shapes.items() if key not in found]
    wrong += [f"unexpected {k} {tuple(t.shape)}" for k, t in found.items() if k not in shapes]
    wrong += [
        f"{key} must be {shape}, got {tuple(found[key].shape)}"
        for key, shape in shapes.items()
        if key in found and tuple(found[key].shape) != shape
    ]
    if wrong:
        raise ValueError(f"{what} do not fit the configuration: " + "; ".join(wrong))


def pad_rows(table: Tensor, multiple: int) -> Tensor:
    """The table with zero rows added up to a multiple."""
    padding = table.new_zeros(-len(table) % multiple, *table.shape[1:])
    return torch.cat([table, padding])


def extend_table(
    state: dict[str, Tensor], max_seqlen: int, *, offset: int = 0, how: str = "tile"
) -> None:
    """Give a state dict a position table of another length, in place.

    Args:
        max_seqlen: the new length; the rows before `offset` stay, and do not count.
        how: see positions.extend_positions.
    """
    table = state[POSITION_TABLE]
    longer = extend_positions(table[offset:], max_seqlen, how)
    state[POSITION_TABLE] = torch.cat([table[:offset], longer])
