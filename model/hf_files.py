"""Files of a Hugging Face model: reading a folder or a hub id, writing without half-files.

Nothing here knows an architecture; hf.py maps names and shapes.
"""

import json
import os
import re
from pathlib import Path
from typing import Protocol

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

CONFIG = "config.json"
# In the order of preference: safetensors before pickles, one file before shards.
_WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


class SavedTokenizer(Protocol):
    """What a model's folder gets its tokenizer from; data.tokenizer has one."""

    @property
    def eot(self) -> int | None:
        """What ends a text; None where the files say it."""

    def save_hf(self, folder: Path) -> None:
        """Write the files of Hugging Face."""


def find_model(source: str | os.PathLike) -> Path:
    """The folder of a model: `source` itself, or a hub id downloaded to the hub's cache.

    Raises:
        FileNotFoundError: there is no such folder, or it (or the hub's repository) has no
            config.json or no weights.
        ConnectionError: `source` is no folder, and the hub is out of reach or does not know it.
    """
    folder = Path(source)
    if folder.is_dir():
        missing = [] if (folder / CONFIG).is_file() else [CONFIG]
        if not any((folder / name).is_file() for name in _WEIGHTS):
            missing.append(" or ".join(_WEIGHTS))
        if missing:
            raise FileNotFoundError(f"{folder} must hold {' and '.join(missing)}")
        return folder
    if not _HUB_ID.fullmatch(os.fspath(source)):
        raise FileNotFoundError(
            f"no model folder at {source}; pass a folder or owner/name of the hub"
        )
    return _download(os.fspath(source))


def _download(model_id: str) -> Path:
    # Imported on use: a local folder needs no hub.
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    def download(name: str) -> Path | None:
        try:
            return Path(hf_hub_download(model_id, name))
        except LocalEntryNotFoundError as error:  # an EntryNotFoundError that means: no network
            raise _unreachable(model_id, error) from error
        except EntryNotFoundError:
            return None
        except Exception as error:  # no such model, bad id, or the HTTP client's own errors
            raise _unreachable(model_id, error) from error

    config = download(CONFIG)
    if config is None:
        raise FileNotFoundError(f"the hub's {model_id} must hold {CONFIG}")
    for name in _WEIGHTS:
        if weights := download(name):
            if name.endswith(".index.json"):
                for shard in _shards(weights):
                    download(shard)
            return config.parent
    raise FileNotFoundError(f"the hub's {model_id} must hold {' or '.join(_WEIGHTS)}")


def _unreachable(model_id: str, error: Exception) -> ConnectionError:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
    return ConnectionError(
        f"{model_id!r} must be a local folder or a model of the Hugging Face hub; it is no folder, "
        f"and the hub gave: {reason}. Check the name, or download the model where there is a "
        "network and pass its folder"
    )


def read_config(folder: Path) -> dict:
    """The content of config.json."""
    return json.loads((folder / CONFIG).read_text())


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a model's folder, on the CPU, in its stored dtype.

    Pickles are read with weights_only=True: tensors load, code does not run.

    Raises:
        FileNotFoundError: no weights, or a shard of the index is missing.
        ValueError: a file is damaged, or a pickle holds more than tensors.
    """
    name = next((name for name in _WEIGHTS if (folder / name).is_file()), None)
    if name is None:
        raise FileNotFoundError(f"{folder} must hold {' or '.join(_WEIGHTS)}")
    if not name.endswith(".index.json"):
        return _read_file(folder / name)
    shards = _shards(folder / name)
    if missing := [shard for shard in shards if not (folder / shard).is_file()]:
        raise FileNotFoundError(f"{folder} must hold the shards {', '.join(missing)} of {name}")
    state = {}
    for shard in shards:
        state.update(_read_file(folder / shard))
    return state


def _shards(index: Path) -> list[str]:
    names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    if strange := [name for name in names if Path(name).name != name]:
        raise ValueError(f"{index}: shards must lie beside the index, got {strange[0]}")
    return names


def _read_file(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            return safetensors.torch.load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # of the archive, the pickle or the tensors: any
        raise ValueError(f"{path} must hold tensors and nothing else: {error}") from error


def write_model(
    folder: str | os.PathLike,
    tensors: dict[str, Tensor],
    configs: dict[str, dict],
    *,
    tokenizer: SavedTokenizer | None,
    max_seqlen: int,
) -> Path:
    """Write a model's folder, config.json after the weights.

    Args:
        folder: made if absent; files of the same names are replaced.
        tensors: of model.safetensors; config.json gets their dtype.
        configs: content of each .json file by its name, config.json among them.
        tokenizer: writes its files by `save_hf(folder)`; its model_max_length becomes max_seqlen.

    Returns:
        The folder.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {key: tensor.cpu() for key, tensor in tensors.items()}
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    write_file(
        folder / "model.safetensors", safetensors.torch.save(tensors, metadata={"format": "pt"})
    )
    for name, content in {**configs, CONFIG: {**configs[CONFIG], "dtype": dtype}}.items():
        write_file(folder / name, (json.dumps(content, indent=2) + "\n").encode())
    if tokenizer is not None:
        tokenizer.save_hf(folder)
        path = folder / "tokenizer_config.json"
        settings = {**json.loads(path.read_text()), "model_max_length": max_seqlen}
        write_file(path, (json.dumps(settings, indent=2) + "\n").encode())
    return folder


def write_own(path: str | os.PathLike, model: nn.Module, config_key: str) -> Path:
    """One .safetensors file: the model's state dict, and its `config` in the metadata.

    Raises:
        ValueError: the file's name does not end in .safetensors.
    """
    path = Path(path)
    if path.suffix != ".safetensors":
        raise ValueError(f"the file's name must end in .safetensors, got {path.name}")
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {key: tensor.detach().cpu().contiguous() for key, tensor in model.state_dict().items()}
    metadata = {config_key: json.dumps(model.config)}
    write_file(path, safetensors.torch.save(state, metadata=metadata))
    return path


def read_own(path: Path, config_key: str, writer: str) -> tuple[dict, dict[str, Tensor]]:
    """(configuration, state dict) of a file that write_own wrote; `writer` is named in errors.

    Raises:
        FileNotFoundError, ValueError: no such file, or it carries no configuration.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} must be a file that {writer} wrote; there is none")
    state = _read_file(path)
    with safetensors.safe_open(path, "pt") as file:
        config = (file.metadata() or {}).get(config_key)
    if config is None:
        raise ValueError(
            f"{path} must carry {config_key} in its metadata, as {writer} writes it; pass the "
            "folder of a Hugging Face model instead of its file"
        )
    return json.loads(config), state


def write_file(path: Path, content: bytes) -> None:
    """Write under a temporary name beside `path`, flush, rename: never half a file."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
