"""train.py from the command line, as a user runs it: learns, stops, resumes, reports."""

import json
import os
import re
from types import SimpleNamespace

import pytest
import torch

import train
from model.results import say_result, write_result
from model.run import Run


def newest_weights(workplace, name):
    paths = sorted((workplace.folder / "outputs/runs" / name / "checkpoints").glob("step-*.ckpt"))
    return torch.load(paths[-1], weights_only=True)["state_dict"]


@pytest.mark.slow
def test_a_run_learns_and_reports(workplace):
    out = workplace.run("run_name=plain")
    for expected in ("attention: sdpa", "validation perplexity", "unigram model", "sample: The"):
        assert expected in out
    table = workplace.rows("plain")
    assert [int(row["step"]) for row in table] == list(range(1, 13))
    assert float(table[-1]["train/loss"]) < float(table[0]["train/loss"]) - 1.0
    assert [row["step"] for row in table if row["val/ppl"]] == ["6", "12"]
    facts = json.loads((workplace.folder / "outputs/runs/plain/run.json").read_text())
    assert facts["run_id"].startswith("plain-") and facts["versions"]["torch"]
    result = workplace.result("plain")
    assert (result["step"], result["max_steps"], result["caveat"]) == (12, 12, None)
    assert list(result["splits"]) == ["val"]
    val = result["splits"]["val"]
    assert f"{val['line']}{os.linesep}  {val['comparison']['line']}" in out
    assert val["metrics"]["ppl"] == pytest.approx(float(table[-1]["val/ppl"]), rel=1e-6)
    assert val["line"].endswith(f"perplexity {val['metrics']['ppl']:.2f}")
    unigram = val["comparison"]["numbers"]["unigram_perplexity"]
    assert val["comparison"]["line"].endswith(f"{unigram:.2f}") and val["checkpoint"] is None


@pytest.mark.slow
def test_stop_and_resume_equals_no_stop_bitwise(workplace):
    """Terminated between two checkpoints, and the newest is damaged: steps 9 and 10 are done again,
    as if never done."""
    workplace.run("run_name=whole")
    signalled = "+callbacks.signal={_target_:tests.disturbances.SignalAt,step:9,numbers:[15]}"
    noted = "+logger.end={_target_:tests.disturbances.NotedEnd,path:end.txt}"
    workplace.run("run_name=cut", signalled, noted, code=143)
    assert (workplace.folder / "end.txt").read_text() == "failed"  # every logger was closed
    assert [row["step"] for row in workplace.rows("cut")][-1] == "10"
    folder = workplace.folder / "outputs/runs/cut"
    manifest = json.loads((folder / "checkpoints/manifest.json").read_text())
    assert {"step-00000008.ckpt", "step-00000010.ckpt"} <= set(manifest)
    (folder / "checkpoints/step-00000010.ckpt").write_bytes(b"torn")
    out = workplace.run("run_name=cut", "resume=auto")
    assert f"run folder: outputs/runs/cut{os.linesep}" in out
    for name, value in newest_weights(workplace, "whole").items():
        assert torch.equal(newest_weights(workplace, "cut")[name], value), name
    keep = ("step", "tokens", "train/loss", "train/grad_norm", "lr", "val/loss")
    whole, cut = (
        [[row[key] for key in keep] for row in workplace.rows(name)] for name in ("whole", "cut")
    )
    assert cut == whole


@pytest.fixture(scope="module")
def images_run(workplace):
    """What the run "images" prints."""
    return workplace.run("run_name=images", images=True)


@pytest.mark.slow
def test_a_run_writes_its_results_as_data(workplace, images_run):
    result = workplace.result("images")
    assert result["caveat"].startswith("supervision: labels and a dense target")
    val, test = result["splits"]["val"], result["splits"]["test"]
    assert (val["num_held_out"], test["num_held_out"]) == (30, 70)
    assert val["checkpoint"] is None and test["checkpoint"].startswith("best-")
    for split in (val, test):
        assert split["line"] in images_run and split["comparison"]["line"] in images_run
        assert f"{split['metrics']['accuracy']:.2%}" in split["line"]
    assert set(test["metrics"]) >= {"loss", "accuracy", "dense_loss"}
    numbers = test["comparison"]["numbers"]
    assert f"{numbers['floor']:.2%} +- {numbers['floor_ci95']:.2%}" in test["comparison"]["line"]
    assert val["comparison"]["numbers"] == {}, "too few images for a floor"


