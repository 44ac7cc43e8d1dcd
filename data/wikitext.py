"""WikiText as running text: articles of the released files, without its spaces around marks.

Source: Merity et al. 2016 (arXiv 1609.07843). GPT-2's perplexities on it (Radford et al. 2019,
table 3) are of text that is put together again, and a word of the released files is what they are
counted by. The rules are those that Megatron-LM and lm-evaluation-harness use for it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from data.rows import field, open_rows

HUB = "Salesforce/wikitext"
_HEADING = re.compile(r" = [^=].* = \s*")  # of an article; sections have more signs

# What WikiText's tokenizer set apart, in the order in which it is put together.
_JOINED = [
    ("s '", "s'"),
    (" @-@ ", "-"),
    (" @,@ ", ","),
    (" @.@ ", "."),
    *((f" {mark} ", f"{mark} ") for mark in ":;.!?,"),
]
_ENCLOSED = [
    (r"\(\s*([^)]*?)\s*\)", r"(\1)"),
    (r"\[\s*([^\]]*?)\s*\]", r"[\1]"),
    (r"{\s*([^}]*?)\s*}", r"{\1}"),
    (r'"\s*([^"]*?)\s*"', r'"\1"'),
    (r"'\s*([^']*?)\s*'", r"'\1'"),
]
_REST = [
    ("= = = =", "===="),
    ("= = =", "==="),
    ("= =", "=="),
    (" \N{DEGREE SIGN} ", "\N{DEGREE SIGN}"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" N ", " 1 "),
    (" 's", "'s"),
]


class Article(NamedTuple):
    """Attributes:
    text: running text.
    num_words: words and line ends of the released file, the units of WikiText's perplexities.
    """

    text: str
    num_words: int


def read_wikitext(
    source: str = "hf", *, config: str = "wikitext-103-raw-v1", split: str = "test"
) -> list[Article]:
    """The articles of one split: 245,569 words in the test split of WikiText-103.

    Args:
        source: "hf" (Salesforce/wikitext), the release's wiki.test.raw or wiki.test.tokens, or a
            .jsonl or .parquet file with a line a row in `text`.
        config, split: of the hub.
    Raises:
        ValueError: nothing but white space, and what open_rows raises.
    """
    path = Path(source).expanduser()
    if path.suffix in (".raw", ".tokens", ".txt") and path.is_file():
        with open(path, encoding="utf-8", newline="\n") as file:
            lines = list(file)
    else:
        rows = open_rows(source, hub=HUB, config=config, split=split)
        lines = [field(row, "text", str) or " \n" for row in rows]  # the hub has blank lines as ""
    if not any(line.strip() for line in lines):
        raise ValueError(f"{source} must hold the lines of WikiText, got none with text")
    return [Article(detokenize(text), num_words(text)) for text in _articles(lines)]


def _articles(lines: list[str]) -> list[str]:
    """The lines joined, cut before each heading of an article but the first; a heading has blank
    lines around."""
    starts = [
        i
        for i, line in enumerate(lines)
        if _HEADING.fullmatch(line)
        and (i == 0 or not lines[i - 1].strip())
        and (i + 1 == len(lines) or not lines[i + 1].strip())
    ]
    bounds = [0, *starts[1:], len(lines)]
    return ["".join(lines[a:b]) for a, b in zip(bounds, bounds[1:], strict=False)]


def num_words(text: str) -> int:
    """Words between spaces, and line ends, each of which WikiText counts as the word <eos>."""
    return len(text.split()) + text.count("\n")


def detokenize(text: str) -> str:
    """Running text of WikiText's spaced tokens. Not the original everywhere: quotes that do not
    pair shift the spaces behind them, and every lone N becomes 1."""
    for spaced, joined in _JOINED:
        text = text.replace(spaced, joined)
    for pattern, enclosed in _ENCLOSED:
        text = re.sub(pattern, enclosed, text)
    for spaced, joined in _REST:
        text = text.replace(spaced, joined)
    return text
