"""BERT checkpoints on disk: Hugging Face's folders and hub ids, and files of our own.

The heads of a loaded model are those that the checkpoint holds. transformers is not needed.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from model.attention import Attention, auto_attention
from model.bert import BERT
from model.hf import resize_positions
from model.hf_bert import (
    bert_config_from_hf,
    bert_config_to_hf,
    bert_from_hf,
    bert_to_hf,
    heads_of,
    model_type_of,
    plain_state,
)
from model.hf_files import (
    find_model,
    read_config,
    read_own,
    read_weights,
    write_model,
    write_own,
)


def load_bert(
    source: str | os.PathLike,
    *,
    attention: Attention = auto_attention,
    max_seqlen: int | None = None,
    vocab_multiple: int | None = None,
    resid_dropout: float | None = None,
    attn_dropout: float | None = None,
    skip: Sequence[str] = (),
) -> BERT:
    """A BERT with the weights and heads of a checkpoint, in float32 on the CPU, training mode.

    Args:
        source: a folder in Hugging Face's layout, a hub id, or a file that save_bert wrote.
        attention: see BERT.
        max_seqlen: another length of the position table (hf.resize_positions); default as stored.
        vocab_multiple, resid_dropout, attn_dropout: see BERT; default as stored, and 64 for the
            vocab_multiple of a Hugging Face model.
        skip: tensors of a Hugging Face model to leave out, such as the head of another task; see
            bert_from_hf.

    Raises:
        ValueError: the configuration is not one that BERT computes exactly, or the weights do not
            fit it.
        FileNotFoundError, ConnectionError: see hf_files.find_model.
    """
    if Path(source).suffix == ".safetensors":
        config, state = read_own(Path(source), "bert_config", "save_bert")
        # The one form that both kinds of file share: theirs, without padding rows.
        state = bert_to_hf(state, config)
    else:
        folder = find_model(source)
        config, state = bert_config_from_hf(read_config(folder)), read_weights(folder)
        config |= heads_of(plain_state(state, skip), model_type_of(config))
    given = {
        "vocab_multiple": vocab_multiple,
        "resid_dropout": resid_dropout,
        "attn_dropout": attn_dropout,
    }
    config |= {key: value for key, value in given.items() if value is not None}
    state = bert_from_hf(state, config, skip=skip)
    if max_seqlen is not None:
        config["max_seqlen"] = max_seqlen
        offset = config["position_offset"]
        table = state["embeddings.positions.weight"]
        longer = resize_positions(table[offset:], max_seqlen)
        state["embeddings.positions.weight"] = torch.cat([table[:offset], longer])
    model = BERT(**config, attention=attention)
    model.load_state_dict(state)
    return model


def load_bert_into(
    model: BERT, source: str | os.PathLike, *, skip: Sequence[str] = ()
) -> tuple[list[str], list[str]]:
    """Give a model the weights of a checkpoint (load_bert's sources); the start of a fine-tune.

    The position table is resized to the model's max_seqlen; dropouts are the model's. A head that
    only one of the two has stays as the model made it, or is left out.

    Returns:
        Names of the model's tensors that the checkpoint has not, and of its tensors left out.

    Raises:
        ValueError: the checkpoint is of another shape; names all differences. And what load_bert
            raises.
    """
    own = model.config
    loaded = load_bert(
        source, max_seqlen=own["max_seqlen"], vocab_multiple=own["vocab_multiple"], skip=skip
    )
    free = {"resid_dropout", "attn_dropout", "pooler", "mlm_head", "nsp_head"}
    differences = [
        f"{key} is {loaded.config[key]!r} in the checkpoint and {value!r} in the model"
        for key, value in own.items()
        if key not in free and loaded.config[key] != value
    ]
    if differences:
        raise ValueError(
            f"the model must be of the checkpoint's kind: {'; '.join(differences)}; "
            "set the model's configuration to the checkpoint's"
        )
    missing, unexpected = model.load_state_dict(loaded.state_dict(), strict=False)
    return missing, unexpected


def export_bert(model: BERT, folder: str | os.PathLike, *, tokenizer: object | None = None) -> Path:
    """Write a folder that transformers' from_pretrained loads.

    Args:
        model: the BERT (not a wrapper of it).
        folder: made if absent; files of the same names are replaced.
        tokenizer: writes its files by `save_hf(folder)`.

    Returns:
        The folder.
    """
    return write_model(
        folder,
        bert_to_hf(model.state_dict(), model.config),
        {"config.json": bert_config_to_hf(model.config)},
        tokenizer=tokenizer,
        max_seqlen=model.max_seqlen,
    )


def save_bert(model: BERT, path: str | os.PathLike) -> Path:
    """Write one .safetensors file: our state dict, and the configuration in its metadata."""
    return write_own(path, model, "bert_config")
