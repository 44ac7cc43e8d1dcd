"""Weights to start from: every kind of source, what may differ, and every difference named."""

import pytest
import torch

from model.bert import BERT
from model.bert_files import export_bert, save_bert
from model.checkpoint import AtomicCheckpointIO
from model.gpt import GPT
from model.hf import export_gpt2, save_weights
from model.loss import next_token_loss
from model.warm_start import load_into
from tests.training import randomize

GPT_SIZES = {"vocab_size": 61, "max_seqlen": 16, "depth": 2, "dim": 24, "nheads": 3}
BERT_SIZES = {**GPT_SIZES, "mlp_dim": 40}


def make(kind=GPT, seed=0, **changes):
    torch.manual_seed(seed)
    model = kind(**{**(GPT_SIZES if kind is GPT else BERT_SIZES), **changes})
    randomize(model, scale=0.3)
    with torch.no_grad():
        model.head_weight[61:] = 0.0
        if kind is BERT and model.mlm is not None:
            model.mlm.bias[61:] = 0.0
    return model


def make_run(model, folder):
    (folder / "checkpoints").mkdir(parents=True)
    checkpoint = {
        "global_step": 3,
        "state_dict": {f"model.{key}": value for key, value in model.state_dict().items()},
        "model_config": model.config,
    }
    AtomicCheckpointIO().save_checkpoint(checkpoint, folder / "checkpoints/step-00000003.ckpt")
    return folder


def sources(model, folder):
    """The model as each kind of source."""
    export, save = (export_gpt2, save_weights) if type(model) is GPT else (export_bert, save_bert)
    run = make_run(model, folder / "outputs/runs/trained")
    yield run
    yield run / "checkpoints/step-00000003.ckpt"
    yield "trained"
    yield export(model, folder / "hf")
    yield save(model, folder / "ours.safetensors")


@pytest.mark.parametrize("kind", [GPT, BERT])
def test_every_source_gives_the_same_model(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = make(kind)
    for source in sources(model, tmp_path):
        started = make(kind, seed=1, vocab_multiple=32)
        assert load_into(started, source) == ([], [])
        for name, value in model.state_dict().items():
            got = started.state_dict()[name]
            assert torch.equal(got, value[: len(got)]), (source, name)


@pytest.mark.parametrize("kind", [GPT, BERT])
def test_longer_context_by_tiling_keeps_short_ones(kind, tmp_path):
    model = make(kind, **({"position_offset": 2, "nsp_head": False} if kind is BERT else {}))
    longer = make(kind, 1, **{**model.config, "max_seqlen": 40})
    load_into(longer, make_run(model, tmp_path / "run"))
    ids = torch.randint(61, (3, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(longer.hidden(ids), model.hidden(ids))
        if kind is GPT:
            labels = ids.roll(-1, 1)
            losses = [next_token_loss(m(ids), labels)[0] for m in (model, longer)]
            assert losses[0] == losses[1]
            assert longer(torch.zeros(1, 40, dtype=torch.int64)).isfinite().all()


def test_longer_context_by_interpolation_keeps_the_ends(tmp_path):
    model, longer = make(), make(seed=1, max_seqlen=31)
    load_into(longer, make_run(model, tmp_path / "run"), how="interpolate")
    old, new = (m.embeddings.positions.weight for m in (model, longer))
    torch.testing.assert_close(new[::2], old)  # 31 points: each old one, and one between two
    torch.testing.assert_close(new[1::2], (old[1:] + old[:-1]) / 2)


def test_heads_may_differ_and_are_named(tmp_path):
    headless = {"mlm_head": False, "nsp_head": False, "pooler": False}
    plain, full = make(BERT, **headless), make(BERT, seed=1)
    fresh = full.pooler.weight.clone()
    new, left_out = load_into(full, make_run(plain, tmp_path / "plain"))
    assert "pooler.weight" in new and "nsp.bias" in new and "mlm.norm.weight" in new
    assert not left_out and torch.equal(full.pooler.weight, fresh)
    new, left_out = load_into(make(BERT, 2, **headless), make_run(full, tmp_path / "full"))
    assert not new and {name.split(".")[0] for name in left_out} == {"mlm", "nsp", "pooler"}


def test_every_difference_is_in_one_error(tmp_path):
    run = make_run(make(depth=12, dim=12, bias=False), tmp_path / "run")
    with pytest.raises(ValueError) as caught:
        load_into(make(depth=13, vocab_size=300, inverse_layer_scale=True), run)
    message = str(caught.value)
    for part in (
        "vocab_size is 61 in the checkpoint and 300 in the model",
        "depth is 12 in the checkpoint and 13 in the model",
        "inverse_layer_scale is False in the checkpoint and True in the model",
        "embeddings.positions.weight is (16, 12) in the checkpoint and (16, 24) in the model",
        "blocks.0-11.attention.qkv.weight is (36, 12) in the checkpoint and (72, 24) in the model",
        "blocks.12.attention.qkv.weight (72, 24) is in the model only",
        "blocks.0-12.attention.qkv.bias (72,) is in the model only",
        "norm.bias (24,) is in the model only",
        "Set the model's configuration to the checkpoint's",
    ):
        assert part in message
    assert "\n" not in message and "blocks.3." not in message


def test_head_of_another_shape_is_a_difference(tmp_path):
    run = make_run(make(BERT, vocab_size=50), tmp_path / "run")
    with pytest.raises(ValueError, match=r"mlm.bias is \(64,\) .* and \(128,\) in the model"):
        load_into(make(BERT, vocab_size=100), run)


@pytest.mark.parametrize(
    "kind, other, message",
    [
        (GPT, BERT, "must hold a BERT, it holds a GPT"),
        (BERT, GPT, "must hold a GPT, it holds a BERT"),
    ],
)
def test_another_kind_of_model_is_refused(kind, other, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        load_into(make(other), make_run(make(kind), tmp_path / "run"))
    folder = (export_gpt2 if kind is GPT else export_bert)(make(kind), tmp_path / "hf")
    with pytest.raises(ValueError, match="model_type must be"):
        load_into(make(other), folder)


def test_what_is_no_source_is_refused(tmp_path):
    (tmp_path / "empty/checkpoints").mkdir(parents=True)
    for source, message in (
        (tmp_path / "empty", "holds no intact checkpoint"),
        (tmp_path / "none.ckpt", "no run at"),
        (tmp_path / "none", "no model folder at"),
    ):
        with pytest.raises(FileNotFoundError, match=message):
            load_into(make(), source)
    torch.save({"weights": 1}, tmp_path / "other.ckpt")
    with pytest.raises(ValueError, match="must be a checkpoint of a run, it holds no model_config"):
        load_into(make(), tmp_path / "other.ckpt")
