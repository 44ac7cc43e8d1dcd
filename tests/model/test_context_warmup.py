"""A GPT whose context grows during training: its positions, their moments, resume, speed."""

import functools

import pytest
import torch
from lightning import LightningDataModule
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.data import DataLoader, IterableDataset

from model.attention import sdpa_attention
from model.callbacks import Metrics
from model.checkpoint import load_run, newest_intact
from model.gpt import GPT
from model.language_task import CausalLMTask
from model.loggers import CsvLogger
from model.optim import adamw
from model.positions import extend_in_place, extend_positions
from model.saving import Checkpoints
from tests.training import make_trainer

VOCAB, FINAL, STEP_TOKENS = 37, 16, 64
CONTEXTS = [4, 4, 4, 8, 8, 16, 16, 16]  # of the steps of a run
SHAPE = {"vocab_size": VOCAB, "max_seqlen": FINAL, "depth": 2, "dim": 16, "nheads": 2}


def batch_of(step, seqlen):
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(VOCAB, (STEP_TOKENS // seqlen, seqlen + 1), generator=generator)
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:].clone()}


class Growing(IterableDataset):
    def __init__(self, first):
        self.first = first

    def __iter__(self):
        for step in range(self.first, len(CONTEXTS)):
            yield batch_of(step, CONTEXTS[step])


class GrowingData(LightningDataModule):
    def train_dataloader(self):
        return DataLoader(Growing(self.trainer.global_step), batch_size=None)

    def val_dataloader(self):
        return DataLoader([batch_of(1000, FINAL)], batch_size=None)


def make_task(dropout=0.0, **options):
    torch.manual_seed(0)
    dropouts = dict.fromkeys(("embd_dropout", "resid_dropout", "attn_dropout"), dropout)
    return CausalLMTask(
        GPT(**SHAPE, **dropouts, attention=sdpa_attention),
        functools.partial(adamw, lr=1e-2),
        max_steps=len(CONTEXTS),
        warmup_fraction=0.0,
        micro_batch_tokens=32,
        final_context=FINAL,
        **options,
    )


def fit(task, folder, *, stop=None, ckpt_path=None, save_every=1, callbacks=(), logger=False):
    saves = Checkpoints(folder=str(folder / "checkpoints"), every_n_steps=save_every)
    trainer = make_trainer(stop or task.max_steps, [*callbacks, saves], logger=logger)
    trainer.fit(task, GrowingData(), ckpt_path=ckpt_path, weights_only=True)
    return trainer


def table_of(task):
    return task.model.embeddings.positions.weight.detach().clone()


def moments_of(task):
    weight = task.model.embeddings.positions.weight
    state = task.optimizers(use_pl_optimizer=False).state[weight]
    return [state["exp_avg"].clone(), state["exp_avg_sq"].clone()]


def test_rows_that_no_batch_has_reached_do_not_move(tmp_path):
    task = make_task()
    before = table_of(task)
    fit(task, tmp_path, stop=3)
    assert torch.equal(table_of(task)[4:], before[4:])
    assert (table_of(task)[:4] - before[:4]).abs().min() > 0
    assert all(not moment[4:].any() for moment in moments_of(task))


@pytest.mark.parametrize("how", ["tile", "interpolate"])
def test_a_switch_extends_the_table_and_its_moments_from_the_trained_rows(tmp_path, how):
    task = make_task(extend_positions=how)
    fit(task, tmp_path, stop=3)
    ids = torch.randint(VOCAB, (3, 4))
    task.model.eval()
    old, old_logits = [table_of(task), *moments_of(task)], task.model(ids)
    task._grow(4, 8)
    for before, after in zip(old, [table_of(task), *moments_of(task)], strict=True):
        assert torch.equal(after[:8], extend_positions(before[:4], 8, how))
        assert torch.equal(after[8:], before[8:])
    if how == "tile":
        assert torch.equal(task.model(ids), old_logits), "short contexts keep their outputs"
    with pytest.raises(ValueError, match="must not shrink, from 4 to 2 at step 3"):
        task._grow(4, 2)


