"""Chains of runs: that their options compose, what is gone on with and packed; one for real."""

import hashlib
import json
import re
import tarfile
import time
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

import train
from scripts import long_range, prepare_pathfinder
from scripts.long_range_chains import CHAINS, MEASURE

CONFIGS = Path(__file__).parents[2] / "configs"
STAGES = [(chain, stage) for chain, made in CHAINS.items() for stage in made.stages]
TINY = (
    "trainer=cpu model.depth=1 model.dim=16 model.nheads=2 model.mlp_dim=16 data.num_train=16 "
    "data.num_val=8 data.val_limit=8 data.num_test=8 data.batch_size=4 data.val_batch_size=4 "
    "data.num_workers=0 data.prepare_workers=0 trainer.max_steps=2 trainer.val_check_interval=2 "
    "callbacks.metrics.every_n_steps=1 task.compile=false"
).split()


@pytest.mark.parametrize("chain, stage", STAGES, ids=[stage.name for _, stage in STAGES])
def test_the_options_of_a_stage_are_those_of_train(chain, stage):
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        cfg = compose("train", [*stage.options, *(MEASURE if stage.measures else ())])
    cfg.run_dir, cfg.run_id = "x", "x"
    train.check_options(cfg)
    if "labels" in chain:
        assert cfg.task.dense_weight == 0 and not cfg.data.dense_target
    if stage.measures:
        assert cfg.trainer.max_steps == 1 and cfg.task.warmup_fraction == 1


def test_runs_of_chains_have_names_of_their_own():
    names = [stage.name for _, stage in STAGES]
    assert len(set(names)) == len(names)
    for chain in CHAINS.values():
        assert chain.after is None or chain.after in names
        assert chain.stages[0].measures is False


class Calls(long_range.Plan):
    """Notes what would be started, and leaves what a run of so many steps leaves."""

    def __init__(self, folder, minutes=8.0, stops_at=None, options=()):
        args = long_range.parse(["--runs-root", str(folder), *options])
        super().__init__(args, time.time() + 60 * minutes)
        self.calls, self.stops_at = [], stops_at or {}
        self.logs.mkdir(parents=True, exist_ok=True)

    def _start(self, module, words, log, **_):
        options = dict(word.split("=", 1) for word in words)
        name = options["run_name"]
        self.calls.append((name, Path(options.get("init_from", "-")).name))
        folder = self.runs / name
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        step, most = self.stops_at.get(name, 9), 9
        result = {"step": step, "max_steps": most, "splits": {"val": {"line": "fine"}}}
        (folder / "result.json").write_text(json.dumps(result))
        if "callbacks.checkpoints=null" not in words:
            entry = {"step": step, "sha256": hashlib.sha256(b"x").hexdigest(), "bytes": 1}
            manifest = {f"step-{step:08d}.ckpt": entry}
            (folder / f"checkpoints/step-{step:08d}.ckpt").write_bytes(b"x")
            (folder / "checkpoints/manifest.json").write_text(json.dumps(manifest))
        self.options_of = options
        return type("Done", (), {"wait": lambda self: 0})()


def test_a_chain_goes_on_where_it_stopped(tmp_path):
    """The second run stopped early and is not gone back to, as the third began; the third is."""
    first = Calls(tmp_path, stops_at={"pathx_14": 5, "pathx_full": 5})
    first.run("pathx")
    assert first.calls == [
        ("pathx_6", "-"), ("pathx_14", "pathx_6"), ("pathx_full", "pathx_14"),
        ("pathx_dense", "pathx_full"), ("pathx_balanced", "pathx_full"),
    ]  # fmt: skip
    second = Calls(tmp_path)
    second.run("pathx")
    names = [name for name, _ in second.calls]
    assert names == ["pathx_full", "pathx_dense", "pathx_balanced"], "tested again, as it changed"
    third = Calls(tmp_path)
    third.run("pathx")
    assert third.calls == []


def test_what_is_packed_goes_on_elsewhere(tmp_path):
    """Each run as it ends: weights of the last one, and of the one that path256 starts from."""

    class Watched(Calls):
        def _start(self, module, words, log, **options):
            packed.append(sorted(path.name for path in folder.glob("*")))
            return super()._start(module, words, log, **options)

    folder, packed = tmp_path / "packed", []
    options = ["--pack", str(folder)]
    Watched(tmp_path / "runs", options=options).run("pathx")
    assert packed[:3] == [[], ["pathx_6.tar"], ["pathx_14.tar", "pathx_6.tar"]]
    holds = {}
    for path in folder.iterdir():
        with tarfile.open(path) as tar:
            holds[path.stem] = any("checkpoints" in name for name in tar.getnames())
            tar.extractall(tmp_path / "elsewhere", filter="data")
    assert holds == {
        "pathx_6": False, "pathx_14": True, "pathx_full": True,
        "pathx_dense": False, "pathx_balanced": False,
    }  # fmt: skip
    again = Calls(tmp_path / "elsewhere", options=options)
    again.run("pathx")
    again.run("path256")
    assert again.calls == [("path256", "pathx_14"), ("path256_balanced", "path256")]


def test_weights_stay_until_what_goes_on_with_them_is_packed(tmp_path, monkeypatch):
    """pathx_full is too large here: those of pathx_6 are gone with pathx_14's tar, pathx_14's are
    not."""
    folder = tmp_path / "packed"
    plan = Calls(tmp_path / "runs", options=["--pack", str(folder)])
    monkeypatch.setattr(long_range, "_STARTS", set())
    pack = plan.pack
    monkeypatch.setattr(
        plan, "pack", lambda name, **options: name != "pathx_full" and pack(name, **options)
    )
    plan.run("pathx")
    holds = {}
    for path in folder.iterdir():
        with tarfile.open(path) as tar:
            holds[path.stem] = any("checkpoints" in name for name in tar.getnames())
    assert holds["pathx_14"] and not holds["pathx_6"] and "pathx_full" not in holds


