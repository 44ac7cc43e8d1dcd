"""Without a GPU the kernels run in Triton's interpreter, asked for before they are decorated."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # the workers share the cores

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


def selects_gpu(config) -> bool:
    return config.option.markexpr.startswith("gpu")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """The GPU's tests wait for compilers: one a core, each with 10 GiB of the GPU's memory."""
    most = 4
    if selects_gpu(config) and torch.cuda.is_available():
        most = max(1, torch.cuda.get_device_properties(0).total_memory // (10 * 2**30))
    return min(len(os.sched_getaffinity(0)), most)


def pytest_cmdline_main(config):
    """Most of the GPU's tests are in few files, which then must not stay together."""
    if selects_gpu(config):
        config.option.dist = "worksteal"


def pytest_collection_modifyitems(items):
    """Files with slow tests first, or one process would end on them while the others idle."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture
def one_thread():
    """Threads that wait for each other on a busy machine cost more than such small products."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Workplace:
    """A folder with a small corpus, from which train.py runs as a user calls it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "text").mkdir()
        for number in range(40):
            (folder / f"text/{number}.txt").write_text(SENTENCES * (3 + number % 5))

    def run(self, *overrides: str, code: int = 0, launcher=(), images: bool = False) -> str:
        """Standard output of train.py, or its errors if it has to end with another code."""
        return self._finish(self.start(*overrides, launcher=launcher, images=images), code)

    def start(self, *overrides: str, launcher=(), images: bool = False) -> subprocess.Popen:
        return self._start("train.py", self.complete(overrides, images), launcher)

    def result(self, name: str) -> dict:
        """The result.json of a run."""
        return json.loads((self.folder / "outputs/runs" / name / "result.json").read_text())

    def run_several(self, *runs: list[str], launcher=()) -> str:
        """The same of trainings one after the other, each its overrides."""
        lists = json.dumps([self.complete(overrides) for overrides in runs])
        return self._finish(self._start("tests/train_process.py", [lists], launcher), 0)

    def complete(self, overrides, images: bool = False) -> list[str]:
        """With the defaults that they do not replace."""
        replaced = {override.split("=")[0] for override in overrides}
        defaults = IMAGES if images else [*SMALL, f"data.source={self.folder}/text"]
        defaults = [*defaults, f"data.root={self.folder}/data"]
        return [*overrides, *(d for d in defaults if d.split("=")[0] not in replaced)]

    def _start(self, script: str, arguments: list[str], launcher) -> subprocess.Popen:
        paths = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
        # The models are small, and threads that wait for each other take the cores of other tests.
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            [sys.executable, *launcher, str(ROOT / script), *arguments],
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def _finish(self, process: subprocess.Popen, code: int) -> str:
        out, error = process.communicate()
        assert process.returncode == code, out + error
        return out if code == 0 else error

    def rows(self, name: str) -> list[dict[str, str]]:
        """metrics.csv of a run."""
        with (self.folder / "outputs/runs" / name / "metrics.csv").open(newline="") as file:
            return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Workplace:
    return Workplace(tmp_path_factory.mktemp("work"))
