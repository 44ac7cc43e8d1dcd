"""train.py on several processes: the run of one, whatever the strategy, also after an interruption.

Processes of one machine over gloo.
"""

import json
import os
import signal
import socket
import time
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.slow
EXACT = [
    *("model.embd_dropout=0", "model.resid_dropout=0", "model.attn_dropout=0"),
    *("task.max_steps=6", "task.micro_batch_tokens=64"),
]
SHOWN = ("step", "tokens", "train/loss", "val/loss")


def launcher(num_processes: int, *options: str) -> list[str]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", *options]
    return [*torchrun, f"--nproc-per-node={num_processes}"]


def on_cpu(strategy: str, num_processes: int, context: int = 1) -> list[str]:
    options = [f"trainer={strategy}", "trainer.accelerator=cpu", f"trainer.devices={num_processes}"]
    return [*options, f"context_parallel.size={context}"]


def shown(workplace, name: str) -> list[list[float]]:
    """The columns SHOWN of a run's metrics, without empty cells."""
    rows = workplace.rows(name)
    return [[float(row[key]) for row in rows if row[key]] for key in SHOWN]


def watch(folder: str, step: int) -> str:
    return f"+callbacks.watch={{_target_:tests.disturbances.Watch,folder:{folder},step:{step}}}"


def ids(workplace, folder: str, num_processes: int, steps: int) -> np.ndarray:
    """What the processes together read, (steps, tokens of a step)."""
    files = [workplace.folder / folder / f"{rank}.ids" for rank in range(num_processes)]
    shares = [np.frombuffer(path.read_bytes(), dtype=np.int64) for path in files]
    return np.concatenate([share.reshape(steps, -1) for share in shares], axis=1)


def collectives(workplace, folder: str, num_processes: int) -> list[dict[str, int]]:
    files = [workplace.folder / folder / f"{rank}.json" for rank in range(num_processes)]
    return [json.loads(path.read_text()) for path in files]


@pytest.fixture(scope="module")
def one_process(workplace):
    workplace.run("run_name=one", *EXACT, "trainer.max_steps=6", watch("read_by_one", 5))
    return shown(workplace, "one")


def assert_like(found: list[list[float]], expected: list[list[float]]) -> None:
    """The columns of `found`, the first ones of SHOWN."""
    for key, a, b in zip(SHOWN, found, expected, strict=False):
        assert a == pytest.approx(b, rel=1e-5), key


def test_two_processes_train_like_one(workplace, one_process):
    """Two micro-batches a step on each, against four on one; at a seventh step one of them has a
    gradient of NaN, and both leave the weights as they are, before either host knows. They keep one
    record."""
    options = [*on_cpu("ddp", 2), "trainer.max_steps=7", "callbacks.guard.policy=skip"]
    options += ["callbacks.guard.wait=false", watch("read_by_two", 5)]
    options += ["logger=wandb", "logger.wandb.mode=offline"]
    options += ["+callbacks.poison={_target_:tests.disturbances.PoisonAt,rank:1,step:6}"]
    out = workplace.run("run_name=ddp", *EXACT, *options, launcher=launcher(2))
    assert "step 6: " in out and "not both finite; skip" in out
    found = shown(workplace, "ddp")
    assert_like([column[:6] for column in found[:3]], one_process)
    assert found[3] == pytest.approx(one_process[3] * 2, rel=1e-5)
    read = ids(workplace, "read_by_two", 2, 7)[:6]
    assert np.array_equal(read, ids(workplace, "read_by_one", 1, 6))
    # Gradients once, in two buckets, and sums of whole numbers and of fractions.
    assert collectives(workplace, "read_by_two", 2) == [{"c10d::allreduce_": 4}] * 2
    run = workplace.folder / "outputs/runs/ddp"
    assert len([*run.glob("wandb/offline-run-*")]) == 1
    numbers = [row["step"] for row in workplace.rows("ddp")]
    assert numbers == [str(step) for step in range(1, 8)]


