"""Exports a trained model: writes a bundle to a new folder, checks it, and scores a set with it."""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sbpflow.checkpoint.folder import sync_path
from sbpflow.embedding.ids.batch_ids import BatchIds
from sbpflow.errors import ConfigError
from sbpflow.run.execution.predict import probabilities
from sbpflow.run.export.bundle import BundleModel, array_of, write_bundle
from sbpflow.run.export.plain_model import Bags, PlainModel, matrix_and_bags
from sbpflow.run.export.row_formats import ROW_FORMATS, RowFormat
from sbpflow.serving.cells import MISSING_KEY
from sbpflow.serving.encoder import Cells, Encoded, Encoder
from sbpflow.serving.operations import BundleError
from sbpflow.serving.scorer import Model, load
from sbpflow.training.batch import Batch
from sbpflow.training.metrics import Evaluation, evaluate

_TOLERANCE, _HALF_TOLERANCE = 1e-6, 1e-2
"""The largest accepted difference between a sample score of the bundle and that of the run. The
second limit is for 16-bit arithmetic, whose results vary between CPUs.
"""


def write_export(
    folder: Path,
    model: BundleModel,
    origin: Mapping[str, Any],
    sample: Mapping[str, Any],
    finish: Callable[[Path], None],
) -> list[Path]:
    """Write a bundle to a new ``folder``, check it, and return its files.

    ``finish`` may add files to the bundle. The folder is written under a temporary name, synced to
    disk, and then renamed, so readers never see an incomplete folder, even after a power failure.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = folder.with_name(folder.name + ".partial")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        write_bundle(work, model, origin, sample)
        try:
            load(work)
        except BundleError as error:
            raise ConfigError(f"the new bundle fails its check and was removed: {error}") from error
        finish(work)
        for path in (*work.rglob("*"), work):
            sync_path(path)
        work.replace(folder)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    sync_path(folder.parent)
    return sorted(folder.iterdir())


def sample_of(
    model: PlainModel,
    arguments: tuple[Tensor, Tensor, Bags],
    *,
    half: bool,
    rows: Sequence[Mapping[str, Any]] | None,
) -> dict[str, Any]:
    """Return the content of sample.json: raw ``rows`` or, without raw rows, the model's
    ``arguments``, with their scores.
    """
    with torch.no_grad():
        scores = probabilities(model(*arguments).float().numpy())
    tolerance = _HALF_TOLERANCE if half else _TOLERANCE
    scored = {"scores": [float(score) for score in scores], "tolerance": tolerance}
    if rows is not None:
        return {"rows": rows, **scored}
    bags = {name: [part.tolist() for part in bag] for name, bag in arguments[2].items()}
    return {"ids": arguments[0].tolist(), "dense": arguments[1].tolist(), "bags": bags, **scored}


def sample_ids(model: PlainModel) -> tuple[Tensor, Tensor, Bags]:
    """Return sample arguments with three rows, for a model without a raw format."""
    numbers = torch.arange(3)
    dense = (numbers.unsqueeze(1) + torch.arange(model.num_dense)) / 4.0
    rows = {name: table.num_rows for table in model.tables for name in table.features}
    columns = [
        (numbers * (place + 5)) % rows.get(name, 1)
        for name, at in model.columns.items()
        for place in range(at.start, at.stop)
    ]
    bags: Bags = {}
    for feature in model.features:
        if feature.name not in model.columns:
            weights = (torch.tensor([0.5, 1.5, 1.0]),) if feature.weighted else ()
            ids = (numbers * 7) % rows.get(feature.name, 1)
            bags[feature.name] = (ids.int(), torch.tensor([2, 0, 1], dtype=torch.int32), *weights)
    matrix = torch.stack(columns, 1) if columns else torch.zeros(3, 0)
    return matrix.int(), dense, bags


def encoded_of(model: Model, ids: Tensor | BatchIds, dense: Tensor) -> Encoded:
    """Convert a loader's batch, which may contain keys, to the encoded rows of a bundle."""
    columns = model.content["columns"]
    num_hashed = len(model.content["hashed"])
    fixed = max((stop for _, stop in columns.values()), default=0) - num_hashed
    ragged = [name for name in model.content["features"] if name not in columns]
    given, found = matrix_and_bags(ids, ragged, model.content["weighted"])
    matrix = array_of(given[:, :fixed])
    bags = {name: tuple(map(array_of, bag)) for name, bag in found.items()}
    if matrix.dtype != np.int64 or model.encoder is None:
        return Encoded(matrix, array_of(dense), bags)
    return _looked_up(model.encoder, matrix, array_of(dense), bags)


def _looked_up(
    encoder: Encoder,
    matrix: NDArray[np.int64],
    dense: NDArray[np.float32],
    bags: dict[str, tuple[NDArray[Any], ...]],
) -> Encoded:
    """Return the encoded rows with keys replaced by their ids."""
    ids = matrix.astype(np.int32)
    for entry in encoder.content["fields"]:
        name = entry["name"]
        if not entry["keyed"]:
            continue
        if entry["ragged"]:
            keys, *others = bags[name]
            bags[name] = (_ids_of(encoder, entry, keys), *others)
        else:
            first = encoder.id_columns[name]
            columns = slice(first, first + entry["hot"])
            ids[:, columns] = _ids_of(encoder, entry, matrix[:, columns])
    keys_by_column = {column: matrix[:, column] for column in encoder.crossed}
    return Encoded(ids, dense, bags, keys=keys_by_column)


def _ids_of(
    encoder: Encoder, entry: Mapping[str, Any], keys: NDArray[np.int64]
) -> NDArray[np.int32]:
    """Return the ids of ``keys``, in the same shape."""
    cells = Cells.empty(keys.size, 0, 1)
    cells.keys[:, 0] = keys.reshape(-1).view(np.uint64)
    cells.missing[:, 0] = keys.reshape(-1) == MISSING_KEY
    return encoder.ids_of(entry, cells).reshape(keys.shape)


def score_bundle(model: Model, batches: Iterator[Batch]) -> Evaluation:
    """Evaluate a bundle on labeled rows."""
    logits: list[Tensor] = []
    labels: list[Tensor] = []
    for batch in batches:
        logits.append(model.logits(encoded_of(model, batch.ids, batch.dense)))
        labels.append(batch.labels)
    return evaluate(torch.cat(logits), torch.cat(labels))


def parse_rows(text: str) -> RowFormat:
    """Parse ``--rows``; raise ConfigError for an unknown value."""
    for name in ROW_FORMATS:
        if text == name:
            return name
    raise ConfigError(f"--rows must be {' or '.join(ROW_FORMATS)}, got {text!r}")


def check_unscored(rows: RowFormat, split: str | None, path: Path | None) -> None:
    """Raise ConfigError if a ``split`` is to be scored, or ``rows`` loses precision, as ``path`` is
    not a set to measure it on.
    """
    if split is not None:
        raise ConfigError(
            f"--split: {split} needs a labeled set to score, but the run's set ({path}) does not "
            "exist; use --score out/clicks, for example, or remove --split"
        )
    if rows != "as_trained":
        raise ConfigError(
            f"--score: {rows} rows can reduce the AUC, which only a labeled set can show, got "
            f"{path}; use --score with a labeled set"
        )
