"""The Long Range Arena's tasks as batches: symbols, bytes and pixels (arXiv 2011.04006)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch

from data.classification import Batch, ClassificationData, Examples, LoadingOptions
from data.curriculum import CurriculumExamples, read_rungs
from data.lra_files import TokenTask, open_task
from data.marker_shortcut import shortcut_floor
from data.pathfinder import PathfinderSpec, dense_target, marker_positions
from data.pathfinder_extend import mix
from data.pathfinder_release import PathfinderRelease
from data.pathfinder_store import (
    NUM_IMAGES,
    PathfinderStore,
    pathfinder_folder,
    prepare_pathfinder,
)
from data.sequence_store import SequenceStore, write_sequences
from data.stepped import Comparison


class LongRangeData(ClassificationData):
    """ListOps, Text, Retrieval and Image; see data.lra_files for the sources and stand-ins.

    Token ids: ListOps has 15 symbols from 1, Text and Retrieval have byte + 1, and 0 is padding;
    Image has the grey values 0 ... 255 and no padding.

    Attributes:
        task: the TokenTask.
        stand_in: what stands in for the published data, to be shown beside every result; "" where
            these are used.

    Args:
        task: "listops", "text", "retrieval" or "image".
        source: see data.lra_files.open_task.
        seqlen: tokens of a sequence; longer texts are cut.
        root: folder under which prepared stores are cached.
        val_batch_size, loading: see ClassificationData.
    Raises:
        ValueError: sizes that do not fit together, or an unknown task.
        FileNotFoundError: no such local source.
    """

    def __init__(
        self,
        *,
        task: str,
        source: str | None = None,
        seqlen: int,
        root: str = "outputs/data",
        val_batch_size: int = 32,
        **loading: Unpack[LoadingOptions],
    ) -> None:
        super().__init__(seqlen=seqlen, val_batch_size=val_batch_size, **loading)
        self.task: TokenTask = open_task(task, source, max_length=seqlen)
        self.vocab_size = self.task.vocab_size
        self.num_classes = self.task.num_classes
        self.stand_in = self.task.stand_in
        key = hashlib.sha256(json.dumps(self.task.identity, sort_keys=True).encode()).hexdigest()
        self._folder = Path(root) / f"lra-{task}-{key[:12]}"

    @property
    def store(self) -> SequenceStore:
        """The prepared data."""
        return SequenceStore(self._folder)

    def prepare_data(self) -> None:
        """Make the store if it is missing. Called on one process of each machine."""
        write_sequences(self._folder, self.task.identity, self.task.splits)

    def comparison(self, split: str) -> Comparison | None:
        if not self.stand_in:
            return None
        line = f"stand-in data, not comparable with published results: {self.stand_in}"
        return Comparison(line, {})

    def open_examples(self) -> Examples:
        if self.stand_in:
            print(f"stand-in data for {self.task.name}: {self.stand_in}")
        return _TokenExamples(self.store, self.task, self.seqlen)


class _TokenExamples:
    def __init__(self, store: SequenceStore, task: TokenTask, seqlen: int) -> None:
        self.fingerprint = store.fingerprint
        self._store = store
        self._towers, self._first_id, self._seqlen = task.num_towers, task.first_id, seqlen

    def num_examples(self, split: str) -> int:
        return len(self._store.labels(split))

    def batch(self, split: str, ids: np.ndarray, *, positions: np.ndarray | None = None) -> Batch:
        input_ids = np.zeros((len(ids), self._towers, self._seqlen), np.int64)
        lengths = np.zeros((len(ids), self._towers), np.int64)
        for row, index in enumerate(ids.tolist()):
            for tower in range(self._towers):
                values = self._store.sequence(split, index * self._towers + tower)
                values = values[: self._seqlen]
                input_ids[row, tower, : len(values)] = values
                input_ids[row, tower, : len(values)] += self._first_id
                lengths[row, tower] = len(values)
        if self._towers == 1:
            input_ids, lengths = input_ids[:, 0], lengths[:, 0]
        labels = self._store.labels(split)[ids].astype(np.int64)
        arrays = {"input_ids": input_ids, "labels": labels, "lengths": lengths}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


class PathfinderData(ClassificationData):
    """Pathfinder, Path-X and Path-256: grey values 0 ... 255, row by row; no padding.

    Batches may also hold:
    `dense_labels`, (batch, size * size) int64: 0 on no long snake, 1 on one, 2 on the one that
    joins both discs; more supervision than the Long Range Arena allows, so say where it was used.
    `foreground`, (num_foreground,) int64: where input_ids.view(-1) is not 0, in order, with
    `cu_seqlens`, (batch + 1,) int32, and `max_seqlen`, an int: the non-zero pixels as packed
    sequences. That value 0 is padding is the Long Range Arena's own rule.
    Loaders give pixels and their labels as uint8, an eighth of what goes through pipes and to the
    device; `on_after_batch_transfer` makes int64 of them there.

    Attributes:
        spec: of the images.
        folders: of the prepared sets, the curriculum's first.

    Args:
        size: of the images in pixels: 32, 64, 128 (Path-X) or 256.
        level: paddles a snake, 3 to 14.
        balanced: labels that the discs' positions do not tell.
        num_distractors: short snakes to try for, 0 for an easier set; None is the reference's.
        release: folder of the unpacked release, read instead of generating; needs Pillow.
        dense_target, foreground: add the entries above. The release has no dense target.
        background_up_to: grey values up to this one become 0, the soft rims of strokes: fewer
            non-zero pixels, of the same curves.
        curriculum: easier sets for the first steps of a run, [level, num_distractors, steps] each,
            of num_train / 4 images.
        augment: one of the eight flips and rotations for each training image, by seed and position.
        num_train, num_val, num_test: images to generate.
        data_seed: of the generated images.
        root: folder under which prepared sets are cached.
        prepare_workers: generating processes; None is one a core.
        val_batch_size, loading: see ClassificationData.
    Raises:
        ValueError: an unknown size or level, a curriculum that is none, or what the release has not
            asked of it.
        FileNotFoundError: no release of that size and level in the folder.
    """

    def __init__(
        self,
        *,
        size: int,
        level: int = 14,
        balanced: bool = False,
        num_distractors: int | None = None,
        release: str | None = None,
        dense_target: bool = False,
        foreground: bool = False,
        background_up_to: int = 0,
        curriculum: Sequence[Sequence[int]] | None = None,
        augment: bool = False,
        num_train: int = NUM_IMAGES["train"],
        num_val: int = NUM_IMAGES["val"],
        num_test: int = NUM_IMAGES["test"],
        data_seed: int = 0,
        prepare_workers: int | None = None,
        root: str = "outputs/data",
        val_batch_size: int = 32,
        **loading: Unpack[LoadingOptions],
    ) -> None:
        super().__init__(seqlen=size * size, val_batch_size=val_batch_size, **loading)
        generated_only = dense_target or balanced or num_distractors is not None or curriculum
        if release is not None and generated_only:
            raise ValueError(
                "the release has neither a dense target, a balanced set, another number of "
                "distractors nor the sets of a curriculum: generate the images, or leave these "
                "options out"
            )
        if not 0 <= background_up_to < 255:
            raise ValueError(f"background_up_to must be from 0 to 254, got {background_up_to}")
        self.vocab_size = 256
        self.num_classes = 2
        self.spec = PathfinderSpec(
            size, level, balanced=balanced, num_distractors=num_distractors, seed=data_seed
        )
        self._num_images = {"train": num_train, "val": num_val, "test": num_test}
        self._rungs = read_rungs(curriculum)
        easier = [
            PathfinderSpec(size, level, num_distractors=distractors, seed=data_seed)
            for level, distractors, _ in self._rungs
        ]
        self._sets = [
            *((spec, {"train": max(1, num_train // 4)}) for spec in easier),
            (self.spec, self._num_images),
        ]
        self.folders = [pathfinder_folder(root, *made) for made in self._sets]
        self._release = release
        self._prepare_workers = prepare_workers
        self._options = (
            dense_target,
            foreground,
            background_up_to,
            self._seed if augment else None,
        )

    @property
    def curriculum_steps(self) -> int:
        return sum(rung.steps for rung in self._rungs)

    @property
    def fingerprint(self) -> str:
        """Until the curriculum ends a step has other images if that or the batch is another one."""
        examples = self.examples
        if isinstance(examples, CurriculumExamples) and self.position < examples.ends[-1]:
            return f"{super().fingerprint}-batch{self.batch_size}-curriculum{examples.plan}"
        return super().fingerprint

    def prepare_data(self) -> None:
        """Make the sets that are missing. Called on one process of each machine."""
        if self._release is None:
            for (spec, num_images), folder in zip(self._sets, self.folders, strict=True):
                prepare_pathfinder(spec, folder, num_images, workers=self._prepare_workers)

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        as_ids = {k: v.long() for k, v in batch.items() if k in ("input_ids", "dense_labels")}
        return {**batch, **as_ids}

    def comparison(self, split: str) -> Comparison | None:
        """What the discs' positions alone tell of the labels of the same examples."""
        if self._release is not None:
            line = "marker-only floor: not measured, the release does not say where the discs are"
            return Comparison(line, {})
        scenes = PathfinderStore(self.folders[-1]).scenes(
            split, np.arange(self.num_held_out(split))
        )
        try:
            floor = shortcut_floor(marker_positions(scenes), scenes["label"], self.spec.size)
        except ValueError as error:
            return Comparison(f"marker-only floor: not measured, {error}", {})
        return Comparison(
            f"marker-only floor on the same set: {floor.accuracy:.2%} +- {floor.ci95:.2%} "
            f"(95 %, {floor.num_examples:,} examples)",
            {
                "floor": floor.accuracy,
                "floor_ci95": floor.ci95,
                "floor_examples": floor.num_examples,
            },
        )

    def open_examples(self) -> Examples:
        if self._release is not None:
            images = PathfinderRelease(self._release, self.spec.size, self.spec.level)
            return _ReleaseExamples(images, *self._options)
        *easier, last = (
            _PathfinderExamples(PathfinderStore(folder), *self._options) for folder in self.folders
        )
        if not easier:
            return last
        steps = [rung.steps for rung in self._rungs]
        return CurriculumExamples(list(zip(steps, easier, strict=True)), last, self.batch_size)