def test_a_full_disk_is_a_failure_of_its_chain(tmp_path, monkeypatch, capsys):
    plan = Calls(tmp_path)
    monkeypatch.setattr(plan, "pack", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "full")))
    plan.run_or_fail("path32")
    assert plan.failed == ["path32"] and "path32: ended, OSError" in capsys.readouterr().out


def test_authors_are_read_from_ids():
    (word,) = (
        word
        for word in CHAINS["documents_512_1"].stages[0].options
        if word.startswith("data.label_pattern")
    )
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        pattern = compose("train", ["experiment=longdoc_novels", word]).data.label_pattern
    for text, author in (
        ("ENG18400_Trollope", "Trollope"), ("Barclay_Rosary_1909", "Barclay"), ("alone", None),
    ):  # fmt: skip
        found = re.search(pattern, text)
        assert (found and found[1]) == author


def test_a_stage_has_its_share_of_the_minutes_and_none_starts_without_time(tmp_path, capsys):
    plan = Calls(tmp_path, minutes=1.0)
    plan.run("path32")
    assert plan.calls == [("path32", "-"), ("path32_balanced", "path32")]
    late = Calls(tmp_path / "late", minutes=0.1)
    late.run("path32")
    assert late.calls == [] and "path32: no time left for it" in capsys.readouterr().out
    plan = Calls(tmp_path, minutes=100.0, stops_at={"pathx_6": 5})
    plan._train(CHAINS["pathx"].stages[0], None)
    assert plan.options_of["callbacks.stop.minutes"] == "2.20"


def test_images_that_are_prepared_are_those_of_a_stage(monkeypatch):
    """By the folder that both come to, which names everything they depend on."""
    made = []
    monkeypatch.setattr(
        prepare_pathfinder, "prepare_pathfinder",
        lambda spec, folder, num_images, **options: made.append(Path(folder)) or 1 / 0,
    )  # fmt: skip
    for name, chain in CHAINS.items():
        made.clear()
        for arguments in chain.prepare:
            with pytest.raises(ZeroDivisionError):
                prepare_pathfinder.main([*arguments.split(), "--no-floor"])
        wanted = set()
        for stage in chain.stages:
            with initialize_config_dir(str(CONFIGS), version_base="1.3"):
                cfg = compose("train", list(stage.options))
            if "pathfinder" in cfg.data._target_.lower():
                cfg.run_dir, cfg.run_id = "x", "x"
                wanted.update(instantiate(cfg.data).folders)
        assert set(made) <= wanted and len(set(made)) == len(chain.prepare), name


def test_a_chain_needs_what_it_starts_from(tmp_path, capsys):
    assert long_range.main(["--chains", "path256", "--runs-root", str(tmp_path)]) == 1
    assert "path256 starts from pathx_14, which is not in" in capsys.readouterr().err


def test_wrong_arguments_are_one_line(capsys):
    for words, error in (
        (["nonsense"], "key=value, got nonsense"),
        (["--minutes", "0"], "positive"),
        (["--chains", "pathx", "path33"], "--chains must be of pathx, .* got path33"),
    ):
        with pytest.raises(SystemExit):
            long_range.main(words)
        assert re.search(error, capsys.readouterr().err)
    args = long_range.parse(["--chains", "pathx", "labels", "seed=2"])
    assert (args.chains, args.override) == (["pathx", "labels"], ["seed=2"])
    assert long_range.main(["--list"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in CHAINS) and "pathx_6, pathx_14, pathx_full" in out


@pytest.mark.slow
@pytest.mark.long
def test_a_chain_trains_tests_and_packs(tmp_path, capsys, monkeypatch):
    """Tiny, on the CPU; then from its tar, in another place, with nothing left to do."""
    roots = ["--runs-root", str(tmp_path / "runs"), "--data-root", str(tmp_path / "data")]
    words = ["--chains", "path32", "--minutes", "9", *roots, "--pack", str(tmp_path / "packed")]
    assert long_range.main([*words, *TINY]) == 0
    out = capsys.readouterr().out
    assert "path32: accuracy (test, best-00000002.ckpt)" in out
    assert "path32_balanced: accuracy (test, last step)" in out
    assert {p.name for p in (tmp_path / "packed").iterdir()} == {
        "path32.tar", "path32_balanced.tar"
    }  # fmt: skip
    with tarfile.open(tmp_path / "packed/path32.tar") as tar:
        tar.extractall(tmp_path / "elsewhere", filter="data")
    assert (tmp_path / "elsewhere/path32/metrics.csv").exists()
    again = ["--runs-root", str(tmp_path / "elsewhere"), "--data-root", str(tmp_path / "data")]
    options = [word for word in TINY if "max_steps" not in word]
    small = ["--pack", str(tmp_path / "none"), "--pack-mib", "0.001"]
    command = ["--chains", "path32", *again, *small, *options, "trainer.max_steps=4"]
    assert long_range.main(command) == 0
    out = capsys.readouterr().out
    assert "path32: not packed" in out and not (tmp_path / "none").exists()
    result = json.loads((tmp_path / "elsewhere/path32/result.json").read_text())
    assert result["step"] == 2, "it had made its steps"
