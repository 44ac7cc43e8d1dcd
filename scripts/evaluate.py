"""Measure a GPT on held-out text and on published tasks.

    python -m scripts.evaluate perplexity run=NAME [source=SOURCE] [context=1024,2048] [...]
    python -m scripts.evaluate wikitext   hf=FOLDER_OR_HUB_ID [source=FILE] [key=value ...]
    python -m scripts.evaluate lambada    hf=FOLDER_OR_HUB_ID [source=FILE] [key=value ...]
    python -m scripts.evaluate hellaswag  hf=FOLDER_OR_HUB_ID [source=FILE] [key=value ...]

Every context length scores the same tokens, by windows that move by `stride`: what differs is how
much of the text a prediction sees. With a stride as long as the context the windows are those of a
run's validation, but for the last, which lies at the end. wikitext, lambada and hellaswag are read
from the hub, or from a file with the same rows, and prepared and scored as lm-evaluation-harness
does; it gives openai-community/gpt2 28.92 % of HellaSwag, 31.14 % per character, and a perplexity
of about 40 on LAMBADA. The record goes to outputs/evaluate/.
"""

import dataclasses
import math
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TimeRemainingColumn

from data.completions import Completion, encode, read_hellaswag, read_lambada
from model.classification_task import accuracy_interval
from model.evaluation import extend_context, score_endings, text_losses
from model.gpt import GPT
from model.positions import EXTENSIONS
from scripts.arguments import fail, option, parse_arguments
from scripts.held_out_text import (
    PerplexityOptions,
    Text,
    TextOptions,
    WikiTextOptions,
    open_text,
    open_wikitext,
)
from scripts.models import ModelOptions, open_model
from scripts.records import make_record, write_record


@dataclass
class TaskOptions(ModelOptions):
    source: str = option("hf (the hub) or a .jsonl or .parquet file with its rows", default="hf")
    limit: int | None = option("use only so many examples", default=None)
    batch_tokens: int = option("tokens of one forward pass", default=16384)
    out: str | None = option("record to write; auto: in outputs/evaluate; none", default="auto")


def perplexity(options: PerplexityOptions) -> tuple[list[dict], dict]:
    """Rows, one a context, and what the record says of the text."""
    model, tokenizer, autocast = open_model(options)
    return _text_rows(options, model, autocast, open_text(options, tokenizer), options.skip)


def wikitext(options: WikiTextOptions) -> tuple[list[dict], dict]:
    """As perplexity; words are those of the released files."""
    model, tokenizer, autocast = open_model(options)
    text = open_wikitext(options, tokenizer)
    return _text_rows(options, model, autocast, text, 0)


