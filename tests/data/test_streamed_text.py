"""Training on a stream: its order, its position and its room on the disk."""

import hashlib
import itertools
import json
import os
import random
import shutil
import threading

import numpy as np
import pytest
import torch

from data import shard_maker
from data.order import sample_ids
from data.sources import open_source
from data.streamed_text import StreamedTextData
from data.token_stream import Mark, StreamPlan, make_shards
from data.tokenizer import load_tokenizer
from tests.loading import opened, placed

SEQLEN, BATCH, SHARD = 8, 4, 40  # SHARD windows a shard
VAL_FRACTION, SPLIT_SEED = 0.2, 2357


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """About 1,000 tokens in three files, of which one is empty: some three shards an epoch."""
    folder = tmp_path_factory.mktemp("source")
    draw = random.Random(0)
    words = ["alpha", "beta", "gamma", "delta", "naïve", "42"]
    for name, number in (("a", 12), ("b", 0), ("c", 25)):
        texts = [" ".join(draw.choices(words, k=draw.randint(5, 50))) for _ in range(number)]
        rows = [json.dumps({"text": text}) for text in [*texts, " "]]
        (folder / f"{name}.jsonl").write_text("\n".join(rows))
    return folder


@pytest.fixture(scope="module")
def stream(source):
    """The first tokens of the stream, and the held-out ones before the end of shard 0."""
    tokenizer, train, val = load_tokenizer(), [], []
    for path in sorted(source.iterdir()):
        for line in path.read_text().splitlines():
            if (text := json.loads(line)["text"]).strip():
                digest = hashlib.blake2b(text.encode(), digest_size=8, key=b"split 2357").digest()
                is_val = int.from_bytes(digest, "little") < VAL_FRACTION * 2**64
                ids = [*tokenizer.encode(text), tokenizer.eot]
                if not is_val:
                    train += ids
                elif len(train) <= SHARD * SEQLEN:
                    val += ids
    assert 2 * SHARD * SEQLEN < len(train) < 4 * SHARD * SEQLEN and val
    return np.array(train * 9), val


def make(source, root, rank=0, world_size=1, global_step=0, **options):
    sizes = {"seqlen": SEQLEN, "batch_tokens": BATCH * SEQLEN, "stream_tokens": 3 * SHARD * SEQLEN}
    split = {"val_fraction": VAL_FRACTION, "split_seed": SPLIT_SEED, "root": str(root)}
    options = {**sizes, **split, "prepare_workers": 0, **options}
    data = StreamedTextData(source=str(source), **options)
    return opened(data, rank, world_size, global_step)


def steps(processes, begin, end):
    """Batches of a run's processes for steps [begin, end): all of them in turn, as in training."""
    loaders = [iter(data.train_dataloader()) for data in processes]
    batches = []
    for step in range(begin, end):
        shares = []
        for data, loader in zip(processes, loaders, strict=True):
            data.trainer.global_step = step
            shares.append(data.on_before_batch_transfer(next(loader), 0))
        batches.append({key: torch.cat([share[key] for share in shares]) for key in shares[0]})
        on_disk = list(data._folder.glob("shard-*.bin")) + list(data._folder.glob("shard-*.tmp"))
        assert len([path for path in on_disk if "offsets" not in path.name]) <= 3
    for data in processes:
        data.trainer.global_step = end
    return batches


def expected(stream, begin, end):
    """(BATCH, SEQLEN + 1) of each step: a permutation of every shard, one shard after another."""
    tokens, rows = stream[0], []
    for position in range(begin * BATCH, end * BATCH):
        shard = position // SHARD
        (i,) = sample_ids(position, 1, seed=1111, num_samples=SHARD).tolist()
        start = (shard * SHARD + i) * SEQLEN
        rows.append(tokens[start : start + SEQLEN + 1])
    return np.array(rows).reshape(-1, BATCH, SEQLEN + 1)


def assert_steps(batches, rows):
    assert len(batches) == len(rows)
    for batch, wanted in zip(batches, rows, strict=True):
        assert batch["input_ids"].dtype == torch.int64
        assert batch["input_ids"].tolist() == wanted[:, :-1].tolist()
        assert batch["labels"].tolist() == wanted[:, 1:].tolist()


