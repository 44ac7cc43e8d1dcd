"""Turn a run into a Hugging Face model, or a Hugging Face model into a file to fine-tune from.

    python -m scripts.convert_checkpoint to_hf run=NAME_OR_FOLDER_OR_CKPT out=FOLDER
    python -m scripts.convert_checkpoint from_hf hf=FOLDER_OR_HUB_ID out=FILE.safetensors

to_hf writes model.safetensors, config.json, generation_config.json and the tokenizer's files:
transformers' from_pretrained and pipeline take the folder. from_hf writes one file that
`python train.py init_from=FILE.safetensors` starts from (init_from takes the folder or id, too).
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from data.tokenizer import load_tokenizer
from model.checkpoint import load_run
from model.hf import export_gpt2, load_gpt2, save_weights
from scripts.arguments import fail, option, parse_arguments


@dataclass
class ToHF:
    run: str = option("a run: its name, folder or .ckpt file")
    out: str = option("folder to write")
    which: str = option("checkpoint of the run: best or last", default="best")
    tokenizer: str | None = option("tokenizer of the run; none: no tokenizer files", default="gpt2")
    overwrite: bool = option("replace a model that is already there", default=False)


@dataclass
class FromHF:
    hf: str = option("a GPT-2 folder or hub id")
    out: str = option(".safetensors file to write")
    max_seqlen: int | None = option("repeat the position table to this length", default=None)
    overwrite: bool = option("replace a file that is already there", default=False)


def to_hf(options: ToHF) -> str:
    """Convert; returns a line that says what was written."""
    folder = Path(options.out)
    _refuse_existing(folder / "config.json", options.overwrite)
    tokenizer = None if options.tokenizer is None else load_tokenizer(options.tokenizer)
    model, _ = load_run(options.run, which=options.which, device="cpu")
    if tokenizer is not None and tokenizer.vocab_size != model.vocab_size:
        raise ValueError(
            f"the model's vocabulary must be the tokenizer's {tokenizer.vocab_size} tokens, got "
            f"{model.vocab_size}; pass tokenizer=none to write the model alone"
        )
    export_gpt2(model, folder, tokenizer=tokenizer)
    return f"{folder}: GPT-2 of {model.num_params():,} parameters, loads with from_pretrained"


def from_hf(options: FromHF) -> str:
    """Convert; returns a line that says what was written."""
    path = Path(options.out)
    _refuse_existing(path, options.overwrite)
    model = load_gpt2(options.hf, max_seqlen=options.max_seqlen)
    save_weights(model, path)
    return f"{path}: {model.num_params():,} parameters; python train.py init_from={path}"


def _refuse_existing(path: Path, overwrite: bool) -> None:
    if path.exists() and not overwrite:
        raise ValueError(f"{path} must not exist yet; pass overwrite=true to replace it")


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    verbs = {"to_hf": (ToHF, to_hf), "from_hf": (FromHF, from_hf)}
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
