"""Make a Pathfinder set, look at it, and say what its discs alone tell:

  python -m scripts.prepare_data pathfinder --size 128

The set goes where training looks for it, or to --out. It holds recipes, 250 bytes an image. A
stopped run continues where it was when started again.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

import numpy as np

from data.marker_shortcut import ShortcutFloor, shortcut_floor
from data.pathfinder import LEVELS, SPLITS, PathfinderSpec, marker_positions
from data.pathfinder_release import export_release
from data.pathfinder_sprites import GEOMETRIES
from data.pathfinder_store import (
    NUM_IMAGES,
    PathfinderStore,
    pathfinder_folder,
    prepare_pathfinder,
)
from data.png import encode_png

# Colours of the snake ids: background, the marked long snake, the other one, distractors.
_PALETTE = np.array([0, 255, 110, 60], np.uint8)


def main(arguments: list[str] | None = None) -> int:
    """Prepare what the command line asks for. Returns the exit status."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        spec = PathfinderSpec(
            options.size,
            options.level,
            balanced=options.balanced,
            num_distractors=options.distractors,
            seed=options.seed,
        )
        num_images = {split: getattr(options, split) for split in SPLITS}
        folder = options.out or pathfinder_folder(options.root, spec, num_images)
        store = prepare_pathfinder(spec, folder, num_images, workers=options.workers)
        if options.verify:
            store.verify()
        if options.sheet:
            Path(options.sheet).write_bytes(encode_png(contact_sheet(store, options.sheet_images)))
        if options.export:
            for split in SPLITS:
                if store.num_images(split):
                    parts = np.array_split(store.scenes(split), -(-store.num_images(split) // 500))
                    export_release(spec, parts, Path(options.export) / split)
        print(summary(store, floor=None if options.no_floor else floor_of(store)))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; the same command continues after the last finished part", file=sys.stderr)
        return 130
    return 0


def contact_sheet(store: PathfinderStore, num_images: int = 24) -> np.ndarray:
    """Images of the first split side by side, each above its snakes, label 1 in the left half.

    The long snake whose start is marked is white, the other one light grey, distractors dark grey.

    Returns:
        (height, width) uint8; fewer images than asked for if the split has fewer of a label.
    """
    split = next(split for split in SPLITS if store.num_images(split))
    scenes = store.scenes(split, slice(0, 4 * num_images))
    by_label = [np.flatnonzero(scenes["label"] == label) for label in (1, 0)]
    per_half = 4 if num_images >= 8 else max(1, num_images // 2)
    rows = min(-(-num_images // (2 * per_half)), *(len(ids) // per_half for ids in by_label))
    if rows < 1:
        raise ValueError(f"{store.folder} must hold more images for a contact sheet")
    gap, cells = 4, []
    for row in range(rows):
        ids = np.concatenate([ids[row * per_half : (row + 1) * per_half] for ids in by_label])
        pictures = store.images(split, ids), _PALETTE[store.snake_ids(split, ids)]
        padded = [np.pad(p, ((0, 0), (0, gap), (0, gap)), constant_values=40) for p in pictures]
        cells.append(np.concatenate([np.concatenate(list(p), axis=1) for p in padded]))
    return np.concatenate(cells)


def floor_of(store: PathfinderStore) -> tuple[str, ShortcutFloor] | None:
    """What the discs alone tell, on the test split or the largest one."""
    split = "test" if store.num_images("test") else max(SPLITS, key=store.num_images)
    scenes = store.scenes(split)
    if len(scenes) < 300:
        return None
    return split, shortcut_floor(marker_positions(scenes), scenes["label"], store.spec.size)


def summary(store: PathfinderStore, floor: tuple[str, ShortcutFloor] | None = None) -> str:
    """What a set holds, one fact a line."""
    spec = store.spec
    scenes = np.concatenate([store.scenes(s) for s in SPLITS if store.num_images(s)])
    number = scenes["num_distractors"].mean()
    rows = {
        "set": store.folder,
        "images": ", ".join(f"{store.num_images(s):,} {s}" for s in SPLITS),
        "kind": f"{spec.size} px, level {spec.level}, seed {spec.seed}"
        + (", balanced" if spec.balanced else ""),
        "label 1": f"{scenes['label'].mean():.4f}",
        "distractors": f"{number:.2f} of {spec.max_distractors} on average",
        "size": f"{sum(e['bytes'] for e in store.manifest['splits'].values()) / 2**20:.1f} MiB",
        "fingerprint": store.fingerprint,
    }
    if floor is not None:
        split, found = floor
        rows["floor"] = (
            f"{100 * found.accuracy:.1f} +- {100 * found.ci95:.1f} % on {split} from the discs' "
            "positions alone (boosted trees, cross-validated)"
        )
    return "\n".join(f"{name:12} {value}" for name, value in rows.items())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.prepare_data pathfinder",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--size", type=int, required=True, choices=[*GEOMETRIES], help="pixels")
    parser.add_argument("--level", type=int, default=14, choices=[*LEVELS], help="%(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    for split, number in NUM_IMAGES.items():
        parser.add_argument(f"--{split}", type=int, default=number, help="images: %(default)s")
    parser.add_argument(
        "--balanced", action="store_true", help="labels that the discs' positions do not tell"
    )
    parser.add_argument("--distractors", type=int, help="to try for; default: the reference's")
    parser.add_argument("--out", help="folder of the set; default: a cached one under --root")
    parser.add_argument("--root", default="outputs/data", help="default: %(default)s")
    parser.add_argument("--workers", type=int, help="processes; default: one a core")
    parser.add_argument("--sheet", help="write a contact sheet to this .png file")
    parser.add_argument("--sheet-images", type=int, default=24, help="on it: %(default)s")
    parser.add_argument(
        "--export", help="also write PNG files as the LRA release, a folder a split"
    )
    parser.add_argument("--no-floor", action="store_true", help="skip the marker-only accuracy")
    parser.add_argument("--verify", action="store_true", help="check the hash of every file")
    return parser
