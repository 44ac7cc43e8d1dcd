"""Long documents: what their experiments state, and from local files to F1 with all parts."""

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
PAPER = {"longdoc_ecthr": (10, 9_000), "longdoc_mimic": (50, 8_066)}  # labels, documents


def composed(*overrides):
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return compose("train", list(overrides))


def run(folder, *overrides):
    """A run as train.py does it, in this process: (data, trainer)."""
    places = [f"runs_root={folder}/runs", f"data.root={folder}/data"]
    cfg, run, data, task, trainer = train.build(composed(*SMALL, *places, *overrides))
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


@pytest.mark.parametrize("experiment, seqlen", zip(PAPER, (512, 16384), strict=True))
def test_experiment_states_the_recipe_of_long_documents(experiment, seqlen):
    """PAPER 2.9, Dai et al.: RoBERTa-base, lr 2e-5, 30 epochs of batch 16, a tenth of warm-up."""
    cfg = composed(f"experiment={experiment}", f"data.seqlen={seqlen}", "data.source=x")
    train.check_options(cfg)
    num_classes, documents = PAPER[experiment]
    assert cfg.data.num_classes == cfg.model.num_classes == num_classes and cfg.model.multi_label
    model = cfg.model
    assert (model.depth, model.dim, model.nheads, model.vocab_size) == (12, 768, 12, 50265)
    assert (model.num_segments, model.position_offset, model.norm_eps) == (1, 2, 1e-5)
    assert (cfg.optimizer.lr, cfg.optimizer.weight_decay, cfg.task.grad_clip) == (2e-5, 0.0, 1.0)
    assert (cfg.data.batch_size, cfg.task.warmup_fraction, cfg.task.decay) == (16, 0.1, "linear")
    assert cfg.trainer.max_steps == pytest.approx(30 * documents / 16, abs=1)
    assert cfg.trainer.val_check_interval == pytest.approx(documents / 16, abs=1)
    assert cfg.init_from == cfg.data.tokenizer == "FacebookAI/roberta-base"
    assert cfg.model.max_seqlen == seqlen and cfg.task.extend_positions == "tile"
    for length in (512, 1024, 2048, 4096, 8192, 16384):
        assert 16 % min(16, cfg.task.micro_batch_tokens // length) == 0


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["model.num_classes=3"], "model.num_classes=3 must be the 10 of the data"),
        (["model.multi_label=false"], "model.multi_label must be true: an example of these data"),
        (["model.vocab_size=99"], "model.vocab_size=99 must be at least 30522"),
        (["data.source=null", "data.task=mimic"], "given to trained persons under a contract"),
        (
            ["task.micro_batch_tokens=1600", "data.seqlen=512"],
            "must divide into micro-batches of 3",
        ),
    ],
)
def test_wrong_documents_say_what_to_do_in_one_line(overrides, message, tmp_path):
    row = json.dumps({"text": "a", "labels": [*range(10)]})
    for split in ("train", "val", "test"):
        (tmp_path / f"{split}.jsonl").write_text(row)
    places = [f"runs_root={tmp_path}/runs", f"data.root={tmp_path}/data", f"data.source={tmp_path}"]
    with pytest.raises(SystemExit, match=message) as stop:
        with train.one_line_errors(train.BUILD_ERRORS):
            train.build(composed("experiment=longdoc_ecthr", *SMALL, *places, *overrides))
    assert "\n" not in str(stop.value) and str(stop.value).startswith("error: ")
