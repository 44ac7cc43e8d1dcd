"""The optimizer step: invariant to how its batch is split, bitwise the same after a resume."""

import functools

import pytest
import torch
from lightning import LightningDataModule
from torch.utils.data import DataLoader, IterableDataset

from model.attention import sdpa_attention
from model.checkpoint import load_run, newest_intact
from model.gpt import GPT
from model.language_task import CausalLMTask
from model.optim import adamw
from model.saving import Checkpoints
from model.task import step_seed
from tests.training import make_trainer, weights

VOCAB, SEQLEN, PER_STEP = 37, 16, 4


class Steps(IterableDataset):
    def __init__(self, first: int, ragged: bool):
        self.first, self.ragged = first, ragged

    def __iter__(self):
        step = self.first
        while True:
            generator = torch.Generator().manual_seed(step)
            ids = torch.randint(VOCAB, (PER_STEP, SEQLEN + 1), generator=generator)
            labels = ids[:, 1:].clone()
            if self.ragged:  # sequences with 16, 11, 6 and 1 labelled tokens
                for row in range(PER_STEP):
                    labels[row, SEQLEN - 5 * row :] = -100
            yield {"input_ids": ids[:, :-1], "labels": labels}
            step += 1


class RandomTokens(LightningDataModule):
    def __init__(self, ragged: bool = False):
        super().__init__()
        self.ragged = ragged

    def train_dataloader(self):
        return DataLoader(Steps(self.trainer.global_step, self.ragged), batch_size=None)

    def val_dataloader(self):
        batches = iter(Steps(10_000, self.ragged))
        return DataLoader([next(batches) for _ in range(2)], batch_size=None)


def make_task(
    dropout=0.0, max_steps=6, micro_batch_tokens=10_000, optimizer=adamw, lr=1e-2, **options
):
    torch.manual_seed(0)
    model = GPT(
        vocab_size=VOCAB,
        max_seqlen=SEQLEN,
        depth=2,
        dim=16,
        nheads=2,
        embd_dropout=dropout,
        resid_dropout=dropout,
        attn_dropout=dropout,
        attention=sdpa_attention,
    )
    optimizer = functools.partial(optimizer, lr=lr)
    return CausalLMTask(
        model, optimizer, max_steps=max_steps, micro_batch_tokens=micro_batch_tokens, **options
    )


def fit(
    task,
    folder,
    *,
    stop=None,
    ckpt_path=None,
    ragged=False,
    val_every=3,
    data=None,
    **checkpointing,
):
    checkpoints = Checkpoints(folder=str(folder), **{"every_n_steps": 1, **checkpointing})
    trainer = make_trainer(stop or task.max_steps, [checkpoints], val_every=val_every)
    data = data or RandomTokens(ragged)
    trainer.fit(task, data, ckpt_path=ckpt_path, weights_only=True)
    return trainer


