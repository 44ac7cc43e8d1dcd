"""Train a model: compose the configuration, build data, task and trainer, fit, report.

python train.py                      a small GPT-2 on an embedded corpus, on any machine
python train.py experiment=gpt2_4k   the paper's GPT-2 at 4K context
python train.py --help               groups, options and how to override them
"""

import inspect
import logging
import os
import signal
import sys
import types
import typing
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.errors import HydraException
from hydra.utils import get_object, instantiate
from lightning import Trainer
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from data.classification import ClassificationData
from data.masked_lm import MaskedLMData
from data.packed_documents import PackedDocumentsData
from data.stepped import SteppedData
from model.attention import auto_attention, is_flash
from model.block_sparse import BlockSparseAttention
from model.callbacks import StopAtTarget
from model.checkpoint import AtomicCheckpointIO, newest_best
from model.generation import sample_text
from model.guard import RollBack, TrainingError, explained
from model.language_task import CausalLMTask
from model.results import say_result, write_result
from model.run import Run, plan_run, record_run
from model.saving import EXIT_CODES, Checkpoints
from model.task import TrainingTask, say, step_seed
from model.wandb_logger import PatientWandbLogger

WANTS_TRACEBACK = bool(os.environ.get("HYDRA_FULL_ERROR"))
CONFIGURATION_ERRORS = (HydraException, OmegaConfBaseException)
BUILD_ERRORS = (
    *CONFIGURATION_ERRORS,
    MisconfigurationException,
    NotImplementedError,
    ValueError,
    TypeError,
    OSError,
    ImportError,
)


@hydra.main(version_base="1.3", config_path="configs", config_name="train")
def main(cfg: DictConfig) -> float:
    """One run. Returns its validation loss, the objective of a sweep."""
    quiet()
    with one_line_errors(BUILD_ERRORS):
        cfg, run, data, task, trainer = build(cfg)
        if rank_zero_only.rank == 0:
            record_run(run, OmegaConf.to_yaml(cfg, resolve=True))
        trainer.loggers = instantiate_all(cfg.logger)
        for logger in trainer.loggers:
            logger.log_hyperparams(OmegaConf.to_container(cfg, resolve=True))
    say(f"run folder: {run.folder}")
    try:
        fit(run.ckpt_path, data, task, trainer)
        targets = [c for c in trainer.callbacks if isinstance(c, StopAtTarget)]
        reached = [(target.metric, *target.reached) for target in targets if target.reached]
        for metric, step, value in reached:
            say(f"target reached: {metric} {value:.2%} at step {step}")
        if trainer.global_step < trainer.max_steps and not reached:
            say(f"stopped at step {trainer.global_step}; resume=auto goes on from there")
        loss = report(cfg, run, data, task, trainer)
    except BaseException as error:
        is_told = isinstance(error, SystemExit) and error.code in EXIT_CODES.values()
        if is_told:  # all processes are: a launcher ends those that are left when the first ends
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        finalize(trainer, "failed")
        if is_told:
            trainer.strategy.barrier()
        with one_line_errors((TrainingError,)):
            if explanation := explained(error, trainer, task):
                raise explanation from error
            raise
    finalize(trainer, "success")
    return loss


def fit(ckpt_path: Path | None, data: SteppedData, task: TrainingTask, trainer: Trainer) -> None:
    """Train, and again from an older checkpoint as often as the guard asks for it."""
    while True:
        try:
            return trainer.fit(task, data, ckpt_path=ckpt_path, weights_only=True)
        except RollBack as back:
            ckpt_path, data.first_position = back.checkpoint, back.position


def finalize(trainer: Trainer, status: str) -> None:
    """Close every logger: the last validation may have come after Lightning did."""
    for logger in trainer.loggers:
        logger.finalize(status)
        if isinstance(logger, PatientWandbLogger):
            logger.finish(status)


