"""Tables 1 to 6, whose rows are trained: the paper's numbers, ours from the records, a verdict."""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from scripts.benchmark_long_range import ARENA, speedups
from scripts.paper_numbers import NO_COMMAND, TRAINING, PaperRow

PAPER_TOKENS = 400_000 * 524_288  # of a run of GPT-2's: steps, tokens of a step
_LEAST_SPREAD = 0.002  # nats: what counts as equal even where seeds agree better


class Result(NamedTuple):
    """A row with what was measured for it."""

    row: PaperRow
    here: str
    verdict: str


def results(name: str, records: Iterable[dict]) -> list[Result]:
    """The rows of a table, each with a verdict: reproduced, better, worse, not run: why."""
    measured = [row for record in records for row in record["rows"]]
    find = {"table2": _speed, "table3": _accuracy, "table4": _gain, "table6": _accuracy}.get(name)
    found = []
    for row in TRAINING[name]:
        result = find(row, measured) if find and row.command else None
        not_run = f"not run: `{row.command}`" if row.command else f"not run: {NO_COMMAND}"
        found.append(Result(row, *(result or ("", not_run))))
    return found


def _accuracy(row: PaperRow, measured: list[dict]) -> tuple[str, str] | None:
    """The best run on labels alone, tested on the paper's data: no more supervision, no balanced or
    easier set, no stand-in. Of the rows of speed, that of the measured steps."""
    if "times faster" in row.paper:
        name = "block_sparse" if "block-sparse" in row.name else "flash"
        steps = [r for r in measured if r.get("task") in ARENA and "impl" in r]
        is_whole = {r["task"] for r in steps} == set(ARENA)
        if not is_whole or not (times := speedups(steps).get(name)):
            return None
        return f"{times:.2f}", _word(times / row.paper["times faster"] - 1, 0.05)
    task = row.name.split(",")[0].lower().replace("-", "")
    runs = [
        r
        for r in measured
        if "accuracy" in r and str(r.get("task", "")).removeprefix("lra_") == task
        if r.get("supervision", "label") == "label"
        if not r.get("balanced") and not r.get("stand_in") and r.get("level") in (None, 14)
    ]
    if not runs:
        return None
    best = max(runs, key=lambda r: r["accuracy"])
    ours, ci95 = 100 * best["accuracy"], 100 * best.get("ci95", 0.0)
    return f"{ours:.1f} +- {ci95:.1f}", _word(ours - row.paper["accuracy, %"], ci95)


def _speed(row: PaperRow, measured: list[dict]) -> tuple[str, str] | None:
    """Days of the paper's run on 8 of the GPU at hand, at the rate of our fastest run."""
    if row.command is None:
        return None
    experiment = row.command.split("experiment=")[1].split()[0]
    runs = [
        r
        for r in measured
        if r.get("tokens_per_s") and r["model"] == experiment and r.get("impl", "ours") == "ours"
        if r.get("attention", "flash") == "flash"
    ]
    if not runs:
        return None
    best = max(runs, key=lambda r: r["tokens_per_s"])
    days = PAPER_TOKENS / best["tokens_per_s"] / 86400 / 8
    text = f"{days:.2f} days on 8, projected"
    text += ", without dropout" if best.get("dropout_p") == 0.0 else ""
    return text, f"not run: rate measured alone; `{row.command}`"


