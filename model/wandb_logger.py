"""W&B: charts in groups over tokens, one run whatever was resumed, checkpoints as artifacts; its
failures never end a run.

W&B puts charts in groups by what stands before the slash of a name, so the columns of metrics.csv
get such names here (`chart_name`), and every chart has tokens on its x axis.
"""

import re
import ssl
import urllib.error
import urllib.request
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch.loggers import Logger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only

from model.checkpoint import MANIFEST, is_intact, read_manifest

X_AXIS = "tokens"
GROUPS = ("train", "val", "optimizer", "speed", "memory", "progress")  # in the order of interest
_RENAMED = {
    "train/grad_norm": "optimizer/grad_norm",
    "lr": "optimizer/lr",
    "tokens_per_s": "speed/tokens_per_s",
    "samples_per_s": "speed/samples_per_s",
    "mfu_full": "speed/mfu_full",
    "mfu_causal": "speed/mfu_causal",
    "peak_gib": "memory/peak_gib",
    "seconds": "progress/seconds",
    "epoch": "progress/epoch",
    "context": "progress/context",
    "step": "progress/step",
}
CHECKPOINTS = ("none", "end", "every")


def chart_name(column: str) -> str:
    """W&B's name of a column of metrics.csv: "mfu_full" -> "speed/mfu_full"."""
    return _RENAMED.get(column, column)


class PatientWandbLogger(WandbLogger):
    """WandbLogger whose failures cost what W&B shows, not the run.

    A run that goes on online from a checkpoint does some steps again: their training metrics are
    there already and are not sent twice, as W&B refuses a step that it has.

    Args:
        experiment: the W&B run.
        save_dir: the run folder, whose checkpoints become artifacts.
        checkpoints: which do. "none"; "end", the last and the best, when the program ends; "every",
            each when it is saved, online, and as "end" offline, where `wandb sync` would look for
            files that were removed since.
    """

    def __init__(self, *, experiment: Any, save_dir: str = ".", checkpoints: str = "none") -> None:
        if checkpoints not in CHECKPOINTS:
            raise ValueError(
                f"W&B's checkpoints must be one of {', '.join(CHECKPOINTS)}, got {checkpoints!r}"
            )
        super().__init__(experiment=experiment, save_dir=save_dir)
        self.folder = Path(save_dir).resolve() / "checkpoints"  # wandb sync may run elsewhere
        if checkpoints == "every" and getattr(experiment, "offline", False):
            checkpoints = "end"
        self.checkpoints = checkpoints
        # Steps below it the service has, from before a resume.
        self._first_new_step = getattr(experiment, "starting_step", 0)
        self._sent: dict[str, set[str]] = {}  # SHA-256 of a checkpoint -> aliases it was given
        self._try("the axes of the charts", self._define_axes)

    def _define_axes(self) -> None:
        run = self._experiment
        run.define_metric(X_AXIS, hidden=True)
        for group in GROUPS:
            run.define_metric(f"{group}/*", step_metric=X_AXIS)

    @rank_zero_only
    def log_metrics(self, metrics: dict, step: int | None = None) -> None:
        if step is not None and step < self._first_new_step:
            metrics = {k: v for k, v in metrics.items() if not _is_of_training(k)}
            if set(metrics) <= {X_AXIS}:
                return
        row = {chart_name(column): value for column, value in metrics.items()}
        if step is not None:
            row[chart_name("step")] = step
        self._try(f"the metrics of step {step}", self._log, row, step)

    def _log(self, row: dict, step: int | None) -> None:
        if step is None:
            self.experiment.log(row)
        else:
            self.experiment.log(row, step=max(step, self._first_new_step))

    @rank_zero_only
    def log_rows(
        self, name: str, columns: list[str], rows: list[list], step: int, tokens: int
    ) -> None:
        """A table of plain values, whole each time: W&B shows the newest."""

        def log() -> None:
            import wandb

            # A row of its own history entry would have no tokens, and no place on the axis.
            self._log({name: wandb.Table(columns=columns, data=rows), X_AXIS: tokens}, step)

        self._try(f"the table {name}", log)

    @rank_zero_only
    def log_drawing(self, name: str, svg: str, step: int) -> None:
        """A picture in SVG, which W&B shows as a page: no rasterizer is needed, and it zooms."""

        def log() -> None:
            import wandb

            self._log({name: wandb.Html(svg)}, step)

        self._try(f"the picture {name}", log)

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self._try("the configuration", super().log_hyperparams, params)

    @rank_zero_only
    def checkpoint_saved(self) -> None:
        """Called by model.saving.Checkpoints."""
        if self.checkpoints == "every":
            self._try("a checkpoint", self._send_checkpoints)

    def _send_checkpoints(self) -> None:
        """Log the newest and the best checkpoint, if they are new, or new under a name.

        One artifact a run, `model-<id>`, a version a checkpoint, with the aliases `last`, `best`
        and `step-N`. W&B reads the files where they are (no copy in its cache or staging folder):
        they are written once and then only removed.
        """
        import wandb

        manifest = read_manifest(self.folder)
        steps = sorted(name for name in manifest if name.startswith("step-"))
        best = sorted(name for name in manifest if name.startswith("best-"))
        wanted: dict[str, list[str]] = {}  # the first name of the same bytes -> aliases
        for name, alias in [*((n, "best") for n in best[-1:]), *((n, "last") for n in steps[-1:])]:
            same = [n for n in wanted if manifest[n]["sha256"] == manifest[name]["sha256"]]
            wanted.setdefault((same or [name])[0], []).append(alias)
        for name, aliases in wanted.items():
            entry = manifest[name]
            sent = self._sent.setdefault(entry["sha256"], set())
            if sent >= set(aliases) or not is_intact(self.folder / name):
                continue
            artifact = wandb.Artifact(
                f"model-{re.sub(r'[^A-Za-z0-9_.-]', '-', self.experiment.id)}",
                "model",
                metadata={**entry, "file": name, "listed_in": MANIFEST},
            )
            # A sharded checkpoint is a folder.
            add = artifact.add_dir if (self.folder / name).is_dir() else artifact.add_file
            add(str(self.folder / name), name="model.ckpt", skip_cache=True, policy="immutable")
            self.experiment.log_artifact(artifact, aliases=[*aliases, f"step-{entry['step']}"])
            sent.update(aliases)

    @rank_zero_only
    def finish(self, status: str) -> None:
        """End the W&B run: the next one of a sweep gets its own. Lightning's finalize comes after
        fit already, before the last validation."""
        if self.checkpoints != "none":
            self._try("the checkpoints", self._send_checkpoints)
        self._try("the end", lambda: self.experiment.finish(exit_code=int(status == "failed")))

    def _try(self, what: str, log: Callable, *args: Any) -> None:
        try:
            log(*args)
        except Exception as error:  # any fault of the service: the CSV still has every row
            warnings.warn(f"W&B did not take {what}: {error}", stacklevel=3)


