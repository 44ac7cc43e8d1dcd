"""data/prepare.py: the same bytes whatever the workers, the kills and the order of events."""

import errno
import hashlib
import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time

import filelock
import numpy as np
import pytest

from data import parallel_encode, store_parts, text_files
from data import prepare as prepare_module
from data.parallel_encode import encode_in_order
from data.prepare import prepare, store_folder
from data.sources import open_source
from data.token_store import ShardWriter, TokenStore
from data.tokenizer import load_tokenizer

TOKENIZER = load_tokenizer()


def make_texts(count, words=40, seed=0):
    generator = random.Random(seed)
    vocabulary = ["alpha", "beta", "naïve", "42", "東京", "don't", "x.", "\n\n"]
    return [" ".join(generator.choices(vocabulary, k=words)) + f" {i}" for i in range(count)]


def write_source(path, texts):
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    return open_source(str(path))


def run(source, folder, **options):
    options = {"tokenizer": TOKENIZER, "workers": 0, "progress": False, **options}
    return prepare(source, folder, **options)


def file_hashes(folder):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


def drawn_for_val(text, fraction, seed):
    """The split rule as the manifest states it."""
    digest = hashlib.blake2b(text.encode(), digest_size=8, key=f"split {seed}".encode()).digest()
    return int.from_bytes(digest, "little") / 2**64 < fraction


def test_tokens_documents_and_split_follow_the_rule(tmp_path):
    texts = make_texts(300)
    source = write_source(tmp_path / "a.jsonl", texts)
    store = run(source, tmp_path / "s", val_fraction=0.1, split_seed=5, shard_tokens=2000)
    for split, held_out in [(store.train, False), (store.val, True)]:
        chosen = [t for t in texts if drawn_for_val(t, 0.1, 5) == held_out]
        expected = [TOKENIZER.encode(t) + [50256] for t in chosen]
        assert split.read(0, split.num_tokens).tolist() == [i for ids in expected for i in ids]
        ends = np.cumsum([0] + [len(ids) for ids in expected])
        assert split.document_offsets().tolist() == ends.tolist()
    assert 10 < store.val.num_documents < 60
    shards = store.manifest["splits"]["train"]
    assert len(shards) > 5
    assert all(2000 <= shard["num_tokens"] < 2400 for shard in shards[:-1])
    train_ids = store.train.read(0, store.train.num_tokens)
    assert (store.train_counts() == np.bincount(train_ids, minlength=50257)).all()
    store.verify()


def test_nothing_but_the_store_remains(tmp_path):
    store = run(write_source(tmp_path / "a.jsonl", make_texts(50)), tmp_path / "s")
    assert {p.name for p in store.folder.iterdir()} == {"manifest.json", *store.manifest["files"]}


def test_duplicates_share_a_split(tmp_path):
    texts = make_texts(40) * 3
    store = run(write_source(tmp_path / "a.jsonl", texts), tmp_path / "s", val_fraction=0.3)
    assert store.val.num_documents % 3 == 0 and store.train.num_documents % 3 == 0
    assert store.val.num_documents > 0


def test_workers_and_batches_do_not_change_a_byte(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "PIECE_CHARS", 3000)
    texts = make_texts(200) + ["word1 " * 4000] + make_texts(50, seed=1)
    source = write_source(tmp_path / "a.jsonl", texts)
    options = {"val_fraction": 0.1, "shard_tokens": 3000}
    run(source, tmp_path / "one", **options)
    monkeypatch.setattr(parallel_encode, "_BATCH_CHARS", 5000)
    run(source, tmp_path / "small_batches", **options)
    run(source, tmp_path / "two", workers=2, **options)
    expected = file_hashes(tmp_path / "one")
    assert file_hashes(tmp_path / "small_batches") == expected
    assert file_hashes(tmp_path / "two") == expected


def test_pieces_in_flight_are_bounded(monkeypatch):
    monkeypatch.setattr(parallel_encode, "_BATCH_CHARS", 10)
    taken = 0

    def pieces():
        nonlocal taken
        for _ in range(1000):
            taken += 1
            yield "0123456789", True

    batches = encode_in_order(pieces(), tokenizer=TOKENIZER, seed=0, workers=2)
    next(batches)
    assert taken <= 2 * 2 + 2
    batches.close()


