"""Training of classifiers: split of the batch, counts, the loss over pixels, the plateau notice."""

import functools

import numpy as np
import pytest
import torch
from lightning import LightningDataModule
from torch.utils.data import DataLoader

from model.attention import sdpa_attention
from model.checkpoint import load_run, newest_best, newest_intact
from model.classification_task import ClassificationTask, accuracy_interval
from model.classifier_weights import load_from_run
from model.long_range import LongRangeClassifier
from model.optim import adamw
from model.saving import Checkpoints
from tests.training import make_trainer, weights

SIZE, BATCH = 5, 4


def batch(step, number=BATCH, learnable=False, foreground=True):
    rng = np.random.default_rng(step)
    images = rng.integers(1, 256, (number, SIZE**2)) * (rng.random((number, SIZE**2)) < 0.5)
    images[:, 0] = 255
    labels = rng.integers(0, 2, number)
    if learnable:
        images[labels == 1] = np.minimum(images[labels == 1], 90)
    counts = (images > 0).sum(1)
    entries = {
        "input_ids": torch.from_numpy(images),
        "labels": torch.from_numpy(labels),
        "lengths": torch.full((number,), SIZE**2),
        "dense_labels": torch.from_numpy(rng.integers(0, 3, images.shape)),
    }
    if foreground:
        entries["foreground"] = entries["input_ids"].view(-1).nonzero()[:, 0]
        entries["cu_seqlens"] = torch.from_numpy(np.concatenate([[0], counts.cumsum()])).int()
        entries["max_seqlen"] = int(counts.max())
    return entries


class Images(LightningDataModule):
    def __init__(self, **options):
        super().__init__()
        self.options = options

    def train_dataloader(self):
        first = self.trainer.global_step
        return DataLoader([batch(s, **self.options) for s in range(first, 40)], batch_size=None)

    def val_dataloader(self):
        batches = [batch(1000 + i, **self.options) for i in range(3)]
        batches[-1]["labels"][2:] = -100  # what fills a batch
        return DataLoader(batches, batch_size=None)

    test_dataloader = val_dataloader


def make_task(foreground=True, dense_weight=0.5, optimizer=adamw, lr=1e-2, **options):
    torch.manual_seed(0)
    model = LongRangeClassifier(
        vocab_size=256,
        num_classes=2,
        max_seqlen=SIZE**2,
        image_size=SIZE,
        depth=1,
        dim=16,
        nheads=2,
        embedding="pixel",
        positions="rotary_2d",
        foreground=foreground,
        num_dense_classes=3,
        attention=sdpa_attention,
    )
    options = {"max_steps": 4, "plateau_steps": None, **options}
    return ClassificationTask(
        model, functools.partial(optimizer, lr=lr), dense_weight=dense_weight, **options
    )


def fit(task, folder, data=None, ckpt_path=None, stop=None):
    trainer = make_trainer(
        stop or task.max_steps, [Checkpoints(folder=str(folder), every_n_steps=1, keep_last=99)]
    )
    trainer.fit(task, data or Images(), ckpt_path=ckpt_path, weights_only=True)
    return trainer


SGD = {"optimizer": lambda model, lr: torch.optim.SGD(model.parameters(), lr), "lr": 0.05}


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("foreground", [True, False])
def test_update_does_not_depend_on_the_split_of_the_batch(tmp_path, micro, foreground):
    """Images have unequal numbers of non-zero pixels, whose loss is a mean over all of them."""
    whole = make_task(foreground, **SGD)
    split = make_task(foreground, micro_batch_size=micro, **SGD)
    for task, name in ((whole, "whole"), (split, "split")):
        fit(task, tmp_path / name)
    for name, value in weights(whole).items():
        torch.testing.assert_close(weights(split)[name], value, rtol=1e-4, atol=1e-6)


def test_packed_batches_train_as_masked_ones(tmp_path):
    packed, masked = make_task(**SGD), make_task(**SGD)
    fit(packed, tmp_path / "packed")
    fit(masked, tmp_path / "masked", Images(foreground=False))
    for name, value in weights(packed).items():
        torch.testing.assert_close(weights(masked)[name], value, rtol=1e-4, atol=1e-6)