@pytest.mark.parametrize("world_size, num_workers", [(1, 0), (2, 2), (4, 0)])
def test_the_order_is_that_of_the_shards_on_any_processes(
    source, stream, tmp_path, world_size, num_workers
):
    """60 steps: six shards, twice over the end of the source."""
    options = {"world_size": world_size, "num_workers": num_workers}
    processes = [make(source, tmp_path, rank=rank, **options) for rank in range(world_size)]
    assert_steps(steps(processes, 0, 60), expected(stream, 0, 60))
    ids = np.concatenate([processes[0].sample_ids(step) for step in range(60)])
    assert sorted(ids) == list(range(6 * SHARD))
    assert ids[BATCH * 10] // SHARD == 1 and processes[0].num_samples == SHARD
    for data in processes:
        data.teardown("fit")


def test_held_out_documents_are_never_trained_on(source, stream, tmp_path):
    data = make(source, tmp_path)
    assert data.store.val.read(0, data.num_val_tokens).tolist() == stream[1]
    labels = torch.cat([batch["labels"].flatten() for batch in data.val_dataloader()])
    assert labels[labels != -100].tolist() == stream[1]
    counts = np.bincount(stream[0][: SHARD * SEQLEN + 1], minlength=data.vocab_size)
    assert data.store.train_counts().tolist() == counts.tolist() and data.unigram_perplexity() > 1
    assert not len(make(source, tmp_path / "none", val_fraction=0.0).val_dataloader())


def test_held_out_documents_come_once_where_a_shard_is_longer_than_the_source(source, tmp_path):
    data = make(source, tmp_path, stream_tokens=3 * 400 * SEQLEN)
    documents, last = [], []
    for token in data.store.val.read(0, data.num_val_tokens).tolist():
        last.append(token)
        if token == data.tokenizer.eot:
            documents.append(tuple(last))
            last = []
    assert len(documents) == len(set(documents)) == data.store.val.num_documents > 3


@pytest.mark.parametrize(
    "step, place",
    [(0, "same"), (3, "same"), (9, "other"), (10, "same"), (23, "other"), (30, "other")],
)
def test_a_run_goes_on_at_any_step_on_any_machine(
    source, stream, tmp_path, monkeypatch, step, place
):
    """In a shard, at its edge, over the end of the source; what was made is there, or is not."""
    monkeypatch.setattr(shard_maker, "_PATIENCE_S", 20.0)
    first = make(source, tmp_path / "same")
    steps([first], 0, step)
    if not step:
        first.train_dataloader()
    state = json.loads(json.dumps(first.state_dict()))
    assert state["position"] == step * BATCH and state["mark"][0] == step * BATCH // SHARD
    first.teardown("fit")
    second = make(source, tmp_path / place)
    second.load_state_dict(state)
    second.trainer.global_step = step
    assert_steps(steps([second], step, step + 12), expected(stream, step, step + 12))
    second.teardown("fit")


def plan_of(source, **options):
    size = SHARD * SEQLEN
    return StreamPlan(open_source(str(source)), "gpt2", size, VAL_FRACTION, SPLIT_SEED, **options)


def make_some(plan, folder, first, number):
    """Shards from `first` on, as arrays."""
    folder.mkdir(exist_ok=True)
    list(itertools.islice(make_shards(plan, folder, first), number + 1))
    return [np.fromfile(folder / f"shard-{i:08d}.bin", "<u2") for i in range(first, first + number)]


def test_every_shard_can_be_made_alone(source, stream, tmp_path):
    """By its mark, and without one: from the start of the source."""
    size = SHARD * SEQLEN
    plan = plan_of(source, workers=0)
    shards = make_some(plan, tmp_path / "all", 0, 9)
    for i, shard in enumerate(shards):
        assert shard.tolist() == stream[0][i * size : i * size + size + 1].tolist()
    marks = json.loads((tmp_path / "all" / "marks.json").read_text())["places"]
    assert {Mark(*marks[str(i)]).file for i in range(9)} == {0, 2}
    for i in range(9):
        (tmp_path / "one").mkdir()
        shutil.copy(tmp_path / "all" / "marks.json", tmp_path / "one" / "marks.json")
        assert make_some(plan, tmp_path / "one", i, 1)[0].tolist() == shards[i].tolist()
        shutil.rmtree(tmp_path / "one")
    assert make_some(plan, tmp_path / "late", 7, 1)[0].tolist() == shards[7].tolist()
    parallel = plan_of(source, workers=2)
    assert make_some(parallel, tmp_path / "two", 5, 1)[0].tolist() == shards[5].tolist()


