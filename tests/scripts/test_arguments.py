from dataclasses import dataclass

import pytest

from scripts.arguments import option, parse_arguments


@dataclass
class Options:
    name: str = option("what it is called")
    count: int = option("how many", default=3)
    share: float | None = option("how much", default=None)
    loud: bool = option("whether", default=True)


def parse(*arguments):
    return parse_arguments(Options, list(arguments), "What the script does.")


def test_values_take_the_types_of_the_fields():
    assert parse("name=a=b c", "count=-2", "share=1e-3", "loud=False") == Options(
        "a=b c", -2, 1e-3, False
    )
    assert parse("name=12", "share=none") == Options("12", 3, None, True)
    assert parse("name=") == Options("", 3, None, True)


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["name=a", "nmae=b"], "there is no option nmae; the options are name, count, share, loud"),
        (["name=a", "count=2.5"], "count must be int, got '2.5'"),
        (["name=a", "share=much"], "share must be float | None, got 'much'"),
        (["name=a", "loud=yes"], "loud must be bool, got 'yes'"),
        (["name=a", "name=b"], "name is given twice"),
        (["name"], "arguments have the form key=value, got 'name'"),
        ([], "name=... is required"),
    ],
)
def test_wrong_arguments_end_in_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        parse(*arguments)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_help_lists_every_option(capsys):
    with pytest.raises(SystemExit) as caught:
        parse("--help")
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith("What the script does.")
    for part in ("name=str", "what it is called (required)", "how many (default 3)"):
        assert part in text
