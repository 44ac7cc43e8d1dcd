"""Guard: a small classifier, label only, learns short ListOps well above the best constant."""

import functools

import numpy as np
import pytest
import torch
from lightning import Trainer

from data.classification import ClassificationData
from data.listops import ListOpsSpec, make_listops
from model.attention import sdpa_attention
from model.classification_task import ClassificationTask
from model.long_range import LongRangeClassifier
from model.optim import adamw

SPEC = ListOpsSpec(min_length=3, max_length=12, max_depth=2, max_args=8)
NUM = {"train": 8_000, "val": 0, "test": 1_000}


class ShortListOps(ClassificationData):
    """One operator over 2 to 8 digits."""

    vocab_size, num_classes = 16, 10

    def __init__(self):
        super().__init__(
            seqlen=12,
            batch_size=64,
            val_batch_size=250,
            val_limit=None,
            test_limit=None,
            seed=0,
            num_workers=0,
        )

    def open_examples(self):
        return Expressions()


class Expressions:
    fingerprint = "short"

    def __init__(self):
        self.made = {
            split: [make_listops(SPEC, split, i) for i in range(n)] for split, n in NUM.items()
        }

    def num_examples(self, split):
        return NUM[split]

    def batch(self, split, ids, *, positions=None):
        input_ids = np.zeros((len(ids), 12), np.int64)
        chosen = [self.made[split][i] for i in ids]
        for row, (tokens, _) in enumerate(chosen):
            input_ids[row, : len(tokens)] = tokens
        arrays = {
            "input_ids": input_ids,
            "labels": np.array([label for _, label in chosen]),
            "lengths": np.array([len(tokens) for tokens, _ in chosen]),
        }
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


@pytest.mark.slow
def test_short_listops_is_learned(one_thread):
    torch.manual_seed(0)
    model = LongRangeClassifier(
        vocab_size=16,
        num_classes=10,
        max_seqlen=12,
        depth=2,
        dim=32,
        nheads=2,
        mlp_dim=64,
        pooling="cls",
        attention=sdpa_attention,
    )
    optimizer = functools.partial(adamw, lr=4e-3, betas=(0.9, 0.98), weight_decay=0.01)
    task = ClassificationTask(model, optimizer, max_steps=400, warmup_fraction=0.1)
    data = ShortListOps()
    trainer = Trainer(
        accelerator="cpu",
        max_steps=400,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(task, data)
    assert task.loss_weights == {"loss": 1.0}, "label only"
    trainer.test(task, data, verbose=False)
    labels = [label for _, label in data.examples.made["test"]]
    floor = np.bincount(labels).max() / len(labels)
    accuracy = float(trainer.callback_metrics["test/accuracy"])
    assert floor < 0.2 and accuracy > 0.5, (accuracy, floor)