def test_finished_store_is_opened_not_redone(tmp_path):
    source = write_source(tmp_path / "a.jsonl", make_texts(30))
    run(source, tmp_path / "s")
    before = (tmp_path / "s" / "train-00000.bin").stat().st_mtime_ns
    run(source, tmp_path / "s")
    assert (tmp_path / "s" / "train-00000.bin").stat().st_mtime_ns == before
    with pytest.raises(ValueError, match="got a store of other settings"):
        run(source, tmp_path / "s", split_seed=1)


def test_folder_of_other_things_is_refused(tmp_path):
    source = write_source(tmp_path / "a.jsonl", make_texts(3))
    with pytest.raises(ValueError, match="got files such as 'a.jsonl': choose another folder"):
        run(source, tmp_path)
    assert (tmp_path / "a.jsonl").exists()


def test_key_covers_what_determines_the_content(tmp_path):
    source = write_source(tmp_path / "a.jsonl", make_texts(3))
    base = store_folder(tmp_path, source, tokenizer=TOKENIZER)
    assert base == store_folder(tmp_path, source, tokenizer=TOKENIZER)
    assert base.name.startswith("a.jsonl-gpt2-")
    for change in ({"val_fraction": 0.1}, {"split_seed": 1}, {"shard_tokens": 10}):
        assert store_folder(tmp_path, source, tokenizer=TOKENIZER, **change) != base
    other = open_source(str(tmp_path / "a.jsonl"), text_field="body")
    assert store_folder(tmp_path, other, tokenizer=TOKENIZER) != base


@pytest.mark.parametrize(
    "num_bytes,fraction",
    # 0.0005 is the paper's; below 4 GB the 500,000 tokens rule, at 4 bytes a token; at most 5 %.
    [(40e9, 0.0005), (200e6, 0.01), (12e6, 0.05), (0, 0.0005), (None, 0.0005)],
)
def test_default_fraction(num_bytes, fraction):
    assert prepare_module._default_val_fraction(num_bytes) == pytest.approx(fraction)


def test_single_document_gives_up_its_end(tmp_path):
    (tmp_path / "a.txt").write_text("word " * 1000)
    store = run(open_source(str(tmp_path / "a.txt")), tmp_path / "s")
    ids = TOKENIZER.encode("word " * 1000) + [50256]
    assert store.val.num_tokens == round(0.05 * len(ids))
    both = [*store.train.read(0, store.train.num_tokens), *store.val.read(0, store.val.num_tokens)]
    assert both == ids
    assert store.train.document_offsets().tolist() == [0, store.train.num_tokens]
    assert store.val.document_offsets().tolist() == [0, store.val.num_tokens]
    store.verify()


def test_tail_keeps_document_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(parallel_encode, "_draw", lambda text, seed: 2**64 - 1)
    source = write_source(tmp_path / "a.jsonl", ["a", "b", "c", "d", "e"])  # 2 tokens each
    store = run(source, tmp_path / "s", val_fraction=0.5)
    assert store.train.document_offsets().tolist() == [0, 2, 4, 5]
    assert store.val.document_offsets().tolist() == [0, 1, 3, 5]


def test_zero_fraction_holds_out_nothing(tmp_path):
    store = run(write_source(tmp_path / "a.jsonl", make_texts(5)), tmp_path / "s", val_fraction=0)
    assert (store.val.num_tokens, store.train.num_documents) == (0, 5)