class _ImageExamples:
    """Images to batches; subclasses say where images come from."""

    fingerprint: str

    def __init__(
        self, dense: bool, foreground: bool, background_up_to: int, augment_seed: int | None
    ) -> None:
        self._dense, self._foreground, self._augment_seed = dense, foreground, augment_seed
        self._background_up_to = background_up_to

    def num_examples(self, split: str) -> int:
        raise NotImplementedError

    def read(self, split: str, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Images and dense targets, (n, size, size) uint8, and labels between them, (n,)."""
        raise NotImplementedError

    def batch(self, split: str, ids: np.ndarray, *, positions: np.ndarray | None = None) -> Batch:
        images, labels, target = self.read(split, ids)
        if self._background_up_to:
            images *= images > self._background_up_to
        layers = [images] if target is None else [images, target]
        if positions is not None and self._augment_seed is not None:
            words = mix(mix(positions.astype(np.uint64)) + np.uint64(self._augment_seed % 2**63))
            layers = [_turned(layer, (words >> np.uint64(61)).astype(np.int64)) for layer in layers]
        pixels = layers[0].reshape(len(ids), -1)
        batch: Batch = {
            "input_ids": torch.from_numpy(pixels),
            "labels": torch.from_numpy(labels.astype(np.int64)),
            "lengths": torch.full((len(ids),), pixels.shape[1], dtype=torch.int64),
        }
        if target is not None:
            batch["dense_labels"] = torch.from_numpy(layers[1].reshape(len(ids), -1))
        if self._foreground:
            counts = np.count_nonzero(pixels, axis=1)
            batch["foreground"] = torch.from_numpy(np.flatnonzero(pixels))
            starts = np.concatenate([[0], counts.cumsum()]).astype(np.int32)
            batch["cu_seqlens"] = torch.from_numpy(starts)
            batch["max_seqlen"] = int(counts.max())
        return batch


class _PathfinderExamples(_ImageExamples):
    def __init__(self, store: PathfinderStore, *options: Any) -> None:
        super().__init__(*options)
        self.fingerprint = store.fingerprint
        self._store = store

    def num_examples(self, split: str) -> int:
        return self._store.num_images(split)

    def read(self, split: str, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        labels = self._store.scenes(split, ids)["label"]
        target = None
        if self._dense:
            target = dense_target(self._store.snake_ids(split, ids), labels)
        return self._store.images(split, ids), labels, target


class _ReleaseExamples(_ImageExamples):
    def __init__(self, release: PathfinderRelease, *options: Any) -> None:
        super().__init__(*options)
        names = "\n".join(f"{p.parent.name}/{p.name}" for p in release.paths)
        payload = names.encode() + release.labels.tobytes()
        self.fingerprint = hashlib.sha256(payload).hexdigest()[:32]
        self._release = release
        self._ids = {split: release.split_ids(split) for split in ("train", "val", "test")}

    def num_examples(self, split: str) -> int:
        return len(self._ids[split])

    def read(self, split: str, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        ids = self._ids[split][ids]
        return self._release.images(ids), self._release.labels[ids], None


def _turned(images: np.ndarray, turns: np.ndarray) -> np.ndarray:
    """Each image flipped (4), then rotated by 90 degrees (0 to 3 times): turns in [0, 8)."""
    out = np.empty_like(images)
    for turn in range(8):
        chosen = images[turns == turn]
        chosen = chosen[:, :, ::-1] if turn >= 4 else chosen
        out[turns == turn] = np.rot90(chosen, turn % 4, axes=(1, 2))
    return out
