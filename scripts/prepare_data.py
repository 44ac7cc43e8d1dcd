"""Tokenize a corpus once, ahead of training: python -m scripts.prepare_data --source PATH

Without --out the store goes where training with the same source looks for it; with --out, train
with data.source=OUT. A killed or failed run continues where it was when started again.

Images of Path-X and its relatives: python -m scripts.prepare_data pathfinder --help
The Long Range Arena's other tasks: python -m scripts.prepare_data lra --help
"""

from __future__ import annotations

import argparse
import logging
import resource
import sys
import time
from pathlib import Path

from data.prepare import SHARD_TOKENS, SPLIT_SEED, prepare, store_folder
from data.sources import open_source
from data.token_store import TokenStore
from data.tokenizer import TOKENIZER_NAMES, load_tokenizer


def main(arguments: list[str] | None = None) -> int:
    """Prepare what the command line asks for. Returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    # Imported where they are needed: torch takes seconds.
    if arguments[:1] == ["pathfinder"]:
        from scripts import prepare_pathfinder

        return prepare_pathfinder.main(arguments[1:])
    if arguments[:1] == ["lra"]:
        from scripts import prepare_lra

        return prepare_lra.main(arguments[1:])
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        source = open_source(
            options.source,
            text_field=options.text_field,
            config=options.config,
            split=options.split,
            revision=options.revision,
        )
        plan = {
            "tokenizer": load_tokenizer(options.tokenizer),
            "val_fraction": options.val_fraction,
            "split_seed": options.split_seed,
            "shard_tokens": options.shard_tokens,
        }
        folder = options.out or store_folder(options.root, source, **plan)
        is_new, began = not Path(folder).exists(), time.perf_counter()
        store = prepare(source, folder, workers=options.workers, **plan)
        seconds = time.perf_counter() - began
        if options.verify:
            store.verify()
    except (ValueError, OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; the same command continues after the last finished shard", file=sys.stderr)
        return 130
    print(summary(store))
    if is_new:
        print(f"{'speed':12} {speed(store.train.num_tokens + store.val.num_tokens, seconds)}")
    return 0


def speed(num_tokens: int, seconds: float) -> str:
    """How fast a store was made: by the clock, and by the CPU time of what made it."""
    text = f"{num_tokens / max(seconds, 1e-9):,.0f} tokens/s"
    used = {}
    for name, who in (("own", resource.RUSAGE_SELF), ("workers", resource.RUSAGE_CHILDREN)):
        usage = resource.getrusage(who)
        used[name] = usage.ru_utime + usage.ru_stime
    if not used["workers"]:
        return f"{text}, {num_tokens / used['own']:,.0f} per second of CPU time, in one process"
    return (
        f"{text}; per second of CPU time {num_tokens / used['workers']:,.0f} by a tokenizing "
        f"process, {num_tokens / used['own']:,.0f} by the one that reads and writes"
    )


def summary(store: TokenStore) -> str:
    """What a store holds, one fact a line."""
    manifest = store.manifest
    split, report = manifest["split"], manifest["source"]["report"]
    gib = sum(entry["bytes"] for entry in manifest["files"].values()) / 2**30
    rows = {
        "store": store.folder,
        "source": ", ".join(f"{k} {v}" for k, v in manifest["source"].items() if k != "report"),
        "tokenizer": f"{manifest['tokenizer']['name']}, ids stored as {store.dtype.name}",
        "train": f"{store.train.num_tokens:,} tokens, {store.train.num_documents:,} documents",
        "val": f"{store.val.num_tokens:,} tokens, {store.val.num_documents:,} documents",
        "held out": f"fraction {split['val_fraction']:.6g} of documents, seed {split['seed']}",
        "skipped": f"{report['empty_documents']:,} empty documents, "
        f"{report['malformed_lines']:,} malformed lines",
        "replaced": f"{report['replaced_characters']:,} invalid characters",
        "size": f"{gib:.3f} GiB in {len(manifest['files'])} files",
        "fingerprint": store.fingerprint,
    }
    return "\n".join(f"{name:12} {value}" for name, value in rows.items())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.prepare_data",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--source",
        required=True,
        help='"embedded", a file or folder of .txt, .jsonl(.gz, .xz, .zst), .parquet, or '
        "hf:OWNER/NAME such as hf:Skylion007/openwebtext; stream:OWNER/NAME keeps its text off the "
        "disk",
    )
    parser.add_argument("--out", help="folder of the store; default: a cached one under --root")
    parser.add_argument("--root", default="outputs/data", help="default: %(default)s")
    parser.add_argument("--tokenizer", default="gpt2", choices=TOKENIZER_NAMES)
    parser.add_argument("--text-field", default="text", help="field with the text: %(default)s")
    parser.add_argument("--config", help="configuration of a Hugging Face data set")
    parser.add_argument("--split", default="train", help="split of it, default: %(default)s")
    parser.add_argument("--revision", help="branch, tag or commit of it")
    parser.add_argument(
        "--val-fraction",
        type=float,
        help="fraction of documents held out; default: 0.0005, more for small sources",
    )
    parser.add_argument("--split-seed", type=int, default=SPLIT_SEED, help="default: %(default)s")
    parser.add_argument("--shard-tokens", type=int, default=SHARD_TOKENS, help="%(default)s")
    parser.add_argument("--workers", type=int, help="tokenizing processes; default: one a core")
    parser.add_argument("--verify", action="store_true", help="check the hash of every file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
