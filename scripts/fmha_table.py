"""Table 7, FlashAttention against FMHA of NVIDIA's Apex: what is compared, and how it is shown.

FMHA, the attention of NVIDIA's MLPerf 1.1 BERT for at most 512 tokens, is an extension that Apex
builds from its source; no package has it. So its time on this machine is not known, and a verdict
can only come from the paper's time of it on an A100, divided by how much faster this GPU is: the
ratio of the dense bf16 peaks. That is an estimate, and every verdict says so. (From an A100 of 40
GB to an H200 the ratio of the bandwidths, 3.1, is nearly that of the peaks, 3.2.)
"""

from rich.console import Console
from rich.table import Table

from model.callbacks import peak_flops
from scripts.paper_numbers import FMHA_MS, FMHA_SEQLENS, verdict

SHAPE = dict(batch=64, nheads=16)  # of 64 dims; dropout and key padding as in table 9
IMPLEMENTATIONS = ("pytorch", "flash")  # what is timed here
NOT_AVAILABLE = "not available: FMHA is built from Apex's source, no package has it"
_PAPER_GPU = "NVIDIA A100"


def table_rows(measured: list[dict], gpu: str) -> list[dict]:
    """Three rows a length and direction, for the record: FMHA, ours, and PyTorch for scale.

    Args:
        measured: of reproduce.measure_runtime, milliseconds.
        gpu: the name of the GPU they were measured on.

    Returns:
        Rows with `paper_ratio` = FMHA / it in the paper, `here_ratio` = the paper's FMHA at the
        speed of this GPU / it here, None where the GPU's peak is not known.
    """
    peak, peak_of_paper = peak_flops(gpu), peak_flops(_PAPER_GPU)
    faster = peak / peak_of_paper if peak and peak_of_paper else None
    rows = []
    for row in measured:
        at = FMHA_SEQLENS.index(row["seqlen"])
        for direction, paper in FMHA_MS.items():
            fmha, flash = paper["fmha"][at], paper["flash"][at]
            ours = row["flash"][direction]
            scaled = fmha / faster / ours if faster and ours else None
            if ours is None:
                word = f"not measured: {row['failures'].get('flash', 'no time')}"
            elif scaled is None:
                word = f"no verdict: the peak of {gpu} is not known"
            else:
                word = f"{verdict(scaled, fmha / flash)}: FMHA's time scaled by the GPUs' peaks"
            common = dict(seqlen=row["seqlen"], direction=direction, unit="ms", against="FMHA")
            empty = dict(paper_ratio=None, here_ratio=None, verdict="")
            rows += [
                dict(**common, **{**empty, "verdict": NOT_AVAILABLE}, impl="fmha", paper=fmha,
                     here=None),
                dict(**common, impl="flash", paper=flash, here=ours, paper_ratio=fmha / flash,
                     here_ratio=scaled, verdict=word),
                dict(**common, **empty, impl="pytorch", paper=None,
                     here=row["pytorch"][direction]),
            ]  # fmt: skip
    return rows


def show_rows(rows: list[dict], console: Console) -> None:
    """Print the table."""
    table = Table(
        "tokens", "direction", "", "paper, ms", "here, ms", "FMHA / it: paper", "here, scaled", ""
    )
    for row in rows:
        numbers = (row["paper"], row["here"], row["paper_ratio"], row["here_ratio"])
        cells = ["-" if number is None else f"{number:.3g}" for number in numbers]
        table.add_row(str(row["seqlen"]), row["direction"], row["impl"], *cells, row["verdict"])
    console.print(table)