@pytest.mark.slow
def test_images_start_from_an_easier_run(workplace, images_run):
    options = ["run_name=next", "init_from=outputs/runs/images", "trainer.max_steps=2"]
    options += ["task.dense_weight=0", "model.num_dense_classes=0"]
    out = workplace.run(*options, images=True)
    assert "accuracy (test, best-00000002.ckpt)" in out and "dense target" not in out


@pytest.mark.slow
def test_images_are_classified_alike_by_one_process_and_two(workplace, images_run):
    """The last batches of two processes are filled up, and each image still counts once."""
    outs = [images_run]
    assert "marker-only floor on the same set" in outs[0] and "dense target" in outs[0]
    assert "sample" not in outs[0]
    options = ["run_name=images-ddp", "trainer=ddp", "trainer.accelerator=cpu"]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    options += ["trainer.devices=2", "task.micro_batch_size=2"]
    outs.append(workplace.run(*options, launcher=launcher, images=True))
    reports = [re.findall(r"accuracy \((.*?)\): (\S+) .*95 %, (\d+) examples", out) for out in outs]
    assert reports[0] == reports[1] and [number for *_, number in reports[0]] == ["30", "70"]
    for key in ("train/loss", "train/dense_loss", "val/loss", "val/accuracy"):
        one, two = (
            [float(row[key]) for row in workplace.rows(name) if row[key]]
            for name in ("images", "images-ddp")
        )
        assert one and two == pytest.approx(one, rel=1e-4), key


@pytest.mark.slow
def test_sweep_makes_one_run_a_value(workplace):
    workplace.run("-m", "run_name=sweep", "optimizer.lr=1e-2,1e-3", "trainer.max_steps=2")
    losses = [float(workplace.rows(name)[-1]["train/loss"]) for name in ("sweep", "sweep-2")]
    assert losses[0] != losses[1]


def test_a_run_without_held_out_data_says_so(capsys, tmp_path):
    data = SimpleNamespace(num_held_out=lambda split: 0)
    task, run = SimpleNamespace(caveat="of another supervision"), Run(tmp_path, "id", None)
    trainer = SimpleNamespace(global_step=2, max_steps=3)
    assert train.report(None, run, data, task, trainer) == float("inf")
    lines = ["no validation: the data hold nothing out for it", "of another supervision"]
    assert capsys.readouterr().out.splitlines() == [*lines, f"run: {tmp_path}"]
    result = {"step": 2, "max_steps": 3, "caveat": "of another supervision", "splits": {}}
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]
    assert json.loads((tmp_path / "result.json").read_text()) == result


def test_a_metric_that_is_not_finite_is_null(tmp_path):
    data = SimpleNamespace(num_held_out=lambda split: 9, comparison=lambda split: None)
    task = SimpleNamespace(result=lambda name, metrics, number: f"{name} {metrics} {number}")
    metrics = {"val/loss": torch.tensor(float("inf")), "train/loss": 1.0, "test/loss": 2.0}
    made = say_result("val", None, metrics, data, task)
    assert made["metrics"] == {"loss": None} and made["comparison"] is None
    write_result(tmp_path, splits={"val": made})
    assert json.loads((tmp_path / "result.json").read_text())["splits"]["val"] == made


def test_unknown_key_is_one_line(workplace):
    error = workplace.run("optimizer.learning_rate=1", code=1)
    lines = [line for line in error.splitlines() if line]
    assert len(lines) == 1 and lines[0].startswith("error: ") and "learning_rate" in lines[0]


def test_help_lists_groups_and_examples(workplace):
    out = workplace.run("--help")
    assert "finetune_gpt2, gpt2_16k, " in out and "python train.py experiment=gpt2_4k" in out


@pytest.mark.gpu
def test_a_run_on_a_gpu_samples_resumes_and_generates(workplace):
    options = ["run_name=gpu", "trainer=gpu", "attention=flash", "task.compile=false"]
    assert "sample: The" in workplace.run(*options)
    out = workplace.run(*options, "trainer.max_steps=16", "resume=auto")
    assert "sample: The" in out
    steps = [int(row["step"]) for row in workplace.rows("gpu") if row["train/loss"]]
    assert steps[-1] == 16 and len(steps) == len(set(steps))
