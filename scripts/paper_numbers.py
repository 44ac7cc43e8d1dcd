"""Numbers printed in the FlashAttention paper (arXiv 2205.14135v2), as far as scripts/reproduce.py
measures them again."""

from typing import Any, NamedTuple

SEQLENS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
_WITHIN = 0.1  # a ratio this close to the paper's counts as reproduced
_: Any = None  # out of memory, or not printed

# Tables 9 to 20: milliseconds on an A100 40 GB, batch 16, 8 heads of 64, fp16.
# (dropout, key padding) -> direction -> implementation -> one number a length. Of Linformer and of
# local attention, which ran in fp32, the times of both directions together.
RUNTIME_MS = {
    (True, True): {
        "forward": {
            "pytorch": (0.36, 0.34, 0.78, 2.54, 9.33, 36.33, _, _, _, _),
            "flash": (0.04, 0.06, 0.21, 0.82, 2.85, 10.41, 41.74, 167.19, 670.76, 2682.35),
            "block_sparse": (0.06, 0.06, 0.06, 0.12, 0.44, 0.86, 1.70, 3.29, 6.55, 13.34),
        },
        "backward": {
            "pytorch": (0.37, 0.49, 1.66, 5.81, 22.32, 87.67, _, _, _, _),
            "flash": (0.30, 0.26, 0.68, 2.02, 6.84, 26.89, 105.70, 418.96, 1666.89, 6660.44),
            "block_sparse": (0.30, 0.27, 0.29, 0.59, 1.50, 2.94, 5.82, 11.85, 23.98, 47.61),
        },
        "both": {
            "pytorch": (0.84, 0.86, 2.35, 8.29, 31.75, 124.19, _, _, _, _),
            "flash": (0.43, 0.41, 0.95, 2.55, 9.56, 37.49, 147.75, 586.61, 2339.11, 9341.30),
            "block_sparse": (0.44, 0.44, 0.45, 0.89, 1.95, 4.12, 7.64, 16.60, 32.73, 64.11),
            "linformer": (1.57, 1.49, 1.55, 1.60, 4.19, 8.04, 15.71, 30.92, 61.47, _),
            "local": (1.40, 1.60, 2.06, 6.06, 20.94, 42.01, 84.08, 168.48, 339.45, _),
        },
    },
    (False, True): {
        "forward": {
            "pytorch": (0.30, 0.30, 0.63, 1.93, 7.08, 27.45, 112.90, _, _, _),
            "flash": (0.03, 0.04, 0.17, 0.68, 2.28, 8.40, 33.55, 134.14, 537.50, 2150.88),
            "block_sparse": (0.05, 0.04, 0.05, 0.11, 0.35, 0.68, 1.33, 2.54, 5.34, 10.73),
        },
        "backward": {
            "pytorch": (0.44, 0.46, 1.53, 5.33, 20.34, 79.87, _, _, _, _),
            "flash": (0.21, 0.22, 0.62, 1.84, 5.77, 22.25, 86.21, 338.91, 1343.91, 5361.09),
            "block_sparse": (0.22, 0.22, 0.26, 0.57, 1.55, 3.13, 5.98, 12.21, 23.49, 47.85),
        },
        "both": {
            "pytorch": (0.80, 0.81, 2.08, 7.23, 27.51, 107.58, _, _, _, _),
            "flash": (0.32, 0.30, 0.83, 2.37, 7.95, 30.77, 119.98, 473.65, 1883.43, 7513.01),
            "block_sparse": (0.34, 0.34, 0.36, 0.69, 1.85, 3.89, 7.16, 14.85, 30.46, 60.03),
            "linformer": (1.51, 1.42, 1.56, 1.67, 3.67, 6.99, 13.63, 26.77, 53.36, 117.56),
        },
    },
    (True, False): {
        "forward": {
            "pytorch": (0.26, 0.24, 0.57, 1.80, 6.56, 25.34, _, _, _, _),
            "flash": (0.10, 0.10, 0.22, 0.83, 2.81, 10.38, 41.63, 167.01, 668.74, 2678.11),
            "block_sparse": (0.54, 0.51, 0.68, 0.61, 0.67, 1.10, 1.89, 3.71, 7.18, 14.41),
        },
        "backward": {
            "pytorch": (0.44, 0.35, 0.90, 2.94, 10.77, 41.67, _, _, _, _),
            "flash": (0.15, 0.18, 0.58, 1.86, 6.50, 26.21, 104.27, 416.10, 1661.92, 6643.01),
            "block_sparse": (0.17, 0.17, 0.17, 0.40, 1.10, 2.04, 4.43, 9.33, 18.28, 37.31),
        },
        "both": {
            "pytorch": (0.66, 0.67, 1.43, 4.82, 17.47, 67.29, _, _, _, _),
            "flash": (0.35, 0.36, 0.80, 2.52, 9.16, 36.70, 146.13, 583.45, 2332.01, 9323.63),
            "block_sparse": (0.91, 0.83, 0.94, 0.92, 1.83, 3.50, 7.02, 13.56, 26.71, 53.92),
            "linformer": (1.31, 1.21, 1.30, 1.39, 3.73, 7.15, 14.05, 27.69, 55.00, _),
        },
    },
    (False, False): {
        "forward": {
            "pytorch": (0.21, 0.22, 0.43, 1.27, 4.32, 16.47, 67.77, _, _, _),
            "flash": (0.08, 0.09, 0.18, 0.68, 2.40, 8.42, 33.54, 134.03, 535.95, 2147.05),
            "block_sparse": (0.56, 0.52, 0.63, 0.65, 0.61, 0.96, 1.69, 3.02, 5.69, 11.77),
        },
        "backward": {
            "pytorch": (0.26, 0.29, 0.78, 2.44, 8.82, 33.87, _, _, _, _),
            "flash": (0.11, 0.16, 0.52, 1.62, 5.45, 21.57, 84.75, 336.00, 1338.56, 5343.19),
            "block_sparse": (0.11, 0.12, 0.16, 0.38, 1.20, 2.34, 4.69, 9.10, 18.74, 37.04),
        },
        "both": {
            "pytorch": (0.67, 0.70, 1.18, 3.67, 13.22, 50.44, _, _, _, _),
            "flash": (0.31, 0.31, 0.73, 2.29, 7.64, 30.09, 118.50, 470.51, 1876.08, 7492.85),
            "block_sparse": (0.74, 0.77, 0.82, 0.88, 1.71, 3.21, 6.56, 12.60, 24.93, 50.39),
            "linformer": (1.31, 1.25, 1.30, 1.29, 3.20, 6.10, 11.93, 23.39, 46.72, 100.52),
        },
    },
}
# Table 21: MB of a forward and backward without dropout and padding.
MEMORY_MB = {
    "pytorch": (36, 104, 336, 1184, 4416, 17024, _, _, _, _),
    "flash": (22, 44, 104, 209, 418, 836, 1672, 3344, 6688, 13376),
    "block_sparse": (22, 44, 104, 209, 418, 836, 1672, 3344, 6690, 13384),
    "linformer": (25, 52, 114, 287, 832, 1652, 3292, 6572, 13132, 26252),
}
# Figures 1 (right) and 2 (left), the attention of GPT-2 medium with dropout: direction,
# milliseconds on an A100, times faster than PyTorch. Of figure 1 only the factor is printed.
FIGURES = {
    "figure1": ("forward", {"pytorch": _, "flash": _}, 7.6),
    "figure2": ("both", {"pytorch": 41.7, "flash": 7.3}, 41.7 / 7.3),
}
# Figure 2 (left), the attention of GPT-2 medium forward and backward: GB of HBM traffic.
HBM_GB = {"standard": 40.3, "flash": 4.4}
# Table 7: milliseconds on an A100 40 GB, batch 64, 16 heads of 64, dropout and key padding.
FMHA_SEQLENS = (128, 256, 512)
FMHA_MS = {
    "forward": {"fmha": (0.10, 0.29, 1.14), "flash": (0.08, 0.22, 0.81)},
    "backward": {"fmha": (0.17, 0.52, 1.81), "flash": (0.20, 0.53, 2.00)},
    "both": {"fmha": (0.27, 0.81, 2.95), "flash": (0.28, 0.75, 2.81)},
}
# name -> (dropout, key padding), direction
RUNTIME_TABLES = {
    f"table{9 + 3 * i + j}": (options, direction)
    for i, options in enumerate(RUNTIME_MS)
    for j, direction in enumerate(("forward", "backward", "both"))
}


