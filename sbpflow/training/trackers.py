"""Logs a run to the trackers in ``train.trackers``: TensorBoard, MLflow, Weights & Biases.

Each tracker needs a package, which is imported only if ``train.trackers`` names the tracker.
"""

import logging
import re
from collections.abc import Iterable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, Protocol

from sbpflow.config.load import config_facts
from sbpflow.config.parse import show
from sbpflow.config.schema import Config
from sbpflow.config.train_options import TrackerName
from sbpflow.errors import ConfigError, PeerStoppedError, unknown_value
from sbpflow.runtime.compute.versions import SBPFLOW_VERSION
from sbpflow.runtime.files.run_folder import BOARD_FOLDER

logger = logging.getLogger(__name__)

Status = Literal["FINISHED", "FAILED", "KILLED"]  # the names that MLflow uses
_RUN_TAG = "sbpflow.run"


class Tracker(Protocol):
    """The interface of a tracker, which receives the metrics of a run on rank 0."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log finite values by name, such as ``step/loss`` and ``val/auc``."""
        ...

    def close(self, status: Status) -> None:
        """Mark the run as ended in the tracker."""
        ...


def check_trackers(names: Iterable[TrackerName]) -> None:
    """Raise ConfigError if the package of a tracker in ``names`` is not installed."""
    if missing := [name for name in names if find_spec(name) is None]:
        raise ConfigError(
            f"train.trackers: the packages of {show(missing)} are not installed; run `pip install "
            f"{' '.join(missing)}`, or remove the names"
        )


def open_trackers(config: Config, run: str, resumed_step: int | None) -> list[Tracker]:
    """Start logging to the configured trackers.

    A resumed run continues the run that the trackers store under the ID ``run``. Raises ConfigError
    if a tracker cannot start, for example because its server does not respond.
    """
    opened: list[Tracker] = []
    try:
        for name in config.train.trackers:
            opened.append(_open(name, config, run, resumed_step))
    except BaseException as error:
        # MLflow would keep the run active and make it the parent of later runs of this process.
        close_trackers(opened, type(error))
        raise
    return opened


def close_trackers(trackers: Iterable[Tracker], error: type[BaseException] | None) -> None:
    """Close all trackers of a run that ended with ``error``. If one fails, this is only logged, so
    that it does not hide ``error``.
    """
    for tracker in trackers:
        try:
            tracker.close(status_of(error))
        except Exception:
            logger.exception("a tracker could not be closed")


def status_of(error: type[BaseException] | None) -> Status:
    """Return the status of an ended run; KILLED means that a signal stopped the run."""
    if error is None:
        return "FINISHED"
    stopped = issubclass(error, PeerStoppedError) or not issubclass(error, Exception)
    return "KILLED" if stopped else "FAILED"


def _open(name: TrackerName, config: Config, run: str, resumed_step: int | None) -> Tracker:
    if name == "tensorboard":
        return _TensorBoard(config.run.dir / BOARD_FOLDER, resumed_step)
    if name == "mlflow":
        return _MLflow(config, run, resumed=resumed_step is not None)
    if name == "wandb":
        return _Wandb(config, run)
    raise unknown_value("train.trackers", name, TrackerName)


def _cannot_start(name: TrackerName, error: Exception, hint: str) -> ConfigError:
    return ConfigError(f"train.trackers: {name} cannot start ({error}); {hint}, or remove {name}")


class _TensorBoard:
    """Writes event files to the run folder. When a run resumes, values after ``resumed_step`` are
    dropped.
    """

    def __init__(self, folder: Path, resumed_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge_step = None if resumed_step is None else resumed_step + 1
        self._writer = SummaryWriter(str(folder), purge_step=purge_step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self, status: Status) -> None:
        self._writer.close()


class _MLflow:
    """Logs to the server and experiment that MLflow's environment variables select.

    MLflow cannot delete values, so steps that the interrupted run logged after its last checkpoint
    are not logged again when the run resumes. If a request fails during training, its values are
    dropped and training continues.
    """

    def __init__(self, config: Config, run: str, *, resumed: bool) -> None:
        self._mlflow = import_module("mlflow")
        self._error: type[Exception] = self._mlflow.exceptions.MlflowException
        self._logged: set[tuple[str, int]] = set()
        facts = config_facts(config)
        tags = {_RUN_TAG: run, "sbpflow.version": SBPFLOW_VERSION}
        active = None
        try:
            query = f"tags.`{_RUN_TAG}` = '{run}'"
            runs = (
                self._mlflow.search_runs(filter_string=query, output_format="list")
                if resumed
                else []
            )
            # nested: sbpflow's run becomes a child of any run that the calling program has started
            if runs:
                active = self._mlflow.start_run(runs[0].info.run_id, nested=True)
                client = self._mlflow.MlflowClient()
                for key in runs[0].data.metrics:
                    history = client.get_metric_history(active.info.run_id, key)
                    self._logged |= {(key, metric.step) for metric in history}
            else:
                name = config.run.dir.resolve().name
                active = self._mlflow.start_run(run_name=name, tags=tags, nested=True)
                self._mlflow.log_params(
                    {_mlflow_name(key): text for key, text in facts.items()},
                    run_id=active.info.run_id,
                )
        except BaseException as error:
            if active is not None:
                self.close(status_of(type(error)))
            if not isinstance(error, self._error):
                raise
            hint = "set MLFLOW_TRACKING_URI to a server or to, for example, sqlite:///mlflow.db"
            raise _cannot_start("mlflow", error, hint) from error
        self._id: str = active.info.run_id
        logger.info("MLflow run %s in %s", self._id, self._mlflow.get_tracking_uri())

    def log(self, step: int, values: Mapping[str, float]) -> None:
        named = {_mlflow_name(name): value for name, value in values.items()}
        new = {name: value for name, value in named.items() if (name, step) not in self._logged}
        try:
            self._mlflow.log_metrics(new, step=step, run_id=self._id)
        except self._error as error:
            logger.warning("MLflow did not save the values of step %d: %s", step, error)

    def close(self, status: Status) -> None:
        try:
            self._mlflow.end_run(status)
        except self._error as error:
            logger.warning("MLflow did not save the status %s: %s", status, error)


def _mlflow_name(name: str) -> str:
    """Return the name with ``_`` instead of characters that MLflow refuses, such as ``=``."""
    return re.sub(r"[^\w. :/-]", "_", name)


class _Wandb:
    """Logs to the project that Weights & Biases' environment variables select."""

    def __init__(self, config: Config, run: str) -> None:
        wandb = import_module("wandb")
        name, facts = config.run.dir.resolve().name, config_facts(config)
        try:
            self._run = wandb.init(
                id=run, resume="allow", name=name, config=facts, dir=str(config.run.dir)
            )
        except wandb.Error as error:
            hint = "run `wandb login`, or set WANDB_MODE=offline"
            raise _cannot_start("wandb", error, hint) from error
        # By default, W&B drops values logged for an earlier step, such as the final values of the
        # best step.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def close(self, status: Status) -> None:
        self._run.finish(exit_code=0 if status == "FINISHED" else 1)