def test_what_is_damaged_is_made_again(source, tmp_path):
    plan = plan_of(source, workers=0)
    shards = make_some(plan, tmp_path / "a", 0, 3)
    path = tmp_path / "a" / "shard-00000001.bin"
    raw = bytearray(path.read_bytes())
    raw[7] ^= 1
    path.write_bytes(raw)
    (tmp_path / "a" / "shard-00000003.bin.tmp").write_bytes(b"x")
    again = make_some(plan, tmp_path / "a", 0, 3)
    assert all(np.array_equal(a, b) for a, b in zip(shards, again, strict=True))
    assert not list((tmp_path / "a").glob("*.tmp"))
    (tmp_path / "a" / "marks.json").write_bytes(b"{")
    again = make_some(plan, tmp_path / "a", 1, 2)
    assert all(np.array_equal(a, b) for a, b in zip(shards[1:], again, strict=True))


def test_a_shard_of_another_size_is_refused(source, tmp_path):
    data = make(source, tmp_path)
    (data._folder / "shard-00000000.bin").write_bytes(b"short")
    with pytest.raises(ValueError, match="shard-00000000.bin is damaged: it has 5 bytes"):
        data.train_batch()(np.arange(4), np.arange(4))


def test_one_maker_a_folder_and_its_death_is_said(source, tmp_path, monkeypatch):
    monkeypatch.setattr(shard_maker, "_PATIENCE_S", 0.2)
    monkeypatch.setattr(shard_maker, "_TAKE_OVER_S", 0.2)
    data = make(source, tmp_path)
    loader = iter(data.train_dataloader())
    next(loader)
    with pytest.raises(RuntimeError, match="another run reads the same stream in .*: give one"):
        make(source, tmp_path).train_dataloader()
    data._maker._process.kill()
    with pytest.raises(RuntimeError, match="the stream cannot go on: .* is gone, perhaps for"):
        list(itertools.islice(loader, 60))
    data.teardown("fit")


def test_the_maker_ends_though_a_fork_holds_its_input(source, tmp_path):
    """As the workers of a loader do."""
    data = make(source, tmp_path)
    data.train_dataloader()
    end, held = os.pipe()
    if not (fork := os.fork()):
        os.close(held)
        os.read(end, 1)
        os._exit(0)
    os.close(end)
    stopping = threading.Thread(target=data.teardown, args=("fit",), daemon=True)
    stopping.start()
    stopping.join(20.0)
    is_stopped = not stopping.is_alive()
    os.close(held)
    os.waitpid(fork, 0)
    assert is_stopped


def test_a_maker_that_gives_up_says_why(source, tmp_path):
    folder = tmp_path / "source"
    shutil.copytree(source, folder)
    data = make(folder, tmp_path)
    (folder / "c.jsonl").write_text('{"body": 1}')
    with pytest.raises(
        RuntimeError, match="the stream cannot go on: .* must have the field 'text'"
    ):
        steps([data], 0, 60)
    data.teardown("fit")
    assert (data._folder / "stopped.txt").exists()
    data.prepare_data()  # another start: nobody shall take it for this one's end
    assert not (data._folder / "stopped.txt").exists()


def test_options_are_checked(source, tmp_path):
    with pytest.raises(ValueError, match="at least 3 times batch_tokens=32, got 95"):
        make(source, tmp_path, stream_tokens=95)
    with pytest.raises(ValueError, match="must be held out before 320 tokens are through"):
        make(source, tmp_path, val_fraction=1e-9)
    data = placed(make(source, tmp_path))
    with pytest.raises(ValueError, match="is prepared already: use data=text"):
        make(data._folder, tmp_path)
    (tmp_path / "empty.txt").write_text(" ")
    with pytest.raises(ValueError, match="must hold text to train on, got 0 documents"):
        make(tmp_path / "empty.txt", tmp_path)
    state = data.state_dict()
    other = make(source, tmp_path, stream_tokens=6 * SHARD * SEQLEN)
    other.load_state_dict(state)
    with pytest.raises(ValueError, match="must be continued on the data that it was trained on"):
        other.train_dataloader()
