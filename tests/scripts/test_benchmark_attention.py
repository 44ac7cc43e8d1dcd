import pytest

from scripts import benchmark_attention as benchmark


def test_what_is_compared_takes_turns_and_each_gets_its_own_time(monkeypatch):
    turns = []

    def time_in_turns(makers):
        turns.append(list(makers))
        broken = [name for name in makers if name[1] == "sdpa_flash2"]
        times = {
            (name, direction): 1.0 + case.packed + 2.0 * (case.dropout_p > 0.0)
            for name in makers
            for direction, case in (("forward", name[0]), ("backward", name[0]))
            if name not in broken
        }
        return times, dict.fromkeys(broken, "no such kernel")

    monkeypatch.setattr(benchmark, "time_in_turns", time_in_turns)
    for suite, option, expected in (("dropout", "dropout_p", 3.0), ("packed", "packed", 2.0)):
        for cases, implementations in benchmark.jobs_of(suite, quick=True):
            rows = benchmark.measure(cases, implementations)
            assert {case for case, _ in turns.pop()} == set(cases) and len(cases) == 2
            assert len(rows) == 2 * 2 * len(implementations)
            for row in rows:
                if row["impl"] == "sdpa_flash2":
                    assert row["ms"] is row["tflops"] is None and row["failure"]
                else:
                    assert row["ms"] == (expected if row[option] else 1.0)
                    pairs = row["batch"] * row["nheads"] * row["seqlen"] ** 2
                    flops = 4 * pairs * row["headdim"] / (2 if row["causal"] else 1)
                    flops *= 2.5 if row["direction"] == "backward" else 1
                    assert row["tflops"] == pytest.approx(flops / row["ms"] / 1e9)


def test_each_kernel_is_compiled_ahead_once():
    jobs = [("speed", *job) for job in benchmark.jobs_of("speed", quick=False)]
    makers = benchmark.kinds_to_compile(jobs)
    found = [(maker.args[0], maker.args[1].seqlen) for maker in makers]
    # Per headdim and mask: ours of short and of long rows, FlexAttention of every length.
    assert found.count(("flash_hopper", 1024)) == found.count(("flash_hopper", 4096)) == 4
    assert sum(impl == "flex" for impl, _ in found) == 20
    assert not {impl for impl, _ in found} & {"sdpa_flash2", "sdpa_cudnn", "sdpa_math"}
