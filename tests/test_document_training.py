"""Long documents from local files to F1: configuration, data, model, task and report together."""

import json
import random
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir

import train

CONFIGS = Path(__file__).parents[1] / "configs"
SMALL = (
    "trainer=cpu model.depth=1 model.dim=32 model.nheads=2 model.resid_dropout=0.0 "
    "model.attn_dropout=0.0 init_from=null data.tokenizer=bert-base-uncased data.num_workers=0 "
    "data.batch_size=8 trainer.max_steps=60 trainer.val_check_interval=60 optimizer.lr=2e-2"
).split()


def run(folder, *overrides):
    """A run as train.py does it, in this process: (data, trainer)."""
    places = [f"runs_root={folder}/runs", f"data.root={folder}/data"]
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        cfg = compose("train", [*SMALL, *places, *overrides])
    cfg, run, data, task, trainer = train.build(cfg)
    trainer.loggers = train.instantiate_all(cfg.logger)
    trainer.fit(task, data, ckpt_path=run.ckpt_path, weights_only=True)
    train.report(cfg, run, data, task, trainer)
    return data, trainer


def f1(trainer, kind="micro"):
    """Of the test, which comes last."""
    return float(trainer.callback_metrics[f"test/{kind}_f1"])


@pytest.fixture
def letters(tmp_path):
    """90 letters of 30 common words, after which one of three names says who wrote them."""
    generator = random.Random(0)
    common = "the a of and to in is was for on with as by at from".split()
    rows = []
    for i in range(90):
        words = generator.choices(common, k=30)
        name = ("river", "mountain", "garden")[i % 3]
        rows.append({"text": " ".join([*words, name]), "who": name})
    path = tmp_path / "letters.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.slow
def test_what_is_told_late_is_learned_by_a_longer_context_alone(letters, tmp_path, capsys):
    options = ["experiment=longdoc_novels", f"data.source={letters}", "data.label_field=who"]
    options += ["data.num_classes=3", "model.num_classes=3", "data.piece_tokens=null"]
    options += ["callbacks.metrics.every_n_steps=60"]
    short = run(tmp_path, *options, "data.seqlen=20", "run_name=short", "trainer.max_steps=30")[1]
    assert f1(short) < 0.8
    capsys.readouterr()
    data, long = run(tmp_path, *options, "data.seqlen=40", "run_name=long")
    assert f1(long) == f1(long, "macro") == 1.0
    said = capsys.readouterr().out
    assert "micro-F1 (validation): 100.00%, macro-F1 100.00% (9 documents)" in said
    assert "micro-F1 (test, best-00000060.ckpt): 100.00%" in said
    assert said.count("stand-in data, not comparable with published results: letters.jsonl") == 2
    assert "the commonest label for every document: micro-F1 33.33%" in said
    table = (tmp_path / "runs/long/metrics.csv").read_text().splitlines()
    assert "val/micro_f1" in table[0] and len(table) == 1 + 60


@pytest.mark.slow
def test_cases_with_several_labels_stop_and_resume_and_grow(tmp_path, capsys):
    """A run goes on where it stopped; a longer one starts from its encoder."""
    cases = tmp_path / "cases"
    cases.mkdir()
    words = [f"word{i}" for i in range(10)]
    for split in ("train", "val", "test"):
        generator = random.Random(split)
        rows = []
        for _ in range(20):
            labels = generator.sample(range(10), 2)
            rows.append({"text": [words[i] for i in labels] * 4, "labels": labels})
        (cases / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["experiment=longdoc_ecthr", f"data.source={cases}", "data.seqlen=12"]
    options += ["task.micro_batch_tokens=48", "trainer.val_check_interval=2"]
    options += ["callbacks.checkpoints.every_n_steps=2"]
    run(tmp_path, *options, "trainer.max_steps=2")
    trainer = run(tmp_path, *options, "trainer.max_steps=4", "resume=auto")[1]
    assert trainer.global_step == 4
    said = capsys.readouterr().out
    assert "micro-F1 (validation)" in said and "stand-in" not in said
    assert "the commonest labels for every document: micro-F1" in said
    first = trainer.lightning_module.model.encoder.state_dict()
    options += ["data.seqlen=24", f"init_from={tmp_path}/runs/longdoc_ecthr", "run_name=longer"]
    longer = run(tmp_path, *options, "trainer.max_steps=1", "optimizer.lr=0.0")[1]
    second = longer.lightning_module.model.encoder.state_dict()
    best = torch.load(
        next((tmp_path / "runs/longdoc_ecthr/checkpoints").glob("best-*.ckpt")), weights_only=True
    )["state_dict"]
    for name in first:
        value = best[f"model.encoder.{name}"]
        if name == "embeddings.positions.weight":
            assert torch.equal(second[name][2:], torch.cat([value[2:], value[2:]]))
        else:
            assert torch.equal(second[name], value), name
