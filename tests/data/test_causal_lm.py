"""data/causal_lm.py: windows, order over processes and resumes, validation, global state."""

import contextlib
import inspect
import math
import multiprocessing
import os
import random
import signal

import lightning
import numpy as np
import pytest
import torch

from data.causal_lm import IGNORED_LABEL, CausalLMData, unigram_perplexity
from data.order import sample_ids
from data.prepare import prepare
from data.sources import open_source
from data.tokenizer import load_tokenizer
from tests.loading import opened, take

SEQLEN = 16


@pytest.fixture(scope="module")
def store_folder(tmp_path_factory):
    """About 2,000 training tokens and 300 held out."""
    folder = tmp_path_factory.mktemp("store")
    generator = random.Random(0)
    words = ["alpha", "beta", "gamma", "delta", "naïve", "42"]
    for i in range(60):
        text = " ".join(generator.choices(words, k=generator.randint(5, 50)))
        (folder / f"{i:02}.txt").write_text(text)
    options = {"val_fraction": 0.1, "shard_tokens": 500, "workers": 0, "progress": False}
    prepare(open_source(str(folder)), folder / "store", tokenizer=load_tokenizer(), **options)
    return str(folder / "store")


def make(store_folder, rank=0, world_size=1, global_step=0, **options):
    options = {"source": store_folder, "seqlen": SEQLEN, "batch_tokens": 8 * SEQLEN, **options}
    data = CausalLMData(**options)
    return opened(data, rank, world_size, global_step)


def window_ids(data, batches):
    """Which windows of the training split a list of batches holds, by comparison with the store."""
    tokens = data.store.train.read(0, data.num_train_tokens)
    ids = []
    for batch in batches:
        for inputs, labels in zip(batch["input_ids"], batch["labels"], strict=True):
            found = [
                w
                for w in range(data.num_samples)
                if (tokens[w * SEQLEN : (w + 1) * SEQLEN] == inputs.numpy()).all()
                and (tokens[w * SEQLEN + 1 : (w + 1) * SEQLEN + 1] == labels.numpy()).all()
            ]
            assert len(found) == 1, "windows of the fixture differ"
            ids.append(found[0])
    return ids


def test_batches_are_the_windows_of_the_order(store_folder):
    data = make(store_folder)
    batches = take(data.train_dataloader(), 5)
    for batch in batches:
        assert {k: (v.shape, v.dtype) for k, v in batch.items()} == {
            "input_ids": ((8, SEQLEN), torch.int64),
            "labels": ((8, SEQLEN), torch.int64),
        }
    expected = sample_ids(0, 40, seed=1111, num_samples=data.num_samples)
    assert window_ids(data, batches) == expected.tolist()
    assert data.sample_ids(3).tolist() == expected[24:32].tolist()
    assert data.num_samples == (data.num_train_tokens - 1) // SEQLEN


def test_loader_is_endless_and_visits_each_window_once_an_epoch(store_folder):
    data = make(store_folder)
    loader = data.train_dataloader()
    with pytest.raises(TypeError):
        len(loader)
    n = data.num_samples
    steps = math.ceil(2 * n / 8)
    ids = window_ids(data, take(loader, steps))
    assert sorted(ids[:n]) == sorted(ids[n : 2 * n]) == list(range(n))
    assert ids[:n] != ids[n : 2 * n]


@pytest.mark.parametrize("world_size", [2, 4])
def test_processes_share_the_same_batch(store_folder, world_size):
    whole = take(make(store_folder).train_dataloader(), 6)
    shares = [
        take(make(store_folder, rank=r, world_size=world_size).train_dataloader(), 6)
        for r in range(world_size)
    ]
    for step, batch in enumerate(whole):
        for key in ("input_ids", "labels"):
            joined = torch.cat([share[step][key] for share in shares])
            assert torch.equal(joined, batch[key])


@pytest.mark.parametrize("num_workers", [1, 2])
def test_workers_change_nothing(store_folder, num_workers):
    expected = take(make(store_folder).train_dataloader(), 7)
    got = take(make(store_folder, num_workers=num_workers).train_dataloader(), 7)
    for a, b in zip(expected, got, strict=True):
        assert torch.equal(a["input_ids"], b["input_ids"])
        assert torch.equal(a["labels"], b["labels"])


