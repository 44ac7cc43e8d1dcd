"""Chains of long-range runs, each starting from the one before: the Long Range Arena's images, and
long documents.

With a dense target Path-X is learned in minutes, from 6 paddles to 14, at first on bright pixels;
Path-256 starts from Path-X. The chains of labels alone (recipe=labels) differ in one thing each.
"""

from typing import NamedTuple


class Stage(NamedTuple):
    """One run of a chain.

    Attributes:
        name: of the run; its weights are the next stage's start.
        options: overrides of train.py.
        minutes: at most so many; None takes what is left.
        measures: only tests the weights of the last trained stage, in another way: one step at a
            rate of 0 changes nothing.
    """

    name: str
    options: tuple[str, ...]
    minutes: float | None = None
    measures: bool = False


class Chain(NamedTuple):
    """Stages one after the other.

    Attributes:
        about: one line for --help.
        stages: of it.
        prepare: images of later stages, to generate while the first train: arguments of
            scripts.prepare_data pathfinder, in the order in which they are needed.
        after: another chain's stage to start from.
    """

    about: str
    stages: tuple[Stage, ...]
    prepare: tuple[str, ...] = ()
    after: str | None = None


def _steps(number: int) -> tuple[str, ...]:
    return (f"trainer.max_steps={number}",)


_NO_TEST = ("data.num_train=160000", "data.num_val=2000", "data.num_test=0")  # on the way
_BALANCED = ("data.balanced=true", "data.num_train=64", "data.num_val=64", "data.num_test=10000")
_COMPILED = "task.compile=true"  # takes half a minute: for the long stages
_BRIGHT = "data.background_up_to=96"
_PATH32 = (
    *("experiment=lra_pathfinder", "recipe=fast", "model.nearness=1.5"),
    *("data.background_up_to=16", "data.num_workers=3"),
)
_PATHX = ("experiment=pathx", "recipe=fast", "model.nearness=1.5", "data.num_workers=8")
_PAPER = (
    *("experiment=pathx", "data.num_workers=4", "trainer.val_check_interval=1000", _COMPILED),
)
_PATH256 = ("experiment=path256", *_PATHX[1:], _BRIGHT, "data.val_batch_size=100")


_STAND_INS = {
    "text": (
        *("experiment=lra_text", "data.source=movie_reviews.zip", "optimizer.lr=2e-4"),
        *("task.decay=cosine", "task.warmup_fraction=0.1", *_steps(600)),
        *("trainer.val_check_interval=100", _COMPILED),
    ),
    "image": (
        *("experiment=lra_image", "data.source=fashion-mnist", "task.warmup_fraction=0.05"),
        *(*_steps(3000), "trainer.val_check_interval=500", "data.num_workers=3", _COMPILED),
    ),
}
# The same documents in as many steps, whatever is seen of them. Ids of novels name the authors:
# ENG18400_Trollope, Barclay_Rosary_1909; 30 have three novels or more, whole ones are held out.
_DOCUMENTS = (
    *("experiment=longdoc_novels", "data.source=novels.jsonl.xz", "data.label_field=id"),
    "data.label_pattern='^(?:ENG[0-9]+_)?([A-Z][a-z]+)(?:_|$)'",
    *("data.num_classes=24", "model.num_classes=24"),
    *("trainer.max_steps=300", "trainer.val_check_interval=50", _COMPILED),
)


def _balanced(name: str, *options: str) -> Stage:
    return Stage(f"{name}_balanced", (*options, *_BALANCED), measures=True)


def _labels(name: str, *options: str, experiment: str = "lra_pathfinder") -> tuple[Stage, ...]:
    workers = 3 if experiment == "lra_pathfinder" else 8
    base = (f"experiment={experiment}", "recipe=labels", f"data.num_workers={workers}", *options)
    tested = _balanced(name, *base, "data.curriculum=null", "data.val_batch_size=100")
    return (Stage(name, (*base, _COMPILED)), tested)


# The easier images of recipe=labels, at 128 pixels.
_LABELS_128 = tuple(
    f"--size 128 --level {level} --distractors {distractors} --train 40000 --val 0 --test 0"
    for level, distractors in ((3, 0), (4, 0), (6, 0), (9, 0), (14, 0), (14, 2))
)