def test_a_run_goes_on_with_other_processes(workplace, one_process):
    """Two steps on one; two on four under FSDP2, of which one gets a signal; two on two.

    Of several, two share a sequence. Two micro-batches a step.
    """
    name = "run_name=elastic"
    workplace.run(name, *EXACT, "trainer.max_steps=2")
    options = [*on_cpu("fsdp", 4, context=2), "resume=auto"]
    options += ["callbacks.checkpoints.ask_every_n_steps=1"]
    options += ["task.micro_batch_tokens=32", watch("read_by_four", 2)]
    options += ["+callbacks.x={_target_:tests.disturbances.SignalAt,rank:2,step:3,numbers:[15]}"]
    error = workplace.run(name, *EXACT, *options, launcher=launcher(4), code=1)
    assert error.count("exitcode  : 143") == 4, error
    for counts in collectives(workplace, "read_by_four", 4):
        # Gradients of the block and of what is around it.
        assert counts["c10d::_reduce_scatter_base_"] == 2
    options = [*on_cpu("ddp", 2, context=2), "trainer.max_steps=6", "resume=auto"]
    workplace.run(name, *EXACT, *options, launcher=launcher(2))
    found = shown(workplace, "elastic")
    assert_like(found[:3], one_process[:3])
    assert found[3][-1] == pytest.approx(one_process[3][-1], rel=1e-5)


@pytest.mark.long
def test_shards_are_continued_by_other_processes(workplace, one_process):
    """Written by two, continued and written by four, read by one."""
    name = "run_name=shards"
    sharded = "trainer.strategy.save_distributed_checkpoint=true"
    for number, steps in ((2, 2), (4, 4)):
        options = [*on_cpu("fsdp", number), f"trainer.max_steps={steps}", "resume=auto", sharded]
        workplace.run(name, *EXACT, *options, launcher=launcher(number))
    folder = workplace.folder / "outputs/runs/shards/checkpoints"
    assert (folder / "step-00000004.ckpt/.metadata").exists() and not [*folder.glob("*.part")]
    workplace.run(name, *EXACT, "trainer.max_steps=6", "resume=auto")
    found = shown(workplace, "shards")
    assert_like(found[:3], one_process[:3])
    assert found[3][-1] == pytest.approx(one_process[3][-1], rel=1e-5)


def children(pid: int) -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                status = (folder / "stat").read_text()
            except OSError:  # it has ended
                continue
            if int(status.rpartition(")")[2].split()[1]) == pid:
                found.append(int(folder.name))
    return found


def wait_for(checkpoint, process):
    deadline = time.monotonic() + 120
    while not checkpoint.exists():
        assert time.monotonic() < deadline and process.poll() is None, "no checkpoint came"
        time.sleep(0.02)


def test_a_killed_process_is_said_and_the_run_restarts(workplace, monkeypatch):
    # As in scripts/train.sbatch: torchrun otherwise leaves the addresses of dead processes.
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    steps = 120
    options = [f"trainer.max_steps={steps}", f"trainer.val_check_interval={steps}"]
    options += ["callbacks.checkpoints.every_n_steps=10", "resume=auto"]
    torchrun = launcher(2, "--max-restarts=1")
    process = workplace.start("run_name=killed", *options, *on_cpu("ddp", 2), launcher=torchrun)
    checkpoints = workplace.folder / "outputs/runs/killed/checkpoints"
    wait_for(checkpoints / "step-00000020.ckpt", process)
    os.kill(children(process.pid)[-1], signal.SIGKILL)
    killed = time.monotonic()
    out, error = process.communicate(timeout=180)
    assert process.returncode == 0, error
    assert "exitcode: -9" in error and time.monotonic() - killed < 90
    numbers = [int(row["step"]) for row in workplace.rows("killed") if row["train/loss"]]
    assert numbers == list(range(1, steps + 1))


@pytest.mark.long
@pytest.mark.parametrize("launched_by", ["torchrun", "Lightning"])
def test_a_killed_process_ends_the_others_within_a_minute(workplace, launched_by):
    name = f"run_name=ended_{launched_by}"
    options = ["trainer.max_steps=4000", "trainer.val_check_interval=4000", "task.max_steps=4000"]
    options += ["callbacks.checkpoints.every_n_steps=10", *on_cpu("ddp", 2)]
    launch = launcher(2) if launched_by == "torchrun" else []
    process = workplace.start(name, *options, launcher=launch)
    folder = workplace.folder / f"outputs/runs/ended_{launched_by}/checkpoints"
    wait_for(folder / "step-00000020.ckpt", process)
    os.kill(children(process.pid)[-1], signal.SIGKILL)
    out, error = process.communicate(timeout=60)
    assert process.returncode != 0
    said = "exitcode  : -9" if launched_by == "torchrun" else "another process of the run ended"
    assert said in error, error


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.mark.long
@pytest.mark.parametrize("launched_by", ["Lightning", "SLURM"])
def test_other_launchers_train_like_one_process(workplace, one_process, monkeypatch, launched_by):
    name = f"by_{launched_by}"
    options = [*on_cpu("ddp", 2), "trainer.max_steps=6", f"run_name={name}", *EXACT]
    if launched_by == "Lightning":
        workplace.run(*options)
    else:
        tasks = {"NTASKS": "2", "JOB_ID": "7", "JOB_NAME": "flashtrain", "NODEID": "0"}
        tasks |= {"NTASKS_PER_NODE": "2", "NODELIST": "127.0.0.1", "JOB_NUM_NODES": "1"}
        for key, value in tasks.items():
            monkeypatch.setenv(f"SLURM_{key}", value)
        monkeypatch.setenv("MASTER_PORT", str(free_port()))
        started = []
        for rank in ("0", "1"):
            monkeypatch.setenv("SLURM_PROCID", rank)
            monkeypatch.setenv("SLURM_LOCALID", rank)
            started.append(workplace.start(*options))
        for process in started:
            out, error = process.communicate(timeout=120)
            assert process.returncode == 0, error
    assert_like(shown(workplace, name), one_process)