def build(cfg: DictConfig) -> tuple[DictConfig, Run, Any, Any, Trainer]:
    """Check the configuration, then make everything that it names, cheap things first.

    Raises:
        ValueError, FileNotFoundError, ...: the configuration cannot work; the message says why and
            what to change.
    """
    check_options(cfg)
    # Processes that plan for themselves must come to the same folder.
    distributed = (
        cfg.trainer.devices != 1
        or cfg.trainer.get("num_nodes", 1) != 1
        or int(os.environ.get("WORLD_SIZE", os.environ.get("SLURM_NTASKS", "1"))) > 1
    )
    run = plan_run(
        cfg.run_name,
        cfg.runs_root,
        resume=cfg.resume,
        ckpt_path=cfg.ckpt_path,
        shared_name=distributed,
    )
    cfg.run_dir, cfg.run_id = str(run.folder), run.run_id
    on_gpu = choose_precision(cfg)
    data = instantiate(cfg.data)
    check_model_fits_data(cfg.model, data)
    if data.curriculum_steps >= cfg.trainer.max_steps > 0:
        raise ValueError(
            f"data.curriculum must end before the run: it lasts {data.curriculum_steps} steps, "
            f"trainer.max_steps is {cfg.trainer.max_steps}; train longer, or data.curriculum=null"
        )
    callbacks = instantiate_all(cfg.callbacks)
    trainer = instantiate(
        cfg.trainer,
        callbacks=callbacks,
        enable_checkpointing=any(isinstance(callback, Checkpoints) for callback in callbacks),
        plugins=[AtomicCheckpointIO()],
        logger=False,
    )
    shared = cfg.context_parallel.size
    if shared < 1 or trainer.world_size % shared:
        raise ValueError(
            f"context_parallel.size={shared} must divide the {trainer.world_size} devices"
        )
    data.processes_per_sample = shared
    per_step, groups = data.batch_tokens // data.seqlen, trainer.world_size // shared
    if per_step % groups:
        raise ValueError(
            f"data.batch_tokens={data.batch_tokens} is {per_step} sequences of {data.seqlen} "
            f"tokens, which must divide among {groups} "
            + ("devices" if shared == 1 else f"groups of {shared} devices")
        )
    say(f"attention: {choose_attention(cfg, on_gpu)}")
    torch.set_float32_matmul_precision("high")  # what autocast leaves in fp32 may use TF32
    torch.manual_seed(step_seed(cfg.seed, -1, 0))  # initial weights: the same on every rank
    task = instantiate(cfg.task)
    if shared > 1:
        if not isinstance(task, CausalLMTask):
            raise ValueError("context_parallel splits the sequences of a GPT alone: set size=1")
        if len(data.contexts) > 1:
            raise ValueError("context_parallel trains at one context: data.context_warmup=null")
        packed = isinstance(data, PackedDocumentsData)
        task.split_sequences(shared, cfg.context_parallel.method, data.seqlen, packed=packed)
    for seqlen in data.contexts:
        task.micro_batch(data.batch_tokens // seqlen // groups, seqlen // shared)
    task.make_optimizer(torch.nn.Linear(1, 1))  # refuses what the optimizer refuses
    if cfg.init_from is not None and run.ckpt_path is None:
        task.load_weights(cfg.init_from)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        data.prepare_data()  # may download and tokenize for an hour: all else was checked before
        data.setup()
    return cfg, run, data, task, trainer


def choose_precision(cfg: DictConfig) -> bool:
    """Set trainer.precision where it is auto. Returns whether the trainer uses a GPU."""
    if cfg.trainer.accelerator == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "the trainer asks for a CUDA GPU and there is none; add trainer=cpu (and a small model "
            "and batch), or run on a machine with a GPU"
        )
    on_gpu = cfg.trainer.accelerator in ("cuda", "gpu", "auto") and torch.cuda.is_available()
    if cfg.trainer.precision == "auto":
        cfg.trainer.precision = "bf16-mixed" if on_gpu else "32-true"
    if cfg.trainer.precision not in ("bf16-mixed", "32-true"):
        raise ValueError(
            "trainer.precision must be auto, bf16-mixed or 32-true (clipping does not know a loss "
            f"scale of fp16), got {cfg.trainer.precision}"
        )
    return on_gpu


