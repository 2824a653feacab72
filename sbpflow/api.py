"""Train, score, and inspect models from Python, for example in a notebook.

This module is a composition root: it calls the same code as the commands, and only
``sbpflow/__init__.py`` imports it. Errors are raised as exceptions with the same messages that the
commands print.
"""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, cast

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray

from sbpflow.checkpoint.folder import data_folder
from sbpflow.checkpoint.read import Checkpoint
from sbpflow.commands.embeddings import source_of
from sbpflow.commands.export import export_model
from sbpflow.commands.fit import train_ranks
from sbpflow.commands.predict import open_rows, write_scores
from sbpflow.commands.saved_run import own_classes
from sbpflow.commands.train import train_config
from sbpflow.config.load import config_of, read_yaml
from sbpflow.config.parse import brief, plain
from sbpflow.config.schema import Config
from sbpflow.data import RowLoader, load_manifest
from sbpflow.data.frames import Frame, input_of, like, named_rows, prepared_set
from sbpflow.data.predictions import Scoring
from sbpflow.data.prepare.workspace import only_run
from sbpflow.data.values import values_and_rows
from sbpflow.errors import CheckpointError, ConfigError, DataError
from sbpflow.models.registry import MODELS
from sbpflow.run.execution.job import Job
from sbpflow.run.execution.start import closing
from sbpflow.run.report.data import read_final
from sbpflow.run.saved.resume import checkpoint_dir
from sbpflow.run.saved.saved_model import find_checkpoint, saved_config
from sbpflow.runtime.files.local_path import local_path
from sbpflow.runtime.files.remote_path import AnyPath, any_path
from sbpflow.runtime.processes.environment import rank_and_world_size
from sbpflow.training.evaluate import ScoreOptions, score_split
from sbpflow.training.report import figures_of


def fit(
    config: str | Path | Mapping[str, Any] | Config | None = None,
    *,
    data: "Frame | str | Path | Mapping[str, Frame] | None" = None,
    schema: str | Path | Mapping[str, Any] | None = None,
    prepare: Mapping[str, object] | None = None,
    ranks: int = 1,
    **groups: object,
) -> "Run":
    """Train a model and return its run, like ``sbpflow prepare`` followed by ``sbpflow train``.

    * ``config``: a YAML file, or its content as a mapping. Keyword arguments for whole sections,
      such as ``model={"embedding_dim": 8}``, are merged into ``config``. If no layout is given,
      ``parallel.scheme`` defaults to auto.
    * ``data``: a pandas or Polars DataFrame, an Arrow table, a file, or a prepared set; by default
      ``data.path`` of ``config``. A mapping ``{"train": .., "val": .., "test": ..}`` gives each
      split its own rows. Rows are prepared in a temporary folder that is removed afterwards.
    * ``schema``: a description of the columns, as a YAML file or its content; "auto" uses the
      schema that ``sbpflow schema`` proposes. The default is Criteo's schema.
    * ``prepare``: options of ``sbpflow prepare``, such as ``{"min_count": 1}``.
    * ``ranks``: 1 trains in this process; a larger number starts one process per rank on this
      machine.

    Ctrl-C saves the run and raises KeyboardInterrupt; calling ``fit`` again with the same arguments
    resumes the run.
    """
    _check_alone()
    if isinstance(config, str | Path):
        config = read_yaml(local_path(config))
    if not isinstance(cast("object", config), Mapping | Config | None):
        raise ConfigError(
            f"config: a value of type {type(config).__name__} is not a configuration; give a YAML "
            "file or a mapping, and pass a table as data"
        )
    tree = cast("dict[str, Any]", plain(config or {}))
    for name, given in groups.items():
        base, group = cast("object", tree.get(name)), plain(given)
        both = isinstance(base, dict) and isinstance(group, dict)
        tree[name] = cast("dict[str, Any]", base) | group if both else group
    layouts = tree.setdefault("parallel", {})
    if isinstance(layouts, dict) and not any(map(layouts.get, ("scheme", "plan", "tables"))):
        layouts["scheme"] = "auto"
    settings = config_of(tree, models=MODELS)
    model, optimizers = own_classes(settings)
    _check_ranks(ranks, [*([model] if model else []), *optimizers])
    if data is None and (schema is not None or prepare):
        unused = "prepare" if schema is None else "schema"
        raise ConfigError(f"{unused} has no effect without data; pass the rows as data")
    with TemporaryDirectory(prefix="sbpflow-") as name:
        folder = Path(name)
        if data is not None:
            path = prepared_set(data, folder, schema, prepare or {})
            settings = replace(settings, data=replace(settings.data, path=path))
        if ranks == 1:
            train_config(settings)
        else:
            train_ranks(settings, ranks, folder)
    saved = checkpoint_dir(settings) if settings.checkpoint.every else None
    return Run(settings.run.dir, saved, model, optimizers)


