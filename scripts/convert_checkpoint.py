"""Turn a run into a Hugging Face model, or a Hugging Face model into a file to fine-tune from.

    python -m scripts.convert_checkpoint to_hf run=NAME_OR_FOLDER_OR_CKPT out=FOLDER
    python -m scripts.convert_checkpoint from_hf hf=FOLDER_OR_HUB_ID out=FILE.safetensors

GPT-2, BERT and RoBERTa. to_hf writes model.safetensors, config.json, the tokenizer's files and, for
a GPT, generation_config.json: transformers' from_pretrained and pipeline take the folder. from_hf
writes one file that `python train.py init_from=FILE.safetensors` starts from (init_from takes the
folder or id, too).
"""

import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.tokenizer import TOKENIZER_NAMES, load_tokenizer
from data.wordpiece import BERT_UNCASED
from model.bert import BERT
from model.bert_files import export_bert, load_bert, save_bert
from model.checkpoint import load_run
from model.gpt import GPT
from model.hf import export_gpt2, load_gpt2, save_weights
from model.hf_files import SavedTokenizer, find_model, read_config
from scripts.arguments import fail, option, parse_arguments

_TOKENIZER_FILES = (
    *("tokenizer_config.json", "tokenizer.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "vocab.txt"),
)


@dataclass
class ToHF:
    run: str = option("a run: its name, folder or .ckpt file")
    out: str = option("folder to write")
    which: str = option("checkpoint of the run: best or last", default="best")
    tokenizer: str | None = option(
        f"{', '.join(TOKENIZER_NAMES)} or a folder to copy its files from; auto: of the model's "
        "kind; none: no files",
        default="auto",
    )
    overwrite: bool = option("replace a model that is already there", default=False)


@dataclass
class FromHF:
    hf: str = option("a GPT-2, BERT or RoBERTa folder or hub id")
    out: str = option(".safetensors file to write")
    max_seqlen: int | None = option("repeat the position table to this length", default=None)
    overwrite: bool = option("replace a file that is already there", default=False)


@dataclass
class TokenizerFolder:
    """The tokenizer of another Hugging Face model, whose files go along."""

    folder: Path
    eot: int | None = None  # which token ends a text, its files say

    def __post_init__(self) -> None:
        if not (self.folder / "tokenizer_config.json").is_file():
            raise FileNotFoundError(
                f"tokenizer must be {', '.join(TOKENIZER_NAMES)}, auto, none or a folder with "
                f"tokenizer_config.json, got {self.folder}"
            )

    def save_hf(self, folder: Path) -> None:
        for name in _TOKENIZER_FILES:
            if (self.folder / name).is_file():
                shutil.copyfile(self.folder / name, folder / name)


def to_hf(options: ToHF) -> str:
    """Convert; returns a line that says what was written."""
    folder = Path(options.out)
    _refuse_existing(folder / "config.json", options.overwrite)
    model, _ = load_run(options.run, which=options.which, kinds=("GPT", "BERT"))
    tokenizer = _tokenizer_of(options.tokenizer, model)
    if isinstance(model, BERT):
        export_bert(model, folder, tokenizer=tokenizer)
    else:
        export_gpt2(model, folder, tokenizer=tokenizer)
    kind = read_config(folder)["architectures"][0]
    return f"{folder}: {kind} of {model.num_params():,} parameters, loads with from_pretrained"


def _tokenizer_of(name: str | None, model: GPT | BERT) -> SavedTokenizer | None:
    """What writes the tokenizer's files, or None."""
    if name is None:
        return None
    if name == "auto":
        name = BERT_UNCASED if isinstance(model, BERT) else "gpt2"
    elif name not in TOKENIZER_NAMES:
        return TokenizerFolder(Path(name))
    tokenizer = load_tokenizer(name)
    if tokenizer.vocab_size != model.vocab_size:
        raise ValueError(
            f"the model's vocabulary must be the {tokenizer.vocab_size} tokens of {name}, got "
            f"{model.vocab_size}; pass tokenizer=FOLDER with the files of its own one, or "
            "tokenizer=none to write the model alone"
        )
    return tokenizer


def from_hf(options: FromHF) -> str:
    """Convert; returns a line that says what was written."""
    path = Path(options.out)
    _refuse_existing(path, options.overwrite)
    folder = find_model(options.hf)
    model: GPT | BERT
    if read_config(folder).get("model_type") == "gpt2":
        model = load_gpt2(folder, max_seqlen=options.max_seqlen)
        save_weights(model, path)
    else:
        model = load_bert(folder, max_seqlen=options.max_seqlen)
        save_bert(model, path)
    return f"{path}: {model.num_params():,} parameters; python train.py init_from={path}"


def _refuse_existing(path: Path, overwrite: bool) -> None:
    if path.exists() and not overwrite:
        raise ValueError(f"{path} must not exist yet; pass overwrite=true to replace it")


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    verbs: dict[str, tuple[type, Callable[[Any], str]]] = {
        "to_hf": (ToHF, to_hf),
        "from_hf": (FromHF, from_hf),
    }
    verb, *rest = arguments or ["--help"]
    if verb in ("-h", "--help", "help"):
        print(__doc__.strip() + "\n\nto_hf --help and from_hf --help list the options.")
        return
    if verb not in verbs:
        fail(f"the first word must be to_hf or from_hf, got {verb!r}; see --help")
    options, convert = verbs[verb]
    try:
        print(convert(parse_arguments(options, rest, __doc__)))
    except (ValueError, OSError) as error:
        fail(str(error))


if __name__ == "__main__":
    main()
