"""Every configuration composes and builds, small and on CPU; a wrong one says what to do."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

import train
from data.context_warmup import ContextWarmup
from model.block_sparse import PATTERNS
from model.gpt import GPT
from model.hf import export_gpt2

CONFIGS = Path(__file__).parents[1] / "configs"
EXPERIMENTS = sorted(path.stem for path in (CONFIGS / "experiment").glob("*.yaml"))
PAPER = {  # experiment: (depth, dim, nheads, seqlen, peak lr), PAPER table 4 and the GPT-2 recipe
    "gpt2_1k": (12, 768, 12, 1024, 6e-4),
    "gpt2_2k": (12, 768, 12, 2048, 6e-4),
    "gpt2_4k": (12, 768, 12, 4096, 6e-4),
    "gpt2_8k": (12, 768, 12, 8192, 6e-4),
    "gpt2_16k": (12, 768, 12, 16384, 6e-4),
    "gpt2_32k": (12, 768, 12, 32768, 6e-4),
    "gpt2_64k": (12, 768, 12, 65536, 6e-4),
    "gpt2_4k_warmup": (12, 768, 12, 4096, 6e-4),
    "gpt2_16k_warmup": (12, 768, 12, 16384, 6e-4),
    "gpt2_medium_1k": (24, 1024, 16, 1024, 1.5e-4),
    "gpt2_medium_16k": (24, 1024, 16, 16384, 1.5e-4),
}


BERT = {  # experiment: shape, sequences, tokens, peak lr, steps, warm-up steps, decay; PAPER 2.6
    "bert_large_512": ((24, 1024, 16), 448, 512, 3.75e-4, 7100, 0, "linear"),
    "bert_base_512": ((12, 768, 12), 448, 512, 3.75e-4, 7100, 0, "linear"),
    "bert_large_phase1": ((24, 1024, 16), 65_536, 128, 5e-3, 7038, 2000, "sqrt"),
    "bert_large_phase2": ((24, 1024, 16), 32_768, 512, 3.7e-3, 1563, 200, "sqrt"),
}


LONGDOC_LABELS = {"longdoc_ecthr": 10, "longdoc_mimic": 50}


def composed(*overrides):
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return compose("train", list(overrides))


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("Call me Ishmael. Some years ago, never mind how long precisely.\n" * 6000)
    return path


PATHFINDERS = ("lra_pathfinder", "pathx", "path256")
SMALL_PATHFINDER = (
    "data.num_train=4 data.num_val=2 data.num_test=2 data.level=6 data.prepare_workers=0"
).split()


@pytest.fixture
def source(tmp_path, text):
    """What data.source may be for an experiment: a few examples in the layout of its release."""

    def make(experiment):
        folder = tmp_path / "source"
        folder.mkdir()
        if experiment == "lra_listops":
            for split in ("train", "val", "test"):
                (folder / f"basic_{split}.tsv").write_text("Source\tTarget\n( [MAX 3 4 ] )\t4\n")
        elif experiment == "lra_text":
            for part in ("train/neg", "train/pos", "test/neg", "test/pos"):
                (folder / "aclImdb" / part).mkdir(parents=True)
                (folder / "aclImdb" / part / "0_1.txt").write_text("a review")
        elif experiment == "lra_retrieval":
            for split in ("train", "eval", "test"):
                (folder / f"new_aan_pairs.{split}.tsv").write_text("1\ta\tb\tone text\tanother\n")
        elif experiment == "lra_image":
            images = np.zeros((5002, 28, 28), np.uint8)
            for stem, number in (("train", 5002), ("t10k", 2)):
                for kind, array in (("images-idx3", images), ("labels-idx1", images[:, 0, 0])):
                    header = np.array([0x800 + array.ndim, number, *array.shape[1:]], ">i4")
                    path = folder / f"{stem}-{kind}-ubyte.gz"
                    path.write_bytes(gzip.compress(header.tobytes() + array[:number].tobytes(), 1))
        elif experiment == "longdoc_novels":
            rows = [{"text": f"text {i}", "label": str(i % 10)} for i in range(30)]
            (folder / "novels.jsonl").write_text("\n".join(map(json.dumps, rows)))
            return folder / "novels.jsonl"
        elif experiment in LONGDOC_LABELS:
            row = json.dumps({"text": ["a", "b"], "labels": [*range(LONGDOC_LABELS[experiment])]})
            for split in ("train", "val", "test"):
                (folder / f"{split}.jsonl").write_text(row)
        else:
            return text
        return folder

    return make


def small(tmp_path, text, *overrides):
    data = [f"data.source={text}"] if text else SMALL_PATHFINDER
    return composed(
        "trainer=cpu",
        "model.depth=1",
        "model.dim=16",
        "model.nheads=2",
        *data,
        f"data.root={tmp_path}/data",
        f"runs_root={tmp_path}/runs",
        *overrides,
    )


@pytest.mark.parametrize(
    "experiment, recipe",
    [(name, None) for name in EXPERIMENTS]
    + [(name, recipe) for name in PATHFINDERS for recipe in ("paper", "fast", "labels")],
)
def test_experiment_builds(experiment, recipe, tmp_path, source):
    where = None if experiment in PATHFINDERS else source(experiment)
    options = [f"experiment={experiment}", "trainer=cpu"]
    options += [f"recipe={recipe}"] if recipe else []
    # Neither Wikipedia nor the hub's GPT-2 is to be had without a network.
    options += ["data=masked_text"] if experiment in BERT else ["init_from=null"]
    if experiment.startswith("longdoc_"):
        options += ["data.tokenizer=bert-base-uncased", "data.piece_tokens=null"]
    cfg, run, data, task, trainer = train.build(small(tmp_path, where, *options))
    assert run.folder == tmp_path / "runs" / experiment
    assert task.model.max_seqlen == (512 if experiment in BERT else data.seqlen)
    assert not run.folder.exists(), "building writes nothing"


LRA = {  # preset: (depth, nheads, dim, mlp_dim, headdim, pooling), the arena's and fly's configs
    "lra_listops": (4, 8, 512, 1024, None, "cls"),
    "lra_text": (4, 4, 256, 1024, None, "cls"),
    "lra_retrieval": (4, 4, 128, 512, None, "cls"),
    "fly_retrieval": (2, 2, 64, 128, None, "mean"),
    "lra_image": (1, 8, 128, 128, 8, "cls"),
    "lra_pathfinder": (4, 4, 32, 32, 4, "mean"),
    "fly_pathfinder": (2, 2, 64, 128, None, "mean"),
}


@pytest.mark.parametrize("preset", LRA)
def test_preset_states_the_published_shape(preset):
    model = composed(f"model={preset}").model
    keys = ("depth", "nheads", "dim", "mlp_dim", "headdim", "pooling")
    assert tuple(model[key] for key in keys) == LRA[preset]


@pytest.mark.parametrize("experiment", PATHFINDERS)
def test_recipes_of_pathfinder_say_what_they_are_given(experiment):
    """The paper's: labels only, all pixels, 200 epochs. Ours: non-zero pixels, and a dense target
    or a curriculum."""
    paper, fast, labels = (
        composed(f"experiment={experiment}", f"recipe={r}") for r in ("paper", "fast", "labels")
    )
    assert not (labels.data.dense_target or labels.task.dense_weight)
    assert not labels.model.num_dense_classes and labels.model.foreground
    assert labels.data.curriculum[0] == [3, 0, 400]
    assert sum(steps for *_, steps in labels.data.curriculum) < labels.trainer.max_steps
    assert not (paper.data.dense_target or paper.task.dense_weight or paper.model.foreground)
    assert paper.trainer.max_steps * paper.data.batch_size == 200 * 160_000
    assert paper.model.positions == "learned" and fast.model.positions == "rotary_2d"
    assert fast.data.dense_target and fast.task.dense_weight and fast.model.foreground
    for cfg in (paper, fast, labels):
        assert cfg.data.level == 14 and cfg.data.num_train == 160_000
        assert cfg.model.image_size == cfg.data.size and cfg.seed == 1111
        train.check_options(cfg)


def test_a_curriculum_ends_before_the_run(tmp_path):
    options = ["experiment=lra_pathfinder", "recipe=labels", "trainer=cpu"]
    with pytest.raises(
        ValueError, match="lasts 4000 steps, trainer.max_steps is 3000; train longer"
    ):
        train.build(small(tmp_path, None, *options, "trainer.max_steps=3000"))


@pytest.mark.parametrize("experiment", PAPER)
def test_experiment_states_the_recipe_of_the_paper(experiment):
    cfg = composed(f"experiment={experiment}")
    model = cfg.model
    shape = (model.depth, model.dim, model.nheads, cfg.data.seqlen, cfg.optimizer.lr)
    assert shape == PAPER[experiment]
    assert cfg.data.batch_tokens == 524_288  # 512 sequences of 1,024
    assert cfg.trainer.max_steps == 400_000 and cfg.task.warmup_fraction == 0.01
    assert cfg.optimizer.weight_decay == 0.1 and cfg.task.grad_clip == 1.0
    assert model.inverse_layer_scale and cfg.seed == 1111


@pytest.mark.parametrize(
    "experiment, first_steps",
    [("gpt2_4k_warmup", (0, 280_000)), ("gpt2_16k_warmup", (0, 280_000, 360_000))],
)
def test_warmup_trains_at_1k_for_70_percent_of_the_tokens(experiment, first_steps):
    data = composed(f"experiment={experiment}").data
    options = {"seqlen": data.seqlen, "max_steps": data.max_steps}
    warmup = ContextWarmup.planned(data.context_warmup, **options)
    assert warmup.first_steps == first_steps and warmup.contexts[0] == 1024


@pytest.mark.parametrize("experiment", BERT)
def test_experiment_states_the_published_recipe_of_bert(experiment):
    cfg = composed(f"experiment={experiment}")
    train.check_options(cfg)
    shape, sequences, seqlen, lr, steps, warmup_steps, decay = BERT[experiment]
    assert (cfg.model.depth, cfg.model.dim, cfg.model.nheads) == shape
    assert (cfg.data.batch_tokens, cfg.data.seqlen) == (sequences * seqlen, seqlen)
    assert (cfg.optimizer.lr, cfg.trainer.max_steps, cfg.task.decay) == (lr, steps, decay)
    assert round(cfg.task.warmup_fraction * steps) == warmup_steps
    assert cfg.optimizer._target_ == "model.optim.lamb" and cfg.optimizer.weight_decay == 0.01
    assert list(cfg.optimizer.betas) == [0.9, 0.999] and cfg.optimizer.eps == 1e-6
    assert cfg.task.grad_clip == 1.0 and cfg.task.final_lr_fraction == 0.0
    assert cfg.data.val_samples_limit == 10_000 and cfg.model.max_seqlen == 512


def test_robertas_network_is_a_matter_of_options(tmp_path, text):
    options = ["experiment=bert_base_512", "data=masked_text", "data.sentence_pairs=false"]
    options += ["model.num_segments=1", "model.position_offset=2", "model.norm_eps=1e-5"]
    options += ["model.nsp_head=false", "model.pooler=false"]
    task = train.build(small(tmp_path, text, *options))[3]
    assert task.loss_weights == {"mlm_loss": 1.0}
    assert task.model.embeddings.positions.num_embeddings == 514  # RoBERTa's, 2 never trained


def test_bert_large_stops_where_mlperf_does():
    cfg = composed("experiment=bert_large_512")
    assert cfg.callbacks.target.metric == "val/accuracy" and cfg.callbacks.target.at_least == 0.72
    assert cfg.trainer.val_check_interval * 448 == pytest.approx(150_000, rel=1e-3)
    assert cfg.data.max_masked == 76


def test_fine_tune_starts_from_a_folder_with_a_longer_table(tmp_path, text):
    sizes = {"max_seqlen": 1024, "depth": 1, "dim": 16, "nheads": 2}
    source = GPT(**sizes)
    export_gpt2(source, tmp_path / "hf")
    options = ["experiment=finetune_gpt2", f"init_from={tmp_path}/hf", "data.seqlen=2048"]
    task = train.build(small(tmp_path, text, *options))[3]
    table = task.model.embeddings.positions.weight
    assert torch.equal(table, source.embeddings.positions.weight.repeat(2, 1))
    assert torch.equal(task.model.head_weight, source.head_weight)
    with pytest.raises(ValueError, match="depth is 1 in the checkpoint and 2 in the model"):
        train.build(small(tmp_path, text, *options, "model.depth=2"))


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_debug_makes_every_experiment_small_and_local(experiment):
    cfg = composed(f"experiment={experiment}", "debug=fast")
    train.check_options(cfg)
    assert cfg.data.get("source", "embedded") in ("embedded", "random") and cfg.init_from is None
    assert cfg.data.num_workers == 0 and not cfg.task.compile
    assert cfg.data.get("batch_tokens", 1024) == 1024 and cfg.data.get("batch_size", 4) <= 4


@pytest.mark.parametrize(
    "experiment, more",
    [(name, None) for name in ("gpt2_4k_warmup", "bert_large_512", "lra_retrieval", "lra_image")]
    + [("longdoc_mimic", None), ("path256", "recipe=fast"), ("gpt2_1k", "data=stream")],
)
def test_debug_builds(experiment, more, tmp_path, text):
    options = [f"experiment={experiment}", "debug=fast"] + [more] * bool(more)
    places = [f"data.root={tmp_path}/data", f"runs_root={tmp_path}/runs", "trainer=cpu"]
    cfg = composed(*options, *places)
    if cfg.data.get("source") == "embedded" and more != "data=stream":
        cfg.data.source = str(text)  # quicker to prepare
    cfg, run, data, task, trainer = train.build(cfg)
    assert task.model.num_params() < 5_000_000 and trainer.max_steps == task.max_steps == 5
    assert len(list(data.val_dataloader())) <= 16


def choices(group):
    return sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))


@pytest.mark.parametrize(
    "override",
    [
        f"{group}={choice}"
        for group in ("model", "attention", "optimizer", "trainer", "logger", "callbacks", "debug")
        for choice in choices(group)
    ],
)
def test_every_choice_of_a_group_composes_and_fits_its_signature(override):
    train.check_options(composed(override))


def test_a_callback_can_be_switched_off(tmp_path, text):
    trainer = train.build(small(tmp_path, text, "callbacks.checkpoints=null"))[-1]
    assert [type(c).__name__ for c in trainer.callbacks] == ["Metrics", "StopAfter", "StepGuard"]


def readme_commands():
    lines = (CONFIGS.parent / "README.md").read_text().splitlines()
    commands = [line.split("#")[0].split() for line in lines if line.startswith("python train.py")]
    return [command[2:] for command in commands if "--help" not in command]


@pytest.mark.parametrize("arguments", readme_commands(), ids=" ".join)
def test_commands_of_the_readme_compose(arguments):
    cfg = composed(*[a.split(",")[0] for a in arguments if a not in ("-m", "...")])
    train.check_options(cfg)
    if "batch_tokens" not in cfg.data:
        classifiers = ("lra_", "path", "longdoc_")
        assert cfg.run_name.startswith(classifiers), "classification counts examples"
        return
    assert cfg.data.batch_tokens % cfg.data.seqlen == 0
    if cfg.run_name in (*BERT, "finetune_gpt2"):
        return  # recipes of their own
    if cfg.model.dim > 64:  # not the quickstart: its learning rate and batch are for a toy
        assert cfg.optimizer.lr <= 6e-4 and cfg.data.batch_tokens == 524_288


def test_later_overrides_win():
    cfg = composed("experiment=gpt2_4k", "debug=fast", "trainer.max_steps=7")
    assert (cfg.trainer.max_steps, cfg.data.seqlen, cfg.model.dim) == (7, 128, 64)


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["+model.width=3"], "model.width is unknown; GPT has .*dim"),
        (["optimizer.lr=fast"], "optimizer.lr must be float, got 'fast'"),
        (
            ["data=packed_documents", "+data.tokenizer=gpt2"],
            "data.tokenizer is unknown; PackedDocumentsData has max_documents, .*seqlen",
        ),
        (["data=packed_documents", "data.val_fraction=much"], "data.val_fraction must be float"),
        (["+task.width=3"], "task.width is unknown; CausalLMTask has .*final_context, max_steps"),
        (["model.depth=1.5"], "model.depth must be int, got 1.5"),
        (["data.batch_tokens=1000"], "batch_tokens"),
        (["model.max_seqlen=64"], "data.seqlen=128 is longer than the 64 positions"),
        (["data.source=missing.txt"], "missing.txt"),
        (["data.source=hf:nobody/nothing"], "no network|cannot be reached|local files"),
        (["attention=flash"], "needs a GPU; use attention=sdpa"),
        (["attention=block_sparse"], "attention=block_sparse needs a GPU"),
        (["attention=block_sparse", "+attention.pattern.size=3"], "butterfly got a wrong option"),
        (["context_parallel.size=2"], "context_parallel.size=2 must divide the 1 devices"),
        (
            ["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2"]
            + ["context_parallel.size=2", "context_parallel.method=ring"],
            "method=ring needs attention=flash or block_sparse, and GPUs: use method=heads",
        ),
        (["model.nheads=3"], "dim .16. must be a multiple of nheads .3."),
        (["task.micro_batch_tokens=384"], "must divide into micro-batches of 3"),
        (["trainer.precision=16-mixed"], "must be auto, bf16-mixed or 32-true"),
        (["optimizer.lr=-1.0"], "Invalid learning rate: -1.0"),
        (["task.extend_positions=repeat"], "must be one of tile, interpolate, got 'repeat'"),
        (["data.context_warmup=[[96,0.5]]"], "must rise and divide seqlen=128, got .96."),
        (["data.context_warmup=[[8,0.5]]", "task.micro_batch_tokens=384"], "micro-batches of 48"),
        (["resume=always"], "resume must be null or auto, got 'always'"),
        (["+model.vocab_size=100"], "model.vocab_size=100 must be at least 50257"),
    ],
)
def test_wrong_configuration_says_what_to_do_in_one_line(
    overrides, message, tmp_path, text, monkeypatch
):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    # Both read HF_HUB_OFFLINE when they are imported, which an earlier test may have done.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(SystemExit, match=message) as stop:
        with train.one_line_errors(train.BUILD_ERRORS):
            train.build(small(tmp_path, text, *overrides))
    assert "\n" not in str(stop.value) and str(stop.value).startswith("error: ")


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["data.size=64"], "data.seqlen=4096 is longer than the 1024 positions"),
        (["data.size=48"], "size must be one of"),
        (["model.num_classes=3"], "num_classes=3 must be the 2 of the data"),
        (["model.vocab_size=10"], "vocab_size=10 must be at least 256"),
        (["task.dense_weight=1.0"], "needs a dense head: set model.num_dense_classes"),
        (["data.batch_size=6", "task.micro_batch_size=4"], "must divide into micro-batches of 4"),
        (["init_from=nowhere"], "no run at nowhere"),
    ],
)
def test_wrong_classification_says_what_to_do_in_one_line(overrides, message, tmp_path):
    with pytest.raises(SystemExit, match=message) as stop:
        with train.one_line_errors(train.BUILD_ERRORS):
            train.build(small(tmp_path, None, "experiment=lra_pathfinder", *overrides))
    assert "\n" not in str(stop.value) and str(stop.value).startswith("error: ")


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["data.sentence_pairs=false"], "an NSP head needs pairs: set data.sentence_pairs=true"),
        (["model.nsp_head=false"], "only an NSP head trains the pooler: set model.pooler=false"),
        (["model.mlm_head=false"], "must have an MLM head: set model.mlm_head=true"),
        (["model.vocab_size=99"], "model.vocab_size=99 must be at least 30522"),
        (["optimizer.lr=-1.0"], "lr must be at least 0, got -1.0"),
    ],
)
def test_wrong_bert_says_what_to_do_in_one_line(overrides, message, tmp_path, text):
    options = ["experiment=bert_base_512", "data=masked_text", *overrides]
    with pytest.raises(SystemExit, match=message) as stop:
        with train.one_line_errors(train.BUILD_ERRORS):
            train.build(small(tmp_path, text, *options))
    assert "\n" not in str(stop.value) and str(stop.value).startswith("error: ")


@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_pattern_of_block_sparse_attention_composes(pattern):
    cfg = composed("experiment=gpt2_4k", "attention=block_sparse", f"attention/pattern={pattern}")
    attention = instantiate(cfg.attention)
    mask = attention.mask(0, torch.device("cpu"))
    assert mask.seqlen_q == mask.seqlen_k == 4096 and 0.0 < mask.density < 0.7
