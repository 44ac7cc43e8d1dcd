import json
from pathlib import Path

import pytest

from scripts import count_hbm, hbm_counts, ncu_counters
from scripts.hbm_counts import Traffic
from scripts.report_sections import section_of
from scripts.svg_plot import Plot

# As Nsight Compute writes it (--csv --page raw): its own lines, a header, units, a row a kernel.
NCU = """==PROF== Connected to process 4242 (/usr/bin/python3.11)
==PROF== Profiling "attention_forward_kernel" - 0: 0%....50%....100% - 1 pass
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size",\
"Grid Size","Device","CC","dram__bytes_read.sum","dram__bytes_write.sum"
"","","","","","","","","","","","byte","{unit}"
"0","4242","python3.11","127.0.0.1","attention_forward_kernel","1","7","(128, 1, 1)",\
"(16384, 1, 1)","0","9.0","402,653,184","134"
"1","4242","python3.11","127.0.0.1","at::cuda::(anonymous)::spin_kernel(long)","1","7",\
"(1, 1, 1)","(1, 1, 1)","0","9.0","32","0"
"2","4242","python3.11","127.0.0.1","delta_kernel","1","7","(128, 1, 1)","(1, 1, 1)","0","9.0",\
"5","6.5"
"3","4242","python3.11","127.0.0.1","dk_dv_kernel","1","7","(128, 1, 1)","(1, 1, 1)","0","9.0",\
"7","{last}"
"4","4242","python3.11","127.0.0.1","spin_kernel","1","7","(1, 1, 1)","(1, 1, 1)","0","9.0",\
"32","0"
==PROF== Disconnected from process 4242
"""


@pytest.mark.parametrize("unit, factor", [("byte", 1), ("Kbyte", 1e3), ("Gbyte", 1e9)])
def test_ncus_csv_is_read_in_bytes(unit, factor):
    kernels = ncu_counters.parse(NCU.format(unit=unit, last="1,000"))
    assert kernels[0] == ("attention_forward_kernel", Traffic(402_653_184, 134 * factor))
    assert [k.traffic.written for k in kernels[2:4]] == [6.5 * factor, 1000 * factor]


def test_kernels_are_told_apart_by_the_marks_between_them():
    forward, backward = ncu_counters.sections(ncu_counters.parse(NCU.format(unit="byte", last="0")))
    assert [k.name for k in forward] == ["attention_forward_kernel"]
    assert [k.name for k in backward] == ["delta_kernel", "dk_dv_kernel"]


@pytest.mark.parametrize(
    "text, message",
    [
        (NCU.format(unit="sector", last="0"), "in bytes, got '134' 'sector' for attention_forward"),
        (NCU.format(unit="byte", last="n/a"), "in bytes, got 'n/a' 'byte' for dk_dv_kernel"),
        (NCU.replace("dram__bytes_write.sum", "other"), "must have a column dram__bytes_write.sum"),
        ("==WARNING== No kernels were profiled.", "it printed: WARNING== No kernels were profiled"),
        ("", "it printed: nothing"),
    ],
)
def test_a_csv_without_the_counters_is_one_line(text, message):
    with pytest.raises(ValueError, match=message) as error:
        ncu_counters.parse(text)
    assert "\n" not in str(error.value)


def fake_ncu(folder: Path, log: str, code: int) -> str:
    """A program that takes ncu's options and leaves a log, for machines without a GPU."""
    (folder / "text").write_text(log)
    path = folder / "ncu"
    path.write_text(
        "#!/bin/sh\n"
        'while [ "$1" != --log-file ]; do echo "$1" >>' + f"{folder}/options; shift; done\n"
        f'cp {folder}/text "$2"\nexit {code}\n'
    )
    path.chmod(0o755)
    return str(path)


def test_profile_runs_ncu_and_says_why_it_cannot(tmp_path):
    good = fake_ncu(tmp_path, NCU.format(unit="byte", last="0"), 0)
    found = ncu_counters.profile(good, ["true"], tmp_path / "log.csv")
    assert [len(section) for section in found] == [1, 2]
    options = (tmp_path / "options").read_text().split()
    assert "dram__bytes_read.sum,dram__bytes_write.sum" in options and "raw" in options
    refusal = "==PROF== Connected\n==ERROR== ERR_NVGPUCTRPERM - no permission to read counters\n"
    bad = fake_ncu(tmp_path, refusal, 1)
    with pytest.raises(RuntimeError, match="^ncu ended with 1: ERROR== ERR_NVGPUCTRPERM - no perm"):
        ncu_counters.profile(bad, ["true"], tmp_path / "log.csv")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen, block_m, block_n", [(64, 16, 32), (70, 32, 16), (33, 64, 16)])
def test_loaded_tiles_are_those_with_a_visible_pair(seqlen, block_m, block_n, causal):
    """By listing the pairs of each tile."""
    keys = rows = 0
    for first_row in range(0, seqlen, block_m):
        for first_key in range(0, seqlen, block_n):
            last_row = min(first_row + block_m, seqlen) - 1
            if not causal or first_key <= last_row:
                keys += min(block_n, seqlen - first_key)
                rows += min(block_m, seqlen - first_row)
    assert hbm_counts.keys_of_row_tiles(seqlen, block_m, block_n, causal) == keys
    assert hbm_counts.rows_of_key_tiles(seqlen, block_m, block_n, causal) == rows


