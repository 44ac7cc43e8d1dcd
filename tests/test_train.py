"""train.py from the command line, as a user runs it: learns, stops, resumes, reports."""

import csv
import json
import os
import re
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
IMAGES = (  # Pathfinder, labels and a dense target, non-zero pixels
    "experiment=lra_pathfinder recipe=fast trainer=cpu model.depth=1 model.dim=16 model.nheads=2 "
    "model.mlp_dim=16 data.level=6 data.num_train=64 data.num_val=30 data.num_test=70 "
    "data.batch_size=8 data.val_batch_size=4 data.num_workers=0 data.prepare_workers=0 "
    "task.micro_batch_size=4 trainer.max_steps=4 trainer.val_check_interval=2 "
    "callbacks.metrics.every_n_steps=2"
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


def run(workplace, *overrides, code=0, launcher=(), images=False):
    replaced = {override.split("=")[0] for override in overrides}
    defaults = IMAGES if images else [*SMALL, f"data.source={workplace}/text"]
    defaults = [*defaults, f"data.root={workplace}/data"]
    defaults = [default for default in defaults if default.split("=")[0] not in replaced]
    done = subprocess.run(
        [sys.executable, *launcher, str(ROOT / "train.py"), *overrides, *defaults],
        cwd=workplace,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])},
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


LIKE_ONE = [
    *("trainer.max_steps=4", "model.embd_dropout=0", "model.resid_dropout=0"),
    *("model.attn_dropout=0", "task.micro_batch_tokens=64"),
]


@pytest.fixture(scope="module")
def one_process(workplace):
    """Losses of a run on one process."""
    run(workplace, "run_name=one", *LIKE_ONE)
    return [
        [float(row[key]) for row in rows(workplace, "one") if row[key]]
        for key in ("train/loss", "val/loss", "tokens")
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy,num_processes,context", [("ddp", 2, 1), ("ddp", 2, 2), ("fsdp", 4, 2)]
)
def test_several_processes_train_like_one(workplace, one_process, strategy, num_processes, context):
    """In several micro-batches a step, and with each sequence on `context` processes."""
    name = f"{strategy}-{num_processes}-{context}"
    options = [f"run_name={name}", f"trainer={strategy}", "trainer.accelerator=cpu"]
    options += [f"trainer.devices={num_processes}", f"context_parallel.size={context}"]
    launcher = ["-m", "torch.distributed.run", "--standalone"]
    launcher += [f"--nproc-per-node={num_processes}"]
    run(workplace, *LIKE_ONE, *options, launcher=launcher)
    for key, expected in zip(("train/loss", "val/loss", "tokens"), one_process, strict=True):
        found = [float(row[key]) for row in rows(workplace, name) if row[key]]
        assert found == pytest.approx(expected, rel=1e-5), key


@pytest.mark.slow
def test_images_are_classified_alike_by_one_process_and_two(workplace):
    """The last batches of two processes are filled up, and each image still counts once."""
    outs = [run(workplace, "run_name=images", images=True)]
    assert "marker-only floor on the same set" in outs[0] and "dense target" in outs[0]
    assert "sample" not in outs[0]
    options = ["run_name=images-ddp", "trainer=ddp", "trainer.accelerator=cpu"]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    options += ["trainer.devices=2", "task.micro_batch_size=2"]
    outs.append(run(workplace, *options, launcher=launcher, images=True))
    reports = [re.findall(r"accuracy \((.*?)\): (\S+) .*95 %, (\d+) examples", out) for out in outs]
    assert reports[0] == reports[1] and [number for *_, number in reports[0]] == ["30", "70"]
    for key in ("train/loss", "train/dense_loss", "val/loss", "val/accuracy"):
        one, two = (
            [float(row[key]) for row in rows(workplace, name) if row[key]]
            for name in ("images", "images-ddp")
        )
        assert one and two == pytest.approx(one, rel=1e-4), key


@pytest.mark.slow
def test_images_start_from_an_easier_run(workplace):
    run(workplace, "run_name=easy", images=True)
    options = ["run_name=next", "init_from=outputs/runs/easy", "trainer.max_steps=2"]
    options += ["task.dense_weight=0", "model.num_dense_classes=0"]
    out = run(workplace, *options, images=True)
    assert "accuracy (test, best-00000002.ckpt)" in out and "dense target" not in out


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
    assert "gpt2_16k, gpt2_1k" in out and "python train.py experiment=gpt2_4k" in out


@pytest.mark.gpu
def test_a_run_on_a_gpu_samples_resumes_and_generates(workplace):
    options = ["run_name=gpu", "trainer=gpu", "attention=flash", "task.compile=false"]
    assert "sample: The" in run(workplace, *options)
    out = run(workplace, *options, "trainer.max_steps=16", "resume=auto")
    assert "sample: The" in out
    steps = [int(row["step"]) for row in rows(workplace, "gpu") if row["train/loss"]]
    assert steps[-1] == 16 and len(steps) == len(set(steps))
