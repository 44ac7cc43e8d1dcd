"""A report as one HTML page without scripts or links to elsewhere, and as Markdown."""

import re
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from scripts.svg_plot import Plot


@dataclass(frozen=True)
class Table:
    """Cells are text in which **bold**, `code` and [links](#section) are marked; a verdict gets its
    colour, a column of words is set to the left."""

    header: list[str]
    rows: list[list[str]]
    caption: str = ""


Block = str | Table | Plot


@dataclass(frozen=True)
class Section:
    """A heading, then text, tables and plots in order; `facts` (name -> text) stand at the end."""

    title: str
    blocks: list[Block]
    facts: dict[str, str] = field(default_factory=dict)


def anchor(title: str) -> str:
    """What a link to a section says; in Markdown the hosts make the same of its heading."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


# A phone shows a table in a box of its own that scrolls sideways, its first column in place.
_STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1c1c1c; --line: #d5d5d5; --quiet: #595959;
  --good: #00694f; --bad: #a33c00 }
@media (prefers-color-scheme: dark) { :root { --paper: #161616; --ink: #e8e8e8; --line: #3d3d3d;
  --quiet: #a6a6a6; --good: #4cc9a4; --bad: #ff9a5c } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 76rem; padding: 1rem; background: var(--paper);
  color: var(--ink); font: 16px/1.5 system-ui, sans-serif; overflow-wrap: break-word }
h1 { font-size: 1.6rem; line-height: 1.2 }
h2 { font-size: 1.25rem; margin: 2.5rem 0 .5rem; padding-top: .75rem;
  border-top: 1px solid var(--line) }
a { color: inherit }
p, nav { max-width: 48rem }
nav ul { columns: 18rem; padding-left: 1.2rem }
code { font: .85em ui-monospace, monospace; overflow-wrap: anywhere }
.option { white-space: nowrap }
figure { margin: 1rem 0 }
figcaption { font-weight: 600; margin-bottom: .3rem }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px }
table { border-collapse: separate; border-spacing: 0; font-size: .875rem;
  font-variant-numeric: tabular-nums; min-width: 100% }
th, td { padding: .3rem .6rem; text-align: right; border-bottom: 1px solid var(--line) }
td { white-space: nowrap }
th { vertical-align: bottom }
tbody tr:last-child > * { border-bottom: 0 }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0;
  background: var(--paper) }
.text { text-align: left }
td.long { white-space: normal; min-width: 11rem }
@media (max-width: 40rem) { td.wide:first-child { white-space: normal; min-width: 7rem }
  td.long { min-width: 8.5rem } th, td { padding: .3rem .45rem } svg { font-size: 13px } }
summary { font-weight: 600; cursor: pointer }
.plots { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(100%,
  22rem), 1fr)) }
.plots figure { margin: 0; max-width: 34rem }
svg { display: block; width: 100%; height: auto }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem .8rem; color: var(--quiet);
  font-size: .875rem }
dt { font-weight: 600 } dd { margin: 0; min-width: 0 }
.good { color: var(--good); font-weight: 600 } .bad { color: var(--bad); font-weight: 600 }
""".strip()
_GOOD, _BAD = ("reproduced", "better"), ("worse",)
_MOST_ROWS = 20  # a longer table with a caption is folded


def html_page(title: str, lead: str, sections: list[Section]) -> str:
    """The page, complete: styles and pictures are in it."""
    links = "".join(
        f'<li><a href="#{anchor(s.title)}">{escape(s.title)}</a></li>' for s in sections
    )
    body = "\n".join(_section_html(section) for section in sections)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{_STYLE}\n</style>\n</head>\n<body>\n"
        f"<header><h1>{escape(title)}</h1><p>{_inline(lead)}</p></header>\n"
        f'<nav aria-label="Contents"><ul>{links}</ul></nav>\n<main>\n{body}\n</main>\n'
        "</body>\n</html>\n"
    )


