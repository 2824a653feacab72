"""What is checked of a configuration before a run: world size, tables, folders."""

import tempfile
from collections.abc import Mapping
from pathlib import Path

from sbpflow.config.data_folder import HOW_TO_MAKE_DATA, data_folder_problem
from sbpflow.config.schema import Config
from sbpflow.config.table_layouts import resolve_table_layouts
from sbpflow.config.table_rules import Schemes, Shape, TableRule
from sbpflow.embedding.plan.tables import TableLayout
from sbpflow.errors import ConfigError


def check(
    config: Config,
    tables: Mapping[str, Shape],
    schemes: Schemes,
    world_size: int,
    device_type: str = "cpu",
    planned: Mapping[str, TableRule] | None = None,
) -> dict[str, TableLayout]:
    """What needs the world size or the tables (name -> (rows, dim)); gives the tables' layouts.

    ``planned`` are the rules of ``parallel.plan``.

    Call it on every rank before any process group exists.
    """
    if config.data.batch_size < world_size:
        raise ConfigError(
            f"data.batch_size: {config.data.batch_size} rows for {world_size} ranks leave ranks "
            f"without any; for example data.batch_size: {world_size}"
        )
    if config.parallel.tf32 and device_type != "cuda":
        raise ConfigError(
            f"parallel.tf32: true on {device_type}, which has no TF32; remove it, or use "
            "parallel.device: cuda"
        )
    if config.parallel.cuda_graph and device_type != "cuda":
        raise ConfigError(
            f"parallel.cuda_graph: true on {device_type}, which has no such graphs; remove it, or "
            "use parallel.device: cuda"
        )
    if config.parallel.row_buffer_fraction is not None and device_type != "cuda":
        raise ConfigError(
            f"parallel.row_buffer_fraction: {config.parallel.row_buffer_fraction:g} on "
            f"{device_type}, where the host knows how many rows there are; remove it, or use "
            "parallel.device: cuda"
        )
    return resolve_table_layouts(config.parallel, tables, schemes, world_size, device_type, planned)


def check_rows(config: Config, rows: Mapping[str, int], *, batch_norm: bool) -> None:
    """What needs the rows of each split: what only the last batch or an evaluation would meet."""
    train, size = config.train, config.data.batch_size
    if batch_norm and config.data.tail == "keep" and rows["train"] % size == 1:
        raise ConfigError(
            f"data.batch_size: {size} leaves a last batch of one row ({rows['train']:,} rows of "
            "train), and the model's batch norm needs two at least; data.tail: drop leaves it out"
        )
    scored = min(rows.get("val", 0), train.eval_rows or rows.get("val", 0))
    for name, watch in (("stop", train.stop), ("plateau", train.plateau)):
        if watch is not None and watch.metric == "gauc" and scored > train.exact_auc_rows:
            raise ConfigError(
                f"train.{name}.metric: gauc is of rows that are gathered, and evaluations of val "
                f"have {scored:,}, more than train.exact_auc_rows {train.exact_auc_rows:,}; for "
                f"example train.exact_auc_rows={scored}"
            )


def run_dir(config: Config) -> Path:
    """``run.dir``, made if need be; ConfigError where nothing can be written."""
    return writable_folder("run.dir", config.run.dir, "run.dir=runs/train")


def writable_folder(key: str, folder: Path, example: str) -> Path:
    """``folder``, made if need be; ConfigError, naming ``key``, where nothing can be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = (error.strerror or "cannot be used").lower()
        raise ConfigError(
            f"{key}: {folder} cannot be written to ({reason}); for example {example}"
        ) from error
    return folder


def data_path(config: Config) -> Path:
    """``data.path``, which a run needs; ConfigError where it is not given or not a folder."""
    path = config.data.path
    if path is None:
        raise ConfigError(f"data.path: not given, for example data.path=DIR; {HOW_TO_MAKE_DATA}")
    if problem := data_folder_problem(path):
        raise ConfigError(problem)
    return path
