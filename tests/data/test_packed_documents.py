"""data/packed_documents.py: every token once, documents apart, rows full, the order as ever."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter

from data.packed_documents import IGNORED_LABEL, PackedDocumentsData, pack_documents
from data.prepare import prepare
from data.sources import open_source
from data.tokenizer import load_tokenizer
from model.attention import sdpa_attention
from model.gpt import GPT
from model.language_task import CausalLMTask

SEQLEN = 16


@pytest.fixture(scope="module")
def store_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    generator = random.Random(0)
    for i in range(60):
        text = " ".join(generator.choices(["alpha", "beta", "gamma"], k=generator.randint(1, 40)))
        (folder / f"{i:02}.txt").write_text(text)
    options = {"val_fraction": 0.2, "workers": 0, "progress": False}
    prepare(open_source(str(folder)), folder / "store", tokenizer=load_tokenizer(), **options)
    return str(folder / "store")


def make(store_folder, rank=0, world_size=1, global_step=0, batch=8, **options):
    data = PackedDocumentsData(
        source=store_folder, seqlen=SEQLEN, batch_tokens=batch * SEQLEN, **options
    )
    data.trainer = SimpleNamespace(
        global_rank=rank,
        world_size=world_size,
        global_step=global_step,
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
    )
    data.setup("fit")
    return data


def take(loader, count):
    iterator = iter(loader)
    return [next(iterator) for _ in range(count)]


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=40),
    st.integers(1, 20),
    st.integers(1, 5),
)
@settings(max_examples=100, deadline=None)
def test_each_input_of_each_document_comes_once(lengths, seqlen, max_documents):
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    rows = pack_documents(offsets, seqlen, max_documents)
    covered = [
        place
        for start, length in zip(rows.starts, rows.lengths, strict=True)
        for place in range(start, start + length)
    ]
    expected = [p for a, b in zip(offsets, offsets[1:], strict=False) for p in range(a, b - 1)]
    assert sorted(covered) == expected
    held = np.diff(rows.first)
    assert held.max(initial=0) <= max_documents and held.min(initial=1) >= 1
    sums = np.add.reduceat(rows.lengths, rows.first[:-1]) if rows.num_rows else np.zeros(0)
    assert sums.max(initial=0) <= seqlen


def test_best_fit_takes_the_row_with_the_least_room():
    """Inputs 9, 6, 5, 4, 3, 3 in rows of 10: 9 | 6 4 | 5 3 | 3, where first-fit has 5 3 too; and
    then 2, which fits the row of 5 3 and that of 3, goes to the fuller."""
    inputs = [3, 9, 4, 6, 3, 5, 2]
    rows = pack_documents(np.concatenate([[0], np.cumsum(np.array(inputs) + 1)]), 10, 9)
    split = np.split(rows.lengths, rows.first[1:-1])
    assert [r.tolist() for r in split] == [[9], [6, 4], [5, 3, 2], [3]]


def test_a_batch_holds_whole_documents_and_their_ends(store_folder):
    data = make(store_folder, max_documents=5)
    assert "packed " in data.report() and "% of the tokens are padding" in data.report()
    split = data.store.train
    offsets = split.document_offsets().tolist()
    documents = [
        " ".join(map(str, split.read(a, b - a))) for a, b in zip(offsets, offsets[1:], strict=False)
    ]
    for batch in take(data.train_dataloader(), 4):
        assert batch["cu_seqlens"].shape == (8, 7) and batch["cu_seqlens"].dtype == torch.int32
        for ids, labels, cu in zip(*(batch[name].numpy() for name in batch), strict=True):
            assert cu[0] == 0 and cu[-1] == SEQLEN and (np.diff(cu) >= 0).all()
            for begin, end in zip(cu, cu[1:], strict=False):
                if begin == end or labels[begin] == IGNORED_LABEL:
                    assert (labels[begin:end] == IGNORED_LABEL).all()
                    continue
                text = [*ids[begin:end], labels[end - 1]]
                assert (labels[begin : end - 1] == ids[begin + 1 : end]).all()
                text = " ".join(map(str, text))
                assert any(text in document for document in documents)
                assert labels[end - 1] == data.store.eot or end - begin == SEQLEN


def test_processes_workers_and_resumes_keep_the_order(store_folder):
    whole = take(make(store_folder).train_dataloader(), 5)
    shares = [take(make(store_folder, r, 2).train_dataloader(), 5) for r in range(2)]
    workers = take(make(store_folder, num_workers=2).train_dataloader(), 5)
    data = make(store_folder, global_step=2)
    state = data.state_dict()
    later = make(store_folder, global_step=2)
    later.load_state_dict(state)
    resumed = take(later.train_dataloader(), 3)
    for step, batch in enumerate(whole):
        for name in batch:
            assert torch.equal(torch.cat([s[step][name] for s in shares]), batch[name])
            assert torch.equal(workers[step][name], batch[name])
            if step >= 2:
                assert torch.equal(resumed[step - 2][name], batch[name])
    other = make(store_folder, max_documents=3)
    other.load_state_dict(state)
    with pytest.raises(ValueError, match="must be continued on the data"):
        other.train_dataloader()


@pytest.mark.parametrize("world_size", [1, 3])
def test_each_held_out_label_comes_once(store_folder, world_size):
    labels = []
    for rank in range(world_size):
        for batch in make(store_folder, rank, world_size, 0, 9).val_dataloader():
            labels += batch["labels"][batch["labels"] != IGNORED_LABEL].tolist()
    split = make(store_folder).store.val
    offsets = split.document_offsets()
    expected = [split.read(a + 1, b - a - 1) for a, b in zip(offsets, offsets[1:], strict=False)]
    assert sorted(labels) == sorted(np.concatenate(expected).tolist())


def test_held_out_rows_can_be_limited(store_folder):
    batches = list(make(store_folder, val_tokens_limit=3 * SEQLEN).val_dataloader())
    assert sum(int((b["labels"] != IGNORED_LABEL).any(1).sum()) for b in batches) == 3


@pytest.mark.parametrize("micro", [1, 4])
def test_loss_and_gradient_are_those_of_each_document_alone(store_folder, micro):
    data = make(store_folder, batch=4)
    (batch,) = take(data.train_dataloader(), 1)
    torch.manual_seed(0)
    sizes = {"vocab_size": 50257, "max_seqlen": SEQLEN, "depth": 2, "dim": 8, "nheads": 2}
    model = GPT(**sizes, attention=sdpa_attention).eval()
    task = CausalLMTask(model, lambda model: None, max_steps=1)
    for start in range(0, 4, micro):
        task.sums(task.piece(batch, slice(start, start + micro)))["loss"].backward()
    packed = [param.grad.clone() for param in model.parameters()]
    model.zero_grad()
    for row in range(4):
        cu = batch["cu_seqlens"][row].tolist()
        for begin, end in zip(cu, cu[1:], strict=False):
            if begin < end:
                alone = {n: batch[n][row : row + 1, begin:end] for n in ("input_ids", "labels")}
                task.sums(alone)["loss"].backward()
    for grad, param in zip(packed, model.parameters(), strict=True):
        torch.testing.assert_close(grad, param.grad, rtol=1e-4, atol=1e-5)
    work = task.work(batch)
    assert work["tokens"] == (batch["labels"] != IGNORED_LABEL).sum() and work["samples"] == 4
    assert work["pairs"] <= 4 * SEQLEN**2


def test_nothing_is_compiled_anew_whatever_a_row_holds(store_folder):
    sizes = {"vocab_size": 50257, "max_seqlen": SEQLEN, "depth": 1, "dim": 8, "nheads": 2}
    task = CausalLMTask(GPT(**sizes, attention=sdpa_attention), lambda model: None, max_steps=1)
    counter = CompileCounter()
    task._hidden = torch.compile(task.model.hidden, backend=counter, dynamic=False)
    for batch in take(make(store_folder, batch=2).train_dataloader(), 4):
        task.sums(task.piece(batch, slice(0, 2)))
    assert counter.frame_count == 1


def test_wrong_options_are_refused(store_folder):
    with pytest.raises(ValueError, match="max_documents must be at least 1, got 0"):
        make(store_folder, max_documents=0)