def load(
    run_dir: str | Path,
    *,
    checkpoint: str | Path | None = None,
    model: str | None = None,
    optimizers: tuple[str, ...] = (),
) -> "Run":
    """Return the run in the folder ``run_dir``, created by ``sbpflow train`` or ``fit``.

    Pass ``checkpoint`` to use a checkpoint, or a folder of checkpoints, outside the run folder. For
    safety, your own classes are imported only if you pass their names, ``package.module:Class``, as
    ``model`` and ``optimizers``.
    """
    if isinstance(optimizers, str):
        raise ConfigError(f"optimizers must be a tuple of names; use ({optimizers!r},)")
    folder = local_path(run_dir)
    return Run(folder, any_path(checkpoint or folder), model, optimizers)


class Run:
    """A trained model, as returned by ``fit`` and ``load``.

    ``result`` contains the final scores (the last line of ``metrics.jsonl``); it is empty if the
    run did not finish. Every method runs in this process and loads the same checkpoint as ``sbpflow
    predict``.
    """

    def __init__(
        self, folder: Path, saved: AnyPath | None, model: str | None, optimizers: tuple[str, ...]
    ) -> None:
        self.dir = folder
        final = read_final(folder)
        self.result = {key: final[key] for key in final if key not in ("event", "time")}
        self._saved, self._model, self._optimizers = saved, model, optimizers
        self._id = None if saved is None else find_checkpoint(saved).run

    def __repr__(self) -> str:
        return f"Run({str(self.dir)!r})"

    def predict(
        self,
        data: "Frame | str | Path",
        *,
        split: str | None = None,
        max_bad_fraction: float | None = None,
    ) -> Frame:
        """Return a frame with row keys or row numbers, the probability ``score``, and any labels.

        ``data`` is a table of rows, a file, or a prepared set, as in ``fit``. ``split`` names the
        split of a prepared set to score, by default "test". ``max_bad_fraction`` is the fraction of
        raw rows that may be skipped, by default 0. The result is a pandas DataFrame or an Arrow
        table if ``data`` is one; otherwise it is a Polars DataFrame. The result has the same
        content as the output file of ``sbpflow predict``.
        """
        with self._open(data, split, max_bad_fraction) as rows:
            write_scores(rows.job, rows.loader, rows.scoring)
            return like(pl.read_parquet(rows.output, glob=False), data)

    def evaluate(
        self,
        data: "Frame | str | Path",
        *,
        split: str | None = None,
        max_bad_fraction: float | None = None,
    ) -> dict[str, float | int | None]:
        """Return the metrics of labeled rows, as training reports them for a split. The arguments
        have the same meaning as in ``predict``.
        """
        with self._open(data, split, max_bad_fraction) as rows:
            if not rows.scoring.manifest().labelled:
                label = rows.scoring.like.content["schema"]["label"]
                raise DataError(
                    f"data: the rows have no label column {label!r}; add it, or use predict, "
                    "which needs no labels"
                )
            options = ScoreOptions(exact_rows=rows.config.train.exact_auc_rows)
            evaluation = score_split(rows.job.trainer, rows.loader, rows.job.boxing, options)
        if evaluation is None:
            raise RuntimeError("score_split returned no evaluation on the only rank")
        return {"num_rows": evaluation.num_rows, **figures_of(evaluation)}

    def embeddings(
        self, table: str, *, values: object = None
    ) -> tuple[NDArray[Any], NDArray[np.float32]]:
        """Return a column's values ([n]) and their embedding vectors in ``table`` ([n, columns]).

        By default, all values that have their own rows are returned; pass ``values`` to get only
        those among the given values. For a column of strings, ``values`` is required unless the set
        was prepared with ``keep_strings``. For a growing table, ``values`` is never required: by
        default, the keys of strings are returned instead of the strings.
        """
        checkpoint, config = self._checkpoint()
        manifest, feature, saved = source_of(checkpoint, config, table)
        given = None if values is None else _series(values)
        found, rows = values_and_rows(manifest, feature, given, saved)
        vectors = checkpoint.tensor(f"tables/{table}", dtype=torch.float32)
        return found, vectors.numpy()[rows]

    def export(
        self,
        output: str | Path,
        *,
        rows: str = "as_trained",
        score: str | Path | None = None,
        split: str | None = None,
        pt2: bool = False,
        compiled: bool = False,
        onnx: bool = False,
    ) -> list[Path]:
        """Write the model as a bundle, like ``sbpflow export``, and return the paths of its files.

        ``score`` is a labeled prepared set on which the bundle is evaluated, by default the run's
        set if it exists and has test rows. ``split`` names the split to score, by default "test".
        Rows to score are required if ``rows`` stores the table rows in lower precision. ``pt2``,
        ``compiled`` and ``onnx`` add optional files.
        """
        checkpoint, config = self._checkpoint()
        folder = local_path(output)
        with only_run(folder):
            return export_model(
                checkpoint,
                config,
                folder,
                rows=rows,
                scored=None if score is None else any_path(score),
                split=split,
                pt2=pt2,
                compiled=compiled,
                onnx=onnx,
            )

    def _checkpoint(self) -> tuple[Checkpoint, Config]:
        _check_alone()
        if self._saved is None:
            raise CheckpointError(
                f"{self.dir} has no checkpoint, because checkpoint.every is 0; train with "
                "checkpoint.every: 1000"
            )
        checkpoint = find_checkpoint(self._saved)
        if checkpoint.run != self._id:
            raise CheckpointError(
                f"{self.dir} now contains the checkpoints of a later run; this run's files were "
                "moved to a subfolder previous-N, which sbpflow.load can read; use a different "
                "run.dir for every run"
            )
        return checkpoint, saved_config(
            checkpoint,
            [],
            models=MODELS,
            own_model=self._model,
            own_optimizers=self._optimizers,
        )

    @contextmanager
    def _open(
        self, data: "Frame | str | Path", split: str | None, max_bad_fraction: float | None
    ) -> "Generator[_Rows]":
        checkpoint, config = self._checkpoint()
        manifest = load_manifest(data_folder(checkpoint.path), cache=config.data.cache)
        with TemporaryDirectory(prefix="sbpflow-") as name, closing() as opened:
            folder = Path(name)
            source, output = input_of(data, folder / "rows.arrow"), folder / "scores.parquet"
            scoring = Scoring([source], output, split or "test", manifest, overwrite=False)
            scoring.refuse_unused(split, max_bad_fraction)
            bad = max_bad_fraction or 0.0
            with named_rows(folder):
                job, loader = open_rows(checkpoint, config, scoring, opened, home=self.dir, bad=bad)
            yield _Rows(config, scoring, job, loader, output)


