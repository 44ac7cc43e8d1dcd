"""train.py from the command line, as a user runs it: learns, stops, resumes, reports."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
SMALL = (
    "model.depth=1 model.dim=32 model.nheads=2 data.seqlen=32 data.batch_tokens=256 "
    "data.val_fraction=0.1 trainer.max_steps=12 trainer.val_check_interval=6 optimizer.lr=1e-2 "
    "callbacks.metrics.every_n_steps=3 callbacks.checkpoints.every_n_steps=4 trainer=cpu "
    "model.embd_dropout=0.1 sample_tokens=4 sample_prompt=The"
).split()
SENTENCES = "The whale swims. The ship sails. The sailor sings of whales and of ships. "


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("work")
    text = folder / "text"
    text.mkdir()
    for number in range(40):
        (text / f"{number}.txt").write_text(SENTENCES * (3 + number % 5))
    return folder


def run(workplace, *overrides, code=0, launcher=()):
    replaced = {override.split("=")[0] for override in overrides}
    defaults = [*SMALL, f"data.source={workplace}/text", f"data.root={workplace}/data"]
    defaults = [default for default in defaults if default.split("=")[0] not in replaced]
    done = subprocess.run(
        [sys.executable, *launcher, str(ROOT / "train.py"), *overrides, *defaults],
        cwd=workplace,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if code == 0 else done.stderr


def rows(workplace, name):
    with (workplace / "outputs/runs" / name / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def newest_weights(workplace, name):
    paths = sorted((workplace / "outputs/runs" / name / "checkpoints").glob("step-*.ckpt"))
    return torch.load(paths[-1], weights_only=True)["state_dict"]


@pytest.mark.slow
def test_a_run_learns_and_reports(workplace):
    out = run(workplace, "run_name=plain")
    for expected in ("attention: sdpa", "validation perplexity", "unigram model", "sample: The"):
        assert expected in out
    table = rows(workplace, "plain")
    assert [int(row["step"]) for row in table] == list(range(1, 13))
    assert float(table[-1]["train/loss"]) < float(table[0]["train/loss"]) - 1.0
    assert [row["step"] for row in table if row["val/ppl"]] == ["6", "12"]
    facts = json.loads((workplace / "outputs/runs/plain/run.json").read_text())
    assert facts["run_id"].startswith("plain-") and facts["versions"]["torch"]


@pytest.mark.slow
def test_stop_and_resume_equals_no_stop_bitwise(workplace):
    """Stopped between two checkpoints: steps 9 and 10 are done again, as if never done."""
    run(workplace, "run_name=whole")
    run(workplace, "run_name=cut", "trainer.max_steps=10", "task.max_steps=12")
    folder = workplace / "outputs/runs/cut"
    manifest = json.loads((folder / "checkpoints/manifest.json").read_text())
    assert {"step-00000008.ckpt", "step-00000010.ckpt"} <= set(manifest)
    (folder / "checkpoints/step-00000010.ckpt").write_bytes(b"torn")
    out = run(workplace, "run_name=cut", "resume=auto")
    assert f"run folder: outputs/runs/cut{os.linesep}" in out
    for name, value in newest_weights(workplace, "whole").items():
        assert torch.equal(newest_weights(workplace, "cut")[name], value), name
    keep = ("step", "tokens", "train/loss", "train/grad_norm", "lr", "val/loss")
    whole, cut = (
        [[row[key] for key in keep] for row in rows(workplace, name)] for name in ("whole", "cut")
    )
    assert cut == whole


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_train_like_one(workplace, strategy):
    """Two micro-batches a step on each process, against one batch on one process."""
    options = ["trainer.max_steps=4", "model.embd_dropout=0", "model.resid_dropout=0"]
    options += ["model.attn_dropout=0", "task.micro_batch_tokens=64"]
    one = f"one-for-{strategy}"
    run(workplace, f"run_name={one}", *options)
    options += [f"trainer={strategy}", "trainer.accelerator=cpu", "trainer.devices=2"]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    run(workplace, f"run_name={strategy}", *options, launcher=launcher)
    losses = {
        name: [float(row["train/loss"]) for row in rows(workplace, name)]
        for name in (one, strategy)
    }
    assert losses[strategy] == pytest.approx(losses[one], rel=1e-5)


@pytest.mark.slow
def test_sweep_makes_one_run_a_value(workplace):
    run(workplace, "-m", "run_name=sweep", "optimizer.lr=1e-2,1e-3", "trainer.max_steps=2")
    losses = [float(rows(workplace, name)[-1]["train/loss"]) for name in ("sweep", "sweep-2")]
    assert losses[0] != losses[1]


def test_unknown_key_is_one_line(workplace):
    error = run(workplace, "optimizer.learning_rate=1", code=1)
    lines = [line for line in error.splitlines() if line]
    assert len(lines) == 1 and lines[0].startswith("error: ") and "learning_rate" in lines[0]


def test_help_lists_groups_and_examples(workplace):
    out = run(workplace, "--help")
    assert "experiment: gpt2_16k, gpt2_1k" in out and "python train.py experiment=gpt2_4k" in out


@pytest.mark.gpu
def test_a_run_on_a_gpu_samples_resumes_and_generates(workplace):
    options = ["run_name=gpu", "trainer=gpu", "attention=flash", "task.compile=false"]
    assert "sample: The" in run(workplace, *options)
    out = run(workplace, *options, "trainer.max_steps=16", "resume=auto")
    assert "sample: The" in out
    steps = [int(row["step"]) for row in rows(workplace, "gpu") if row["train/loss"]]
    assert steps[-1] == 16 and len(steps) == len(set(steps))