def check_model_fits_data(model: DictConfig, data: Any) -> None:
    """Hold the options of the model against the data, which know nothing of each other."""
    if data.seqlen > model.max_seqlen:
        raise ValueError(
            f"data.seqlen={data.seqlen} is longer than the {model.max_seqlen} positions of "
            "the model; raise model.max_seqlen or shorten data.seqlen"
        )
    if data.vocab_size > model.get("vocab_size", data.vocab_size):
        raise ValueError(
            f"model.vocab_size={model.vocab_size} must be at least {data.vocab_size}, the "
            "vocabulary of the tokenizer"
        )
    if isinstance(data, ClassificationData) and data.num_classes != model.num_classes:
        raise ValueError(
            f"model.num_classes={model.num_classes} must be the {data.num_classes} of the data"
        )
    multi_label = model.get("multi_label", False)
    if isinstance(data, ClassificationData) and data.multi_label != multi_label:
        raise ValueError(
            f"model.multi_label must be {str(data.multi_label).lower()}: an example of these data "
            f"has {'any number of labels' if data.multi_label else 'one label'}"
        )
    if isinstance(data, MaskedLMData) and model.get("nsp_head") and not data.sentence_pairs:
        raise ValueError(
            "an NSP head needs pairs: set data.sentence_pairs=true, or model.nsp_head=false and "
            "model.pooler=false"
        )


def choose_attention(cfg: DictConfig, on_gpu: bool) -> str:
    """The name of the attention function, which must work here, and what auto comes to."""
    attention = instantiate(cfg.attention)
    name = getattr(attention, "__name__", repr(attention))
    if attention is auto_attention:
        name = "flash (auto, GPU)" if on_gpu else "sdpa (auto, no GPU)"
    on_cpu = torch.empty(0)
    needs_gpu = is_flash(attention, on_cpu) or isinstance(attention, BlockSparseAttention)
    if cfg.context_parallel.size > 1 and cfg.context_parallel.method == "ring":
        if not needs_gpu and not (on_gpu and attention is auto_attention):
            raise ValueError(
                "context_parallel.method=ring needs attention=flash or block_sparse, and GPUs: use "
                "method=heads"
            )
    # Triton's interpreter, slow, is to look into the kernels.
    if needs_gpu and not on_gpu and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(f"attention={name} needs a GPU; use attention=sdpa or attention=auto here")
    return name


def instantiate_all(group: DictConfig | None) -> list:
    """Every member of a group that is not switched off (key=null) or unavailable (W&B)."""
    made = [instantiate(node) for node in (group or {}).values() if node is not None]
    return [member for member in made if member is not None]


def report(cfg: DictConfig, run: Run, data: Any, task: TrainingTask, trainer: Trainer) -> float:
    """What the run came to, beside what it must be compared with, and where it is; the same in
    result.json.

    Returns:
        Loss of the last step's validation, which is made up for if it has not been; infinity if
        nothing is held out for it.
    """
    loss = float("inf")
    splits = {}
    if data.num_held_out("val"):
        if task.validated_step != trainer.global_step:
            trainer.validate(task, data, verbose=False)
        loss = float(trainer.callback_metrics["val/loss"])
        splits["val"] = say_result("val", None, trainer.callback_metrics, data, task)
    else:
        say("no validation: the data hold nothing out for it")
    if data.num_held_out("test"):
        best = newest_best(run.folder)
        trainer.test(task, data, ckpt_path=best, weights_only=True, verbose=False)
        tested = best.name if best else None
        splits["test"] = say_result("test", tested, trainer.callback_metrics, data, task)
    if task.caveat:
        say(task.caveat)
    write_result(
        run.folder,
        step=trainer.global_step,
        max_steps=trainer.max_steps,
        caveat=task.caveat or None,
        splits=splits,
    )
    more = ""
    if isinstance(task, CausalLMTask):
        more = f"  (python -m scripts.generate run={run.folder.name} prompt='...')"
        if cfg.sample_prompt and rank_zero_only.rank == 0 and trainer.world_size == 1:
            model = task.model.eval().to(trainer.strategy.root_device)  # fit moves it to the CPU
            prompt, num_tokens = cfg.sample_prompt, cfg.sample_tokens
            texts = sample_text(model, data.tokenizer, prompt, num_tokens, seed=cfg.seed)
            say(f"sample: {texts[0]}")
    say(f"run: {run.folder}{more}")
    return loss