CHAINS = {
    "pathx": Chain(
        "Path-X with a dense target: level 6, level 14 on bright pixels, all non-zero pixels; "
        "tested on all 16,384 pixels and on the balanced set too",
        (
            Stage("pathx_6", (*_PATHX, *_NO_TEST, _BRIGHT, "data.level=6", "data.batch_size=128",
                              "trainer.max_steps=4000"), 2.2),
            Stage("pathx_14", (*_PATHX, _BRIGHT, "trainer.max_steps=6000", _COMPILED), 4.2),
            Stage("pathx_full", (*_PATHX, "data.batch_size=128", "data.val_batch_size=100",
                                 "optimizer.lr=5e-4", "trainer.max_steps=1500",
                                 "trainer.val_check_interval=500", _COMPILED)),
            Stage("pathx_dense", (*_PATHX, "data.foreground=false", "data.val_batch_size=16",
                                  "data.test_limit=10000"), measures=True),
            _balanced("pathx", *_PATHX, "data.val_batch_size=100"),
        ),
        prepare=("--size 128",),
    ),
    "pathx_labels": Chain(
        "Path-X, labels alone, bright pixels",
        _labels("pathx_labels", _BRIGHT, experiment="pathx"),
        prepare=(*_LABELS_128, "--size 128"),
    ),
    "path256": Chain(
        "Path-256 with a dense target, from pathx_14",
        (
            Stage("path256", (*_PATH256, "data.batch_size=128", "trainer.max_steps=6000",
                             _COMPILED)),
            _balanced("path256", *_PATH256),
        ),
        prepare=("--size 256",),
        after="pathx_14",
    ),
    "paper": Chain(
        "Path-X as the paper trained it, as far as the minutes go: labels alone, all pixels, "
        "learned positions, from Path-64",
        (
            Stage("paper_64", (*_PAPER, "data.size=64", "model.max_seqlen=4096",
                               "data.num_val=2000", "data.num_test=0"), 3.0),
            Stage("paper_pathx", (*_PAPER, "data.val_limit=2000", "data.test_limit=10000")),
        ),
        prepare=("--size 64 --val 2000 --test 0", "--size 128"),
    ),
    "path32": Chain(
        "32 pixels with a dense target",
        (
            Stage("path32", (*_PATH32, "trainer.max_steps=6000", _COMPILED)),
            _balanced("path32", *_PATH32),
        ),
    ),
    "labels": Chain("32 pixels, labels alone", _labels("labels")),
    "labels_mean": Chain(
        "the same with mean pooling", _labels("labels_mean", "model.pooling=mean")
    ),
    "labels_heads": Chain("the same with 8 heads of 16", _labels("labels_heads", "model.nheads=8")),
    "labels_pixel": Chain(
        "the same with a linear embedding of grey values",
        _labels("labels_pixel", "model.embedding=pixel"),
    ),
    "labels_hard": Chain(
        "the same without the curriculum: the control",
        _labels("labels_hard", "data.curriculum=null"),
    ),
    "listops": Chain(
        "ListOps by a small model with rotary positions; the arena's own, at its rate of 1.6e-3, "
        "stays at the commonest class",
        (
            Stage("listops", ("experiment=lra_listops", "model.depth=2", "model.dim=128",
                              "model.nheads=2", "model.mlp_dim=256", "model.pooling=mean",
                              "model.positions=rotary", "model.nearness=1.5",
                              "model.rotary_wavelengths=[4.0,4096.0]",
                              "optimizer.lr=1e-3", "task.decay=cosine",
                              "task.warmup_fraction=0.05", "data.batch_size=64",
                              "data.num_workers=3", "trainer.val_check_interval=500",
                              *_steps(10000), _COMPILED)),
        ),
    ),
    **{
        f"{task}_{attention}": Chain(
            f"the arena's {task} on a stand-in, attention={attention}: the two of a task compare",
            (Stage(f"{task}_{attention}", (*_STAND_INS[task], f"attention={attention}")),),
        )
        for task in ("text", "image")
        for attention in ("flash", "sdpa")
    },
    **{
        f"documents_{seqlen}_{seed}": Chain(
            f"a stand-in of table 5: novels by their author, {seqlen:,} tokens seen, seed {seed}",
            (Stage(f"documents_{seqlen}_{seed}", (*_DOCUMENTS, f"data.seqlen={seqlen}",
                                                  f"seed={seed}")),),
        )
        for seqlen in (512, 16384)
        for seed in (1, 2, 3)
    },
}  # fmt: skip
# What a measurement does instead of training.
MEASURE = (
    *("trainer.max_steps=1", "trainer.val_check_interval=1", "task.warmup_fraction=1"),
    *("task.compile=false", "data.batch_size=16", "data.val_limit=32", "data.num_workers=2"),
    "callbacks.checkpoints=null",
)