def _section_html(section: Section) -> str:
    parts, plots = [f'<section id="{anchor(section.title)}"><h2>{escape(section.title)}</h2>'], []
    for block in [*section.blocks, None]:
        if isinstance(block, Plot):  # neighbours stand side by side where there is room
            plots.append(
                f"<figure><figcaption>{escape(block.title)}</figcaption>{block.svg()}</figure>"
            )
            continue
        if plots:
            parts.append(f'<div class="plots">{"".join(plots)}</div>')
            plots = []
        if isinstance(block, Table):
            parts.append(_table_html(block))
        elif block is not None:
            parts.append(f"<p>{_inline(block)}</p>")
    if section.facts:
        facts = "".join(
            f"<dt>{escape(k)}</dt><dd>{_inline(v)}</dd>" for k, v in section.facts.items()
        )
        parts.append(f"<dl>{facts}</dl>")
    return "\n".join([*parts, "</section>"])


def _table_html(table: Table) -> str:
    kinds = [_column_kind(cells) for cells in zip(*table.rows, strict=True)]
    head, *rows = (
        "".join(
            f"<{tag}{_classes(c, kind)}>{_inline(c)}</{tag}>"
            for c, kind in zip(row, kinds, strict=True)
        )
        for tag, row in [("th", table.header), *(("td", row) for row in table.rows)]
    )
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    # A box that scrolls has to be reached by the keyboard.
    box = (
        f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )
    if table.caption and len(table.rows) > _MOST_ROWS:
        return f"<details><summary>{_inline(table.caption)}</summary>{box}</details>"
    caption = f"<figcaption>{_inline(table.caption)}</figcaption>" if table.caption else ""
    return f"<figure>{caption}{box}</figure>"


def _column_kind(cells: tuple[str, ...]) -> list[str]:
    """Classes of a column's cells."""
    has_words = any(re.search("[a-z]{2}", cell) for cell in cells)
    longest = max(map(len, cells))
    return ["text"] * has_words + ["wide"] * (longest > 14) + ["long"] * (longest > 28)


def _classes(cell: str, kind: list[str]) -> str:
    word = re.split("[:, ]", cell)[0]
    names = [*kind, *["good"] * (word in _GOOD), *["bad"] * (word in _BAD)]
    return f' class="{" ".join(names)}"' if names else ""


def _inline(text: str) -> str:
    text = re.sub(r"\[([^\]]+)\]\((#[a-z0-9-]+)\)", r'<a href="\2">\1</a>', escape(text))
    text = re.sub(r"`([^`]+)`", lambda found: f"<code>{_whole_options(found[1])}</code>", text)
    return re.sub(r"\*\*([^*]+)\*\*", r"<b>\1</b>", text)


def _whole_options(command: str) -> str:
    """A browser breaks a line behind a hyphen, and an option has two."""
    return re.sub(r"(?<!\S)(--?\S{1,30})(?!\S)", r'<span class="option">\1</span>', command)


def markdown_page(title: str, lead: str, sections: list[Section], plot_folder: Path) -> str:
    """The same in Markdown; plots become files of `plot_folder`, a neighbour of the text."""
    parts = [f"# {title}", lead]
    for section in sections:
        parts.append(f"## {section.title}")
        for number, block in enumerate(section.blocks):
            if isinstance(block, Table):
                parts += [f"**{block.caption}**"] if block.caption else []
                lines = [block.header, ["---"] * len(block.header), *block.rows]
                parts.append("\n".join("| " + " | ".join(cells) + " |" for cells in lines))
            elif isinstance(block, Plot):
                path = plot_folder / f"{anchor(section.title)}-{number}.svg"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(block.svg(is_file=True))
                parts.append(f"![{block.title}]({plot_folder.name}/{path.name})")
            else:
                parts.append(block)
        if section.facts:
            parts.append("\n".join(f"- {name}: {text}" for name, text in section.facts.items()))
    return "\n\n".join(parts) + "\n"
