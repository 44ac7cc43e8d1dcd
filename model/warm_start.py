"""Weights to start from: a run of ours, a file of ours, or a Hugging Face model; GPT and BERT.

Everything that does not fit is listed, by option and by tensor, in one error. Three things may
differ: the length of the position table, the padding of the vocabulary, and BERT's heads.
"""

import os
import re
from pathlib import Path

from torch import Tensor

from model.bert import BERT
from model.bert_files import read_bert
from model.checkpoint import find_checkpoint, read_checkpoint
from model.document_classifier import encoder_part
from model.gpt import GPT
from model.hf import read_gpt2
from model.hf_bert import PADDED_ROWS
from model.state_dicts import extend_table, pad_rows

_RUNS = Path("outputs/runs")
_HEADS = ("pooler.", "mlm.", "nsp.")
# Options of a model that need not be the checkpoint's.
_FREE = {
    *("embd_dropout", "resid_dropout", "attn_dropout"),
    *("max_seqlen", "vocab_multiple", "pooler", "mlm_head", "nsp_head"),
}


def load_into(
    model: GPT | BERT, source: str | os.PathLike, *, how: str = "tile"
) -> tuple[list[str], list[str]]:
    """Give a model the weights of another one of its kind.

    Args:
        model: changed in place; its dropouts and heads are its own.
        source: a run's folder or its name (the best checkpoint), a .ckpt file, a .safetensors file
            of scripts.convert_checkpoint, a folder in Hugging Face's layout, or a hub id. A run
            goes before a hub id of the same name.
        how: what a longer position table is made of; see positions.extend_positions.

    Returns:
        Names of the model's tensors that the source has not, which keep their values, and of the
        source's that the model has not: both of heads only.

    Raises:
        ValueError: the source holds another kind of model, or does not fit; all differences are
            named.
        FileNotFoundError, ConnectionError: there is no such source.
    """
    kind = "BERT" if isinstance(model, BERT) else "GPT"
    config, state = read_weights(source, kind)
    own = model.state_dict()
    shapes = {name: tuple(value.shape) for name, value in own.items()}
    if config["vocab_size"] == model.vocab_size:
        for name in state.keys() & own.keys() & set(PADDED_ROWS):
            state[name] = pad_rows(state[name][: model.vocab_size], shapes[name][0])
    extend_table(state, model.max_seqlen, offset=config.get("position_offset", 0), how=how)

    differences = [
        f"{name} is {config.get(name)!r} in the checkpoint and {value!r} in the model"
        for name, value in model.config.items()
        if name not in _FREE and config.get(name) != value
    ]
    differences += _tensor_differences({n: tuple(t.shape) for n, t in state.items()}, shapes)
    if differences:
        raise ValueError(
            f"{source} must hold a model like the configured one: {'; '.join(differences)}. Set "
            "the model's configuration to the checkpoint's"
        )
    new, left_out = model.load_state_dict(state, strict=False)
    return new, left_out


def read_weights(source: str | os.PathLike, kind: str) -> tuple[dict, dict[str, Tensor]]:
    """(configuration, state dict) of a "GPT" or "BERT" in our layout; see load_into for sources.

    Of a classifier of documents it is the encoder, without its head.
    """
    path = Path(source)
    is_run = path.suffix == ".ckpt" or (path / "checkpoints").is_dir()
    if is_run or (not path.exists() and (_RUNS / path / "checkpoints").is_dir()):
        path = find_checkpoint(source, runs_root=str(_RUNS))
        found, config, state = read_checkpoint(path)
        if kind == "BERT" and found == "document classifier":
            return encoder_part(config, state)
        if found != kind:
            raise ValueError(f"{path} must hold a {kind}, it holds a {found}")
        return config, state
    return read_bert(source) if kind == "BERT" else read_gpt2(source)


def _tensor_differences(
    found: dict[str, tuple[int, ...]], wanted: dict[str, tuple[int, ...]]
) -> list[str]:
    """What differs between the checkpoint's shapes and the model's; equal blocks share a line."""
    lines: dict[str, list[int]] = {}
    for name in sorted(found.keys() | wanted.keys(), key=_in_order):
        if found.get(name) == wanted.get(name):
            continue
        if name.startswith(_HEADS) and (name not in found or name not in wanted):
            continue
        block = re.match(r"blocks\.(\d+)\.", name)
        text = name.replace(block[0], "blocks.{}.", 1) if block else name
        if name not in wanted:
            text += f" {found[name]} is in the checkpoint only"
        elif name not in found:
            text += f" {wanted[name]} is in the model only"
        else:
            text += f" is {found[name]} in the checkpoint and {wanted[name]} in the model"
        lines.setdefault(text, []).extend([int(block[1])] if block else [])
    return [text.format(_range(blocks)) for text, blocks in lines.items()]


def _in_order(name: str) -> list[str | int]:
    """Sorts block 10 after block 9."""
    return [int(part) if part.isdigit() else part for part in name.split(".")]


def _range(blocks: list[int]) -> str:
    """Rising numbers as first-last; "" for none."""
    return "-".join(str(block) for block in sorted({*blocks[:1], *blocks[-1:]}))
