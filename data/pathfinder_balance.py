"""Thinning Pathfinder scenes until the positions of the discs no longer tell the label.

A finished pair of snakes with its marks is kept with probability min(1, p(other label) / p(its
label)), where p is fitted on the discs' positions alone (data.marker_shortcut). Then both labels
leave the same positions behind, up to the error of the fit, and the label is a coin drawn before.

The shipped models are fitted on 36,000 scenes a set (18,000 at 64 pixels) of level 14 and 24,000
of the easier levels, by fit_balance_model and save_balance_models below. A little of the shortcut
stays: `python -m scripts.prepare_data pathfinder --size 32 --balanced` prints what trees find.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

import numpy as np

from data.marker_shortcut import (
    LOGIT_ONE,
    BoostedTrees,
    all_marker_pairs,
    fit_trees,
    marker_features,
)
from data.pathfinder_extend import attempt_keys, random_words
from data.pathfinder_grow import Accept

_MODELS = Path(__file__).parent / "assets" / "pathfinder_balance.npz"
# Words of an attempt's stream behind all that growing a snake uses.
_START_WORD, _KEEP_WORD = 200, 201


def thinning(size: int, level: int, labels: np.ndarray) -> Accept:
    """What data.pathfinder_grow.grow_long_snakes takes to keep balanced scenes only.

    Args:
        labels: (num_scenes,), the label that each scene shall have.
    """
    model = balance_model(size, level)

    def accept(scenes: np.ndarray, keys: np.ndarray, ends: np.ndarray) -> np.ndarray:
        start, label = _start_snakes(keys), labels[scenes].astype(np.int64)
        tip = np.where(label == 1, start, 1 - start)
        rows = np.arange(len(scenes))
        markers = np.stack([ends[rows, 0, start], ends[rows, 1, tip]], axis=1)
        logits = model.logits(marker_features(markers, size)) / LOGIT_ONE
        surplus = np.maximum(np.where(label == 1, logits, -logits), 0)
        return random_words(keys, _KEEP_WORD) < np.exp(-surplus) * 2.0**32

    return accept


def balanced_start_snakes(keys: np.ndarray, attempts: np.ndarray) -> np.ndarray:
    """Which snake's start is marked, (n,) 0 or 1: a coin of the attempt that was kept.

    A coin of the scene would not do, as the two snakes differ in how often they are kept.
    """
    return _start_snakes(attempt_keys(keys, attempts))


def _start_snakes(keys: np.ndarray) -> np.ndarray:
    return random_words(keys, _START_WORD) >> 31


@functools.cache
def balance_model(size: int, level: int) -> BoostedTrees:
    """The fitted log-odds of label 1 given the discs' positions."""
    with np.load(_MODELS) as models:
        parts = [models[f"{size}-{level}-{name}"] for name in ("feature", "threshold", "leaf")]
    return BoostedTrees(*parts)


def fit_balance_model(ends: np.ndarray, size: int, *, num_trees: int = 400) -> BoostedTrees:
    """Fit one model; more scenes leave less of the shortcut.

    Args:
        ends: (n, 2, 2, 2) integers: start or tip, snake, (y, x), of scenes that are not thinned.
        size: of the image.
        num_trees: 400 is what the shipped models of level 14 have, 200 those of levels 6 and 9.
    """
    markers, labels, _ = all_marker_pairs(ends)
    features = marker_features(markers, size)
    return fit_trees(features, labels, num_trees=num_trees, depth=6)


def save_balance_models(
    models: dict[tuple[int, int], BoostedTrees], path: str | os.PathLike[str] = _MODELS
) -> None:
    """Write models by (size, level) where `balance_model` reads them."""
    arrays = {}
    for (size, level), model in models.items():
        for name in ("feature", "threshold", "leaf"):
            arrays[f"{size}-{level}-{name}"] = getattr(model, name)
    np.savez_compressed(path, **arrays)
