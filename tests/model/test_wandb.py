"""W&B, read back from what an offline run leaves on disk: no network, no account."""

import functools
import hashlib
import json
import struct
import time
import warnings
from types import SimpleNamespace

import pytest
import torch
import wandb
from lightning import LightningDataModule
from wandb.proto import wandb_internal_pb2

import model.wandb_logger
from model.block_sparse import BlockSparseAttention
from model.callbacks import Metrics
from model.generation import sample_text
from model.gpt import GPT
from model.language_task import CausalLMTask
from model.loggers import COLUMNS
from model.optim import adamw
from model.saving import Checkpoints
from model.wandb_logger import GROUPS, PatientWandbLogger, chart_name, wandb_logger
from model.wandb_media import WandbMedia
from tests.training import make_trainer

BLOCK = 32768  # bytes; of LevelDB's log format, which W&B writes behind 7 bytes of its own
HEADER = struct.Struct("<IHB")  # CRC, length, kind: whole, first, middle, last


def parse(data):
    """The protobuf records of a .wandb file, as `wandb sync` reads them; not one cut off."""
    records, parts, at = [], [], 7
    while at + HEADER.size <= len(data):
        if BLOCK - at % BLOCK < HEADER.size:  # padding
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = HEADER.unpack_from(data, at)
        at += HEADER.size
        if at + length > len(data):
            break
        parts.append(data[at : at + length])
        at += length
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(b"".join(parts))
            records.append(record)
            parts = []
    return records


def read_records(path):
    """Of a run that was finished: W&B's service writes the last of them when finish() is over."""
    deadline = time.monotonic() + 20
    while not of_kind(records := parse(path.read_bytes()), "exit"):
        assert time.monotonic() < deadline, f"{path} does not end"
        time.sleep(0.02)
    assert path.read_bytes()[:4] == b":W&B"
    return records


def of_kind(records, kind):
    return [getattr(r, kind) for r in records if r.WhichOneof("record_type") == kind]


def history(records):
    """Rows that were logged: name -> value; W&B's own step is _step."""
    return [
        {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in row.item}
        for row in of_kind(records, "history")
    ]