@pytest.mark.parametrize("how", ["tile", "interpolate"])
def test_validation_reads_the_extended_table_and_leaves_the_trained_one(tmp_path, how):
    task = make_task(extend_positions=how)
    trainer = fit(task, tmp_path, stop=2)
    trained = table_of(task)
    trainer.validate(task, GrowingData(), verbose=False)
    assert torch.equal(table_of(task), trained)
    model = GPT(**SHAPE, attention=sdpa_attention).eval()
    model.load_state_dict(task.model.state_dict())
    model.embeddings.positions.weight.data = extend_positions(trained[:4], FINAL, how)
    batch = batch_of(1000, FINAL)
    loss = torch.nn.functional.cross_entropy(
        model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten()
    )
    assert trainer.callback_metrics["val/loss"].item() == pytest.approx(loss.item(), rel=1e-5)


@pytest.mark.parametrize("stop", [2, 3, 4])
def test_stop_and_resume_equals_no_stop_bitwise(tmp_path, stop):
    """Stops within a stage, at the last step before a switch (3) and right after it."""
    straight = make_task(dropout=0.2)
    fit(straight, tmp_path / "straight")
    fit(make_task(dropout=0.2), tmp_path / "stopped", stop=stop)
    torch.rand(7)
    second = make_task(dropout=0.2)
    second.model.reset_parameters()
    newest = newest_intact(tmp_path / "stopped/checkpoints")
    trainer = fit(second, tmp_path / "stopped", ckpt_path=newest)
    assert trainer.global_step == len(CONTEXTS)
    for name, value in straight.model.state_dict().items():
        assert torch.equal(second.model.state_dict()[name], value), name
    assert all(map(torch.equal, moments_of(straight), moments_of(second)))


def test_checkpoint_within_the_warmup_is_a_model_of_its_context(tmp_path):
    task = make_task()
    fit(task, tmp_path, stop=3)
    model, config = load_run(tmp_path, "last", attention=sdpa_attention)
    assert config["max_seqlen"] == model.max_seqlen == 4
    ids = torch.randint(VOCAB, (2, 4))
    assert torch.equal(model(ids), task.model.eval()(ids))
    fit(make_task(), tmp_path / "whole")
    assert load_run(tmp_path / "whole", "last")[1]["max_seqlen"] == FINAL


def test_speed_and_mfu_are_of_one_context_an_interval(tmp_path):
    metrics = Metrics(every_n_steps=4, show=False)
    metrics._peak = 1e9
    task, logger = make_task(), CsvLogger(save_dir=str(tmp_path))
    fit(task, tmp_path, save_every=100, callbacks=[metrics], logger=logger)
    lines = [line.split(",") for line in logger.path.read_text().splitlines()]
    rows = [dict(zip(lines[0], line, strict=True)) for line in lines[1:]]
    assert [float(row["tokens"]) for row in rows] == [64.0 * (i + 1) for i in range(8)]
    timed = [row for row in rows if row["tokens_per_s"]]
    # Steps 2, 4, 6 end with a validation; 3 and 5 are the last ones before a switch.
    assert {int(row["step"]): int(row["context"]) for row in timed} == {
        step: CONTEXTS[step - 1] for step in (2, 3, 4, 5, 6, 8)
    }
    num_params = sum(p.numel() for p in task.model.parameters()) - FINAL * 16
    for row in timed:
        per_token = 6 * num_params + 12 * 2 * 16 * int(row["context"])
        expected = float(row["tokens_per_s"]) * per_token / 1e9
        assert float(row["mfu_full"]) == pytest.approx(expected, rel=1e-6)


class NoBlock(torch.nn.Module):
    def forward(self, x, branch, **options):
        return x, torch.zeros_like(x)


def test_one_compilation_a_stage_and_one_for_validation(tmp_path, monkeypatch):
    shapes = []

    def backend(graph, inputs):
        shapes.append({tuple(x.shape) for x in inputs if x.dtype == torch.int64})
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    torch._dynamo.reset()
    task = make_task(compile=True)
    task.model.blocks = torch.nn.ModuleList([NoBlock()])  # quick to trace
    fit(task, tmp_path, save_every=100)
    torch._dynamo.reset()
    assert sorted(max(s) for s in shapes) == [(2, 16), (4, 8), (4, 16), (8, 4)]


def test_a_sharded_table_is_extended_like_a_whole_one():
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        table = torch.randn(FINAL, 3)
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        shard = distribute_tensor(table, mesh, [Shard(0)])
        extend_in_place(shard, 4, 10, "tile")
        assert torch.equal(shard.full_tensor()[:10], extend_positions(table[:4], 10))
        assert torch.equal(shard.full_tensor()[10:], table[10:]) and shard.placements == (Shard(0),)
    finally:
        torch.distributed.destroy_process_group()
