import pytest

from model.run import environment
from scripts.records import appended, command_line, read_earlier, write_record


@pytest.mark.parametrize("where", [["--out", "x.json"], ["--out=x.json"]])
def test_command_line_leaves_the_place_of_the_record_out(monkeypatch, where):
    monkeypatch.setattr("sys.argv", ["script.py", "--steps", "3", *where, "a=1"])
    assert command_line("scripts.name", omit="--out") == "python -m scripts.name --steps 3 a=1"


def test_appended_keeps_what_is_not_measured_again():
    def record(command, rows, **settings):
        return {"command": command, "date": command, "settings": settings, "rows": rows}

    first = record("a", [{"n": 1, "ms": 1.0}, {"n": 1, "ms": 2.0}, {"n": 2, "ms": 3.0}],
                   lengths=[1, 2], tokens=5)  # fmt: skip
    second = record("b", [{"n": 1, "ms": 9.0}], lengths=[1, 4], tokens=6)
    both = appended(first, second, key=lambda row: row["n"])
    assert both == {
        "command": "a && b",
        "date": "b",
        "settings": {"lengths": [1, 2, 4], "tokens": 6},
        "rows": [{"n": 2, "ms": 3.0}, {"n": 1, "ms": 9.0}],
    }
    again = appended(both, second, key=lambda row: row["n"])
    assert again["command"] == "a && b" and again["rows"] == both["rows"]
    assert appended(None, second, key=lambda row: row["n"]) is second
    # More rows of 1 are to come: until then the earlier ones stay. There was none of 7.
    third = record("c", [{"n": 1, "ms": 0.5}, {"n": 7, "ms": 0.7}])
    partial = appended(first, third, key=lambda row: row["n"], unfinished={1, 7})
    assert partial["rows"] == [*first["rows"], {"n": 7, "ms": 0.7}]


def test_a_record_of_another_machine_is_not_added_to(tmp_path):
    path = tmp_path / "x.json"
    assert read_earlier(path, append=True) is None
    here = environment()
    write_record(path, {**here, "rows": []})
    assert (
        read_earlier(path, append=True)["rows"] == [] and read_earlier(path, append=False) is None
    )
    other = {**here, "versions": {**here["versions"], "triton": "1.0"}}
    for changed, name in ((other, "triton"), ({**here, "hardware": {"gpus": ["x"]}}, "hardware")):
        write_record(path, {**changed, "rows": []})
        with pytest.raises(
            SystemExit, match=f"error: --append needs the {name} of .*: give another"
        ):
            read_earlier(path, append=True)
        assert read_earlier(path, append=True, of_this_machine=False)
