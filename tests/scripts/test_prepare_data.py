"""scripts/prepare_data.py: the command line, its summary and its errors."""

import subprocess
import sys

from data.token_store import TokenStore
from scripts.prepare_data import main


def test_prepares_and_prints_the_manifest_summary(tmp_path, capsys):
    (tmp_path / "in").mkdir()
    for i in range(30):
        (tmp_path / "in" / f"{i}.txt").write_text(f"some words of document {i}. " * 20)
    (tmp_path / "in" / "empty.txt").write_text("")
    out = tmp_path / "out"
    arguments = ["--source", str(tmp_path / "in"), "--out", str(out), "--val-fraction", "0.2"]
    assert main([*arguments, "--workers", "0", "--verify"]) == 0
    printed = capsys.readouterr().out
    store = TokenStore(out)
    assert store.train.num_documents + store.val.num_documents == 30
    for fact in (
        f"{store.train.num_tokens:,} tokens, {store.train.num_documents} documents",
        f"{store.val.num_tokens:,} tokens, {store.val.num_documents} documents",
        "fraction 0.2 of documents, seed 2357",
        "1 empty documents, 0 malformed lines",
        "ids stored as uint16",
        store.fingerprint,
    ):
        assert fact in printed
    assert main(arguments) == 0, "a finished store is opened again"


def test_errors_are_one_line_and_status_one(tmp_path, capsys):
    assert main(["--source", str(tmp_path / "no")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: source must be an existing file or folder")
    assert error.count("\n") == 1


def test_help_runs_as_a_module():
    command = [sys.executable, "-m", "scripts.prepare_data", "--help"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "hf:Skylion007/openwebtext" in printed and "--workers" in printed
