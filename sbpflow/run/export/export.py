"""Writes a trained model to a folder that does not need sbpflow: torch.export and safetensors.

``model.pt2`` contains code and values: ``torch.export.load(FILE).module()`` returns an ordinary
module and needs only torch. ``model.safetensors`` contains the values by logical name, for other
programs. ``model.json`` describes the inputs, the tables, and the origin of the model.
docs/decisions/export.md explains the choice of formats.
"""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from sbpflow.checkpoint.read import Checkpoint
from sbpflow.embedding.ids.batch_ids import BatchIds
from sbpflow.errors import ConfigError
from sbpflow.run.export.plain_model import Bag, PlainModel
from sbpflow.run.export.row_formats import ROW_FORMATS, RowFormat
from sbpflow.runtime.compute.versions import SBPFLOW_VERSION
from sbpflow.training.metrics import Evaluation, evaluate

FORMAT, VERSION = "sbpflow-model", 1
Form = Literal["pt2", "safetensors"]
FORMS: tuple[Form, ...] = ("pt2", "safetensors")
_EXAMPLE_ROWS = 2  # torch.export treats sizes 0 and 1 as constants


class LabelledBatch(Protocol):
    """Defines the attributes of a batch that scoring uses."""

    @property
    def labels(self) -> Tensor: ...
    @property
    def dense(self) -> Tensor: ...
    @property
    def ids(self) -> Tensor | BatchIds: ...


def write_model(
    folder: Path, model: PlainModel, facts: Mapping[str, Any], forms: Sequence[Form]
) -> list[Path]:
    """Write the model to a new ``folder`` and return the files; ``facts`` go to model.json.

    The folder is written under another name and then renamed, so a reader never sees it
    incomplete. Raises ConfigError if the folder exists.
    """
    if folder.exists():
        raise ConfigError(f"--output {folder}: already exists; use a new folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = folder.with_name(folder.name + ".partial")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        if "pt2" in forms:
            torch.export.save(exported(model), work / "model.pt2")
        content = {"format": FORMAT, "version": VERSION, **describe_model(model), **facts}
        text = json.dumps(content, indent=1, default=str)
        (work / "model.json").write_text(text + "\n", encoding="utf-8")
        if "safetensors" in forms:
            file = work / "model.safetensors"
            _write_safetensors(file, model)
            # safetensors creates files that only their owner can read.
            file.chmod((work / "model.json").stat().st_mode)
        work.replace(folder)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return sorted(folder.iterdir())


def exported(model: PlainModel) -> torch.export.ExportedProgram:
    """Trace the model for any number of rows, and any number of ids in bags."""
    ids, dense, bags = example_inputs(model)
    rows = torch.export.Dim("rows")
    sizes = {
        name: tuple({0: torch.export.Dim(f"num_ids_{number}")} for _ in bag)
        for number, (name, bag) in enumerate(bags.items())
    }
    shapes = {
        "ids": {0: rows},
        "dense": {0: rows},
        "bags": {name: (size[0], {0: rows}, *size[2:]) for name, size in sizes.items()},
    }
    with torch.no_grad():
        return torch.export.export(model, (ids, dense, bags), dynamic_shapes=shapes)


def example_inputs(model: PlainModel) -> tuple[Tensor, Tensor, dict[str, Bag]]:
    """Return inputs of two rows in which every id is 0."""
    bags: dict[str, Bag] = {}
    for feature in model.features:
        if feature.name not in model.columns:
            values = torch.zeros(_EXAMPLE_ROWS + 1, dtype=torch.int32)
            lengths = torch.tensor([1, _EXAMPLE_ROWS], dtype=torch.int32)
            weights = (torch.ones(values.shape),) if feature.weighted else ()
            bags[feature.name] = (values, lengths, *weights)
    columns = max((place.stop for place in model.columns.values()), default=0)
    ids = torch.zeros(_EXAMPLE_ROWS, columns, dtype=torch.int32)
    return ids, torch.zeros(_EXAMPLE_ROWS, model.num_dense), bags


def describe_model(model: PlainModel) -> dict[str, Any]:
    """Describe the inputs and the tables for model.json."""
    return {
        "inputs": {
            "ids": {
                "shape": ["rows", sum(s.stop - s.start for s in model.columns.values())],
                "dtype": "int32 or int64",
                "columns": {name: [s.start, s.stop] for name, s in model.columns.items()},
            },
            "dense": {"shape": ["rows", model.num_dense], "dtype": "float32"},
            "bags": {
                feature.name: ["values [ids]", "lengths [rows]"]
                + (["weights [ids]"] if feature.weighted else [])
                for feature in model.features
                if feature.name not in model.columns
            },
        },
        "output": "logits [rows]; the sigmoid of a logit is the probability of a click",
        "tables": {
            table.name: {
                "rows": table.num_rows,
                "dim": table.dim,
                "features": list(table.features),
                "pooling": table.pooling,
                "stored": model.rows_of(table.name).format,
            }
            for table in model.tables
        },
        "versions": {"sbpflow": SBPFLOW_VERSION, "torch": torch.__version__},
    }


def parse_forms(text: str) -> tuple[Form, ...]:
    """Parse ``--forms``; raise ConfigError for an unknown form."""
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in FORMS]:
        raise ConfigError(f"--forms: {unknown[0]!r} is not supported; use {' or '.join(FORMS)}")
    return tuple(form for form in FORMS if form in names)


def parse_rows(text: str) -> RowFormat:
    """Parse ``--rows``; raise ConfigError for an unknown value."""
    for name in ROW_FORMATS:
        if text == name:
            return name
    raise ConfigError(f"--rows: {text!r} is not supported; use {' or '.join(ROW_FORMATS)}")


def check_unscored(rows: RowFormat, path: Path | None) -> None:
    """Raise ConfigError if ``rows`` loses precision and no set is given to measure the loss."""
    if rows != "as_trained":
        raise ConfigError(
            f"--score: rows in {rows} cost some AUC, but {path} is not a set to measure this on; "
            "use --score with a labelled set"
        )


def facts_of(checkpoint: Checkpoint, vocabulary_digest: str | None) -> dict[str, Any]:
    """Describe the origin of the values for model.json."""
    return {
        "trained": {
            "run": checkpoint.run,
            "step": checkpoint.step,
            "vocabulary": vocabulary_digest,
            "config": checkpoint.documents.get("config"),
        }
    }


@torch.no_grad()
def score_plain(model: PlainModel, batches: Iterator[LabelledBatch]) -> Evaluation:
    """Evaluate the model on labelled rows in one process."""
    logits: list[Tensor] = []
    labels: list[Tensor] = []
    for batch in batches:
        logits.append(model(*model.arguments_of(batch.ids, batch.dense)))
        labels.append(batch.labels)
    return evaluate(torch.cat(logits), torch.cat(labels))


def _write_safetensors(path: Path, model: PlainModel) -> None:
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise ConfigError(
            f"--forms: safetensors is not installed ({error}); run pip install 'sbpflow[export]', "
            "or use --forms pt2"
        ) from error
    save_file(model.stored(), path, metadata={"format": "pt"})
