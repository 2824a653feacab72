"""Checks a configuration before a run: the world size, the tables, the row counts, and the
folders."""

import tempfile
from collections.abc import Mapping
from pathlib import Path

from sbpflow.config.data_folder import HOW_TO_MAKE_DATA, data_folder_problem
from sbpflow.config.parse import show
from sbpflow.config.schema import Config
from sbpflow.config.table_rules import ParallelConfig
from sbpflow.embedding.plan.group_plan import exchanges_of
from sbpflow.embedding.plan.tables import TableLayout
from sbpflow.errors import ConfigError
from sbpflow.runtime.fields.keys import device_keys
from sbpflow.runtime.files.remote_path import AnyPath
from sbpflow.runtime.files.run_folder import RUN_FILES


def check(config: Config, world_size: int, device_type: str) -> None:
    """Check everything that needs the ranks, but not the tables; raise ConfigError. Every rank must
    call this function before any process group exists.
    """
    parallel = config.parallel
    if config.data.batch_size < world_size:
        raise ConfigError(
            f"data.batch_size: {config.data.batch_size} is less than the number of ranks, "
            f"{world_size}, so some ranks would get no rows; use, for example, "
            f"data.batch_size: {world_size}"
        )
    for key, reason in device_keys(ParallelConfig).items():
        value: object = getattr(parallel, key)
        if reason and value not in (None, False, "auto") and device_type != "cuda":
            raise ConfigError(
                f"parallel.{key}: {show(value)} is not supported on {device_type}, {reason}; "
                "remove it, or use parallel.device: cuda"
            )


def check_layouts(config: Config, layouts: Mapping[str, TableLayout], world_size: int) -> None:
    """Raise ConfigError if the layout of a table cannot be combined with other settings."""
    if (fraction := config.parallel.row_buffer_fraction) is None:
        return
    for name, given in layouts.items():
        exchange = exchanges_of(given.exchange, given.layout, world_size)[0]
        if len(exchange.calls) > 1:
            raise ConfigError(
                f"parallel.row_buffer_fraction: {fraction} cannot be combined "
                f"with the layout {given.layout} of {name}, because this layout exchanges ids "
                "twice and needs exact counts; remove row_buffer_fraction, or use sbp: S(0)"
            )


def check_rows(config: Config, rows: Mapping[str, int], *, batch_norm: bool) -> None:
    """Check settings against each split's number of rows, so that a run fails at its start, not at
    its end.
    """
    size = config.data.batch_size
    if batch_norm and size == 1:
        raise ConfigError(
            "data.batch_size: 1 is too small for the model's batch norm, which needs at least two "
            "rows; use data.batch_size=2 or more"
        )
    if batch_norm and config.data.tail == "keep" and rows["train"] % size == 1:
        raise ConfigError(
            f"data.batch_size: {size} leaves a last batch of one row ({rows['train']:,} rows of "
            "train to read), but the model's batch norm needs at least two; use data.tail: drop"
        )


def run_dir(config: Config) -> Path:
    """Return ``run.dir``, created if missing; raise ConfigError if the folder is not writable, or
    if a new run would move the file ``parallel.plan``.
    """
    plan = Path(config.parallel.plan or "auto")
    if plan.name in RUN_FILES and plan.parent.resolve() == config.run.dir.resolve():
        raise ConfigError(
            f"parallel.plan: {plan} is in run.dir, and a new run moves a file of this name to "
            "previous-N, so the run could not be repeated; rename the file, for example, "
            f"parallel.plan={plan.with_name('plan.yaml')}"
        )
    return writable_folder("run.dir", config.run.dir, "run.dir=runs/train")


def writable_folder(key: str, folder: Path, example: str) -> Path:
    """Return ``folder``, created if missing; raise ConfigError with ``key`` if the folder is not
    writable.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = (error.strerror or "cannot be used").lower()
        raise ConfigError(
            f"{key}: {folder} is not writable ({reason}); use, for example, {example}"
        ) from error
    return folder


def data_path(config: Config) -> AnyPath:
    """Return ``data.path``; raise ConfigError if it is missing or is neither a folder nor a URL."""
    path = config.data.path
    if path is None:
        raise ConfigError(f"data.path is not given; use data.path=DIR; {HOW_TO_MAKE_DATA}")
    if isinstance(path, Path) and (problem := data_folder_problem(path)):
        raise ConfigError(problem)
    return path
