"""Make the store of a Long Range Arena task ahead of training:

  python -m scripts.prepare_data lra --task text --source PATH --seqlen 4000

data/lra_files.py lists the sources of each task and the stand-ins. Pathfinder is another verb.
"""

from __future__ import annotations

import argparse
import sys

import numpy as np

from data.long_range import LongRangeData


def main(arguments: list[str] | None = None) -> int:
    """Prepare what the command line asks for. Returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        data = LongRangeData(
            task=options.task,
            source=options.source,
            seqlen=options.seqlen,
            batch_size=1,
            root=options.root,
        )
        data.prepare_data()
        data.setup()
        print(summary(data))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; the same command starts again", file=sys.stderr)
        return 130
    return 0


def summary(data: LongRangeData) -> str:
    """What a store holds, one fact a line."""
    store = data.store
    rows = {"store": store.folder, "task": data.task.name}
    if data.stand_in:
        rows["stand-in"] = data.stand_in
    for split in ("train", "val", "test"):
        labels = store.labels(split)
        lengths = store.lengths(split)
        shares = np.bincount(labels, minlength=data.num_classes) / max(1, len(labels))
        rows[split] = (
            f"{len(labels):,} examples, {lengths.mean():,.0f} tokens on average, "
            f"{lengths.max():,} at most; largest class {100 * shares.max():.1f} %"
        )
    rows["fingerprint"] = store.fingerprint
    return "\n".join(f"{name:12} {value}" for name, value in rows.items())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.prepare_data lra",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    tasks = ("listops", "text", "retrieval", "image")
    parser.add_argument("--task", required=True, choices=tasks)
    parser.add_argument("--source", help='a file, a folder or "hf"; default: see data/lra_files.py')
    parser.add_argument("--seqlen", type=int, required=True, help="longer texts are cut")
    parser.add_argument("--root", default="outputs/data", help="default: %(default)s")
    return parser
