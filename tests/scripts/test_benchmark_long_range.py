import pytest
import torch

from scripts.benchmark_long_range import (
    CONTESTANTS,
    TASKS,
    Racer,
    Setting,
    arguments,
    configured,
    race,
    report_blocks,
    speed_table,
    speedups,
)

SMALL = ("model.depth=1", "model.dim=16", "model.nheads=2", "model.mlp_dim=16",
         "data.batch_size=4", "model.attn_dropout=0", "model.resid_dropout=0",
         "model.embd_dropout=0")  # fmt: skip


def tiny(task, seqlen=32):
    return Setting(task, (*SMALL, f"data.seqlen={seqlen}"))


def test_all_train_the_same_model():
    """The first loss, before any step, is that of the same weights and tokens."""
    losses = {
        name: float(Racer(name, tiny("lra_listops"), "cpu").step())
        for name in ("flash", "sdpa_math", "sdpa_flash2")
    }
    for loss in losses.values():
        assert loss == pytest.approx(losses["sdpa_math"], rel=1e-4)


def test_pairs_and_images_race_too():
    rows = race(tiny("lra_retrieval"), ["sdpa_math"], 1, 1, "cpu")
    size = ("model.image_size=8", "model.max_seqlen=64", "data.size=32")
    image = Setting("lra_pathfinder", (*SMALL, *size))
    rows += race(image, ["sdpa_math"], 1, 1, "cpu")
    assert [row["failure"] for row in rows] == [None, None]
    assert [row["seqlen"] for row in rows] == [32, 64] and all(row["ms"] > 0 for row in rows)


@pytest.mark.parametrize("names", [("sdpa_math", "sdpa_flash2"), ("sdpa_flash2", "sdpa_math")])
def test_each_runs_the_kernel_of_its_name(names):
    """Whichever came before; the operators by their names on a CPU."""
    racers = [Racer(name, tiny("lra_listops"), "cpu") for name in names]
    for name, racer in zip(names, racers, strict=True):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            racer.step()
        ran = {event.key for event in profile.key_averages()}
        flash = any("_scaled_dot_product_flash_attention" in key for key in ran)
        math = any("_scaled_dot_product_attention_math" in key for key in ran)
        assert (flash, math) == ((False, True) if name == "sdpa_math" else (True, False))


def test_a_step_trains():
    racer = Racer("sdpa_math", tiny("lra_listops"), "cpu")
    first = float(racer.step())
    for _ in range(30):
        last = float(racer.step())
    assert last < first - 0.1, "the same batch each step"


def test_what_fails_is_reported():
    wrong = Setting("lra_listops", (*SMALL, "model.nheads=3"))
    (row,) = race(wrong, ["sdpa_math"], 1, 1, "cpu")
    assert "dim (16)" in row["failure"] and "ms" not in row


def test_torch_s_own_choice_of_kernels_comes_back():
    before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    Racer("sdpa_math", tiny("lra_listops"), "cpu").step()
    assert torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed() == before


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("name", CONTESTANTS)
def test_every_experiment_takes_every_attention(task, name):
    cfg = configured(Setting(task), CONTESTANTS[name].attention)
    assert cfg.model.max_seqlen in (1024, 2000, 4000, 16384)
    words = str(cfg.attention)
    assert {"flash": "flash_attention", "sdpa": "sdpa_attention"}.get(
        CONTESTANTS[name].attention, "BlockSparse"
    ) in words


def rows_of(times):
    return [
        {"task": task, "impl": impl, "ms": ms, "batch": 8, "seqlen": 1024, "failure": None}
        for (task, impl), ms in times.items()
    ]


def test_speedups_are_a_geometric_mean_of_the_arena():
    """2 and 8 times faster are 4 times; Path-X does not count, nor who lacks a task."""
    rows = rows_of({
        ("lra_text", "sdpa_math"): 20.0, ("lra_text", "flash"): 10.0,
        ("lra_image", "sdpa_math"): 40.0, ("lra_image", "flash"): 5.0,
        ("lra_image", "sdpa_cudnn"): 5.0, ("pathx", "sdpa_math"): 9.0, ("pathx", "flash"): 9.0,
    })  # fmt: skip
    assert speedups(rows) == pytest.approx({"flash": 4.0, "sdpa_math": 1.0})
    header, lines = speed_table({"rows": rows})
    assert header == ["ms a step", "ours", "SDPA math", "cuDNN (SDPA)"]
    assert lines == [
        ["lra_text, 8 x 1,024", "10.00", "20.00", "-"],
        ["lra_image, 8 x 1,024", "5.00", "40.00", "5.00"],
        ["pathx, 8 x 1,024", "9.00", "9.00", "-"],
        ["times faster", "4.00", "1.00", "-"],
        ["the paper's (A100)", "2.4", "-", "-"],
    ]
    (table,) = report_blocks({"rows": rows})
    assert table.rows == lines


def test_mistakes_are_refused(capsys):
    with pytest.raises(SystemExit):
        arguments(["--steps", "0"])
    assert "--rounds and --steps must be at least 1" in capsys.readouterr().err
