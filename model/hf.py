"""GPT-2 weights in and out of Hugging Face's layout, without transformers.

A GPT-2 folder is config.json, generation_config.json and model.safetensors (or its shards, or
pytorch_model.bin). Differences from our layout, all undone here:

* linear weights are stored (in, out), Conv1D style: transposed;
* the embedding has vocab_size rows: padding rows are added on import and trimmed on export;
* the tied lm_head is absent, or a copy of the embedding.

Whatever a GPT cannot represent exactly is refused with the reason.
"""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model.attention import Attention, auto_attention
from model.gpt import GPT
from model.hf_files import (
    SavedTokenizer,
    find_model,
    read_config,
    read_own,
    read_weights,
    write_model,
    write_own,
)
from model.state_dicts import (
    POSITION_TABLE,
    TOKEN_TABLE,
    check_keys,
    extend_table,
    pad_rows,
    strip_prefixes,
)

# Ours -> theirs; {} is the block. True: Conv1D, stored transposed.
_BLOCK_KEYS = {
    "norm1.weight": ("ln_1.weight", False),
    "norm1.bias": ("ln_1.bias", False),
    "attention.qkv.weight": ("attn.c_attn.weight", True),
    "attention.qkv.bias": ("attn.c_attn.bias", False),
    "attention.out.weight": ("attn.c_proj.weight", True),
    "attention.out.bias": ("attn.c_proj.bias", False),
    "norm2.weight": ("ln_2.weight", False),
    "norm2.bias": ("ln_2.bias", False),
    "mlp.up.weight": ("mlp.c_fc.weight", True),
    "mlp.up.bias": ("mlp.c_fc.bias", False),
    "mlp.down.weight": ("mlp.c_proj.weight", True),
    "mlp.down.bias": ("mlp.c_proj.bias", False),
}
_TOP_KEYS = {
    TOKEN_TABLE: ("wte.weight", False),
    POSITION_TABLE: ("wpe.weight", False),
    "norm.weight": ("ln_f.weight", False),
    "norm.bias": ("ln_f.bias", False),
}
_TANH_GELUS = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
_GPT2_EOT = 50256


def _key_map(depth: int) -> dict[str, tuple[str, bool]]:
    blocks = {
        f"blocks.{i}.{ours}": (f"h.{i}.{theirs}", transposed)
        for i in range(depth)
        for ours, (theirs, transposed) in _BLOCK_KEYS.items()
    }
    return {**_TOP_KEYS, **blocks}


def _shapes(config: dict, *, padded: bool) -> dict[str, tuple[int, ...]]:
    """Our keys and shapes for a GPT of this configuration."""
    with torch.device("meta"):
        model = GPT(**(config if padded else {**config, "vocab_multiple": 1}))
    return {key: tuple(value.shape) for key, value in model.state_dict().items()}


def config_to_hf(config: dict, *, eos_id: int | None = None) -> dict:
    """GPT.config -> the content of config.json.

    eos_id: token that ends a text; default 50256 for GPT-2's vocabulary, none for another.
    """
    if eos_id is None and config["vocab_size"] == _GPT2_EOT + 1:
        eos_id = _GPT2_EOT
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "attn_pdrop": config["attn_dropout"],
        "bos_token_id": eos_id,
        "dtype": "float32",
        "embd_pdrop": config["embd_dropout"],
        "eos_token_id": eos_id,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-5,
        "n_embd": config["dim"],
        "n_head": config["nheads"],
        "n_inner": None,
        "n_layer": config["depth"],
        "n_positions": config["max_seqlen"],
        "reorder_and_upcast_attn": False,
        "resid_pdrop": config["resid_dropout"],
        "scale_attn_by_inverse_layer_idx": config["inverse_layer_scale"],
        "scale_attn_weights": True,
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": config["vocab_size"],
    }