def test_workers_outlive_the_signal_that_stops_a_run(store_folder):
    """A launcher or a terminal sends it to every process."""
    before = set(multiprocessing.active_children())
    iterator = iter(make(store_folder, num_workers=1).train_dataloader())
    first = next(iterator)
    (worker,) = set(multiprocessing.active_children()) - before
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(worker.pid, number)
    assert all(not torch.equal(next(iterator)["input_ids"], first["input_ids"]) for _ in range(9))
    with contextlib.suppress(RuntimeError):  # of DataLoader, if it hears of it before join does
        os.kill(worker.pid, signal.SIGTERM)
        worker.join(10)
    worker.join(10)
    assert worker.exitcode == -signal.SIGTERM


def test_resume_continues_at_the_same_sample_with_any_batch_and_world_size(store_folder):
    data = make(store_folder)
    data.trainer.global_step = 5
    state = data.state_dict()
    assert state == {"position": 40, "global_step": 5, "fingerprint": data.fingerprint}

    other = make(store_folder, batch_tokens=4 * SEQLEN, rank=1, world_size=2)
    other.load_state_dict(state)
    # Lightning restores global_step after this state, and may ask for a loader before.
    assert other.position == 40
    early = window_ids(other, take(other.train_dataloader(), 1))
    other.trainer.global_step = 5
    order = sample_ids(40, 100, seed=1111, num_samples=data.num_samples).tolist()
    assert early == window_ids(other, take(other.train_dataloader(), 1)) == order[2:4]
    assert other.sample_ids(6).tolist() == order[4:8]
    other.trainer.global_step = 8
    assert other.state_dict()["position"] == 40 + 3 * 4
    assert window_ids(other, take(other.train_dataloader(), 1)) == order[14:16]


@pytest.mark.parametrize("change", [{"seed": 1}, {"seqlen": 8}])
def test_resuming_on_other_data_is_refused(store_folder, change):
    state = make(store_folder).state_dict()
    other = make(store_folder, **change)
    other.load_state_dict(state)
    with pytest.raises(ValueError, match="must be continued on the data that it was trained on"):
        other.train_dataloader()
    assert len(other.val_dataloader()) > 0  # evaluation elsewhere is fine


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("windows", [1, 3, 1000])
@pytest.mark.parametrize("limit", [None, 1, 16, 50])
def test_each_held_out_token_is_a_label_exactly_once(store_folder, world_size, windows, limit):
    options = {"val_batch_tokens": windows * SEQLEN, "val_tokens_limit": limit}
    options["batch_tokens"] = 12 * SEQLEN
    ranks = [
        make(store_folder, rank=r, world_size=world_size, **options) for r in range(world_size)
    ]
    batches = [list(data.val_dataloader()) for data in ranks]
    assert len({len(b) for b in batches}) == 1, "processes must take part equally often"
    assert len({batch["labels"].shape for b in batches for batch in b}) == 1
    data = ranks[0]
    expected = data.store.val.read(0, data.num_val_tokens)
    assert data.num_val_tokens == (data.store.val.num_tokens if limit is None else limit)
    # Batch i of rank r comes i-th, then r-th, in the order of the split.
    rows = [batch for step in zip(*batches, strict=True) for batch in step]
    inputs = torch.cat([batch["input_ids"].flatten() for batch in rows])
    labels = torch.cat([batch["labels"].flatten() for batch in rows])
    assert labels[labels != IGNORED_LABEL].numpy().tolist() == expected.tolist()
    assert (labels[len(expected) :] == IGNORED_LABEL).all()
    # The input before each label is the token before it; end-of-text stands before the first.
    assert inputs[: len(expected)].tolist() == [50256, *expected[:-1]]
    assert (inputs[len(expected) :] == 50256).all()


def test_unigram_perplexity_by_arithmetic(store_folder):
    # Counts 3, 1, 0 with one added: probabilities 4/7, 2/7, 1/7.
    got = unigram_perplexity(np.array([3, 1, 0]), np.array([0, 0, 1, 2]))
    assert got == pytest.approx((4 / 7 * 4 / 7 * 2 / 7 * 1 / 7) ** (-1 / 4))
    assert unigram_perplexity(np.zeros(8, np.int64), np.array([3, 5])) == pytest.approx(8)
    with pytest.raises(ValueError, match="must hold tokens"):
        unigram_perplexity(np.ones(3), np.empty(0, np.int64))

    data = make(store_folder, val_tokens_limit=20)
    train = data.store.train.read(0, data.num_train_tokens).tolist()
    probabilities = [
        (train.count(token) + 1) / (len(train) + 50257) for token in data.store.val.read(0, 20)
    ]
    expected = math.prod(probabilities) ** (-1 / 20)
    assert data.unigram_perplexity() == pytest.approx(expected)
    assert data.comparison("val").line == f"unigram model: {expected:.2f}"
    assert data.comparison("val").numbers == {"unigram_perplexity": pytest.approx(expected)}
    assert (data.num_held_out("val"), data.num_held_out("test")) == (20, 0)


