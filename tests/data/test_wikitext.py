"""data/wikitext.py: WikiText put together again, and counted as its authors do."""

import json

import pytest

from data.wikitext import detokenize, num_words, read_wikitext

FILE = (
    " \n = Robert Boulter = \n \n Robert Boulter is an actor . \n \n = = Career = = \n \n In 2000"
    " @-@ 01 he had a role . \n = no heading = \n \n \n = Du Fu = \n \n Du Fu was a poet . \n"
)


@pytest.mark.parametrize(
    "spaced, joined",
    [
        ("a 2 @,@ 000 @-@ mile , 3 @.@ 5 inch road", "a 2,000-mile, 3.5 inch road"),
        ("Is it ? Yes : no ; well ! Done . Next", "Is it? Yes: no; well! Done. Next"),
        ("the ( old ) [ new ] { both } town", "the (old) [new] {both} town"),
        ('he said " go away " twice', 'he said "go away" twice'),
        ("the ' best ' of it", "the 'best' of it"),
        ("the workers ' rights", "the workers' rights"),
        ("the end of John 's day", "the end of John's day"),
        (" = = Career = = \n He", " == Career ==\nHe"),
        (" = = = Early = = = \n He", " === Early ===\nHe"),
        ("at 20 \N{DEGREE SIGN} C", "at 20\N{DEGREE SIGN}C"),
        ("of N days", "of 1 days"),
    ],
)
def test_detokenized_text(spaced, joined):
    assert detokenize(spaced) == joined


def test_words_and_line_ends_are_counted(tmp_path):
    """The release says 245,569 words of its test file: 241,211 between spaces, 4,358 lines."""
    assert num_words(" \n = A = \n Two words . \n") == (3 + 3) + 3
    for name in ("wiki.test.raw", "wiki.test.tokens"):
        path = tmp_path / name
        path.write_text(FILE)
        first, second = read_wikitext(str(path))
        assert first.num_words + second.num_words == len(FILE.split()) + FILE.count("\n")
        assert second.text == " = Du Fu =\n\nDu Fu was a poet.\n"
        assert first.text.startswith("\n= Robert Boulter =\n\nRobert Boulter is an actor.\n\n")
        assert "2000-01 he had a role.\n= no heading =\n" in first.text


def test_hub_rows_are_the_lines_of_the_file(tmp_path):
    """The hub keeps a blank line as an empty row."""
    (tmp_path / "wiki.test.raw").write_text(FILE)
    lines = [line if line.strip() else "" for line in FILE.splitlines(keepends=True)]
    rows = "".join(json.dumps({"text": line}) + "\n" for line in lines)
    (tmp_path / "rows.jsonl").write_text(rows)
    expected = read_wikitext(str(tmp_path / "wiki.test.raw"))
    assert read_wikitext(str(tmp_path / "rows.jsonl")) == expected


def test_an_empty_file_is_refused(tmp_path):
    (tmp_path / "wiki.test.raw").write_text(" \n \n")
    with pytest.raises(ValueError, match="must hold the lines of WikiText, got none with text"):
        read_wikitext(str(tmp_path / "wiki.test.raw"))