def config_from_hf(hf_config: dict) -> dict:
    """The content of a GPT-2 config.json -> arguments of GPT, all but attention.

    Raises:
        ValueError: the configuration is not one that GPT computes exactly.
    """

    def get(key: str, default: Any) -> Any:
        value = hf_config.get(key, default)
        return default if value is None else value

    dim = get("n_embd", 768)
    refused = {
        "model_type": (get("model_type", None), ("gpt2",), "only GPT-2 is converted here"),
        "activation_function": (
            get("activation_function", "gelu_new"),
            _TANH_GELUS,
            "the MLP uses the tanh approximation of GELU",
        ),
        "n_inner": (get("n_inner", 4 * dim), (4 * dim,), "the MLP is four times as wide as n_embd"),
        "layer_norm_epsilon": (get("layer_norm_epsilon", 1e-5), (1e-5,), "the norms use 1e-5"),
        "scale_attn_weights": (
            get("scale_attn_weights", True),
            (True,),
            "scores are divided by the square root of the head size",
        ),
        "add_cross_attention": (get("add_cross_attention", False), (False,), "it has no encoder"),
        "tie_word_embeddings": (
            get("tie_word_embeddings", True),
            (True,),
            "the head is the token embedding",
        ),
    }
    for key, (value, served, reason) in refused.items():
        if value not in served:
            raise ValueError(f"config.json: {key} must be {served[0]!r}, got {value!r}: {reason}")
    return {
        "vocab_size": get("vocab_size", 50257),
        "max_seqlen": get("n_positions", 1024),
        "depth": get("n_layer", 12),
        "dim": dim,
        "nheads": get("n_head", 12),
        "vocab_multiple": 128,
        "embd_dropout": get("embd_pdrop", 0.1),
        "resid_dropout": get("resid_pdrop", 0.1),
        "attn_dropout": get("attn_pdrop", 0.1),
        "inverse_layer_scale": get("scale_attn_by_inverse_layer_idx", False),
        "bias": True,
    }


def to_hf(state: dict[str, Tensor], config: dict) -> dict[str, Tensor]:
    """State dict of a GPT (wrappers' prefixes allowed) -> tensors of GPT2LMHeadModel.

    The result is contiguous, in the dtype of the state, under `transformer.*` keys. A model without
    biases exports zeros for them.

    Raises:
        ValueError: keys are missing, unexpected or of another shape.
    """
    state = strip_prefixes(state)
    check_keys(state, _shapes(config, padded=True), "the weights")
    tensors = {}
    for ours, (theirs, transposed) in _key_map(config["depth"]).items():
        if ours in state:
            tensor = state[ours].detach()
        else:  # bias=False: a bias as long as its layer's output
            weight = state[ours.removesuffix("bias") + "weight"]
            tensor = weight.new_zeros(weight.shape[0])
        if ours == TOKEN_TABLE:
            tensor = tensor[: config["vocab_size"]]
        tensors[f"transformer.{theirs}"] = (tensor.T if transposed else tensor).contiguous()
    return tensors


def from_hf(state: dict[str, Tensor], config: dict) -> dict[str, Tensor]:
    """Tensors of GPT2Model or GPT2LMHeadModel -> state dict of GPT(**config).

    Args:
        state: their tensors; wrappers' prefixes and the causal-mask buffers are dropped.
        config: as config_from_hf gives it; its max_seqlen is the length of the position table.

    Raises:
        ValueError: keys are missing, unexpected or of another shape, or lm_head is not tied.
    """
    state = strip_prefixes(state)
    # Released files carry the causal mask of each block as a buffer.
    buffers = {f"h.{i}.attn.{b}" for i in range(config["depth"]) for b in ("bias", "masked_bias")}
    state = {key: tensor for key, tensor in state.items() if key not in buffers}
    head = state.pop("lm_head.weight", None)
    if head is not None and "wte.weight" in state and not torch.equal(head, state["wte.weight"]):
        raise ValueError("lm_head.weight must equal wte.weight (the head is tied), it differs")
    key_map = _key_map(config["depth"])
    shapes = {
        key_map[ours][0]: shape[::-1] if key_map[ours][1] else shape
        for ours, shape in _shapes(config, padded=False).items()
    }
    check_keys(state, shapes, "the checkpoint's weights")
    converted = {
        ours: state[theirs].T.contiguous() if transposed else state[theirs]
        for ours, (theirs, transposed) in key_map.items()
    }
    converted[TOKEN_TABLE] = pad_rows(converted[TOKEN_TABLE], config["vocab_multiple"])
    return converted


