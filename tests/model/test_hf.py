import json

import pytest
import safetensors.torch
import torch

from model.attention import sdpa_attention
from model.evaluation import text_losses
from model.gpt import GPT
from model.hf import (
    config_from_hf,
    config_to_hf,
    export_gpt2,
    from_hf,
    load_gpt2,
    save_weights,
    to_hf,
)
from model.hf_files import find_model
from model.loss import next_token_loss
from tests.training import randomize

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 61, "max_seqlen": 16, "depth": 3, "dim": 24, "nheads": 3}
HF_SIZES = {"vocab_size": 61, "n_positions": 16, "n_layer": 3, "n_embd": 24, "n_head": 3}


def make_gpt(**changes):
    model = randomize(GPT(**{**SIZES, "attention": sdpa_attention, **changes}), 0)
    with torch.no_grad():
        model.head_weight[61:] = 0.0
    return model


def make_theirs(**changes):
    config = transformers.GPT2Config(**HF_SIZES, bos_token_id=60, eos_token_id=60, **changes)
    return randomize(transformers.GPT2LMHeadModel(config), 1)


def make_ids(seqlen=16):
    return torch.randint(0, 61, (2, seqlen), generator=torch.Generator().manual_seed(2))


@torch.no_grad()
def assert_same_logits(ours, theirs):
    ids = make_ids()
    torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=0, atol=1e-4)
    assert ours(ids).std() > 0.5  # the comparison is not between near-zeros


@pytest.mark.parametrize("inverse_layer_scale", [False, True])
@pytest.mark.parametrize("vocab_multiple", [1, 64, 128])
def test_their_weights_give_their_logits(tmp_path, inverse_layer_scale, vocab_multiple):
    theirs = make_theirs(scale_attn_by_inverse_layer_idx=inverse_layer_scale)
    theirs.save_pretrained(tmp_path)
    ours = load_gpt2(tmp_path, vocab_multiple=vocab_multiple).eval()
    assert len(ours.head_weight) == -(-61 // vocab_multiple) * vocab_multiple
    assert ours.head_weight[61:].eq(0).all()
    assert_same_logits(ours, theirs)


@pytest.mark.parametrize("inverse_layer_scale", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_our_weights_give_our_logits_and_generate(tmp_path, inverse_layer_scale, bias):
    ours = make_gpt(inverse_layer_scale=inverse_layer_scale, bias=bias, attn_dropout=0.25)
    export_gpt2(ours, tmp_path, eos_id=7)
    theirs, report = transformers.GPT2LMHeadModel.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert theirs.config.attn_pdrop == 0.25 and theirs.config.eos_token_id == 7
    assert theirs.generation_config.eos_token_id == 7
    assert_same_logits(ours, theirs.eval())
    with torch.no_grad():
        out = theirs.generate(
            make_ids(4), max_new_tokens=1, do_sample=False, attention_mask=torch.ones(2, 4)
        )
        assert torch.equal(out[:, 4], ours(make_ids(4))[:, -1].argmax(-1))


def test_exported_file_is_the_released_layout(tmp_path):
    export_gpt2(make_gpt(), tmp_path / "ours")
    make_theirs().save_pretrained(tmp_path / "theirs")
    ours, theirs = (
        safetensors.torch.load_file(tmp_path / side / "model.safetensors")
        for side in ("ours", "theirs")
    )
    assert {k: (v.shape, v.dtype) for k, v in ours.items()} == {
        k: (v.shape, v.dtype) for k, v in theirs.items()
    }
    assert {file.name for file in (tmp_path / "ours").iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
    }


def test_round_trip_is_bit_equal(tmp_path):
    ours = make_gpt(inverse_layer_scale=True, embd_dropout=0.3, resid_dropout=0.2)
    export_gpt2(ours, tmp_path / "hf")
    save_weights(ours, tmp_path / "ours.safetensors")
    for source in (tmp_path / "hf", tmp_path / "ours.safetensors"):
        again = load_gpt2(source, attention=sdpa_attention)
        assert again.config == ours.config
        for key, value in ours.state_dict().items():
            assert torch.equal(again.state_dict()[key], value), key


def test_padded_rows_never_influence_the_loss(tmp_path):
    make_theirs().save_pretrained(tmp_path)
    ids = make_ids()
    losses = {
        multiple: next_token_loss(load_gpt2(tmp_path, vocab_multiple=multiple).eval()(ids), ids)[0]
        for multiple in (1, 128)
    }
    torch.testing.assert_close(losses[1], losses[128])


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "model.", "model._orig_mod.module."])
def test_prefixes_of_wrappers_are_accepted(prefix):
    ours = make_gpt()
    tensors = to_hf({prefix + k: v for k, v in ours.state_dict().items()}, ours.config)
    state = from_hf({prefix + k: v for k, v in tensors.items()}, ours.config)
    assert all(torch.equal(state[k], v) for k, v in ours.state_dict().items())


