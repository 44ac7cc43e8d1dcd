"""Pathfinder sets on disk: recipes of scenes, 250 bytes each, rendered when they are read.

A finished set is a folder with train.bin, val.bin and test.bin (recipes end to end, see
data.pathfinder.PathfinderSpec.recipe_dtype) and manifest.json, written last. 200,000 scenes of
Path-X take 50 MB; as images they would take 3.3 GB, or as many files.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import json
import logging
import multiprocessing
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import rich.progress

from data.pathfinder import SPLITS, VERSION, PathfinderSpec, make_scenes, render, render_snake_ids
from data.token_store import MANIFEST_NAME, is_finished, sha256_file, write_atomically

NUM_IMAGES = {"train": 160_000, "val": 20_000, "test": 20_000}  # as the Long Range Arena's
_PART_SCENES = 1024  # made at once, and lost at most when a run is killed
_FORMAT = "pathfinder recipes 1"

logger = logging.getLogger(__name__)


def pathfinder_folder(
    root: str | os.PathLike[str], spec: PathfinderSpec, num_images: Mapping[str, int] = NUM_IMAGES
) -> Path:
    """Where a set is cached: root/pathfinderSIZE-LEVEL-KEY."""
    key = hashlib.sha256(json.dumps(_identity(spec, num_images)).encode()).hexdigest()[:12]
    kind = "-balanced" if spec.balanced else ""
    return Path(root) / f"pathfinder{spec.size}-level{spec.level}{kind}-{key}"


def prepare_pathfinder(
    spec: PathfinderSpec,
    folder: str | os.PathLike[str],
    num_images: Mapping[str, int] = NUM_IMAGES,
    *,
    workers: int | None = None,
    progress: bool = True,
) -> PathfinderStore:
    """Make a set, or open what is there already. The same bytes for any number of workers.

    Args:
        folder: made if missing; an unfinished one is continued. Another process that prepares the
            same folder is waited for.
        num_images: of each split; a split of none is left out.
        workers: processes; None is one a core, 0 works in this one.
        progress: show a bar.
    Raises:
        ValueError: the folder holds another set, or a split is unknown.
    """
    unknown = set(num_images) - set(SPLITS)
    if unknown or min(num_images.values(), default=-1) < 0:
        raise ValueError(f"num_images must give numbers for {SPLITS}, got {dict(num_images)}")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(folder.parent / f".{folder.name}.lock"):
        if not is_finished(folder):
            _make_parts(spec, folder, num_images, workers, progress)
            _finish(spec, folder, num_images)
        store = PathfinderStore(folder)
        if store.manifest["identity"] != _identity(spec, num_images):
            raise ValueError(
                f"{folder} must be new or hold the same set, got {store.manifest['identity']}: "
                "choose another folder or delete it"
            )
        return store


class PathfinderStore:
    """A finished set, opened read-only. Pickles as its folder.

    Attributes:
        spec: what it holds.
        manifest: the parsed manifest.json.
        fingerprint: hex digest of its recipes; equal sets have equal fingerprints.
    Raises:
        FileNotFoundError: no manifest: unfinished, or no set.
        ValueError: a file is missing or has the wrong size, or this version draws other sprites.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        if not is_finished(self.folder):
            raise FileNotFoundError(
                f"a Pathfinder set must have a {MANIFEST_NAME}, found none in {folder}: prepare it "
                "(again) with python -m scripts.prepare_data pathfinder"
            )
        self.manifest: dict[str, Any] = json.loads((self.folder / MANIFEST_NAME).read_bytes())
        if self.manifest.get("format") != _FORMAT:
            raise ValueError(
                f"{folder} must hold {_FORMAT!r}, got {self.manifest.get('format')!r}: prepare it "
                "again"
            )
        self.spec = PathfinderSpec(**self.manifest["identity"]["spec"])
        if self.manifest["identity"]["tables_sha256"] != self.spec.tables_sha256():
            raise ValueError(
                f"{folder} was made with other sprites than this version draws: its recipes would "
                f"give other images; delete it and prepare it again"
            )
        self._scenes = {}
        for split, entry in self.manifest["splits"].items():
            path = self.folder / f"{split}.bin"
            if not path.is_file() or path.stat().st_size != entry["bytes"]:
                raise ValueError(
                    f"{path} must have {entry['bytes']} bytes: the set is truncated or altered; "
                    f"delete {folder} and prepare it again"
                )
            self._scenes[split] = np.memmap(path, dtype=self.spec.recipe_dtype, mode="r")
        digests = {split: entry["sha256"] for split, entry in self.manifest["splits"].items()}
        self.fingerprint = hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()[
            :32
        ]

    def __reduce__(self) -> tuple[Any, ...]:
        return PathfinderStore, (self.folder,)

    def num_images(self, split: str) -> int:
        return len(self._scenes[split]) if split in self._scenes else 0

    def scenes(self, split: str, ids: np.ndarray | slice = slice(None)) -> np.ndarray:
        """Recipes, (n,) of spec.recipe_dtype.

        Raises:
            IndexError: an id beyond the split.
        """
        return np.array(self._scenes[split][ids])

    def images(self, split: str, ids: np.ndarray | slice) -> np.ndarray:
        """(n, size, size) uint8."""
        return render(self.spec, self.scenes(split, ids))

    def snake_ids(self, split: str, ids: np.ndarray | slice) -> np.ndarray:
        """(n, size, size) uint8; see data.pathfinder.render_snake_ids."""
        return render_snake_ids(self.spec, self.scenes(split, ids))

    def verify(self) -> None:
        """Compare every file with its SHA-256.

        Raises:
            ValueError: a file's content is not what was written.
        """
        for split, entry in self.manifest["splits"].items():
            path = self.folder / f"{split}.bin"
            if sha256_file(path) != entry["sha256"]:
                raise ValueError(
                    f"{path} must have SHA-256 {entry['sha256']}: the file is damaged; delete "
                    f"{self.folder} and prepare it again"
                )


