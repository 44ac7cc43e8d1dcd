"""What the positions of Pathfinder's two discs alone tell of the label.

The two long snakes start close together and bend little, so that two ends of one snake lie
elsewhere than ends of two. Boosted trees over the discs' coordinates find it: on the hard level
they reach 67.0, 76.9, 55.6 and 67.4 % at 32, 64, 128 and 256 pixels without seeing any curve.
That, and not 50 %, is the floor of a Pathfinder accuracy. The same trees thin out scenes for
balanced sets.

The model is gradient boosting on the logistic loss over binned features (Friedman 2001; splits as
in Chen and Guestrin 2016, eq. 7). A fitted model is made of integers alone, so that it decides
alike on every machine.
"""

from __future__ import annotations

import dataclasses

import numpy as np

LOGIT_ONE = 1 << 12  # unit of a model's integer log-odds
_NUM_BINS = 64
_LEAF_PENALTY = 1.0
_MIN_LEAF_WEIGHT = 5.0  # sum of p (1 - p): at least 20 examples


@dataclasses.dataclass(frozen=True)
class ShortcutFloor:
    """Accuracy of a classifier that sees where the discs are, and nothing else.

    Attributes:
        accuracy: fraction, on examples held out from its fit, each once.
        ci95: half the width of the 95 % interval of that fraction.
        num_examples: how many were judged.
    """

    accuracy: float
    ci95: float
    num_examples: int


def marker_features(markers: np.ndarray, size: int) -> np.ndarray:
    """What the two discs show; they look alike, so neither is known to be the start.

    Args:
        markers: (n, 2, 2) integers, two discs, (y, x).
        size: of the image.
    Returns:
        (n, 9) int64: the disc nearer to the middle, the other, their difference, the squared
        distance between them and those from the middle, the last two in half pixels.
    """
    markers = np.asarray(markers, dtype=np.int64)
    radius = ((2 * markers - size) ** 2).sum(axis=2)
    place = markers[..., 0] * size + markers[..., 1]  # orders discs that are equally far
    swapped = (radius[:, 0] > radius[:, 1]) | (
        (radius[:, 0] == radius[:, 1]) & (place[:, 0] > place[:, 1])
    )
    near, far = np.where(swapped[:, None, None], markers[:, ::-1], markers).transpose(1, 0, 2)
    apart = far - near
    radius.sort(axis=1)
    return np.concatenate([near, far, apart, (apart**2).sum(1)[:, None], radius], axis=1)


def shortcut_floor(
    markers: np.ndarray,
    labels: np.ndarray,
    size: int,
    *,
    groups: np.ndarray | None = None,
    num_folds: int = 3,
    num_trees: int = 150,
) -> ShortcutFloor:
    """How well the discs' positions predict the labels of a set, by cross-validation.

    Args:
        markers: (n, 2, 2) integers, as data.pathfinder.marker_positions gives them.
        labels: (n,), 0 or 1.
        size: of the images.
        groups: (n,) integers; examples of one group are never judged by a model that saw another
            of it. None: each example is its own.
        num_folds: parts that are held out in turn.
        num_trees: of each model.
    Raises:
        ValueError: fewer than 20 examples a fold, which nothing can be learned from.
    """
    labels = np.asarray(labels)
    if len(labels) < 20 * num_folds:
        raise ValueError(
            f"at least {20 * num_folds} examples are needed to measure a shortcut, got "
            f"{len(labels)}: use a larger set"
        )
    features = marker_features(markers, size)
    fold = (np.arange(len(labels)) if groups is None else np.asarray(groups)) % num_folds
    correct = 0
    for held_out in range(num_folds):
        test = fold == held_out
        model = fit_trees(features[~test], labels[~test], num_trees=num_trees)
        correct += int(((model.logits(features[test]) > 0) == (labels[test] == 1)).sum())
    accuracy = correct / len(labels)
    ci95 = 1.96 * (accuracy * (1 - accuracy) / len(labels)) ** 0.5
    return ShortcutFloor(accuracy, ci95, len(labels))


