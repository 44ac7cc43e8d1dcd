"""BERT checkpoints on disk: Hugging Face's folders and hub ids, and files of our own.

The heads of a loaded model are those that the checkpoint holds. transformers is not needed.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from model.attention import Attention, auto_attention
from model.bert import BERT
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
    SavedTokenizer,
    find_model,
    read_config,
    read_own,
    read_weights,
    write_model,
    write_own,
)
from model.state_dicts import extend_table


def read_bert(
    source: str | os.PathLike, *, vocab_multiple: int | None = None, skip: Sequence[str] = ()
) -> tuple[dict, dict[str, Tensor]]:
    """(arguments of BERT, state dict) of what load_bert reads; see there."""
    if Path(source).suffix == ".safetensors":
        config, state = read_own(Path(source), "bert_config", "save_bert")
        # The one form that both kinds of file share: theirs, without padding rows.
        state = bert_to_hf(state, config)
    else:
        folder = find_model(source)
        config, state = bert_config_from_hf(read_config(folder)), read_weights(folder)
        config |= heads_of(plain_state(state, skip), model_type_of(config))
    if vocab_multiple is not None:
        config["vocab_multiple"] = vocab_multiple
    return config, bert_from_hf(state, config, skip=skip)


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
        max_seqlen: another length of the position table, a longer one by repeating it
            (positions.extend_positions); default as stored.
        vocab_multiple, resid_dropout, attn_dropout: see BERT; default as stored, and 64 for the
            vocab_multiple of a Hugging Face model.
        skip: tensors of a Hugging Face model to leave out, such as the head of another task; see
            bert_from_hf.

    Raises:
        ValueError: the configuration is not one that BERT computes exactly, or the weights do not
            fit it.
        FileNotFoundError, ConnectionError: see hf_files.find_model.
    """
    config, state = read_bert(source, vocab_multiple=vocab_multiple, skip=skip)
    dropouts = {"resid_dropout": resid_dropout, "attn_dropout": attn_dropout}
    config |= {key: value for key, value in dropouts.items() if value is not None}
    if max_seqlen is not None:
        config["max_seqlen"] = max_seqlen
        extend_table(state, max_seqlen, offset=config["position_offset"])
    model = BERT(**config, attention=attention)
    model.load_state_dict(state)
    return model


def export_bert(
    model: BERT, folder: str | os.PathLike, *, tokenizer: SavedTokenizer | None = None
) -> Path:
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