def _text_rows(
    options: TextOptions, model: GPT, autocast: torch.autocast, text: Text, skip: int
) -> tuple[list[dict], dict]:
    if skip < 0:
        raise ValueError(f"skip must not be negative, got {skip}")
    contexts = _contexts(options, model)
    if options.extend_positions is not None:
        if options.extend_positions not in EXTENSIONS:
            raise ValueError(
                f"extend_positions must be {' or '.join(EXTENSIONS)} or none, got "
                f"{options.extend_positions!r}"
            )
        extend_context(model, max(contexts), options.extend_positions)
    elif max(contexts) > model.max_seqlen:
        raise ValueError(
            f"context={max(contexts)} is longer than the model's {model.max_seqlen} positions; "
            "shorten it, or set extend_positions=tile"
        )
    num_targets = sum(max(0, len(document) - 1 - skip) for document in text.documents)
    rows = []
    for context in contexts:
        stride = max(1, context // 2) if options.stride is None else options.stride
        start = time.perf_counter()
        with progress(f"context {context:,}", num_targets) as advance, autocast:
            losses = text_losses(
                model,
                text.documents,
                context=context,
                stride=stride,
                skip=skip,
                batch_tokens=options.batch_tokens,
                on_tokens=advance,
            )
        row = {
            "model": model_name(options),
            "seqlen": context,
            "stride": stride,
            "tokens": losses.num_tokens,
            "loss": losses.nll / losses.num_tokens,
            "same_target_ppl": _exp(losses.nll / losses.num_tokens),
            "word_ppl": _exp(losses.nll / text.num_words),
            "bits_per_byte": losses.nll / math.log(2.0) / text.num_bytes,
            "seconds": time.perf_counter() - start,
        }
        rows.append(row)
        print(
            f"context {context:,}, stride {stride:,}: perplexity {row['same_target_ppl']:.2f} of "
            f"{losses.num_tokens:,} tokens, {row['word_ppl']:.2f} a word of {text.num_words:,}, "
            f"{row['bits_per_byte']:.4f} bits a byte ({row['seconds']:.1f} s)"
        )
    facts = {"text": text.name, "documents": len(text.documents), **text.facts}
    return rows, {**facts, "words": text.num_words, "bytes": text.num_bytes}


def _exp(nats: float) -> float:
    """e ** nats, infinite where a float does not reach."""
    return math.exp(nats) if nats < 700.0 else math.inf


def _contexts(options: TextOptions, model: GPT) -> list[int]:
    if options.context is None:
        return [model.max_seqlen]
    lengths = options.context.split(",")
    if not all(length.isdigit() and int(length) > 0 for length in lengths):
        raise ValueError(f"context must be lengths like 1024,2048, got {options.context!r}")
    return [int(length) for length in lengths]


def lambada(options: TaskOptions) -> tuple[list[dict], dict]:
    """One row: how often the last word is the likeliest, and its perplexity."""
    completions, scores, seconds = _scores(options, read_lambada)
    accuracy = sum(score.is_greedy for (score,) in scores) / len(scores)
    row = {
        "task": "lambada",
        "model": model_name(options),
        "accuracy": accuracy,
        "ci95": accuracy_interval(accuracy, len(scores)),
        "ppl": _exp(sum(score.nll for (score,) in scores) / len(scores)),
        "num_examples": len(scores),
        "seconds": seconds,
    }
    print(
        f"LAMBADA, {len(scores):,} passages: accuracy of the last word {accuracy:.2%} +- "
        f"{row['ci95']:.2%} (95 %), its perplexity {row['ppl']:.2f}"
    )
    return [row], {}


def hellaswag(options: TaskOptions) -> tuple[list[dict], dict]:
    """One row: how often the right ending is the likeliest, as it is and per character."""
    completions, scores, seconds = _scores(options, read_hellaswag)
    correct = correct_norm = 0
    for completion, endings in zip(completions, scores, strict=True):
        nlls = np.array([score.nll for score in endings])
        # An ending's length is without the space before it.
        lengths = np.array([len(ending) - 1 for ending in completion.endings])
        correct += int(nlls.argmin()) == completion.label
        correct_norm += int((nlls / lengths.clip(min=1)).argmin()) == completion.label
    accuracy, accuracy_norm = correct / len(scores), correct_norm / len(scores)
    row = {
        "task": "hellaswag",
        "model": model_name(options),
        "accuracy": accuracy,
        "ci95": accuracy_interval(accuracy, len(scores)),
        "accuracy_norm": accuracy_norm,
        "ci95_norm": accuracy_interval(accuracy_norm, len(scores)),
        "num_examples": len(scores),
        "seconds": seconds,
    }
    print(
        f"HellaSwag, {len(scores):,} contexts: accuracy {accuracy:.2%} +- {row['ci95']:.2%}, by "
        f"likelihood per character {accuracy_norm:.2%} +- {row['ci95_norm']:.2%} (95 %)"
    )
    return [row], {}


def _scores(
    options: TaskOptions, read: Callable[[str], Iterator[Completion]]
) -> tuple[list, list, float]:
    """Completions, the scores of their endings, and seconds."""
    model, tokenizer, autocast = open_model(options)
    completions = []
    for completion in read(options.source):
        completions.append(completion)
        if len(completions) == options.limit:
            break
    if not completions:
        raise ValueError(f"{options.source} must hold examples, got none")
    encoded = [encode(tokenizer, completion) for completion in completions]
    texts = [ending for endings in encoded for ending in endings]
    start = time.perf_counter()
    with progress("endings", len(texts)) as advance, autocast:
        flat = score_endings(model, texts, batch_tokens=options.batch_tokens, on_texts=advance)
    seconds = time.perf_counter() - start
    scores = iter(flat)
    return completions, [[next(scores) for _ in endings] for endings in encoded], seconds


@contextmanager
def progress(name: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr, if that is a terminal; gives the function that advances it."""
    columns = (name, BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    disable = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=disable) as bar:
        task = bar.add_task(name, total=total)
        yield lambda number: bar.advance(task, number)


def model_name(options: ModelOptions) -> str:
    """What a record calls the model: a name or hub id, never a path."""
    name = options.run or options.hf or ""
    return Path(name).name if Path(name).exists() else name


VERBS: dict[str, tuple[type, Callable[[Any], tuple[list[dict], dict]]]] = {
    "perplexity": (PerplexityOptions, perplexity),
    "wikitext": (WikiTextOptions, wikitext),
    "lambada": (TaskOptions, lambada),
    "hellaswag": (TaskOptions, hellaswag),
}


def evaluate(verb: str, options: TextOptions | TaskOptions) -> dict:
    """Measure, write the record, return it."""
    rows, facts = VERBS[verb][1](options)
    hidden = ("run", "hf", "source", "root", "out")
    settings = {k: v for k, v in dataclasses.asdict(options).items() if k not in hidden} | facts
    record = make_record("evaluate", rows, settings, omit="out", name=f"evaluate_{verb}")
    if options.out is not None:
        slug = re.sub(r"[^A-Za-z0-9._-]+", "-", model_name(options))
        auto = Path("outputs/evaluate") / f"{verb}-{slug}.json"
        path = auto if options.out == "auto" else Path(options.out)
        write_record(path, record)
        print(f"record: {path}")
    return record


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    verb, *rest = arguments or ["--help"]
    if verb in ("-h", "--help", "help"):
        print(__doc__.strip() + "\n\nperplexity --help and the others list their options.")
        return
    if verb not in VERBS:
        fail(f"the first word must be one of {', '.join(VERBS)}, got {verb!r}; see --help")
    try:
        evaluate(verb, parse_arguments(VERBS[verb][0], rest, __doc__))
    except (ValueError, OSError) as error:
        fail(" ".join(str(error).split()))


if __name__ == "__main__":
    main()