def all_marker_pairs(ends: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The four ways to mark each scene: as much as scenes can tell of the shortcut.

    Args:
        ends: (n, 2, 2, 2) integers: start or tip, snake, (y, x).
    Returns:
        markers (4n, 2, 2), labels (4n,) and the scene of each, (4n,).
    """
    pairs = [(start, tip) for start in (0, 1) for tip in (0, 1)]
    markers = [np.stack([ends[:, 0, start], ends[:, 1, tip]], axis=1) for start, tip in pairs]
    labels = np.repeat([int(start == tip) for start, tip in pairs], len(ends))
    return np.concatenate(markers), labels, np.tile(np.arange(len(ends)), len(pairs))


@dataclasses.dataclass(frozen=True)
class BoostedTrees:
    """Complete binary trees of equal depth; node i has children 2i + 1 and 2i + 2.

    Attributes:
        feature: (num_trees, 2**depth - 1) uint8, what a node looks at.
        threshold: (num_trees, 2**depth - 1) int32; larger values go right.
        leaf: (num_trees, 2**depth) int16, what a leaf adds to the log-odds, in LOGIT_ONE.
    """

    feature: np.ndarray
    threshold: np.ndarray
    leaf: np.ndarray

    def logits(self, features: np.ndarray) -> np.ndarray:
        """Log-odds of label 1, (n,) int64 in units of LOGIT_ONE, for (n, num_features) int64."""
        total = np.zeros(len(features), np.int64)
        rows = np.arange(len(features))
        depth = self.leaf.shape[1].bit_length() - 1
        for feature, threshold, leaf in zip(self.feature, self.threshold, self.leaf, strict=True):
            node = np.zeros(len(features), np.int64)
            for _ in range(depth):
                node = 2 * node + 1 + (features[rows, feature[node]] > threshold[node])
            total += leaf[node - len(feature)]
        return total


def fit_trees(
    features: np.ndarray,
    labels: np.ndarray,
    *,
    num_trees: int = 150,
    depth: int = 5,
    learning_rate: float = 0.1,
) -> BoostedTrees:
    """Fit boosted trees to 0/1 labels.

    Args:
        features: (n, num_features) int64.
        labels: (n,), 0 or 1.
    """
    edges = [_bin_edges(column) for column in features.T]
    columns = zip(edges, features.T, strict=True)
    bins = np.stack([np.searchsorted(e, column) for e, column in columns], axis=1)
    labels = np.asarray(labels, dtype=np.float64)
    logits = np.zeros(len(labels))
    trees = []
    for _ in range(num_trees):
        probs = 1 / (1 + np.exp(-logits))
        gradient, weight = probs - labels, probs * (1 - probs)
        feature, cut, node = _grow_tree(bins, gradient, weight, depth)
        sums = [np.bincount(node, values, minlength=2**depth) for values in (gradient, weight)]
        step = -learning_rate * sums[0] / (sums[1] + _LEAF_PENALTY)
        leaf = np.rint(np.clip(step, -4, 4) * LOGIT_ONE).astype(np.int16)
        logits += leaf[node] / LOGIT_ONE
        threshold = [
            edges[f][c] if c < len(edges[f]) else np.iinfo(np.int32).max
            for f, c in zip(feature.tolist(), cut.tolist(), strict=True)
        ]
        trees.append((feature.astype(np.uint8), np.array(threshold, np.int32), leaf))
    return BoostedTrees(*(np.stack(part) for part in zip(*trees, strict=True)))


def _bin_edges(column: np.ndarray) -> np.ndarray:
    """Values that end a bin, at most _NUM_BINS - 1: a value goes right of an edge if larger."""
    quantiles = np.quantile(column, np.linspace(0, 1, _NUM_BINS + 1)[1:-1], method="lower")
    return np.unique(quantiles.astype(np.int64))


def _grow_tree(
    bins: np.ndarray, gradient: np.ndarray, weight: np.ndarray, depth: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The best splits level by level: features, last bins of the left side, and each row's leaf."""
    num_features = bins.shape[1]
    feature = np.zeros(2**depth - 1, np.int64)
    cut = np.full(2**depth - 1, _NUM_BINS)  # nothing goes right
    node = np.zeros(len(bins), np.int64)  # within its level
    columns = bins + np.arange(num_features) * _NUM_BINS
    rows = np.arange(len(bins))
    for level in range(depth):
        cells = (node[:, None] * (num_features * _NUM_BINS) + columns).reshape(-1)
        shape = (2**level, num_features, _NUM_BINS)
        left_gradient, left_weight = (
            np.bincount(cells, np.repeat(values, num_features), minlength=np.prod(shape))
            .reshape(shape)
            .cumsum(axis=2)
            for values in (gradient, weight)
        )
        all_gradient, all_weight = left_gradient[..., -1:], left_weight[..., -1:]
        right_weight = all_weight - left_weight
        gain = left_gradient**2 / (left_weight + _LEAF_PENALTY)
        gain += (all_gradient - left_gradient) ** 2 / (right_weight + _LEAF_PENALTY)
        gain -= all_gradient**2 / (all_weight + _LEAF_PENALTY)
        gain[(left_weight < _MIN_LEAF_WEIGHT) | (right_weight < _MIN_LEAF_WEIGHT)] = 0
        gain = gain.reshape(2**level, -1)
        best = gain.argmax(axis=1)
        is_split = gain.max(axis=1) > 1e-9
        first = 2**level - 1
        feature[first : first + 2**level] = best // _NUM_BINS
        cut[first : first + 2**level] = np.where(is_split, best % _NUM_BINS, _NUM_BINS)
        here = first + node
        node = 2 * node + (bins[rows, feature[here]] > cut[here])
    return feature, cut, node
