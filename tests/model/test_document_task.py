"""model/document_task.py: F1 by hand, split of the batch, resume, weights to start from."""

import functools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning import LightningDataModule
from torch import nn
from torch.utils.data import DataLoader

from model.bert import BERT
from model.bert_files import export_bert
from model.checkpoint import newest_intact
from model.document_classifier import DocumentClassifier
from model.document_task import DocumentTask, f1_scores
from model.optim import adamw
from model.saving import Checkpoints
from tests.training import make_trainer, weights

BATCH, CLASSES, SEQLEN = 4, 3, 10
SIZES = {"vocab_size": 40, "depth": 1, "dim": 16, "nheads": 2}


def batch(step, multi_label=True):
    rng = np.random.default_rng(step)
    lengths = rng.integers(2, SEQLEN + 1, BATCH)
    shape = (BATCH, CLASSES) if multi_label else (BATCH,)
    return {
        "input_ids": torch.from_numpy(rng.integers(0, 40, lengths.sum())),
        "cu_seqlens": torch.from_numpy(np.append(0, lengths.cumsum())).int(),
        "max_seqlen": SEQLEN,
        "labels": torch.from_numpy(rng.integers(0, 2 if multi_label else CLASSES, shape)),
    }


class Documents(LightningDataModule):
    def __init__(self, multi_label=True):
        super().__init__()
        self.multi_label = multi_label

    def train_dataloader(self):
        first = self.trainer.global_step
        steps = [batch(s, self.multi_label) for s in range(first, 40)]
        return DataLoader(steps, batch_size=None)

    def val_dataloader(self):
        batches = [batch(1000 + i, self.multi_label) for i in range(3)]
        batches[-1]["labels"][2:] = -100  # what fills a batch
        return DataLoader(batches, batch_size=None)

    test_dataloader = val_dataloader


def make_model(multi_label=True, max_seqlen=SEQLEN, **changes):
    torch.manual_seed(0)
    options = {"num_classes": CLASSES, "multi_label": multi_label, "max_seqlen": max_seqlen}
    options |= {"resid_dropout": 0.0, "attn_dropout": 0.0}
    model = DocumentClassifier(**{**SIZES, **options, **changes})
    nn.init.normal_(model.head.bias, std=0.3)  # some labels are predicted
    return model


def make_task(multi_label=True, optimizer=adamw, lr=1e-2, **options):
    options = {"max_steps": 4, **options}
    return DocumentTask(make_model(multi_label), functools.partial(optimizer, lr=lr), **options)


def fit(task, folder, ckpt_path=None, stop=None):
    trainer = make_trainer(
        stop or task.max_steps, [Checkpoints(folder=str(folder), every_n_steps=1, keep_last=99)]
    )
    data = Documents(task.model.multi_label)
    trainer.fit(task, data, ckpt_path=ckpt_path, weights_only=True)
    return trainer, data


def test_f1_by_hand():
    """Label 0: 3 hits of 4 predicted and 5 there, 6 / 9; label 1: 1 of 1 and 3, 2 / 4; label 2:
    predicted twice in vain, 0; label 3: nowhere, 0. All: 4 hits, 7 and 8: 8 / 15."""
    counts = torch.tensor([[3.0, 1, 0, 0], [4, 1, 2, 0], [5, 3, 0, 0]])
    micro, macro = f1_scores(*counts)
    assert float(micro) == pytest.approx(8 / 15)
    assert float(macro) == pytest.approx((6 / 9 + 2 / 4) / 4)
    assert [float(f1) for f1 in f1_scores(*torch.zeros(3, 4))] == [0.0, 0.0]


@pytest.mark.parametrize("multi_label", [True, False])
def test_held_out_means_count_each_document_once(tmp_path, multi_label):
    task = make_task(multi_label, max_steps=2)
    trainer, data = fit(task, tmp_path)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    trainer.test(task, data, verbose=False)
    losses, hits, predicted, actual = [], *np.zeros((3, CLASSES))
    for entries in data.val_dataloader():
        starts = entries["cu_seqlens"].tolist()
        for row in range(BATCH):
            label = entries["labels"][row]
            if (label == -100).any():
                continue
            piece = task.piece({**entries, "starts": starts}, slice(row, row + 1))
            with torch.no_grad():
                logits = task.model.eval()(piece["input_ids"], piece["packing"])[0].double()
            if multi_label:
                p = torch.sigmoid(logits)
                losses += [-float(p[i].log() if label[i] else (1 - p[i]).log()) for i in range(3)]
                guess, truth = (p > 0.5).numpy(), label.numpy() == 1
            else:
                losses.append(-float(logits.log_softmax(0)[label]))
                guess, truth = np.arange(3) == int(logits.argmax()), np.arange(3) == int(label)
            hits += guess & truth
            predicted += guess
            actual += truth
    assert len(losses) == (3 * BATCH - 2) * (CLASSES if multi_label else 1)
    both = predicted + actual
    expected = {
        "loss": np.mean(losses),
        "micro_f1": 2 * hits.sum() / both.sum(),
        "macro_f1": np.mean([2 * h / b if b else 0.0 for h, b in zip(hits, both, strict=True)]),
    }
    assert 0.0 < expected["micro_f1"] < 1.0
    for name, value in expected.items():
        assert metrics[f"val/{name}"] == pytest.approx(value, rel=1e-4)
        assert float(trainer.callback_metrics[f"test/{name}"]) == metrics[f"val/{name}"]
    if not multi_label:
        assert expected["micro_f1"] == hits.sum() / (3 * BATCH - 2), "it is the accuracy"