def test_counts_of_one_head_by_hand():
    """128 tokens of 64 dims in fp16: a matrix of 32,768 bytes, rows of 128."""
    assert hbm_counts.standard_forward(128, 64, 2) == (2 * 32768 + 3 * 16384, 2 * 32768 + 16384)
    options = dict(causal=False, has_dropout=False)
    forward = hbm_counts.flash_forward(128, 64, 2, (64, 64), **options)
    assert forward == (16384 + 2 * 2 * 16384, 16384 + 128 * 4)  # k and v for each of two tiles
    backward = hbm_counts.flash_backward(128, 64, 2, (64, 64), (128, 64), **options)
    assert backward.written == 128 * 16 + 3 * 16384  # delta_kernel's words, dk, dv, dq


def test_algorithm_1_moves_what_theorem_2_says_up_to_a_constant():
    """N^2 d^2 / M: whatever the length and the SRAM, within a quarter of one constant."""
    ratios = []
    for seqlen in (8192, 16384, 65536):
        for sram in (49152, 98304, 196608):
            count = hbm_counts.paper_forward(seqlen, 64, 2, sram, causal=False)
            ratios.append(count.total / hbm_counts.theorem_2(seqlen, 64, 2, sram))
    assert max(ratios) / min(ratios) < 1.25
    assert hbm_counts.theorem_2(512, 64, 2, 227 * 1024) is None  # the SRAM holds all keys


def test_no_kernel_moves_less_than_inputs_and_outputs_once():
    options = count_hbm.Options(causal=False)
    least = count_hbm.bounds(options, 227)["inputs and outputs once"]
    for tiles in count_hbm.cases(options).values():
        for direction, count in count_hbm.computed(options, tiles).items():
            assert count.total > least[direction].total


def read(path):
    return json.loads(path.read_text())


def test_without_ncu_all_is_computed_and_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ncu_counters, "find_ncu", lambda: None)
    monkeypatch.setattr(count_hbm.torch.cuda, "is_available", lambda: False)
    count_hbm.main([f"out={tmp_path}/record.json", "seqlen=4096"])
    shown = capsys.readouterr().out
    assert "No bytes here were measured: ncu (Nsight Compute) is not installed" in shown
    record = read(tmp_path / "record.json")
    assert record["settings"]["not_measured"] and record["settings"]["sram_kib"] == 227
    assert all(row["computed_read"] > 0 and row["measured_read"] is None for row in record["rows"])
    own = next(row for row in record["rows"] if row["impl"] == "flash, its own tiles")
    assert own["tiles"] == {"forward": "64x64", "dk_dv": "64x64", "dq": "64x64"}


class OutOfResources(Exception):
    """As Triton raises it: no RuntimeError."""


def test_measured_bytes_stand_beside_and_have_a_verdict(tmp_path, monkeypatch, capsys):
    """Figure 2: 40.3 / 4.4 GB, a ratio of 9.2."""
    monkeypatch.setattr(count_hbm.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(count_hbm, "gpu_family", lambda device: "hopper")
    monkeypatch.setattr(count_hbm, "sram_of_gpu", lambda: 227)
    monkeypatch.setattr(ncu_counters, "find_ncu", lambda: "ncu")

    def profile(ncu, command, log):
        names = ("standard", "flash, its own tiles")
        sections = [[name, d] for name in names for d in ("forward", "backward")]
        told = next(word for word in command if word.startswith("profile=")).split("=")[1]
        listed = {"sections": sections, "failures": {"flash, tiles 128x64": "out of resource"}}
        Path(told).write_text(json.dumps(listed))
        assert "causal=true" in command and "seqlen=1024" in command
        kernel = ncu_counters.Kernel
        return [[kernel("a", Traffic(n, n)), kernel("b", Traffic(n, 0))] for n in (9, 21, 1, 2)]

    def time_in_turns(makers):
        """The tile of 256 is too large."""
        (name,) = makers
        if name == "flash, tiles 256x64":
            raise OutOfResources("out of resource: shared memory")
        return {(name, "forward"): 1.5, (name, "backward"): 2.5}, {}

    monkeypatch.setattr(count_hbm, "time_in_turns", time_in_turns)
    monkeypatch.setattr(ncu_counters, "profile", profile)
    count_hbm.main([f"out={tmp_path}/record.json"])
    shown = capsys.readouterr().out
    assert "Here 10.0 times less: reproduced" in shown and "No bytes here" not in shown
    rows = {(row["impl"], row["direction"]): row for row in read(tmp_path / "record.json")["rows"]}
    own = rows["flash, its own tiles", "both"]
    assert (own["measured_read"], own["measured_written"], own["standard_ratio"]) == (6, 3, 10.0)
    assert own["ms"] == 4.0 and "4.000" in shown
    assert rows["flash, tiles 128x64", "both"]["failure"] == "out of resource"
    large = rows["flash, tiles 256x64", "forward"]
    assert (large["ms"], large["failure"]) == (None, "out of resource: shared memory")
    # In the report: 9 + 9 + 9 + 21 + 21 + 21 bytes are too few GB to show, their ratio is 10.
    blocks = section_of(read(tmp_path / "record.json")).blocks
    assert [row[0] for row in blocks[1].rows] == ["computed", "measured", "paper, A100"]
    assert blocks[1].rows[1][3:] == ["10.0", "reproduced"] and blocks[1].rows[2][3] == "9.2"
    plots = [block for block in blocks if isinstance(block, Plot)]
    assert [list(plot.series) for plot in plots] == [["computed"], ["time"]]
    assert [x for x, _ in plots[0].series["computed"]] == [16, 32, 64, 128, 256]
    assert plots[1].series["time"] == [(16, 1.5), (32, 1.5), (64, 1.5), (128, 1.5)]


def test_sizes_are_checked(capsys):
    with pytest.raises(SystemExit):
        count_hbm.main(["seqlen=0"])
    assert "seqlen must be at least 1, got 0" in capsys.readouterr().err