def test_bad_sources_and_arguments(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n{\n')
    source = open_source(str(tmp_path / "a.jsonl"))
    with pytest.raises(ValueError, match=r"got none \(1 empty documents, 1 malformed lines\)"):
        run(source, tmp_path / "s")
    assert not list((tmp_path / "s").iterdir())
    source = write_source(tmp_path / "a.jsonl", ["a"])
    for options, words in [
        ({"val_fraction": 1.0}, r"in \[0, 1\), got 1.0"),
        ({"shard_tokens": 0}, "at least 1"),
        ({"workers": -1}, "not be negative"),
    ]:
        with pytest.raises(ValueError, match=words):
            run(source, tmp_path / "s", **options)


def test_all_held_out_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(parallel_encode, "_draw", lambda text, seed: 0)
    with pytest.raises(ValueError, match="held out all 3: lower it"):
        run(write_source(tmp_path / "a.jsonl", ["a", "b", "c"]), tmp_path / "s", val_fraction=0.9)


def test_bad_input_is_reported(tmp_path, caplog):
    (tmp_path / "a.jsonl").write_bytes(
        b'{"text": "a b c d"}\n{\n{"text": "\xff e"}\n{"text": ""}\n'
    )
    with caplog.at_level(logging.WARNING):
        store = run(open_source(str(tmp_path / "a.jsonl")), tmp_path / "s")
    for words in ("1 invalid characters", "1 malformed lines", "1 empty", "a.jsonl, line 2"):
        assert words in caplog.text
    assert store.manifest["source"]["report"]["malformed_lines"] == 1


def test_full_disk_is_clear_and_continues(tmp_path, monkeypatch):
    source = write_source(tmp_path / "a.jsonl", make_texts(200))
    options = {"val_fraction": 0.1, "shard_tokens": 2000}
    run(source, tmp_path / "undisturbed", **options)
    append = ShardWriter.append

    def append_until_full(self, ids):
        if self._stem == "train-00003":
            raise OSError(errno.ENOSPC, "No space left on device")
        append(self, ids)

    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "append", append_until_full)
        with pytest.raises(OSError, match="the disk is full while preparing .*same command"):
            run(source, tmp_path / "s", **options)
    with pytest.raises(FileNotFoundError, match="not finished"):
        TokenStore(tmp_path / "s")
    assert not list((tmp_path / "s").glob("*.tmp"))
    run(source, tmp_path / "s", **options)
    assert file_hashes(tmp_path / "s") == file_hashes(tmp_path / "undisturbed")


def test_too_small_a_disk_is_refused_before_work(tmp_path, monkeypatch):
    source = write_source(tmp_path / "a.jsonl", make_texts(200))
    usage = type("Usage", (), {"free": 1000})()
    monkeypatch.setattr(prepare_module.shutil, "disk_usage", lambda folder: usage)
    monkeypatch.setattr(source, "pieces", lambda: pytest.fail("work began"))
    with pytest.raises(OSError, match="takes about 0.00 GiB of disk, got 0.00 GiB free"):
        run(source, tmp_path / "s")


def test_damaged_part_is_redone(tmp_path, monkeypatch):
    source = write_source(tmp_path / "a.jsonl", make_texts(200))
    options = {"val_fraction": 0.1, "shard_tokens": 2000}
    run(source, tmp_path / "undisturbed", **options)
    with monkeypatch.context() as patch:
        patch.setattr(prepare_module, "finish_splits", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(source, tmp_path / "s", **options)
    shard = tmp_path / "s" / "train-00002.bin"
    shard.write_bytes(shard.read_bytes()[:-2])
    run(source, tmp_path / "s", **options)
    assert file_hashes(tmp_path / "s") == file_hashes(tmp_path / "undisturbed")


KILLED = """
import sys
from data.prepare import prepare
from data.sources import open_source
from data.tokenizer import load_tokenizer
if __name__ == "__main__":
    prepare(open_source(sys.argv[1]), sys.argv[2], tokenizer=load_tokenizer(), val_fraction=0.05,
            shard_tokens=5000, workers=int(sys.argv[3]), progress=False)
"""


@pytest.mark.parametrize("workers", [0, 2])
def test_killed_run_continues_to_the_same_bytes(tmp_path, workers):
    source = write_source(tmp_path / "a.jsonl", make_texts(2000, words=60))
    options = {"val_fraction": 0.05, "shard_tokens": 5000}
    run(source, tmp_path / "undisturbed", **options)
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    command = [sys.executable, str(script), str(tmp_path / "a.jsonl"), str(tmp_path / "s")]
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    process = subprocess.Popen([*command, str(workers)], env=environment)
    progress = tmp_path / "s" / "progress.json"
    deadline = time.monotonic() + 60
    while not (progress.exists() and len(json.loads(progress.read_bytes())["parts"]) >= 3):
        assert process.poll() is None and time.monotonic() < deadline, "it ended before the kill"
        time.sleep(0.002)
    children = _children(process.pid)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "s" / "manifest.json").exists()
    kept = len(json.loads(progress.read_bytes())["parts"])
    kept_time = (tmp_path / "s" / "train-00001.bin").stat().st_mtime_ns
    run(source, tmp_path / "s", **options)
    assert kept >= 3
    assert (tmp_path / "s" / "train-00001.bin").stat().st_mtime_ns == kept_time
    assert file_hashes(tmp_path / "s") == file_hashes(tmp_path / "undisturbed")
    while any(os.path.exists(f"/proc/{pid}") for pid in children):
        assert time.monotonic() < deadline, "a worker outlives its killed parent"
        time.sleep(0.01)


def _children(pid):
    path = f"/proc/{pid}/task/{pid}/children"
    return open(path).read().split() if os.path.exists(path) else []


def test_second_process_waits_for_the_first(tmp_path, caplog):
    source = write_source(tmp_path / "a.jsonl", make_texts(20))
    lock = filelock.FileLock(tmp_path / ".s.lock")
    lock.acquire()
    done = []
    thread = threading.Thread(target=lambda: done.append(run(source, tmp_path / "s")))
    with caplog.at_level(logging.WARNING):
        thread.start()
        thread.join(0.3)
        assert not done and not (tmp_path / "s").exists()
        assert "another process is preparing" in caplog.text
        lock.release()
        thread.join(20)
    assert done[0].train.num_documents + done[0].val.num_documents >= 20


def test_dead_worker_is_a_clear_error(monkeypatch):
    monkeypatch.setattr(parallel_encode, "_BATCH_CHARS", 10)
    pieces = (("0123456789", True) for _ in range(1000))
    before = set(_children(os.getpid()))
    batches = encode_in_order(pieces, tokenizer=TOKENIZER, seed=0, workers=2)
    next(batches)
    worker, _ = set(_children(os.getpid())) - before
    os.kill(int(worker), signal.SIGKILL)
    with pytest.raises(RuntimeError, match="run again with fewer workers"):
        list(batches)
    assert set(_children(os.getpid())) == before


def test_error_in_a_worker_reaches_the_caller():
    # A list is no text: the tokenizer refuses it.
    batches = encode_in_order([([], True)], tokenizer=TOKENIZER, seed=0, workers=2)
    with pytest.raises(TypeError):
        list(batches)


def test_interrupt_leaves_a_folder_to_continue(tmp_path, monkeypatch):
    source = write_source(tmp_path / "a.jsonl", make_texts(200))
    options = {"val_fraction": 0.1, "shard_tokens": 2000}
    run(source, tmp_path / "undisturbed", **options)
    commit = store_parts.StoreParts.commit

    def interrupted(self):
        commit(self)
        if len(self.committed) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(store_parts.StoreParts, "commit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(source, tmp_path / "s", **options)
    assert not list((tmp_path / "s").glob("*.tmp"))
    run(source, tmp_path / "s", **options)
    assert file_hashes(tmp_path / "s") == file_hashes(tmp_path / "undisturbed")


PEAK = """
import re, sys
from data.prepare import prepare
from data.sources import open_source
from data.tokenizer import load_tokenizer
source, folder = open_source(sys.argv[1]), sys.argv[2]
options = {"workers": 0, "shard_tokens": 500_000, "progress": False}
prepare(source, folder, tokenizer=load_tokenizer(), **options)
print(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])
"""


@pytest.mark.long
def test_memory_is_that_of_a_shard_whatever_the_size_of_the_source(tmp_path):
    peaks = []
    for number in (2_000, 20_000):
        path, song = (
            tmp_path / f"{number}.jsonl",
            "sails to the whale, and the sailor sings of it. ",
        )
        write_source(path, (f"Ship {i} {song * 50}" for i in range(number)))
        command = [sys.executable, "-c", PEAK, str(path), str(tmp_path / f"s{number}")]
        out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        peaks.append(int(out))
    assert path.stat().st_size > 40 << 20
    assert peaks[1] - peaks[0] < 10_000, "KiB"