SGD = {"optimizer": lambda model, lr: torch.optim.SGD(model.parameters(), lr), "lr": 0.1}


def test_counts_a_label_are_summed_over_ranks(monkeypatch):
    task = make_task()
    task.trainer = SimpleNamespace(world_size=2)
    reduced = []
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda t: reduced.append(t.mul_(2)))
    values = {"a": torch.tensor(1.0), "b": torch.tensor([2.0, 3.0]), "c": torch.tensor(4)}
    summed = task._summed(values)
    assert [summed[name].tolist() for name in "abc"] == [2.0, [4.0, 6.0], 8]
    assert len(reduced) == 2, "one reduction a type"


@pytest.mark.parametrize("micro", [1, 2])
def test_update_does_not_depend_on_the_split_of_the_batch(tmp_path, micro):
    whole, split = make_task(**SGD), make_task(**SGD, micro_batch_tokens=micro * SEQLEN + 1)
    assert split.micro_batch(BATCH, SEQLEN) == micro and whole.micro_batch(BATCH, SEQLEN) == BATCH
    for task, name in ((whole, "whole"), (split, "split")):
        fit(task, tmp_path / name)
    for name, value in weights(whole).items():
        torch.testing.assert_close(weights(split)[name], value, rtol=1e-4, atol=1e-6)


def test_stop_and_resume_equals_no_stop_bitwise(tmp_path):
    straight, first, second = (make_task() for _ in range(3))
    fit(straight, tmp_path / "straight")
    fit(first, tmp_path / "cut", stop=3)
    second.model.encoder.reset_parameters()
    fit(second, tmp_path / "cut", ckpt_path=newest_intact(tmp_path / "cut"))
    for name, value in weights(straight).items():
        assert torch.equal(weights(second)[name], value), name


def test_work_counts_real_tokens():
    entries = {
        "cu_seqlens": torch.tensor([0, 3, 5], dtype=torch.int32),
        "labels": torch.zeros(2, 3, dtype=torch.int64),
    }
    work = {name: int(value) for name, value in make_task().work(entries).items()}
    assert work == {"tokens": 5, "samples": 2, "pairs": 9 + 4}
    assert make_task().flops(work) == {"full": make_model().flops(**work)}


def test_starts_from_a_hugging_face_encoder_with_a_repeated_table(tmp_path, capsys):
    torch.manual_seed(3)
    roberta = {"num_segments": 1, "position_offset": 2, "norm_eps": 1e-5, "max_seqlen": 6}
    source = BERT(**SIZES, **roberta, pooler=False, nsp_head=False)
    export_bert(source, tmp_path / "hf")
    model = make_model(max_seqlen=14, num_segments=1, position_offset=2, norm_eps=1e-5)
    head = {name: value.clone() for name, value in model.head.state_dict().items()}
    DocumentTask(model, adamw, max_steps=1).load_weights(str(tmp_path / "hf"))
    state = model.encoder.state_dict()
    for name, value in source.state_dict().items():
        if name == "embeddings.positions.weight":
            assert torch.equal(state[name][:2], value[:2]), "rows that are never trained"
            for start in range(2, 16, 6):
                rows = state[name][start : start + 6]
                assert torch.equal(rows, value[2 : 2 + len(rows)])
        elif not name.startswith("mlm."):
            assert torch.equal(state[name], value), name
    assert all(torch.equal(model.head.state_dict()[name], value) for name, value in head.items())
    said = capsys.readouterr().out
    assert "head" in said and "left out of" in said and "mlm.bias" in said


def test_starts_from_the_encoder_of_a_shorter_run(tmp_path):
    task = make_task(max_steps=1)
    fit(task, tmp_path / "checkpoints")
    model = make_model(max_seqlen=25, num_classes=5)
    DocumentTask(model, adamw, max_steps=1).load_weights(str(tmp_path))
    for name, value in task.model.encoder.state_dict().items():
        own = model.encoder.state_dict()[name]
        assert torch.equal(own[: len(value)], value), name
    with pytest.raises(ValueError, match="depth is 1 in the checkpoint and 2 in the model"):
        DocumentTask(make_model(depth=2), adamw, max_steps=1).load_weights(str(tmp_path))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"micro_batch_tokens": 0}, "micro_batch_tokens must be positive, got 0"),
        ({"extend_positions": "repeat"}, "must be one of tile, interpolate, got 'repeat'"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make_task(**options)


def test_another_model_is_refused():
    with pytest.raises(ValueError, match="must be a DocumentClassifier, got a Linear: choose"):
        DocumentTask(nn.Linear(1, 1), adamw, max_steps=1)