def machines(options: list[str]) -> list[list[str]]:
    """Launchers of two processes on each of two machines, which are this one."""
    port = free_port()
    torchrun = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", *options]
    torchrun += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=test"]
    return [torchrun, torchrun]


@pytest.mark.long
def test_two_machines_train_like_one_process(workplace, one_process):
    """Weights are sharded within a machine and replicated over both, sequences shared within."""
    options = [*on_cpu("fsdp", 2, context=2), "trainer.num_nodes=2", "trainer.max_steps=6"]
    options += ["run_name=machines", *EXACT, "task.micro_batch_tokens=32"]
    started = [workplace.start(*options, launcher=each) for each in machines([])]
    for process in started:
        out, error = process.communicate(timeout=180)
        assert process.returncode == 0, error
    assert_like(shown(workplace, "machines"), one_process)


@pytest.mark.long
def test_a_killed_process_restarts_two_machines(workplace, monkeypatch):
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    steps = 100
    options = [*on_cpu("fsdp", 2), "trainer.num_nodes=2", f"trainer.max_steps={steps}"]
    options += ["run_name=restarted", f"trainer.val_check_interval={steps}", "resume=auto"]
    options += ["callbacks.checkpoints.every_n_steps=10"]
    started = [workplace.start(*options, launcher=each) for each in machines(["--max-restarts=2"])]
    checkpoints = workplace.folder / "outputs/runs/restarted/checkpoints"
    wait_for(checkpoints / "step-00000020.ckpt", started[0])
    os.kill(children(started[1].pid)[-1], signal.SIGKILL)
    errors = [process.communicate(timeout=240)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0], errors
    assert "exitcode: -9" in errors[1]
    numbers = [int(row["step"]) for row in workplace.rows("restarted") if row["train/loss"]]
    assert numbers == list(range(1, steps + 1))


@pytest.mark.long
def test_sigterm_to_one_process_ends_all_with_a_checkpoint(workplace):
    options = ["trainer.max_steps=4000", "trainer.val_check_interval=4000", "task.max_steps=4000"]
    options += ["callbacks.checkpoints.every_n_steps=10", *on_cpu("ddp", 2)]
    process = workplace.start("run_name=termed", *options, launcher=launcher(2))
    checkpoints = workplace.folder / "outputs/runs/termed/checkpoints"
    wait_for(checkpoints / "step-00000020.ckpt", process)
    os.kill(children(process.pid)[-1], signal.SIGTERM)
    out, error = process.communicate(timeout=60)
    step = int(out.split("stopped at step ")[1].split(";")[0])
    assert step % 10 == 0 and (checkpoints / f"step-{step:08d}.ckpt").exists()


@pytest.mark.long
def test_a_stream_on_two_processes_is_that_of_one(workplace):
    """Killed on two, without a word, and gone on with on one: shards of 1,024 tokens."""
    stream = ["data=stream", "data.stream_tokens=3072", "data.prepare_workers=0", *EXACT]
    stream += ["trainer.max_steps=12", "task.max_steps=12", "data.num_workers=1"]
    workplace.run("run_name=stream", *stream)
    options = [*on_cpu("ddp", 2), "callbacks.checkpoints.every_n_steps=1"]
    options += ["+callbacks.x={_target_:tests.disturbances.SignalAt,rank:1,step:5,numbers:[9]}"]
    workplace.run("run_name=torn", *stream, *options, launcher=launcher(2), code=1)
    workplace.run("run_name=torn", *stream, "resume=auto")
    assert_like(shown(workplace, "torn"), shown(workplace, "stream"))
