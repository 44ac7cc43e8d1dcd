"""The folder layout of the Long Range Arena's Pathfinder release: writer and reader.

    pathfinderSIZE/curv_baseline/imgs/BATCH/sample_NUMBER.png      8-bit grey
    pathfinderSIZE/curv_baseline/metadata/BATCH.npy                one row an image

and the same under curv_contour_length_9 and curv_contour_length_14. In the release the .npy files
are plain text: subfolder, file name, running number, label, continuity, contour length, distractor
length, paddle length, thickness, margin, number of contrasts. Files straight from the generator are
real arrays of strings; both are read. The archive unpacks to nested folders of varying depth.
"""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from data.pathfinder import LEVELS, PathfinderSpec, render
from data.pathfinder_sprites import GEOMETRIES
from data.png import encode_png, read_png

_BATCH = 10_000  # images a folder
_SPLIT_SEED = 42

logger = logging.getLogger(__name__)


def export_release(
    spec: PathfinderSpec, scene_parts: Iterable[np.ndarray], root: str | os.PathLike[str]
) -> Path:
    """Write scenes as the release has them.

    Args:
        scene_parts: recipes, (n,) of spec.recipe_dtype each; numbered on from part to part.
        root: folder under which pathfinderSIZE is made.
    Returns:
        The folder of the level, as root/pathfinder32/curv_contour_length_14.
    Raises:
        FileExistsError: that folder is there already.
    """
    folder = Path(root) / f"pathfinder{spec.size}" / LEVELS[spec.level]
    folder.mkdir(parents=True)
    (folder / "metadata").mkdir()
    geometry = GEOMETRIES[spec.size]
    number = 0
    for scenes in scene_parts:
        for scene, image in zip(scenes, render(spec, scenes), strict=True):
            batch = number // _BATCH
            images = folder / "imgs" / str(batch)
            images.mkdir(parents=True, exist_ok=True)
            name = f"sample_{number}.png"
            (images / name).write_bytes(encode_png(image))
            row = [f"imgs/{batch}", name, number, int(scene["label"]), geometry.continuity]
            row += [spec.level, spec.distractor_length, geometry.paddle_length]
            row += [geometry.thickness, int(scene["margin"]), 1]
            with open(folder / "metadata" / f"{batch}.npy", "a") as file:
                file.write(" ".join(map(str, row)) + "\n")
            number += 1
    return folder


class PathfinderRelease:
    """One size and level of an unpacked release.

    Attributes:
        folder: of the level.
        paths: of the images, in the order of the metadata: files by number, then rows.
        labels: (num_images,) int64.
        num_skipped: images that are missing or empty; the release has one such.
    Raises:
        FileNotFoundError: no such folder anywhere under `root`.
        ValueError: the metadata cannot be read, or name no image.
    """

    def __init__(self, root: str | os.PathLike[str], size: int, level: int = 14) -> None:
        self.size = size
        self.folder = _find_folder(Path(root), size, level)
        files = sorted((self.folder / "metadata").glob("*.npy"), key=_number)
        rows = [row for file in files for row in _read_metadata(file)]
        found = [(self.folder / row[0] / row[1], int(float(row[3]))) for row in rows]
        usable = [(p, label) for p, label in found if p.is_file() and p.stat().st_size]
        self.num_skipped = len(found) - len(usable)
        if self.num_skipped:
            logger.warning("%s: %d empty or missing images skipped", self.folder, self.num_skipped)
        if not usable:
            raise ValueError(f"{self.folder} must hold images, got none: unpack it again")
        self.paths = [path for path, _ in usable]
        self.labels = np.array([label for _, label in usable], dtype=np.int64)

    def images(self, ids: np.ndarray) -> np.ndarray:
        """(len(ids), size, size) uint8. Needs Pillow.

        Raises:
            ValueError: a damaged image, or one of another size.
        """
        out = np.empty((len(ids), self.size, self.size), np.uint8)
        for i, index in enumerate(ids):
            image = read_png(self.paths[index])
            if image.shape != out.shape[1:]:
                raise ValueError(
                    f"{self.paths[index]} must have {self.size} pixels a side, got {image.shape}"
                )
            out[i] = image
        return out

    def split_ids(self, split: str) -> np.ndarray:
        """Image ids of "train", "val" or "test": 80, 10 and 10 % of a permutation, (n,) int64.

        As S4's and fly's code has it: torch's random_split with seed 42.
        """
        import torch

        total = len(self.labels)
        num_val = num_test = int(0.1 * total)
        generator = torch.Generator().manual_seed(_SPLIT_SEED)
        order = torch.randperm(total, generator=generator).numpy()
        first = total - num_val - num_test
        bounds = {"train": (0, first), "val": (first, total - num_test), "test": (-num_test, None)}
        if split not in bounds:
            raise ValueError(f"split must be one of {[*bounds]}, got {split!r}")
        return order[slice(*bounds[split])]


def _find_folder(root: Path, size: int, level: int) -> Path:
    """The level's folder at the least depth below `root`, which may itself be any part of it."""
    name, parent = LEVELS[level], f"pathfinder{size}"
    if root.name == name and root.parent.name == parent and (root / "metadata").is_dir():
        return root
    found = []
    for depth in range(5):
        pattern = "/".join(["*"] * depth + [parent, name]) if depth else f"{parent}/{name}"
        found += [p for p in root.glob(pattern) if (p / "metadata").is_dir()]
        if found:
            break
    if root.name == parent and (root / name / "metadata").is_dir():
        found.insert(0, root / name)
    if not found:
        raise FileNotFoundError(
            f"the release must hold {parent}/{name}/metadata, found none under {root}: unpack "
            "lra_release.gz (a tar file) there, or generate a set with python -m "
            "scripts.prepare_data pathfinder"
        )
    return min(found)


def _read_metadata(path: Path) -> list[list[str]]:
    payload = path.read_bytes()
    try:
        if payload.startswith(b"\x93NUMPY"):
            array = np.load(io.BytesIO(payload), allow_pickle=False)
            rows = [[_text(value) for value in row] for row in np.atleast_2d(array)]
        else:
            rows = [line.split() for line in payload.decode().splitlines() if line.strip()]
    except (ValueError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no metadata file ({error}): fetch it again") from error
    for row in rows:
        if len(row) < 4 or row[3] not in ("0", "1", "0.0", "1.0"):
            raise ValueError(f"{path} must have rows of folder, file, number, label, got {row}")
    return rows


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _number(path: Path) -> tuple[int, str]:
    return (int(path.stem), "") if path.stem.isdigit() else (-1, path.stem)