def check_options(cfg: DictConfig) -> None:
    """Hold every node with a _target_ against the signature of what it names.

    Raises:
        ValueError: an option that the target lacks, or of another type than its annotation.
    """
    for key, node in cfg.items_ex(resolve=False):
        if not isinstance(node, DictConfig):
            continue
        children = [node] if "_target_" in node else list(node.values())
        for child in children:
            if isinstance(child, DictConfig) and "_target_" in child:
                _check_node(str(key), child)


def _check_node(key: str, node: DictConfig) -> None:
    target = get_object(node["_target_"])
    options = _options_of(target)
    if options is None:
        return
    for name in map(str, node):
        if name.startswith("_"):
            continue
        if name not in options:
            known = ", ".join(options)
            raise ValueError(f"{key}.{name} is unknown; {target.__name__} has {known}")
        value = node[name]
        if not _fits(value, options[name]):
            wanted = inspect.formatannotation(options[name])
            raise ValueError(f"{key}.{name} must be {wanted}, got {value!r}")


def _options_of(target: Any) -> dict[str, Any] | None:
    """The options of a class or function and their types; None if it takes any."""
    hints = typing.get_type_hints(target.__init__ if inspect.isclass(target) else target)
    options: dict[str, Any] = {}
    for name, parameter in inspect.signature(target).parameters.items():
        hint = hints.get(name, Any)
        if parameter.kind is not parameter.VAR_KEYWORD:
            options[name] = hint
        elif typing.get_origin(hint) is typing.Unpack:
            options |= typing.get_type_hints(typing.get_args(hint)[0])
        else:
            return None
    return options


def _fits(value: object, hint: Any) -> bool:
    """Whether a configuration value can be of type `hint`; what is not plain data always can."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return any(_fits(value, option) for option in typing.get_args(hint))
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint in (str, bool, type(None)):
        return isinstance(value, hint)
    return True


def quiet() -> None:
    """Keep Lightning's notes about what this program decides itself out of the output."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
    logging.basicConfig(format="%(message)s")
    if rank_zero_only.rank == 0:  # what preparing data needs of the disk, what packing wastes
        logging.getLogger("data").setLevel(logging.INFO)
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    warnings.filterwarnings("ignore", ".*LeafSpec.*")
    warnings.filterwarnings("ignore", ".*overridden `on_.*_batch_transfer`.*")
    warnings.filterwarnings("ignore", ".*sync_dist=True.*")  # the task sums over ranks itself
    warnings.filterwarnings("ignore", ".*across ranks is zero.*")  # no held-out data, by choice


@contextmanager
def one_line_errors(kinds: tuple[type[Exception], ...]) -> Iterator[None]:
    """End the program with one line for an error of these kinds, which the user can mend.

    HYDRA_FULL_ERROR=1 in the environment shows the traceback instead.
    """
    try:
        yield
    except kinds as error:
        if WANTS_TRACEBACK:
            raise
        cause: BaseException = error
        while isinstance(cause, HydraException) and cause.__cause__ is not None:
            cause = cause.__cause__  # what the constructor itself said
        sys.exit("error: " + " ".join(str(cause).split()))


if __name__ == "__main__":
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra hands errors over instead of printing its own
    with one_line_errors(CONFIGURATION_ERRORS):
        main()