class Numbers(LightningDataModule):
    """The same 4 sequences at every step; a tokenizer that writes ids."""

    tokenizer = SimpleNamespace(
        encode=lambda text: [1, 2], decode=lambda ids: " ".join(map(str, ids))
    )

    def __init__(self, num_steps):
        super().__init__()
        ids = torch.arange(4 * 8).view(4, 8) % 13
        self.batches = [{"input_ids": ids, "labels": ids}] * num_steps

    def train_dataloader(self):
        return torch.utils.data.DataLoader(self.batches, batch_size=None)

    def val_dataloader(self):
        return torch.utils.data.DataLoader(self.batches[:1], batch_size=None)


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """No account, and nothing written outside the test's folder."""
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    for name in ("HOME", "WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    return tmp_path / "run"


def train(folder, *, stop, ckpt_path=None):
    """8 tiny steps, or up to `stop`: validation and checkpoint at every second one."""
    torch.manual_seed(0)
    model = GPT(vocab_size=13, dim=16, nheads=2, max_seqlen=16, depth=1)
    task = CausalLMTask(model, functools.partial(adamw, lr=1e-2), max_steps=8)
    folder.mkdir(exist_ok=True)
    logger = wandb_logger(
        save_dir=str(folder), run_id="r-1", name="r", mode="offline", checkpoints="end"
    )
    trainer = make_trainer(
        stop,
        [
            WandbMedia(num_tokens=3, num_samples=1),
            Metrics(every_n_steps=2, show=False),
            Checkpoints(folder=str(folder / "checkpoints"), every_n_steps=2),
        ],
        logger=logger,
    )
    logger.log_hyperparams({"optimizer": {"lr": 1e-2}})
    trainer.fit(task, Numbers(8), ckpt_path=ckpt_path, weights_only=True)
    logger.finish("success")
    return model


@pytest.mark.filterwarnings("ignore")
def test_an_offline_run_and_its_resume_read_back(offline):
    train(offline, stop=5)
    # W&B names folders by the second, and the next start is not to fall into this one's.
    next((offline / "wandb").glob("offline-run-*")).rename(offline / "wandb/offline-run-0-r-1")
    model = train(offline, stop=8, ckpt_path=offline / "checkpoints/step-00000004.ckpt")
    first, second = (
        read_records(path) for path in sorted((offline / "wandb").glob("offline-run-*/*.wandb"))
    )
    # One run for W&B, its steps never going back within a start.
    assert {of_kind(records, "run")[0].run_id for records in (first, second)} == {"r-1"}
    rows = history(first)
    assert [row["_step"] for row in rows] == [1, 2, 3, 4, 5]
    rows = history(second)
    assert [row["_step"] for row in rows] == [5, 6, 7, 8]
    # Every row lies on the axis of tokens, those of a validation too.
    assert [row["tokens"] for row in rows] == [5 * 32, 6 * 32, 7 * 32, 8 * 32]
    assert [row["_step"] for row in rows if "val/loss" in row] == [6, 8]
    metrics = {m.name or m.glob_name: m.step_metric for m in of_kind(second, "metric")}
    assert metrics == {"tokens": "", **{f"{group}/*": "tokens" for group in GROUPS}}
    # Groups of charts.
    names = {name for row in rows for name in row if not name.startswith(("_", "samples/"))}
    assert {"train/loss", "optimizer/lr", "speed/tokens_per_s", "progress/step"} <= names
    assert {name.split("/")[0] for name in names} <= {"tokens", *GROUPS}
    config = {u.key: json.loads(u.value_json) for c in of_kind(second, "config") for u in c.update}
    assert config["optimizer"] == {"lr": 1e-2}
    # The table of samples goes on where it was.
    path = rows[-1]["samples/text/path"]
    table = json.loads(next((offline / "wandb").glob(f"offline-run-*/files/{path}")).read_text())
    assert table["columns"] == ["step", "tokens", "sample", "text"]
    assert [row[:3] for row in table["data"]] == [[s, s * 32, 0] for s in (2, 4, 6, 8)]
    expected = sample_text(model, Numbers.tokenizer, "The", 3, seed=1111)
    assert table["data"][-1][3] == expected[0]
    # The last and the best checkpoint are artifacts, read where they are.
    models = {
        alias: artifact
        for artifact in of_kind(second, "artifact")
        if artifact.type == "model"
        for alias in artifact.aliases
    }
    assert {"last", "best", "step-8"} <= set(models)
    assert models["last"].name == "model-r-1"
    content = models["last"].manifest.contents[0]
    assert content.path == "model.ckpt" and content.skip_cache
    assert content.local_path in {str(p) for p in (offline / "checkpoints").glob("*-00000008.ckpt")}
    assert json.loads(models["last"].metadata)["step"] == 8


def test_a_picture_of_each_pattern_reads_back(offline):
    patterns = [
        {"name": "butterfly", "block_size": 16},
        {"name": "sliding_window", "left": 7, "right": 0},
    ]
    model = GPT(
        vocab_size=13, dim=16, nheads=2, max_seqlen=64, depth=2,
        attention=BlockSparseAttention(patterns[0], 64, layers=patterns),
    )  # fmt: skip
    logger = wandb_logger(save_dir=str(offline.parent), run_id="r-2", name="r", mode="offline")
    trainer = SimpleNamespace(loggers=[logger], global_step=0)
    WandbMedia().on_train_start(trainer, SimpleNamespace(model=model))
    logger.finish("success")
    path = next((offline.parent / "wandb").glob("offline-run-*-r-2/*.wandb"))
    row = history(read_records(path))[0]
    for name in ("butterfly_0", "sliding_window_1"):
        html = (path.parent / "files" / row[f"attention/{name}/path"]).read_text()
        assert "<svg" in html and "64 x 64, density" in html


def test_names_of_charts_keep_the_column_behind_the_group():
    for column in set(COLUMNS) - {"tokens"}:
        group, name = chart_name(column).split("/")
        assert group in GROUPS and name == column.split("/")[-1]


def log_offline(folder, run_id, rows):
    """Records of an offline run to which (columns, step) were logged."""
    folder.mkdir(exist_ok=True)
    logger = wandb_logger(save_dir=str(folder), run_id=run_id, name="r", mode="offline")
    for row, step in rows:
        logger.log_metrics(row, step)
    logger.finish("success")
    return read_records(next((folder / "wandb").glob("offline-run-*/*.wandb")))


def test_every_column_reads_back_in_its_group_mfu_and_memory_too(offline):
    """What only a GPU measures as well."""
    row = {column: float(i) for i, column in enumerate(COLUMNS) if column != "step"}
    (found,) = history(log_offline(offline, "r-4", [(row, 7)]))
    for column, value in row.items():
        assert found[chart_name(column)] == value
    assert {"speed/mfu_full", "speed/mfu_causal", "memory/peak_gib"} <= set(found)
    assert found["progress/step"] == 7


@pytest.fixture
def fresh_wandb():
    """W&B reads its environment once a process."""
    wandb.teardown()
    yield
    wandb.teardown()


def test_a_member_of_a_sweep_is_a_run_of_it(fresh_wandb, offline, monkeypatch):
    """W&B's agent names the sweep and the run in the environment of each member."""
    monkeypatch.setenv("WANDB_SWEEP_ID", "s-1")
    monkeypatch.setenv("WANDB_RUN_ID", "member-1")
    records = log_offline(offline, "ours-1", [({"tokens": 64, "val/loss": 2.5}, 2)])
    run = of_kind(records, "run")[0]
    assert (run.sweep_id, run.run_id) == ("s-1", "member-1")
    assert history(records)[0]["val/loss"] == 2.5  # the objective of scripts/wandb_sweep.yaml


class FakeRun:
    """A run that the service knows up to step 6, as W&B returns it after an online resume."""

    id, starting_step, offline = "sub/name-1", 7, False

    def __init__(self):
        self.rows, self.artifacts = [], []

    def define_metric(self, *args, **kwargs):
        pass

    def log(self, row, step=None):
        self.rows.append((step, row))

    def log_artifact(self, artifact, aliases):
        self.artifacts.append((artifact, aliases))

    def finish(self, exit_code):
        pass


def test_steps_that_the_service_has_are_not_sent_again():
    run = FakeRun()
    logger = PatientWandbLogger(experiment=run)
    logger.log_metrics({"tokens": 60, "train/loss": 1.0, "lr": 0.1}, 6)
    logger.log_metrics({"tokens": 60, "val/loss": 2.0}, 6)  # its validation may be missing there
    logger.log_metrics({"tokens": 70, "train/loss": 0.5}, 7)
    assert run.rows == [
        (7, {"tokens": 60, "val/loss": 2.0, "progress/step": 6}),
        (7, {"tokens": 70, "train/loss": 0.5, "progress/step": 7}),
    ]


def checkpoint_files(folder, **steps_of_names):
    """checkpoints/ with files whose bytes are their step, and their manifest."""
    folder = folder / "checkpoints"
    folder.mkdir(exist_ok=True)
    manifest = {}
    for kind, steps in steps_of_names.items():
        for step in steps:
            data = str(step).encode()
            name = f"{kind}-{step:08d}.ckpt"
            (folder / name).write_bytes(data)
            sha256 = hashlib.sha256(data).hexdigest()
            manifest[name] = {"step": step, "sha256": sha256, "bytes": len(data)}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_artifacts_of_every_checkpoint_have_aliases(tmp_path):
    run = FakeRun()
    logger = PatientWandbLogger(experiment=run, save_dir=tmp_path, checkpoints="every")
    checkpoint_files(tmp_path, step=[2], best=[2])
    logger.checkpoint_saved()
    checkpoint_files(tmp_path, step=[2, 4], best=[2])
    logger.checkpoint_saved()
    (tmp_path / "checkpoints/step-00000004.ckpt").write_bytes(b"torn")
    logger.finish("failed")
    assert [aliases for _, aliases in run.artifacts] == [
        ["best", "last", "step-2"],
        ["last", "step-4"],
    ]
    assert {artifact.name for artifact, _ in run.artifacts} == {"model-sub-name-1"}


def test_checkpoints_are_no_artifacts_unless_asked_for(tmp_path):
    checkpoint_files(tmp_path, step=[2])
    for choice, offline, expected in (("none", False, 0), ("end", False, 1), ("every", True, 1)):
        run = FakeRun()
        run.offline = offline
        logger = PatientWandbLogger(experiment=run, save_dir=tmp_path, checkpoints=choice)
        logger.checkpoint_saved()
        assert not run.artifacts  # offline, `wandb sync` would look for files long removed
        logger.finish("success")
        assert len(run.artifacts) == expected
    with pytest.raises(ValueError, match="must be one of none, end, every, got 'all'"):
        wandb_logger(save_dir=str(tmp_path), run_id="r", name="r", checkpoints="all")


def test_media_are_checked():
    with pytest.raises(ValueError, match="num_samples must be at least 1, got 0"):
        WandbMedia(num_samples=0)


def test_without_an_account_the_run_is_offline(offline, capsys):
    offline.mkdir()
    logger = wandb_logger(save_dir=str(offline), run_id="run-1", name="run")
    logger.finish("success")
    assert logger.experiment.id == "run-1"
    assert list((offline / "wandb").glob("offline-run-*-run-1"))
    assert f"wandb sync {offline}/wandb/offline-run-*-run-1" in capsys.readouterr().out


def test_an_account_without_a_network_logs_offline(offline, monkeypatch):
    assert not model.wandb_logger._is_reachable("http://127.0.0.1:9")  # nobody listens there
    assert not model.wandb_logger._is_reachable("nonsense")
    monkeypatch.setattr(model.wandb_logger, "_has_wandb_account", lambda wandb: True)
    monkeypatch.setattr(model.wandb_logger, "_is_reachable", lambda url: False)
    offline.mkdir()
    with pytest.warns(UserWarning, match="cannot be reached, logging offline"):
        logger = wandb_logger(save_dir=str(offline), run_id="r-3", name="r")
    logger.finish("success")
    assert list((offline / "wandb").glob("offline-run-*-r-3/*.wandb"))


def test_a_start_that_fails_online_is_made_again_offline(offline, monkeypatch):
    """W&B's service holds the id of the failed start until it is torn down."""
    calls = []

    def init(mode, **kwargs):
        calls.append(mode)
        if mode is None:
            raise wandb.errors.CommError("context deadline exceeded\nwhile retrying")
        return SimpleNamespace(**vars(FakeRun), dir="run/wandb/offline-run-1-r/files")

    monkeypatch.setattr(model.wandb_logger, "_has_wandb_account", lambda wandb: True)
    monkeypatch.setattr(model.wandb_logger, "_is_reachable", lambda url: True)
    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.setattr(wandb, "teardown", lambda: calls.append("teardown"))
    with pytest.warns(UserWarning, match="logging offline: context deadline exceeded$"):
        assert wandb_logger(save_dir=str(offline), run_id="r", name="r") is not None
    assert calls == [None, "teardown", "offline"]


def test_failure_costs_no_run(offline, tmp_path, monkeypatch):
    """Neither a service that does not start nor one that dies later raises."""

    def refuse(**kwargs):
        raise wandb.errors.CommError("service is gone")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.warns(UserWarning, match="metrics go to metrics.csv"):
        assert wandb_logger(save_dir=str(tmp_path), run_id="r", name="r") is None

    class DeadRun:
        def log(self, *args, **kwargs):
            raise BrokenPipeError

        define_metric = log

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logger = PatientWandbLogger(experiment=DeadRun(), save_dir=tmp_path)
    with pytest.warns(UserWarning, match="did not take the metrics of step 3"):
        logger.log_metrics({"train/loss": 1.0}, step=3)
    with pytest.warns(UserWarning, match="did not take the table samples"):
        logger.log_rows("samples", ["a"], [[1]], step=3, tokens=1)


def test_mode_is_checked(tmp_path):
    with pytest.raises(ValueError, match="auto, online or offline, got 'sometimes'"):
        wandb_logger(save_dir=str(tmp_path), run_id="r", name="r", mode="sometimes")