@pytest.mark.parametrize("micro_sequences", [1, 2])
def test_update_does_not_depend_on_the_split_of_the_batch(tmp_path, micro_sequences):
    """Sequences hold unequal numbers of labels, so a mean of means would differ by far.

    SGD, because Adam turns the rounding of a zero gradient (the key bias) into a full step.
    """
    plain = {"optimizer": lambda model, lr: torch.optim.SGD(model.parameters(), lr), "lr": 0.5}
    whole = make_task(**plain)
    split = make_task(micro_batch_tokens=micro_sequences * SEQLEN, **plain)
    for task, folder in ((whole, "whole"), (split, "split")):
        fit(task, tmp_path / folder, ragged=True)
    for name, value in weights(whole).items():
        torch.testing.assert_close(weights(split)[name], value, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("stop", [1, 3, 5])
def test_stop_and_resume_equals_no_stop_bitwise(tmp_path, stop):
    straight = make_task(dropout=0.2)
    fit(straight, tmp_path / "straight")
    first = make_task(dropout=0.2)
    fit(first, tmp_path / "stopped", stop=stop)
    torch.rand(7)  # a resumed process has another random state
    second = make_task(dropout=0.2)
    second.model.reset_parameters()
    trainer = fit(second, tmp_path / "stopped", ckpt_path=newest_intact(tmp_path / "stopped"))
    assert trainer.global_step == 6
    for name, value in weights(straight).items():
        assert torch.equal(weights(second)[name], value), name


def test_a_checkpoint_numbers_optimizer_states_in_the_order_of_the_model(tmp_path):
    """As FSDP2's strategy writes and reads them: the groups have another order."""
    task = make_task(max_steps=1)
    fit(task, tmp_path)
    checkpoint = torch.load(newest_intact(tmp_path), weights_only=True)
    (optimizer,) = checkpoint["optimizer_states"]
    assert sorted(n for group in optimizer["param_groups"] for n in group["params"]) != [
        n for group in optimizer["param_groups"] for n in group["params"]
    ]
    for number, param in enumerate(task.model.parameters()):
        assert optimizer["state"][number]["exp_avg"].shape == param.shape


def test_optimizer_states_of_another_model_are_refused(tmp_path):
    fit(make_task(max_steps=2), tmp_path, stop=1)
    checkpoint = torch.load(newest_intact(tmp_path), weights_only=True)
    checkpoint["optimizer_states"][0]["param_groups"][1]["params"].reverse()
    path = tmp_path / "other/other.ckpt"
    path.parent.mkdir()
    torch.save(checkpoint, path)
    with pytest.raises(ValueError, match="must be of this model: exp_avg has shape"):
        fit(make_task(max_steps=2), tmp_path / "new", ckpt_path=path)


def test_dropout_masks_differ_by_step_and_rank():
    seeds = {step_seed(s, step, rank) for s in (1, 2) for step in range(50) for rank in range(8)}
    assert len(seeds) == 2 * 50 * 8 and all(0 <= seed < 2**63 for seed in seeds)


def test_learning_rate_follows_the_schedule(tmp_path):
    """Warm-up over 2 of 4 steps: the updates use 0, 1/2, 1 and 1/2 of the peak."""
    task, seen = make_task(max_steps=4, warmup_fraction=0.5), []
    step = task.training_step

    def spy(batch, batch_idx):
        result = step(batch, batch_idx)
        seen.append(task.lr)
        return result

    task.training_step = spy
    fit(task, tmp_path)
    assert seen == pytest.approx([0.0, 0.005, 0.01, 0.005])


def test_validation_loss_is_the_mean_over_labelled_tokens(tmp_path):
    task = make_task(max_steps=3)
    trainer = fit(task, tmp_path, ragged=True)
    batches = iter(Steps(10_000, True))
    total, count = 0.0, 0
    for batch in (next(batches) for _ in range(2)):
        logits = task.model.eval()(batch["input_ids"]).log_softmax(-1)
        keep = batch["labels"] != -100
        picked = logits.gather(-1, batch["labels"].clamp(min=0)[..., None])[..., 0]
        total -= picked[keep].sum().item()
        count += keep.sum().item()
    assert trainer.callback_metrics["val/loss"].item() == pytest.approx(total / count, rel=1e-5)
    assert task.validated_step == 3


def test_saves_do_not_wait_for_a_validation_that_has_no_data(tmp_path):
    class NothingHeldOut(RandomTokens):
        def val_dataloader(self):
            return []

    fit(make_task(), tmp_path, every_n_steps=3, keep_last=9, data=NothingHeldOut())
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == [
        "step-00000003.ckpt",
        "step-00000006.ckpt",
    ]


def test_continuing_an_older_checkpoint_forgets_the_later_ones(tmp_path):
    fit(make_task(), tmp_path, keep_last=9)
    resumed = make_task()
    fit(resumed, tmp_path, ckpt_path=tmp_path / "step-00000002.ckpt", stop=4, keep_last=9)
    assert newest_intact(tmp_path).name == "step-00000004.ckpt"


def test_configured_optimizer_options_hold_after_a_resume(tmp_path):
    fit(make_task(lr=1e-2), tmp_path, stop=3)
    resumed = make_task(lr=2e-2)
    fit(resumed, tmp_path, ckpt_path=newest_intact(tmp_path), stop=4)
    assert resumed.optimizers().param_groups[0]["peak_lr"] == 2e-2


def test_checkpoint_rebuilds_the_model_alone(tmp_path):
    task = make_task()
    fit(task, tmp_path / "checkpoints")
    model, config = load_run(tmp_path, "last", attention=sdpa_attention)
    assert config["vocab_size"] == VOCAB and not model.training
    for name, value in weights(task).items():
        assert torch.equal(model.state_dict()[name], value)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"max_steps": 0}, "max_steps must be at least 1, got 0"),
        ({"warmup_fraction": 1.5}, "warmup_fraction must be between 0 and 1, got 1.5"),
        ({"decay": "step"}, "decay must be one of .*'cosine', 'linear'.*got 'step'"),
        ({"grad_clip": 0.0}, "grad_clip must be positive or null, got 0.0"),
        ({"micro_batch_tokens": 0}, "micro_batch_tokens must be positive, got 0"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make_task(**options)


def test_batch_that_does_not_divide_is_refused():
    task = make_task(micro_batch_tokens=3 * SEQLEN)
    with pytest.raises(ValueError, match="4 examples .* must divide into micro-batches of 3"):
        task.micro_batch(PER_STEP, SEQLEN)