def _identity(spec: PathfinderSpec, num_images: Mapping[str, int]) -> dict[str, Any]:
    return {
        "version": VERSION,
        "spec": dataclasses.asdict(spec),
        "num_images": {split: num_images.get(split, 0) for split in SPLITS},
        "tables_sha256": spec.tables_sha256(),
    }


def _parts(num_images: Mapping[str, int]) -> Iterator[tuple[str, int, int]]:
    for split in SPLITS:
        number = num_images.get(split, 0)
        for start in range(0, number, _PART_SCENES):
            yield split, start, min(start + _PART_SCENES, number)


def _part_path(folder: Path, split: str, start: int) -> Path:
    return folder / f"{split}-{start:09d}.part"


def _make_parts(
    spec: PathfinderSpec,
    folder: Path,
    num_images: Mapping[str, int],
    workers: int | None,
    progress: bool,
) -> None:
    """Write the parts that are missing. A part that is there is whole: it was renamed last."""
    plan = json.dumps(_identity(spec, num_images)).encode()
    plan_path = folder / "plan.json"
    if plan_path.exists() and plan_path.read_bytes() != plan:
        raise ValueError(
            f"{folder} must be new or hold the same set, got an unfinished one of other settings: "
            "choose another folder or delete it"
        )
    foreign = [p.name for p in folder.iterdir() if p.suffix not in (".part", ".tmp", ".bin")]
    if not plan_path.exists() and foreign:
        raise ValueError(
            f"{folder} must be new, empty or an unfinished set, got files such as "
            f"{min(foreign)!r}: choose another folder"
        )
    write_atomically(plan_path, plan)
    todo = [p for p in _parts(num_images) if not _part_path(folder, p[0], p[1]).exists()]
    total = sum(num_images.values())
    left = sum(stop - start for _, start, stop in todo)
    if workers is None:
        workers = min(len(os.sched_getaffinity(0)), len(todo))
    columns = (
        f"pathfinder {spec.size} px, level {spec.level}",
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TimeRemainingColumn(),
    )
    with rich.progress.Progress(*columns, disable=not progress) as bar:
        task = bar.add_task("", total=total, completed=total - left)
        for number in _run(spec, folder, todo, workers):
            bar.update(task, advance=number)


def _run(
    spec: PathfinderSpec, folder: Path, todo: list[tuple[str, int, int]], workers: int
) -> Iterator[int]:
    """Make parts; yields the number of scenes of each as it is done."""
    if workers < 2:
        for part in todo:
            yield _make_part(spec, folder, *part)
        return
    # Not forked: the parent may hold threads and a CUDA context.
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        jobs = [pool.submit(_make_part, spec, folder, *part) for part in todo]
        try:
            for job in concurrent.futures.as_completed(jobs):
                yield job.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _make_part(spec: PathfinderSpec, folder: Path, split: str, start: int, stop: int) -> int:
    scenes = make_scenes(spec, split, np.arange(start, stop))
    write_atomically(_part_path(folder, split, start), scenes.tobytes())
    return stop - start


def _finish(spec: PathfinderSpec, folder: Path, num_images: Mapping[str, int]) -> None:
    """Join the parts of each split, write the manifest, then delete the parts."""
    splits = {}
    for split in SPLITS:
        parts = [_part_path(folder, *part[:2]) for part in _parts(num_images) if part[0] == split]
        if parts:
            payload = b"".join(part.read_bytes() for part in parts)
            expected = num_images[split] * spec.recipe_dtype.itemsize
            if len(payload) != expected:
                raise ValueError(f"the parts of {folder} are damaged: delete it and start again")
            entry = write_atomically(folder / f"{split}.bin", payload)
            splits[split] = {"num_images": num_images[split], **entry}
    manifest = {"format": _FORMAT, "identity": _identity(spec, num_images), "splits": splits}
    write_atomically(folder / MANIFEST_NAME, (json.dumps(manifest, indent=2) + "\n").encode())
    for path in [*folder.glob("*.part"), *folder.glob("*.tmp"), folder / "plan.json"]:
        path.unlink(missing_ok=True)
