"""What scripts.evaluate scores: held-out documents of a source, or WikiText, as token ids."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from data.prepare import prepare, store_folder
from data.sources import open_source
from data.token_store import TokenStore, is_finished
from data.tokenizer import AnyTokenizer
from data.wikitext import read_wikitext
from model.checkpoint import find_checkpoint
from scripts.arguments import option
from scripts.models import ModelOptions


@dataclass
class TextOptions(ModelOptions):
    context: str | None = option(
        "most tokens that a prediction sees, one length or several: 1024,2048; none: the model's",
        default=None,
    )
    stride: int | None = option(
        "tokens that a window moves by; none: half of its context", default=None
    )
    cross_documents: bool = option(
        "windows run over the ends of documents, as in training; false: each document alone",
        default=True,
    )
    extend_positions: str | None = option(
        "tile or interpolate: makes the positions of a longer context; none: refuses it",
        default=None,
    )
    batch_tokens: int = option("tokens of one forward pass, at least one window", default=16384)
    out: str | None = option("record to write; auto: in outputs/evaluate; none", default="auto")


@dataclass
class PerplexityOptions(TextOptions):
    source: str | None = option(
        "embedded, text files, hf:OWNER/NAME or a prepared store; none: what the run trained on",
        default=None,
    )
    val_fraction: float | None = option(
        "share of the documents that is held out and scored; none: the run's, of another source "
        "all are scored",
        default=None,
    )
    text_field: str = option("of jsonl, parquet and hub data", default="text")
    source_config: str | None = option("of hub data", default=None)
    root: str = option("prepared stores are kept here", default="outputs/data")
    tokens_limit: int | None = option("use only the first so many tokens", default=None)
    skip: int = option("first tokens of each document that are seen, not scored", default=0)


@dataclass
class WikiTextOptions(TextOptions):
    source: str = option(
        "hf (the hub), the release's wiki.test.raw or .tokens, or a .jsonl or .parquet file",
        default="hf",
    )
    source_config: str = option("of the hub", default="wikitext-103-raw-v1")
    split: str = option("of the hub: test or validation", default="test")


@dataclass
class Text:
    """What is scored, from the same tokens at any context.

    Attributes:
        name: what a record calls it.
        documents: (num_tokens,) integers each, an end of text first.
        num_words, num_bytes: of the scored text.
        facts: what else belongs into a record.
    """

    name: str
    documents: list[np.ndarray]
    num_words: int
    num_bytes: int
    facts: dict


def open_text(options: PerplexityOptions, tokenizer: AnyTokenizer) -> Text:
    """The held-out documents that the options name; prepares their store if it is missing."""
    settings: dict[str, Any] = {
        "source": options.source,
        "text_field": options.text_field,
        "source_config": options.source_config,
        "root": options.root,
    }
    trained_on = {} if options.run is None else data_of_run(options.run)
    if options.source is None:
        if not trained_on:
            raise ValueError("source=... is required: what text is to be scored")
        if trained_on.pop("stream_tokens", None):
            raise ValueError(
                "the run read a stream, whose text is not kept: give source=FOLDER, that of the "
                f"stream in {trained_on['root']}, which has what was held out"
            )
        settings |= trained_on
    source, fraction = settings["source"], options.val_fraction
    if fraction is None:
        fraction = trained_on["val_fraction"] if source == trained_on.get("source") else 0.0
    if not source.startswith("hf:") and source != "embedded" and is_finished(source):
        store = TokenStore(source)
        if store.manifest["tokenizer"]["sha256"] != tokenizer.sha256:
            raise ValueError(f"{source} must be tokenized with {tokenizer.name}: prepare it again")
    else:
        opened = open_source(
            source, text_field=settings["text_field"], config=settings["source_config"]
        )
        plan: dict[str, Any] = {"tokenizer": tokenizer, "val_fraction": fraction}
        store = prepare(opened, store_folder(settings["root"], opened, **plan), **plan)
    name = "val" if store.val.num_tokens else "train"
    if trained_on and source == trained_on["source"] and name == "train":
        raise ValueError("the run held nothing out: give source=... with text that it has not seen")
    split = getattr(store, name)
    num_tokens = min(split.num_tokens, options.tokens_limit or split.num_tokens)
    ids = split.read(0, num_tokens)
    pieces = [ids]
    if not options.cross_documents:
        offsets = split.document_offsets()
        pieces = [piece for piece in np.split(ids, offsets[offsets < num_tokens]) if len(piece)]
    scored = [piece[options.skip :] for piece in pieces]
    texts = [tokenizer.decode(piece[piece != tokenizer.eot].tolist()) for piece in scored]
    return Text(
        Path(source).name if Path(source).exists() else source,
        [_after_eot(tokenizer, piece) for piece in pieces],
        max(1, sum(len(text.split()) for text in texts)),
        max(1, sum(len(text.encode()) for text in texts)),
        {
            "split": "held out" if name == "val" else "all",
            "val_fraction": store.manifest["split"]["val_fraction"],
            "store": store.fingerprint,
        },
    )


def data_of_run(run: str) -> dict:
    """Source and split of what a run trained on, from its config.yaml; empty if it has none."""
    path = find_checkpoint(run).resolve().parent.parent / "config.yaml"
    config: Any = OmegaConf.load(path) if path.is_file() else {}
    data = config.get("data", {})
    names = ("source", "val_fraction", "text_field", "source_config", "root", "stream_tokens")
    return {name: data[name] for name in names if name in data} if "source" in data else {}


def open_wikitext(options: WikiTextOptions, tokenizer: AnyTokenizer) -> Text:
    """WikiText as running text; words are those of the released files."""
    articles = read_wikitext(options.source, config=options.source_config, split=options.split)
    texts = [article.text for article in articles]
    if options.cross_documents:
        texts = ["".join(texts)]
    return Text(
        f"{options.source_config} {options.split}" if options.source == "hf" else "WikiText, file",
        [_after_eot(tokenizer, np.array(tokenizer.encode(text))) for text in texts],
        sum(article.num_words for article in articles),
        sum(len(text.encode()) for text in texts),
        {"num_articles": len(articles)},
    )


def _after_eot(tokenizer: AnyTokenizer, ids: np.ndarray) -> np.ndarray:
    """So that the first token, too, is predicted from something."""
    return np.concatenate([[tokenizer.eot], ids])
