"""Several processes train like one, also sequences that lie on several of them: each strategy, way
to attend and kind of data.

Processes of one machine over gloo; our kernels in Triton's interpreter, which takes most of the
time: a few steps, and all of them if `long`. test_distributed.py lets four share sequences, too.
"""

import functools

import pytest

pytestmark = pytest.mark.slow
STEPS, FEW = 20, 2
SMALL = (
    "model.dim=16 model.nheads=2 data.seqlen=64 data.batch_tokens=128 data.val_tokens_limit=64 "
    f"data.val_batch_tokens=128 task.max_steps={STEPS} trainer.val_check_interval={FEW} "
    "callbacks.metrics.every_n_steps=1 callbacks.checkpoints.every_n_steps=1000 "
    "model.embd_dropout=0 model.resid_dropout=0 model.attn_dropout=0 sample_prompt=null"
).split()
DATA = {
    "text": ["data=text"],
    "wide": ["data=text", "data.batch_tokens=256"],  # a sequence for each of four processes
    "packed": ["data=packed_documents", "data.max_documents=2"],
}
ATTENTION = {
    "sdpa": ["attention=sdpa"],
    "flash": ["attention=flash"],
    "reference_dropout": ["attention=reference", "model.attn_dropout=0.2"],
    "dropout": ["attention=flash", "model.attn_dropout=0.2"],
    "window": [
        *("attention=reference", "attention._target_=model.attention.reference_attention"),
        *("~attention.path", "+attention._partial_=true", "+attention.window=[20,0]"),
    ],
    "sparse": [
        *("attention=block_sparse", "attention/pattern=sliding_window"),
        *("attention.pattern.left=20", "attention.pattern.right=0"),
        *("+attention.pattern.block_m=16", "+attention.pattern.block_n=16"),
    ],
}
# What computes the same on one process.
PLAIN = {"sdpa": "sdpa", "flash": "sdpa", "sparse": "window", "dropout": "reference_dropout"}


def options(data: str, attention: str, steps: int) -> list[str]:
    return [*SMALL, *DATA[data], *ATTENTION[attention], f"trainer.max_steps={steps}"]


def shown(workplace, name: str) -> dict[str, list[float]]:
    """Columns of a run's metrics, without empty cells."""
    keys, rows = ("tokens", "train/loss", "val/loss"), workplace.rows(name)
    return {key: [float(row[key]) for row in rows if row[key]] for key in keys}


@pytest.fixture(scope="module")
def one_process(workplace):
    """Of (data, attention), what one process shows without our kernels."""

    @functools.cache
    def run(data: str, attention: str) -> dict[str, list[float]]:
        name = f"{data}_{attention}"
        workplace.run(*options(data, attention, STEPS), f"run_name={name}")
        return shown(workplace, name)

    return run


def check(workplace, one_process, num_processes: int, *cases: tuple[str, int]) -> None:
    """Cases such as "text flash ddp heads 2", and the steps of each."""
    runs = {}
    for case, steps in cases:
        data, attention, strategy, method, size = case.split()
        name = f"{case.replace(' ', '_')}_of_{num_processes}"
        parallel = [f"context_parallel.size={size}", f"context_parallel.method={method}"]
        parallel += [f"trainer={strategy}", f"trainer.devices={num_processes}"]
        parallel += ["trainer.accelerator=cpu", f"run_name={name}"]
        if strategy == "fsdp":  # whose weights are gathered for both runs of a block
            parallel += ["task.recompute=full"]
        runs[name] = [*options(data, attention, steps), *parallel]
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}"]
    workplace.run_several(*runs.values(), launcher=torchrun)
    for name, (case, steps) in zip(runs, cases, strict=True):
        data, attention, *_ = case.split()
        found, expected = shown(workplace, name), one_process(data, PLAIN[attention])
        assert len(found["train/loss"]) == steps and len(found["val/loss"]) == steps // FEW
        for key, column in found.items():
            assert column == pytest.approx(expected[key][: len(column)], rel=1e-5), (name, key)


def test_two_processes_train_like_one(workplace, one_process):
    check(
        workplace, one_process, 2,
        ("packed sdpa ddp heads 1", STEPS),
        ("packed sdpa fsdp heads 1", STEPS),
        ("packed sdpa fsdp heads 2", STEPS),
        ("packed dropout ddp ring 2", FEW),
    )  # fmt: skip


@pytest.mark.long
def test_four_processes_train_like_one(workplace, one_process):
    check(
        workplace, one_process, 4,
        ("text sdpa ddp heads 2", STEPS),
        ("packed flash fsdp ring 2", FEW),
    )  # fmt: skip


def test_four_processes_of_each_strategy_are_one(workplace, one_process):
    cases = ["ddp heads 1", "fsdp heads 1", "ddp heads 2", "fsdp heads 2"]
    check(workplace, one_process, 4, *((f"wide sdpa {case}", STEPS) for case in cases))


@pytest.mark.long
@pytest.mark.parametrize(
    "num_processes, cases",
    [
        (2, ["text flash fsdp ring 2", "text sparse ddp ring 2", "text dropout fsdp ring 2"]),
        (4, ["packed flash fsdp ring 2", "text sparse fsdp ring 2", "text dropout ddp ring 4"]),
    ],
)
def test_all_steps_on_a_ring_are_those_of_one_process(workplace, one_process, num_processes, cases):
    check(workplace, one_process, num_processes, *((case, STEPS) for case in cases))


@pytest.mark.long
def test_patterns_start_with_each_document_over_heads(workplace, one_process):
    check(workplace, one_process, 2, ("packed sparse ddp heads 2", FEW))