def _gain(row: PaperRow, measured: list[dict]) -> tuple[str, str] | None:
    """Perplexity, and by how much a context beats 1K against by how much the paper's does.

    Perplexities of other texts and sizes do not compare; gains do, in nats. A row of its own is the
    schedule with a warm-up; the paper's rows are trained at their context throughout.
    """
    runs = defaultdict(list)
    for r in measured:
        if r.get("val_ppl"):
            is_warmup = r.get("schedule", "throughout") != "throughout"
            runs[r["seqlen"], is_warmup].append(math.log(r.get("same_target_ppl") or r["val_ppl"]))
    base = runs.get((1024, False))
    here = runs.get((1024 * int(row.name.split("K")[0]), "warm-up" in row.name))
    if not base or not here:
        return None
    mean, base_mean = (sum(losses) / len(losses) for losses in (here, base))
    text = f"{math.exp(mean):.2f}"
    if here is base:
        return text, "what the others are compared with"
    text += f" ({math.exp(mean) - math.exp(base_mean):+.2f}, {base_mean - mean:+.3f} nats gained)"
    spread = max(max(s) - min(s) for s in (here, base))
    least = TRAINING["table4"][0].paper["perplexity"]
    paper = row.paper.get("perplexity", TRAINING["table4"][2].paper["perplexity"])
    return text, _word(base_mean - mean - math.log(least / paper), max(spread, _LEAST_SPREAD))


def _word(excess: float, spread: float) -> str:
    """Ours less the paper's, where `spread` apart counts as equal."""
    return "better" if excess > spread else "reproduced" if excess >= -spread else "worse"


def loss_verdict(curve: dict) -> str:
    """What compare_attention found for one experiment at one dropout, in a few sentences."""
    if curve.get("dropout_p"):
        return _dropout_verdict(curve)
    ours, noise = (curve[k]["mean_abs"] for k in ("flash_to_sdpa", "sdpa_to_sdpa"))
    bias, own = curve.get("flash_minus_sdpa"), curve.get("flash_to_flash", {}).get("mean_abs")
    text = (
        f"{curve['model']}: over the steps, the loss of flash is {statistics.fmean(ours):.4f} nats "
        f"from that of SDPA (mean of pairs: {len(ours)}), and SDPA is {_range(noise)} from itself "
        f"where its sums have another order (pairs: {len(noise)})"
        + (f", flash {_range(own)}" if own else "")
        + f": {_within(curve['flash_within_noise'], 'rounding')}."
        + (f" The mean of flash - SDPA is {bias:+.4f}." if bias is not None else "")
    )
    if "flash_to_reference" in curve:
        flash, sdpa = (_mean(curve, f"{name}_to_reference") for name in ("flash", "sdpa"))
        text += (
            f" The reference, which stores the score matrix, is {flash:.4f} from flash and "
            f"{sdpa:.4f} from SDPA: {_within(curve['reference_within_rounding'], 'rounding')}."
        )
    return text


def _dropout_verdict(curve: dict) -> str:
    text = f"{curve['model']}, dropout {curve['dropout_p']:g}: "
    if "flash_to_reference" in curve:
        text += (
            "flash and the reference, which drop the same probabilities, are "
            f"{_mean(curve, 'flash_to_reference'):.4f} nats apart, where rounding alone makes up "
            f"to {curve['rounding']:.4f}: {_within(curve['reference_within_rounding'], 'rounding')}"
            f". SDPA, with masks of its own, is {_mean(curve, 'sdpa_to_reference'):.4f} from the "
            "reference. "
        )
    return text + (
        f"The loss of flash is {_mean(curve, 'flash_to_sdpa'):.4f} nats from that of SDPA, and "
        f"SDPA with other masks {_range(curve['sdpa_to_sdpa']['mean_abs'])} from itself, flash "
        f"{_range(curve['flash_to_flash']['mean_abs'])}: "
        f"{_within(curve['flash_within_noise'], 'the noise of the masks')}. "
        f"The mean of flash - SDPA is {curve['flash_minus_sdpa']:+.4f}."
    )


def _mean(curve: dict, pair: str) -> float:
    return statistics.fmean(curve[pair]["mean_abs"])


def _within(is_within: bool, noise: str) -> str:
    return f"within {noise}" if is_within else f"not within {noise}"


def _range(values: list[float]) -> str:
    low, high = f"{min(values):.4f}", f"{max(values):.4f}"
    return low if low == high else f"{low} to {high}"
