"""Weights of one classifier for another: the next difficulty, a larger image, another task."""

from pathlib import Path

from torch import Tensor

from model.checkpoint import find_checkpoint, read_checkpoint
from model.long_range import LongRangeClassifier
from model.positions import resize_positions

_REPLACED = ("head.", "dense_head.", "cls.")  # what a new task may bring anew


def load_from_run(model: LongRangeClassifier, source: str | Path) -> list[str]:
    """Give a classifier the weights of a run's best checkpoint.

    Args:
        model: changed in place.
        source: a run's folder or name, or a .ckpt file.

    Returns:
        As transfer.

    Raises:
        FileNotFoundError: no such run or file.
        ValueError: a checkpoint of another kind of model, or what transfer raises.
    """
    kind, config, state = read_checkpoint(find_checkpoint(source))
    if kind != "classifier":
        raise ValueError(f"{source} must be a run of a classifier, it holds a {kind}")
    return transfer(model, config, state)


def transfer(model: LongRangeClassifier, config: dict, state: dict[str, Tensor]) -> list[str]:
    """Give a classifier the weights of another one.

    Positions of a smaller image are repeated over blocks (model.positions.resize_positions); rotary
    ones need no change. Heads of another shape, or that the other lacks, keep their values here.

    Args:
        model: changed in place.
        config: of the other model.
        state: its state dict.

    Returns:
        Names of the parameters that kept their values.

    Raises:
        ValueError: the other model differs in more than image size and heads, or its image does not
            grow by a whole factor.
    """
    own, state = model.state_dict(), dict(state)
    old, new = config["image_size"], model.image_size
    if old and new and old != new and any(n.startswith("positions.") for n in state):
        if new % old:
            raise ValueError(
                f"positions grow by whole factors, from {old} to {new} pixels they cannot: use "
                "positions=rotary_2d or sinusoidal"
            )
        for name in ("rows", "columns", "table"):
            key, factor = f"positions.{name}.weight", new // old
            if key in state and name == "table":
                state[key] = resize_positions(state[key], old, old, factor)
            elif key in state:
                state[key] = state[key].repeat_interleave(factor, dim=0)
    fits = {n for n, value in own.items() if n in state and state[n].shape == value.shape}
    wrong = [n for n in own.keys() | state.keys() if n not in fits and not n.startswith(_REPLACED)]
    differences = [
        f"{key} is {config[key]!r} in the checkpoint and {model.config[key]!r} in the model"
        for key in ("nheads", "positions", "embedding")  # the shapes do not tell all of these
        if config[key] != model.config[key]
    ]
    if wrong or differences:
        names = [f"{n} does not fit" for n in sorted(wrong)[:3]]
        raise ValueError(
            f"the model must be of the checkpoint's kind: {'; '.join(differences + names)}; set "
            "its depth, dim, nheads, headdim, mlp_dim, embedding and positions to the checkpoint's"
        )
    model.load_state_dict({**own, **{name: state[name] for name in fits}})
    return [name for name in own if name not in fits]
