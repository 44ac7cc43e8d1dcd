"""scripts/prepare_data.py: the command line, its summary and its errors."""

import subprocess
import sys
import zipfile

from data.pathfinder_store import PathfinderStore
from data.token_store import TokenStore
from scripts.prepare_data import main
from scripts.prepare_pathfinder import contact_sheet


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
        " tokens/s",
        " per second of CPU time",
    ):
        assert fact in printed
    assert main(arguments) == 0, "a finished store is opened again"
    assert "tokens/s" not in capsys.readouterr().out


def test_errors_are_one_line_and_status_one(tmp_path, capsys):
    assert main(["--source", str(tmp_path / "no")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: source must be an existing file or folder")
    assert error.count("\n") == 1


def test_help_runs_as_a_module():
    command = [sys.executable, "-m", "scripts.prepare_data", "--help"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "hf:Skylion007/openwebtext" in printed and "--workers" in printed


def test_pathfinder_set_with_sheet_and_export(tmp_path, capsys):
    sheet, export = tmp_path / "sheet.png", tmp_path / "release"
    arguments = ["pathfinder", "--size", "32", "--level", "6", "--train", "40", "--val", "0"]
    arguments += ["--test", "320", "--out", str(tmp_path / "set"), "--workers", "0", "--verify"]
    assert main([*arguments, "--sheet", str(sheet), "--export", str(export)]) == 0
    printed = capsys.readouterr().out
    store = PathfinderStore(tmp_path / "set")
    for fact in ("40 train, 0 val, 320 test", "32 px, level 6, seed 0", "on test from the discs'"):
        assert fact in printed
    assert store.fingerprint in printed
    assert sheet.read_bytes().startswith(b"\x89PNG")
    image = contact_sheet(store, 16)
    assert image.shape == (2 * 2 * 36, 8 * 36), "two rows of eight, each image above its snakes"
    released = export / "test" / "pathfinder32" / "curv_baseline" / "imgs" / "0"
    assert len(list(released.iterdir())) == 320
    assert main(["pathfinder", "--size", "32", "--out", str(tmp_path / "set")]) == 1
    assert "must be new or hold the same set" in capsys.readouterr().err


def test_lra_store_of_a_stand_in(tmp_path, capsys):
    with zipfile.ZipFile(tmp_path / "reviews.zip", "w") as archive:
        for i in range(100):
            archive.writestr(f"{'pos' if i % 2 else 'neg'}/{i}.txt", "a" * (i + 1))
    arguments = ["lra", "--task", "text", "--source", str(tmp_path / "reviews.zip")]
    assert main([*arguments, "--seqlen", "60", "--root", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "instead of IMDb" in printed and "60 at most" in printed
    assert main(["lra", "--task", "retrieval", "--seqlen", "60", "--root", str(tmp_path)]) == 1
    assert "error: the source of retrieval" in capsys.readouterr().err
