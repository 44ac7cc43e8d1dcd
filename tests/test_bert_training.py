"""BERT from text to a falling loss: configuration, data, model, task and optimizer together."""

import random
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir

import train

CONFIGS = Path(__file__).parents[1] / "configs"
SMALL = (
    "experiment=bert_large_512 data=masked_text trainer=cpu model=bert_tiny model.depth=1 "
    "model.dim=16 model.resid_dropout=0.0 model.attn_dropout=0.0 data.seqlen=32 "
    "data.batch_tokens=256 data.val_fraction=0.1 data.num_workers=0 task.micro_batch_tokens=128 "
    "task.compile=false trainer.max_steps=30 trainer.val_check_interval=30 optimizer.lr=0.1 "
    "task.final_lr_fraction=1.0"
).split()


@pytest.fixture
def sentences(tmp_path):
    """30 texts of sentences that repeat one word: any word of one tells the others."""
    words = ["alpha", "beta", "gamma", "delta", "river", "mountain", "seven", "running"]
    generator = random.Random(0)
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(30):
        word = generator.choice(words)
        sentence = f"{word} {word} {word} {word} {word} {word}. "
        (folder / f"{i}.txt").write_text(sentence * generator.randint(2, 8))
    return folder


def run(folder, *overrides):
    """A run as train.py does it, in this process: (task, trainer, loss of its report)."""
    places = [f"runs_root={folder}/runs", f"data.root={folder}/data", f"data.source={folder}/text"]
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        cfg = compose("train", [*SMALL, *places, *overrides])
    cfg, run, data, task, trainer = train.build(cfg)
    trainer.loggers = train.instantiate_all(cfg.logger)
    trainer.fit(task, data, ckpt_path=run.ckpt_path, weights_only=True)
    return task, trainer, train.report(cfg, run, data, task, trainer)


@pytest.mark.slow
def test_masked_words_of_a_regular_text_are_learned(sentences, tmp_path, capsys):
    task, trainer, loss = run(tmp_path)
    header, *rows = (tmp_path / "runs/bert_large_512/metrics.csv").read_text().splitlines()
    column = header.split(",").index("train/loss")
    losses = [float(row.split(",")[column]) for row in rows]
    assert losses[0] > 9.0  # log of the vocabulary and of 2
    assert sum(losses[-5:]) / 5 < 5.0 and loss < 5.0
    assert float(trainer.callback_metrics["val/accuracy"]) > 0.1
    assert "masked-token accuracy" in capsys.readouterr().out


@pytest.mark.slow
def test_second_phase_starts_from_the_first(sentences, tmp_path, capsys):
    """Phase 1 sees 16 tokens of a table of 32; phase 2 begins with its weights."""
    options = ["data.seqlen=16", "data.batch_tokens=128", "model.max_seqlen=32", "optimizer.lr=0.1"]
    options += ["task.final_lr_fraction=1.0", "trainer.max_steps=2", "task.micro_batch_tokens=64"]
    first = run(tmp_path, "run_name=phase1", *options)[0].model.state_dict()
    options = ["run_name=phase2", f"init_from={tmp_path}/runs/phase1", "trainer.max_steps=1"]
    second = run(tmp_path, *options, "optimizer.lr=0.0")[0].model.state_dict()
    for name, value in first.items():
        assert torch.equal(second[name], value), name
    options += ["run_name=longer", "data.seqlen=64", "task.extend_positions=interpolate"]
    longer = run(tmp_path, *options, "optimizer.lr=0.0")[0].model.state_dict()
    old, new = (state["embeddings.positions.weight"] for state in (first, longer))
    torch.testing.assert_close(new[[0, -1]], old[[0, -1]])
    # A resumed run keeps its own weights.
    options = ["run_name=phase2", "resume=auto", "init_from=nowhere", "trainer.max_steps=2"]
    resumed = run(tmp_path, *options, "optimizer.lr=0.0")
    assert resumed[1].global_step == 2
