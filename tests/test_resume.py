"""A run that is interrupted after every step is the uninterrupted one, bit for bit."""

import functools
import shutil

import pytest
import torch
from lightning import Callback

import train
from data.causal_lm import CausalLMData
from data.streamed_text import StreamedTextData
from model.attention import sdpa_attention
from model.checkpoint import newest_intact
from model.gpt import GPT
from model.language_task import CausalLMTask
from model.optim import adamw
from model.saving import Checkpoints
from tests.training import make_trainer

SEQLEN, BATCH = 8, 4


class Seen(Callback):
    def __init__(self):
        self.rows = []

    def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
        step = trainer.global_step
        ids = trainer.datamodule.sample_ids(step - 1).tolist()
        first = batch["input_ids"][:, 0].tolist()
        self.rows.append((step, ids, first, outputs["loss"].item(), outputs["grad_norm"].item()))


def fit(folder, text, steps, num_steps, num_workers, make_data=CausalLMData):
    torch.manual_seed(torch.seed())  # a new process has random numbers of its own
    sizes = {"max_seqlen": SEQLEN, "depth": 1, "dim": 8, "nheads": 2}
    dropout = {"embd_dropout": 0.2, "resid_dropout": 0.2, "attn_dropout": 0.2}
    model = GPT(**sizes, **dropout, attention=sdpa_attention)
    if not steps:
        torch.manual_seed(0)
        model.reset_parameters()
    make = functools.partial(adamw, lr=1e-2)
    task = CausalLMTask(model, make, max_steps=num_steps, micro_batch_tokens=2 * SEQLEN)
    data = make_data(
        source=str(text),
        seqlen=SEQLEN,
        batch_tokens=BATCH * SEQLEN,
        val_fraction=0.2,
        num_workers=num_workers,
        root=str(text.parent / "data"),
    )
    seen = Seen()
    trainer = make_trainer(
        steps + 1 if steps is not None else num_steps,
        [seen, Checkpoints(folder=str(folder), every_n_steps=100)],
        val_every=5,
    )
    train.fit(newest_intact(folder), data, task, trainer)
    return seen.rows, task.model.state_dict(), data


@pytest.mark.filterwarnings("ignore")
def test_interrupted_after_every_step_of_two_epochs(tmp_path):
    """Accumulation over two micro-batches, dropout, and for one start a worker that loads."""
    text = tmp_path / "a.txt"
    text.write_text("The whale swims, the ship sails, the sailor sings of both. " * 16)
    data = fit(tmp_path / "probe", text, 0, 1, 0)[2]
    num_steps = 2 * data.num_samples // BATCH + 2
    assert num_steps < 30
    whole, weights, _ = fit(tmp_path / "whole", text, None, num_steps, 0)
    assert len({tuple(row[1]) for row in whole}) == num_steps
    cut = []
    for step in range(num_steps):
        rows, cut_weights, data = fit(tmp_path / "cut", text, step, num_steps, int(step == 3))
        cut += rows
    assert cut == whole and data.position == num_steps * BATCH > 2 * data.num_samples
    for name, value in weights.items():
        assert torch.equal(cut_weights[name], value), name


@pytest.mark.filterwarnings("ignore")
def test_a_stream_interrupted_and_moved_to_another_disk(tmp_path):
    """Three shards of 64 tokens; over their edges and the end of the source."""
    text = tmp_path / "texts"
    text.mkdir()
    for number in range(4):
        (text / f"{number}.txt").write_text(f"The whale swims, ship {number} sails. " * 4)
    stream = functools.partial(StreamedTextData, stream_tokens=192, prepare_workers=0)
    whole, weights, _ = fit(tmp_path / "whole", text, None, 8, 0, stream)
    assert len({tuple(row[1]) for row in whole}) == 8
    cut = []
    for step in (0, 3, 7):
        shutil.rmtree(tmp_path / "data")
        rows, cut_weights, data = fit(tmp_path / "cut", text, step, 8, step // 4, stream)
        cut += rows
    assert cut == whole and data.position == 8 * BATCH == 4 * data.num_samples
    for name, value in weights.items():
        assert torch.equal(cut_weights[name], value), name