def test_stop_and_resume_equals_no_stop_bitwise(tmp_path):
    straight, first, second = (make_task() for _ in range(3))
    fit(straight, tmp_path / "straight")
    fit(first, tmp_path / "cut", stop=3)
    second.model.reset_parameters()
    fit(second, tmp_path / "cut", ckpt_path=newest_intact(tmp_path / "cut"))
    for name, value in weights(straight).items():
        assert torch.equal(weights(second)[name], value), name


def test_held_out_means_count_each_example_once(tmp_path):
    task = make_task(max_steps=2)
    trainer = fit(task, tmp_path)
    assert task.validated_step == 2
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    trainer.test(task, Images(), verbose=False)
    loss, dense, correct, pixels, number = 0.0, 0.0, 0, 0, 0
    for entries in Images().val_dataloader():
        out = task.model.eval()(entries["input_ids"])
        for row in range(BATCH):
            label = int(entries["labels"][row])
            if label == -100:
                continue
            loss -= float(out.logits[row].log_softmax(-1)[label])
            correct += int(out.logits[row].argmax()) == label
            number += 1
            for pixel in entries["input_ids"][row].nonzero()[:, 0].tolist():
                target = int(entries["dense_labels"][row, pixel])
                dense -= float(out.dense_logits[row, pixel].log_softmax(-1)[target])
                pixels += 1
    assert number == 3 * BATCH - 2
    expected = {"loss": loss / number, "accuracy": correct / number, "dense_loss": dense / pixels}
    for name, value in expected.items():
        assert metrics[f"val/{name}"] == pytest.approx(value, rel=1e-4)
        assert float(trainer.callback_metrics[f"test/{name}"]) == metrics[f"val/{name}"]


def test_best_checkpoint_has_the_best_accuracy_and_can_be_started_from(tmp_path):
    task = make_task(max_steps=12, warmup_fraction=0.0)
    seen = {}
    validated = task.on_validation_epoch_end

    def spy():
        validated()
        seen[task.global_step] = float(task.trainer.callback_metrics["val/accuracy"])

    task.on_validation_epoch_end = spy
    fit(task, tmp_path / "checkpoints", Images(learnable=True))
    best = newest_best(tmp_path)
    step = max(seen, key=lambda s: (seen[s], -s))
    assert best.name == f"best-{step:08d}.ckpt" and newest_best(tmp_path / "none") is None
    other = make_task().model
    torch.nn.init.zeros_(other.head[0].weight)
    assert load_from_run(other, best) == []
    stored = torch.load(best, weights_only=True)["state_dict"]
    for name, value in other.state_dict().items():
        assert torch.equal(stored[f"model.{name}"], value)
    with pytest.raises(ValueError, match="must hold a GPT, it holds a classifier"):
        load_run(best)


def test_plateau_is_said_once(tmp_path, capsys):
    task = make_task(lr=0.0, dense_weight=0.0, plateau_steps=2, max_steps=6)
    torch.nn.init.zeros_(task.model.head[-1].weight)
    fit(task, tmp_path / "flat")
    assert capsys.readouterr().out.count("still at ln 2 = 0.693 after 2 steps") == 1
    task = make_task(lr=0.0, dense_weight=0.0, plateau_steps=2, max_steps=6)
    torch.nn.init.normal_(task.model.head[-1].weight, std=3.0)
    fit(task, tmp_path / "other")
    assert "still at" not in capsys.readouterr().out


def test_interval_of_an_accuracy():
    assert accuracy_interval(0.5, 10_000) == pytest.approx(0.0098)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"micro_batch_size": 0}, "micro_batch_size must be at least 1 or null, got 0"),
        ({"plateau_steps": 0}, "plateau_steps must be at least 1 or null, got 0"),
        ({"dense_weight": -1.0}, "dense_weight must not be negative"),
        ({"max_steps": 0}, "max_steps must be at least 1, got 0"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make_task(**options)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="4 examples .* must divide into micro-batches of 3"):
        make_task(micro_batch_size=3).micro_batch(4, SIZE**2)
    entries = batch(0)
    del entries["dense_labels"]
    with pytest.raises(ValueError, match="set data.dense_target=true"):
        make_task().counts(entries)