def _is_of_training(column: str) -> bool:
    return column != X_AXIS and not column.startswith("val/")


def wandb_logger(
    *,
    save_dir: str,
    run_id: str,
    name: str,
    project: str = "flashtrain",
    entity: str | None = None,
    group: str | None = None,
    tags: list[str] | None = None,
    mode: str = "auto",
    checkpoints: str = "none",
    init_timeout_s: int = 60,
) -> Logger | None:
    """A W&B logger that continues run `run_id`; offline where W&B cannot be reached.

    Args:
        save_dir: the run folder; W&B's files go to its ``wandb/``.
        run_id: the same id after a resume continues the same W&B run. (An agent of a W&B sweep
            gives the run an id of its own.)
        group: runs that W&B shows together, such as the members of a sweep.
        mode: "auto" (online, else offline), "online" (fail if W&B cannot be reached), "offline".
        checkpoints: which become artifacts: "none", "end" or "every" (PatientWandbLogger).
        init_timeout_s: how long to wait for the service, in seconds.

    Returns:
        The logger, or None on ranks other than 0 and where not even offline mode starts (with a
        warning; metrics.csv has everything).
    """
    if mode not in ("auto", "online", "offline"):
        raise ValueError(f"wandb mode must be auto, online or offline, got {mode!r}")
    if checkpoints not in CHECKPOINTS:
        raise ValueError(
            f"wandb checkpoints must be one of {', '.join(CHECKPOINTS)}, got {checkpoints!r}"
        )
    if rank_zero_only.rank != 0:
        return None
    import wandb

    def start(wandb_mode: Literal["online", "offline"] | None) -> Any:
        return wandb.init(
            dir=save_dir,
            id=run_id,
            name=name,
            project=project,
            entity=entity,
            group=group,
            tags=tags,
            mode=wandb_mode,
            resume=None if wandb_mode == "offline" else "allow",
            settings=wandb.Settings(init_timeout=init_timeout_s, console="off"),
        )

    run = None
    goes_online = mode == "online" or (mode == "auto" and _has_wandb_account(wandb))
    settings = wandb.setup().settings  # of the environment and W&B's own files
    if mode == "auto" and goes_online and settings.mode == "online":
        goes_online = _is_reachable(settings.base_url)
        if not goes_online:
            warnings.warn(f"{settings.base_url} cannot be reached, logging offline", stacklevel=2)
    if goes_online:
        try:
            run = start("online" if mode == "online" else None)  # None heeds WANDB_MODE
        except Exception as error:
            if mode == "online":
                raise
            reason = str(error).split("\n")[0]
            warnings.warn(f"W&B cannot be reached, logging offline: {reason}", stacklevel=2)
            wandb.teardown()  # its service still holds the id for the start that failed
    if run is None:
        try:
            run = start("offline")
        except Exception as error:
            if mode == "offline":
                raise
            warnings.warn(f"W&B does not start, metrics go to metrics.csv: {error}", stacklevel=2)
            return None
        # Each start of the run has a folder; wandb sends those of one id in their order.
        folders = Path(run.dir).parent.parent / f"offline-run-*-{run.id}"
        print(f"W&B is offline; send the run later with: wandb sync {folders}")
        if checkpoints == "every":
            print("W&B is offline: the last and the best checkpoint become artifacts at the end")
    return PatientWandbLogger(experiment=run, save_dir=save_dir, checkpoints=checkpoints)


def _is_reachable(url: str, timeout_s: float = 10.0) -> bool:
    """Whether a server answers, with whatever; W&B itself tries for a minute and more."""
    try:
        urllib.request.urlopen(url, timeout=timeout_s).close()
    except urllib.error.HTTPError:
        return True
    except urllib.error.URLError as error:
        return isinstance(error.reason, ssl.SSLError)  # W&B may know the certificate
    except (OSError, ValueError):
        return False
    return True


def _has_wandb_account(wandb: Any) -> bool:
    """Whether a key is at hand, so that W&B will not stop and ask for one."""
    try:
        return wandb.login(prompt=False, verify=False)
    except Exception:  # an unreadable key file is no key
        return False
