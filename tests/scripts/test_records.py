import pytest

from scripts.records import command_line


@pytest.mark.parametrize("where", [["--out", "x.json"], ["--out=x.json"]])
def test_command_line_leaves_the_place_of_the_record_out(monkeypatch, where):
    monkeypatch.setattr("sys.argv", ["script.py", "--steps", "3", *where, "a=1"])
    assert command_line("scripts.name", omit="--out") == "python -m scripts.name --steps 3 a=1"