class _Rows(NamedTuple):
    """Rows ready to be scored, the loaded model, and the output file for the scores."""

    config: Config
    scoring: Scoring
    job: Job
    loader: RowLoader
    output: Path


def _series(values: object) -> pl.Series:
    problem = ConfigError(
        "values must be a column or a list of values of one type, such as [7, -3], got "
        f"{brief(values)}"
    )
    if isinstance(values, str | bytes):  # Polars would use a string as the name of an empty column
        raise problem
    try:
        series = pl.Series(cast("Any", values))
    except TypeError as error:
        raise problem from error
    if series.dtype.is_nested():  # a table such as frame[["user"]], or an array of two dims
        raise problem
    return series


def _check_alone() -> None:
    rank, size = rank_and_world_size()
    if size > 1:
        raise ConfigError(
            f"this process is rank {rank} of {size}; do not use sbpflow.fit, sbpflow.load, or "
            "methods of a run under torchrun; to train on several ranks, pass ranks=N to fit or "
            "use `sbpflow train`"
        )


def _check_ranks(ranks: int, own_classes: list[str]) -> None:
    if type(ranks) is not int or ranks < 1:
        raise ConfigError(
            f"ranks must be a whole number of 1 or more, got {ranks!r}; for example, ranks=2"
        )
    for name in own_classes:
        if ranks > 1 and name.startswith("__main__:"):
            raise ConfigError(
                f"ranks is {ranks}, but {name} is defined in this notebook or script, which other "
                "processes cannot import; move the class to a file such as my_model.py and name "
                f"it my_model:{name.partition(':')[2]}, or use ranks=1"
            )
