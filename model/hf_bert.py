"""BERT and RoBERTa configurations and tensors in and out of Hugging Face's layout.

Differences from our layout, all undone here:

* query, key and value are three linear layers, one here;
* the embedding and the decoder's bias have vocab_size rows: padding rows are added and trimmed;
* the tied decoder is absent, or a copy of the embedding; so is its bias;
* files of 2018 call the norms' weight and bias gamma and beta.

Whatever a BERT cannot represent exactly is refused with the reason. Files: bert_files.py.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from model.bert import BERT
from model.state_dicts import TOKEN_TABLE, check_keys, pad_rows, strip_prefixes

# Ours -> theirs, without .weight and .bias; several are concatenated. {} is the block.
_EMBEDDINGS = {
    "embeddings.tokens": ["embeddings.word_embeddings"],
    "embeddings.positions": ["embeddings.position_embeddings"],
    "embeddings.segments": ["embeddings.token_type_embeddings"],
    "embeddings.norm": ["embeddings.LayerNorm"],
}
_BLOCK = {
    "blocks.{}.qkv": [
        f"encoder.layer.{{}}.attention.self.{name}" for name in ("query", "key", "value")
    ],
    "blocks.{}.out": ["encoder.layer.{}.attention.output.dense"],
    "blocks.{}.norm1": ["encoder.layer.{}.attention.output.LayerNorm"],
    "blocks.{}.mlp.up": ["encoder.layer.{}.intermediate.dense"],
    "blocks.{}.mlp.down": ["encoder.layer.{}.output.dense"],
    "blocks.{}.norm2": ["encoder.layer.{}.output.LayerNorm"],
}
_HEADS = {
    "bert": {
        "pooler": ["pooler.dense"],
        "mlm.transform": ["cls.predictions.transform.dense"],
        "mlm.norm": ["cls.predictions.transform.LayerNorm"],
        "mlm": ["cls.predictions"],
        "nsp": ["cls.seq_relationship"],
    },
    "roberta": {
        "pooler": ["pooler.dense"],
        "mlm.transform": ["lm_head.dense"],
        "mlm.norm": ["lm_head.layer_norm"],
        "mlm": ["lm_head"],
    },
}
# Our option -> a tensor that a checkpoint with that head holds, by model_type.
_HEAD_MARKS = {
    "bert": {
        "pooler": "pooler.dense.weight",
        "mlm_head": "cls.predictions.bias",
        "nsp_head": "cls.seq_relationship.weight",
    },
    "roberta": {"pooler": "pooler.dense.weight", "mlm_head": "lm_head.bias"},
}
_DECODER = {"bert": "cls.predictions.decoder", "roberta": "lm_head.decoder"}
_PREFIXES = ("_orig_mod.", "module.", "model.", "bert.", "roberta.")
_BUFFERS = ("embeddings.position_ids", "embeddings.token_type_ids")
# What config.json may leave out, where the two model types differ.
_DEFAULTS = {
    "bert": {"vocab_size": 30522, "pad_token_id": 0},
    "roberta": {"vocab_size": 50265, "pad_token_id": 1},
}
PADDED_ROWS = (TOKEN_TABLE, "mlm.bias")  # a row a token, then padding rows
_HEAD_OPTIONS = ("pooler", "mlm_head", "nsp_head")


def model_type_of(config: dict) -> str:
    """ "bert" or "roberta", for a BERT of this configuration."""
    if config["position_offset"] == 0:
        return "bert"
    if config["nsp_head"]:
        raise ValueError(
            "nsp_head must be False where position_offset > 0: RoBERTa has no such head"
        )
    return "roberta"


def _key_map(config: dict) -> dict[str, list[str]]:
    """Our keys -> theirs, for the tensors that a BERT of this configuration has."""
    modules = {**_EMBEDDINGS, **_HEADS[model_type_of(config)]}
    for i in range(config["depth"]):
        modules |= {a.format(i): [b.format(i) for b in theirs] for a, theirs in _BLOCK.items()}
    keys = {}
    for key in _shapes(config):
        module, _, kind = key.rpartition(".")
        keys[key] = [f"{theirs}.{kind}" for theirs in modules[module]]
    return keys


def _shapes(config: dict) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        model = BERT(**config)
    return {key: tuple(value.shape) for key, value in model.state_dict().items()}


def bert_config_to_hf(config: dict) -> dict:
    """BERT.config -> the content of config.json.

    Raises:
        ValueError: an NSP head beside RoBERTa's positions.
    """
    model_type = model_type_of(config)
    heads = (config["mlm_head"], config["nsp_head"])
    architecture = {
        ("bert", True, True): "BertForPreTraining",
        ("bert", True, False): "BertForMaskedLM",
        ("bert", False, True): "BertForNextSentencePrediction",
        ("bert", False, False): "BertModel",
        ("roberta", True, False): "RobertaForMaskedLM",
        ("roberta", False, False): "RobertaModel",
    }[model_type, *heads]
    special = {"pad_token_id": 0}
    if model_type == "roberta":
        special = {"bos_token_id": 0, "eos_token_id": 2}
        special["pad_token_id"] = config["position_offset"] - 1
    return {
        "architectures": [architecture],
        "attention_probs_dropout_prob": config["attn_dropout"],
        "dtype": "float32",
        "hidden_act": "gelu",
        "hidden_dropout_prob": config["resid_dropout"],
        "hidden_size": config["dim"],
        "initializer_range": 0.02,
        "intermediate_size": config["mlp_dim"],
        "layer_norm_eps": config["norm_eps"],
        "max_position_embeddings": config["max_seqlen"] + config["position_offset"],
        "model_type": model_type,
        "num_attention_heads": config["nheads"],
        "num_hidden_layers": config["depth"],
        "position_embedding_type": "absolute",
        "tie_word_embeddings": True,
        "type_vocab_size": config["num_segments"],
        "vocab_size": config["vocab_size"],
        **special,
    }


def bert_config_from_hf(hf_config: dict) -> dict:
    """The content of a BERT or RoBERTa config.json -> arguments of BERT, all but attention.

    The heads are those of pre-training: load_bert goes by the weights instead.

    Raises:
        ValueError: the configuration is not one that BERT computes exactly.
    """
    model_type = hf_config.get("model_type")
    if model_type not in _DEFAULTS:
        raise ValueError(f"config.json: model_type must be 'bert' or 'roberta', got {model_type!r}")

    def get(key: str, default: Any) -> Any:
        value = hf_config.get(key, default)
        return default if value is None else value

    served = {
        "hidden_act": ("gelu", "the MLP uses the exact GELU"),
        "position_embedding_type": ("absolute", "positions are added to the tokens"),
        "is_decoder": (False, "every token sees every other"),
        "add_cross_attention": (False, "there is no second sequence"),
        "tie_word_embeddings": (True, "the decoder is the token embedding"),
    }
    for key, (value, reason) in served.items():
        if get(key, value) != value:
            raise ValueError(
                f"config.json: {key} must be {value!r}, got {hf_config[key]!r}: {reason}"
            )
    defaults = _DEFAULTS[model_type]
    offset = 0
    if model_type == "roberta":
        offset = get("pad_token_id", defaults["pad_token_id"]) + 1
    return {
        "vocab_size": get("vocab_size", defaults["vocab_size"]),
        "max_seqlen": get("max_position_embeddings", 512) - offset,
        "depth": get("num_hidden_layers", 12),
        "dim": get("hidden_size", 768),
        "nheads": get("num_attention_heads", 12),
        "mlp_dim": get("intermediate_size", 3072),
        "num_segments": get("type_vocab_size", 2),
        "position_offset": offset,
        "norm_eps": get("layer_norm_eps", 1e-12),
        "resid_dropout": get("hidden_dropout_prob", 0.1),
        "attn_dropout": get("attention_probs_dropout_prob", 0.1),
        "pooler": True,
        "mlm_head": True,
        "nsp_head": model_type == "bert",
        "vocab_multiple": 64,
    }


def bert_to_hf(state: dict[str, Tensor], config: dict) -> dict[str, Tensor]:
    """State dict of a BERT (wrappers' prefixes allowed) -> tensors of transformers' class for it.

    Raises:
        ValueError: keys are missing, unexpected or of another shape.
    """
    state = strip_prefixes(state, _PREFIXES[:3])
    check_keys(state, _shapes(config), "the weights")
    prefix = ""
    if config["mlm_head"] or config["nsp_head"]:  # a bare BertModel's keys have none
        prefix = f"{model_type_of(config)}."
    tensors = {}
    for ours, theirs in _key_map(config).items():
        tensor = state[ours].detach()
        if ours in PADDED_ROWS:
            tensor = tensor[: config["vocab_size"]]
        for name, part in zip(theirs, tensor.chunk(len(theirs)), strict=True):
            is_head = name.startswith(("cls.", "lm_head."))
            # clone: query, key and value must not share memory in a file
            tensors[name if is_head else prefix + name] = part.clone()
    return tensors


def heads_of(state: dict[str, Tensor], model_type: str) -> dict[str, bool]:
    """Which heads plain tensors hold, as arguments of BERT."""
    marks = _HEAD_MARKS[model_type]
    return {option: marks.get(option) in state for option in _HEAD_OPTIONS}


def plain_state(state: dict[str, Tensor], skip: Sequence[str]) -> dict[str, Tensor]:
    """Their tensors without prefixes, buffers, skipped ones and the names of 2018."""
    plain = {}
    for key, tensor in strip_prefixes(state, _PREFIXES).items():
        key = key.replace("LayerNorm.gamma", "LayerNorm.weight")
        key = key.replace("LayerNorm.beta", "LayerNorm.bias")
        if key not in _BUFFERS and not any(key.startswith(prefix) for prefix in skip):
            plain[key] = tensor
    return plain


def bert_from_hf(
    state: dict[str, Tensor], config: dict, *, skip: Sequence[str] = ()
) -> dict[str, Tensor]:
    """Tensors of a BERT or RoBERTa of transformers -> state dict of BERT(**config).

    Args:
        state: their tensors; wrappers' prefixes and position buffers are dropped.
        config: as bert_config_from_hf gives it, its heads those of the tensors.
        skip: what the names of tensors to leave out start with, without "bert." and "roberta.".

    Raises:
        ValueError: keys are missing, unexpected or of another shape, or the decoder is not tied.
    """
    state = plain_state(state, skip)
    model_type = model_type_of(config)
    copies = {
        f"{_DECODER[model_type]}.weight": "embeddings.word_embeddings.weight",
        f"{_DECODER[model_type]}.bias": f"{_HEADS[model_type]['mlm'][0]}.bias",
    }
    for copy, original in copies.items():
        tensor = state.pop(copy, None)
        if tensor is None or original not in state:
            continue
        if not torch.equal(tensor, state[original]):
            raise ValueError(f"{copy} must equal {original} (the decoder is tied), it differs")
    key_map = _key_map(config)
    shapes: dict[str, tuple[int, ...]] = {}
    for ours, shape in _shapes({**config, "vocab_multiple": 1}).items():
        parts = len(key_map[ours])
        shapes |= {theirs: (shape[0] // parts, *shape[1:]) for theirs in key_map[ours]}
    check_keys(state, shapes, "the checkpoint's weights")
    converted = {}
    for ours, theirs in key_map.items():
        tensor = torch.cat([state[name] for name in theirs])
        is_padded = ours in PADDED_ROWS
        converted[ours] = pad_rows(tensor, config["vocab_multiple"]) if is_padded else tensor
    return converted