def test_bare_gpt2_model_with_its_mask_buffers_loads(tmp_path):
    theirs = make_theirs()
    theirs.transformer.save_pretrained(tmp_path)
    state = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert not any(key.startswith("transformer.") for key in state)
    state["h.0.attn.bias"] = torch.ones(1, 1, 16, 16, dtype=torch.bool).tril()
    state["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    assert_same_logits(load_gpt2(tmp_path).eval(), theirs)


def test_sharded_weights_load(tmp_path):
    theirs = make_theirs()
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2
    assert_same_logits(load_gpt2(tmp_path).eval(), theirs)
    shards[1].unlink()
    with pytest.raises(FileNotFoundError, match=f"must hold the shards {shards[1].name}"):
        load_gpt2(tmp_path)


def test_pickled_weights_load_and_code_is_refused(tmp_path):
    theirs = make_theirs()
    theirs.config.save_pretrained(tmp_path)
    torch.save(theirs.state_dict(), tmp_path / "pytorch_model.bin")  # holds the tied lm_head too
    assert_same_logits(load_gpt2(tmp_path).eval(), theirs)

    class Malicious:
        def __reduce__(self):
            return print, ("this must not run",)

    torch.save({"wte.weight": Malicious()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="must hold tensors and nothing else"):
        load_gpt2(tmp_path)


def test_truncated_file_is_named(tmp_path):
    export_gpt2(make_gpt(), tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="model.safetensors must hold tensors"):
        load_gpt2(tmp_path)


def test_half_precision_checkpoint_loads_as_float32(tmp_path):
    theirs = make_theirs().half()
    theirs.save_pretrained(tmp_path)
    ours = load_gpt2(tmp_path).eval()
    assert {p.dtype for p in ours.parameters()} == {torch.float32}
    assert_same_logits(ours, theirs.float())


def test_every_mismatch_is_named(tmp_path):
    export_gpt2(make_gpt(), tmp_path)
    path = tmp_path / "model.safetensors"
    state = safetensors.torch.load_file(path)
    del state["transformer.h.1.mlp.c_fc.bias"]
    state["transformer.h.3.ln_1.weight"] = torch.ones(24)
    state["transformer.wpe.weight"] = torch.ones(15, 24)
    safetensors.torch.save_file(state, path)
    with pytest.raises(ValueError) as caught:
        load_gpt2(tmp_path)
    message = str(caught.value)
    assert "missing h.1.mlp.c_fc.bias (96,)" in message
    assert "unexpected h.3.ln_1.weight (24,)" in message
    assert "wpe.weight must be (16, 24), got (15, 24)" in message


def test_untied_head_is_refused():
    ours = make_gpt()
    tensors = to_hf(ours.state_dict(), ours.config)
    tied = {**tensors, "lm_head.weight": tensors["transformer.wte.weight"].clone()}
    assert from_hf(tied, ours.config).keys() == ours.state_dict().keys()
    tied["lm_head.weight"] += 1
    with pytest.raises(ValueError, match="the head is tied"):
        from_hf(tied, ours.config)


@pytest.mark.parametrize(
    "key,value,reason",
    [
        ("activation_function", "relu", "tanh approximation"),
        ("activation_function", "gelu", "tanh approximation"),
        ("n_inner", 100, "four times"),
        ("layer_norm_epsilon", 1e-6, "1e-5"),
        ("scale_attn_weights", False, "square root"),
        ("add_cross_attention", True, "no encoder"),
        ("tie_word_embeddings", False, "the head is the token embedding"),
        ("model_type", "llama", "only GPT-2"),
    ],
)
def test_what_gpt_cannot_compute_is_refused(key, value, reason):
    hf_config = {**config_to_hf(make_gpt().config), key: value}
    with pytest.raises(ValueError, match=rf"{key} must be .*got {value!r}: .*{reason}"):
        config_from_hf(hf_config)


def test_defaults_of_a_terse_config_are_gpt2s():
    terse = config_from_hf({"model_type": "gpt2", "n_inner": None})
    assert terse == config_from_hf(transformers.GPT2Config().to_dict())
    assert (terse["depth"], terse["dim"], terse["max_seqlen"]) == (12, 768, 1024)


def test_end_of_text_follows_the_vocabulary():
    assert config_to_hf({**make_gpt().config, "vocab_size": 50257})["eos_token_id"] == 50256
    assert config_to_hf(make_gpt().config)["eos_token_id"] is None
    assert config_to_hf(make_gpt().config, eos_id=3)["bos_token_id"] == 3


def test_longer_position_table_keeps_short_contexts(tmp_path):
    theirs = make_theirs()
    theirs.save_pretrained(tmp_path)
    longer = load_gpt2(tmp_path, max_seqlen=40).eval()
    assert_same_logits(longer, theirs)
    positions = longer.embeddings.positions.weight
    assert torch.equal(positions[16:32], positions[:16])
    assert torch.equal(positions[32:], positions[:8])
    assert longer(make_ids(40)).isfinite().all()
    shorter = load_gpt2(tmp_path, max_seqlen=5).eval()
    with torch.no_grad():
        torch.testing.assert_close(shorter(make_ids(5)), longer(make_ids(5)))


def test_hub_without_network_is_one_clear_error(monkeypatch):
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def offline(model_id, name):
        raise LocalEntryNotFoundError("cannot reach the server\nsecond line")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", offline)
    with pytest.raises(ConnectionError, match="'openai/none' must be.*cannot reach the server. Ch"):
        load_gpt2("openai/none")


def test_hub_model_is_downloaded_safetensors_first(monkeypatch, tmp_path):
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError

    theirs = make_theirs()
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    asked = []

    def download(model_id, name):
        asked.append(name)
        if not (tmp_path / name).is_file():
            raise EntryNotFoundError("404")
        return str(tmp_path / name)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert_same_logits(load_gpt2("somebody/small").eval(), theirs)
    assert asked[:3] == ["config.json", "model.safetensors", "model.safetensors.index.json"]
    assert len(asked) == 3 + len(list(tmp_path.glob("model-*")))


def test_incomplete_folders_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="must hold config.json and model.safetensors or"):
        find_model(tmp_path)
    with pytest.raises(FileNotFoundError, match="no model folder at .*/absent; pass"):
        load_gpt2(tmp_path / "absent")
    with pytest.raises(FileNotFoundError, match="save_weights"):
        load_gpt2(tmp_path / "none.safetensors")
    export_gpt2(make_gpt(), tmp_path)
    with pytest.raises(ValueError, match="gpt_config"):
        load_gpt2(tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(ValueError, match="model_type"):
        load_gpt2(tmp_path)
    with pytest.raises(ValueError, match="must end in .safetensors"):
        save_weights(make_gpt(), tmp_path / "weights.pt")


@pytest.mark.parametrize("context, stride", [(16, 16), (16, 3), (7, 7)])
def test_loss_of_sliding_windows_is_theirs(tmp_path, context, stride):
    """A window a call, and of each the tokens that none before it has scored."""
    theirs = make_theirs()
    theirs.save_pretrained(tmp_path)
    ids = make_ids(45).flatten()
    expected, end = 0.0, 0
    while end < len(ids) - 1:
        previous, end = end, min(end + stride if end else context, len(ids) - 1)
        start = max(0, end - context)
        with torch.no_grad():
            log_p = theirs(ids[start:end][None]).logits[0].log_softmax(-1)
        for target in range(previous + 1, end + 1):
            expected -= float(log_p[target - start - 1, ids[target]])
    losses = text_losses(load_gpt2(tmp_path).eval(), [ids], context=context, stride=stride)
    assert losses.num_tokens == len(ids) - 1
    assert losses.nll == pytest.approx(expected, rel=1e-5)