def test_global_random_state_is_untouched(store_folder):
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)

    def states():
        numpy_state = np.random.get_state()
        return torch.get_rng_state().tolist(), numpy_state[1].tolist(), random.getstate()

    before = states()
    for num_workers in (0, 1):
        data = make(store_folder, num_workers=num_workers)
        take(data.train_dataloader(), 3)
        list(data.val_dataloader())
    assert states() == before


def test_constructor_is_keyword_only_and_refuses_bad_sizes(store_folder):
    kinds = {p.kind for p in inspect.signature(CausalLMData).parameters.values()}
    assert kinds == {inspect.Parameter.KEYWORD_ONLY}
    good = {"source": store_folder, "seqlen": 16, "batch_tokens": 64}
    for change, words in [
        ({"seqlen": 0}, "seqlen must be at least 1, got 0"),
        ({"batch_tokens": 100}, "multiple of seqlen=16, got 100: try 96"),
        ({"batch_tokens": 0}, "positive multiple of seqlen=16, got 0: try 16"),
        ({"tokenizer": "bert"}, "must be one of gpt2, bert-base-uncased, got 'bert'"),
        ({"val_batch_tokens": 0}, "val_batch_tokens must be at least 1"),
        ({"val_tokens_limit": 0}, "val_tokens_limit must be at least 1"),
        ({"val_fraction": 1.5}, r"val_fraction must be in \[0, 1\), got 1.5"),
        ({"num_workers": -1}, "num_workers must not be negative"),
    ]:
        with pytest.raises(ValueError, match=words):
            CausalLMData(**{**good, **change})
    with pytest.raises(FileNotFoundError, match="got '/no/such': correct the path"):
        CausalLMData(**{**good, "source": "/no/such"})


def test_setup_refuses_what_does_not_fit(store_folder, tmp_path):
    with pytest.raises(ValueError, match="8 sequences on 3: change batch_tokens"):
        make(store_folder, world_size=3)
    with pytest.raises(ValueError, match=r"seqlen \+ 1 = 50001 tokens.*smaller seqlen"):
        make(store_folder, seqlen=50000, batch_tokens=50000)
    with pytest.raises(RuntimeError, match="call prepare_data"):
        _ = CausalLMData(source=store_folder, seqlen=16, batch_tokens=16).num_train_tokens
    (tmp_path / "a.txt").write_text("word " * 100)
    data = CausalLMData(source=str(tmp_path), seqlen=4, batch_tokens=4, root=str(tmp_path / "r"))
    with pytest.raises(FileNotFoundError, match="prepare it"):
        data.setup()


def test_no_held_out_documents_means_no_validation(tmp_path):
    (tmp_path / "a.txt").write_text("word " * 100)
    options = {"source": str(tmp_path / "a.txt"), "root": str(tmp_path / "r")}
    assert make(None, val_fraction=0.0, **options).val_dataloader() == []


class Recorder(lightning.LightningModule):
    """Trains one number and keeps the inputs that it saw."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append(batch["input_ids"].clone())
        return self.weight * batch["input_ids"].float().mean()

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        # Makes Lightning ask for the train loader before it restores global_step.
        assert self.trainer.estimated_stepping_batches > 0
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(store_folder, folder, max_steps, ckpt_path=None):
    trainer = lightning.Trainer(
        max_steps=max_steps,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        val_check_interval=2,
        check_val_every_n_epoch=None,
        limit_val_batches=1,
        default_root_dir=folder,
    )
    module = Recorder()
    data = CausalLMData(source=store_folder, seqlen=SEQLEN, batch_tokens=8 * SEQLEN)
    trainer.fit(module, data, ckpt_path=ckpt_path)
    assert data.position == max_steps * 8
    return trainer, module.seen


@pytest.mark.filterwarnings("ignore")
def test_stop_and_resume_under_lightning_equals_no_stop(store_folder, tmp_path):
    # 60 steps of 8 samples cross an epoch edge of the data.
    _, whole = fit(store_folder, tmp_path, 60)
    trainer, first = fit(store_folder, tmp_path, 7)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    _, rest = fit(store_folder, tmp_path, 60, ckpt_path=tmp_path / "x.ckpt")
    assert len(first) == 7 and len(whole) == 60
    assert torch.equal(torch.cat(first + rest), torch.cat(whole))