def read_gpt2(source: str | os.PathLike) -> tuple[dict, dict[str, Tensor]]:
    """(arguments of GPT, state dict) of a GPT-2 folder, a hub id or a file of save_weights.

    Raises: see load_gpt2.
    """
    path = Path(source)
    if path.suffix == ".safetensors":
        config, state = read_own(path, "gpt_config", "save_weights")
        check_keys(state, _shapes(config, padded=True), f"the weights of {path}")
        return config, state
    folder = find_model(source)
    config = config_from_hf(read_config(folder))
    return config, from_hf(read_weights(folder), config)


def load_gpt2(
    source: str | os.PathLike,
    *,
    attention: Attention = auto_attention,
    max_seqlen: int | None = None,
    vocab_multiple: int | None = None,
    embd_dropout: float | None = None,
    resid_dropout: float | None = None,
    attn_dropout: float | None = None,
) -> GPT:
    """A GPT with the weights of a GPT-2 checkpoint, in float32 on the CPU, in training mode.

    Args:
        source: a folder in Hugging Face's layout, a hub id, or a file that save_weights wrote.
        attention: see GPT.
        max_seqlen: another length of the position table, a longer one by repeating it
            (positions.extend_positions); default as stored.
        vocab_multiple, embd_dropout, resid_dropout, attn_dropout: see GPT; default as stored, and
            128 for the vocab_multiple of a Hugging Face model.

    Raises:
        ValueError: the configuration is not one that GPT computes exactly, or the weights do not
            fit it.
        FileNotFoundError, ConnectionError: see hf_files.find_model.
    """
    config, state = read_gpt2(source)
    changes = {
        "max_seqlen": max_seqlen,
        "vocab_multiple": vocab_multiple,
        "embd_dropout": embd_dropout,
        "resid_dropout": resid_dropout,
        "attn_dropout": attn_dropout,
    }
    config |= {key: value for key, value in changes.items() if value is not None}
    with torch.device("meta"):
        model = GPT(**config, attention=attention)
    state[TOKEN_TABLE] = pad_rows(
        state[TOKEN_TABLE][: config["vocab_size"]], config["vocab_multiple"]
    )
    extend_table(state, config["max_seqlen"])
    model.to_empty(device="cpu").load_state_dict(state)
    return model


def export_gpt2(
    model: GPT,
    folder: str | os.PathLike,
    *,
    tokenizer: SavedTokenizer | None = None,
    eos_id: int | None = None,
) -> Path:
    """Write a folder that transformers' from_pretrained loads.

    Args:
        model: the GPT (not a wrapper of it).
        folder: made if absent; files of the same names are replaced.
        tokenizer: writes its files by `save_hf(folder)`; its `eot` is the default eos_id, and its
            model_max_length becomes max_seqlen.
        eos_id: token that ends a text; default 50256 for GPT-2's vocabulary, none for another.

    Returns:
        The folder.
    """
    if eos_id is None and tokenizer is not None:
        eos_id = tokenizer.eot
    config = config_to_hf(model.config, eos_id=eos_id)
    generation_config = {key: config[key] for key in ("bos_token_id", "eos_token_id")}
    return write_model(
        folder,
        to_hf(model.state_dict(), model.config),
        {"generation_config.json": generation_config, "config.json": config},
        tokenizer=tokenizer,
        max_seqlen=model.max_seqlen,
    )


def save_weights(model: GPT, path: str | os.PathLike) -> Path:
    """Write one .safetensors file: our state dict, and the configuration in its metadata."""
    return write_own(path, model, "gpt_config")