def verdict(ours: float | None, paper: float | None) -> str:
    """Of the factor by which an implementation beats PyTorch's, ours against the paper's."""
    if ours is None:
        return "not measured: PyTorch's attention does not fit or would take minutes"
    if paper is None:
        return "no ratio in the paper (out of memory)"
    if ours >= paper * (1 + _WITHIN):
        return "better"
    return "reproduced" if ours >= paper * (1 - _WITHIN) else "worse"


class PaperRow(NamedTuple):
    """A row of a table whose numbers come from training: hours to weeks on a GPU."""

    name: str
    paper: dict[str, float]  # what is measured, with its unit -> the paper's number
    command: str | None  # what would run it here; None: another system's row, or none yet


NO_COMMAND = "another system's row, or no experiment of ours yet"
_DDP = "python train.py experiment={} trainer=ddp"
_LRA = "python train.py experiment={}"
_LRA_TASKS = ("ListOps", "Text", "Retrieval", "Image", "Pathfinder")
_LRA_ACCURACY = {  # of the Long Range Arena, per cent
    "Transformer": (36.0, 63.6, 81.6, 42.3, 72.7),
    "FlashAttention": (37.6, 63.9, 81.4, 43.5, 72.7),
    "block-sparse FlashAttention": (37.0, 63.0, 81.3, 43.6, 73.3),
}
_LRA_SPEED = "python -m scripts.benchmark_long_range"
_LONGDOC = {
    "MIMIC-III": "python train.py experiment=longdoc_mimic data.source=FOLDER data.seqlen={}",
    "ECtHR": "python train.py experiment=longdoc_ecthr data.seqlen={}",
}
_LONG_DOCUMENTS = {  # micro-F1 at 512, 1K, 2K, 4K, 8K, 16K tokens
    "MIMIC-III": (52.8, 50.7, 51.7, 54.6, 56.4, 57.1),
    "ECtHR": (72.2, 74.3, 77.1, 78.6, 80.7, 79.2),
}
TRAINING = {
    "table1": [
        PaperRow("BERT-large to 72.0 % of masked tokens, 8 A100", {"minutes": 17.4},
                 _DDP.format("bert_large_512") + " init_from=..."),
        PaperRow("the same, NVIDIA's MLPerf 1.1", {"minutes": 20.0}, None),
    ],
    "table2": [
        PaperRow("GPT-2 small, OpenWebText, 8 A100", {"perplexity": 18.2, "days": 2.7},
                 _DDP.format("gpt2_1k")),
        PaperRow("the same, HuggingFace", {"perplexity": 18.2, "days": 9.5}, None),
        PaperRow("the same, Megatron-LM", {"perplexity": 18.2, "days": 4.7}, None),
        PaperRow("GPT-2 medium, OpenWebText, 8 A100", {"perplexity": 14.3, "days": 6.9},
                 _DDP.format("gpt2_medium_1k")),
        PaperRow("the same, HuggingFace", {"perplexity": 14.2, "days": 21.0}, None),
        PaperRow("the same, Megatron-LM", {"perplexity": 14.3, "days": 11.5}, None),
    ],
    "table3": [
        PaperRow(f"{task}, {model}", {"accuracy, %": accuracies[i]},
                 _LRA.format(f"lra_{task.lower()}") if model == "FlashAttention" else None)
        for i, task in enumerate(_LRA_TASKS) for model, accuracies in _LRA_ACCURACY.items()
    ] + [
        PaperRow(f"training, {name} against unfused", {"times faster": times}, _LRA_SPEED)
        for name, times in (("FlashAttention", 2.4), ("block-sparse FlashAttention", 2.8))
    ],
    "table4": [
        PaperRow("1K context", {"perplexity": 18.2, "days": 2.7}, _DDP.format("gpt2_1k")),
        PaperRow("2K context", {"perplexity": 17.6, "days": 3.0}, _DDP.format("gpt2_2k")),
        PaperRow("4K context", {"perplexity": 17.5, "days": 3.6}, _DDP.format("gpt2_4k")),
        PaperRow("4K context with a warm-up, ours", {}, _DDP.format("gpt2_4k_warmup")),
    ],
    "table5": [
        PaperRow(f"{source}, {seqlen:,} tokens", {"micro-F1": f1},
                 _LONGDOC[source].format(seqlen))
        for source, row in _LONG_DOCUMENTS.items()
        for seqlen, f1 in zip((512, 1024, 2048, 4096, 8192, 16384), row, strict=True)
    ],
    "table6": [
        PaperRow("Path-X, FlashAttention", {"accuracy, %": 61.4},
                 _LRA.format("pathx recipe=paper")),
        PaperRow("Path-256, block-sparse FlashAttention", {"accuracy, %": 63.1},
                 _LRA.format("path256 recipe=paper attention=block_sparse")),
    ],
}  # fmt: skip
# What each table or figure shows, the command that measures it here, other records that hold it.
_ATTENTION, _REPRODUCE = "benchmark_attention", "python -m scripts.reproduce {}"
OPTION_NAMES = {
    (True, True): "with dropout and padding",
    (False, True): "with padding",
    (True, False): "with dropout",
    (False, False): "without dropout and padding",
}
OVERVIEW = {
    "table1": ("minutes of BERT-large to 72.0 %", _DDP.format("bert_large_512"), ()),
    "table2": ("days and perplexity of GPT-2", _DDP.format("gpt2_1k"), ("compare_attention",)),
    "table3": ("Long Range Arena", _LRA.format("lra_listops"),
               ("long_range_accuracy",)),
    "table4": ("perplexity against context", "python -m scripts.compare_contexts --source ...",
               ("compare_contexts",)),
    "table5": ("long documents", _LONGDOC["ECtHR"].format(8192), ()),
    "table6": ("Path-X and Path-256", _LRA.format("pathx recipe=paper"),
               ("long_range_accuracy",)),
    "table7": ("against Apex's FMHA", _REPRODUCE.format("table7"), ()),
    **{
        name: (
            f"milliseconds, {direction}, {OPTION_NAMES[options]}",
            _REPRODUCE.format(name),
            (_ATTENTION,) * (options in ((True, True), (False, False)) and direction != "both"),
        )
        for name, (options, direction) in RUNTIME_TABLES.items()
    },
    "table21": ("memory", _REPRODUCE.format("table21"), (_ATTENTION,)),
    "figure1": ("GPT-2's attention, forward", _REPRODUCE.format("figure1"), ()),
    "figure2": ("GPT-2's attention, both; runtime against density", _REPRODUCE.format("figure2"),
                ("count_hbm", "benchmark_block_sparse")),
    "figure3": ("runtime and memory against length", _REPRODUCE.format("figure3"), (_ATTENTION,)),
}  # fmt: skip
