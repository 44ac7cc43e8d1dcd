import pytest

from scripts.benchmark_generation import (
    TITLES,
    Setting,
    arguments,
    race,
    report_blocks,
    row_of,
    speed_table,
)

TINY = Setting("tiny", depth=2, dim=16, nheads=2, prompt=9, new=4, batch=2)


def test_all_write_the_same_text():
    """Of the same weights, in fp32; two attentions of ours, transformers with and without a static
    cache."""
    pytest.importorskip("transformers")
    names = ["ours", "ours_sdpa", "hf_eager", "hf_sdpa"]
    rows = race(TINY, names, rounds=2, device="cpu")
    assert [row["failure"] for row in rows] == [None] * 4
    assert [row["agrees"] for row in rows] == [1.0] * 4
    assert all(row["tokens_per_s"] > 0 and row["decoded_per_s"] > 0 for row in rows)


def test_what_cannot_run_is_reported():
    (row,) = race(TINY._replace(dim=15), ["ours"], rounds=1, device="cpu")
    assert "dim (15)" in row["failure"] and "tokens_per_s" not in row


def test_rates():
    """Two sequences of 4 tokens in 0.5 s, of which 0.2 s are the prompt's and its first token's."""
    row = row_of("ours", TINY, {"failure": None}, {1: [0.2, 9.0, 0.1], 4: [0.5, 0.4, 9.0]})
    assert row["prompt_ms"] == pytest.approx(200)
    assert row["tokens_per_s"] == pytest.approx(16)
    assert row["decoded_per_s"] == pytest.approx(2 * 3 / 0.3)
    failed = row_of("hf_sdpa", TINY, {"failure": "out of memory"}, None)
    header, lines = speed_table({"rows": [row, failed]})
    assert header[1:] == [TITLES["ours"], TITLES["hf_sdpa"]]
    assert lines == [["tiny, prompt 9, batch 2", "20 (200.0)", "-"]]
    (table,) = report_blocks({"rows": [row]})
    assert table.rows == [["tiny, prompt 9, batch 2", "20 (200.0)"]]


def test_mistakes_are_refused(capsys):
    with pytest.raises(SystemExit):
        arguments(["--new", "1"])
    assert "--new must be at least 2" in capsys.readouterr().err
