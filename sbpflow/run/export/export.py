"""A trained model in a folder that needs no sbpflow: torch.export, safetensors, and what it takes.

``model.pt2`` carries code and values: ``torch.export.load(FILE).module()`` is an ordinary module
with torch alone. ``model.safetensors`` has the values by their logical names, for any other
program. ``model.json`` says what goes in, what each table is, and where the model comes from. Why
these: docs/decisions/export.md.
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
_EXAMPLE_ROWS = 2  # torch.export takes sizes 0 and 1 for constants


class LabelledBatch(Protocol):
    """What scoring needs of a batch."""

    @property
    def labels(self) -> Tensor: ...
    @property
    def dense(self) -> Tensor: ...
    @property
    def ids(self) -> Tensor | BatchIds: ...


def write_model(
    folder: Path, model: PlainModel, facts: Mapping[str, Any], forms: Sequence[Form]
) -> list[Path]:
    """Write the model into a new ``folder``; ``facts`` go into model.json. Returns the files.

    The folder is made under another name and renamed, so it is there whole or not at all. Raises
    ConfigError for a folder that is there.
    """
    if folder.exists():
        raise ConfigError(f"--output {folder}: is there already; name a new folder")
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
            file.chmod((work / "model.json").stat().st_mode)  # it comes readable by its owner alone
        work.replace(folder)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return sorted(folder.iterdir())


def exported(model: PlainModel) -> torch.export.ExportedProgram:
    """The model traced, for any number of rows and of ids in bags."""
    ids, dense, bags = example_inputs(model)
    rows = torch.export.Dim("rows")
    sizes = {
        name: tuple({0: torch.export.Dim(f"num_ids_{number}")} for _ in bag)
        for number, (name, bag) in enumerate(bags.items())
    }
    shapes = {
        "ids": {0: rows},
        "dense": {0: rows},
        "bags": {name: (one[0], {0: rows}, *one[2:]) for name, one in sizes.items()},
    }
    with torch.no_grad():
        return torch.export.export(model, (ids, dense, bags), dynamic_shapes=shapes)


def example_inputs(model: PlainModel) -> tuple[Tensor, Tensor, dict[str, Bag]]:
    """Inputs of two rows, of id 0 alone."""
    bags: dict[str, Bag] = {}
    for one in model.features:
        if one.name not in model.columns:
            values = torch.zeros(_EXAMPLE_ROWS + 1, dtype=torch.int32)
            lengths = torch.tensor([1, _EXAMPLE_ROWS], dtype=torch.int32)
            weights = (torch.ones(values.shape),) if one.weighted else ()
            bags[one.name] = (values, lengths, *weights)
    columns = max((place.stop for place in model.columns.values()), default=0)
    ids = torch.zeros(_EXAMPLE_ROWS, columns, dtype=torch.int32)
    return ids, torch.zeros(_EXAMPLE_ROWS, model.num_dense), bags


def describe_model(model: PlainModel) -> dict[str, Any]:
    """What goes in and what each table is, for model.json."""
    names = list(model.columns)
    return {
        "inputs": {
            "ids": {
                "shape": ["rows", sum(one.hotness for one in model.features if one.name in names)],
                "dtype": "int32 or int64",
                "columns": {name: [s.start, s.stop] for name, s in model.columns.items()},
            },
            "dense": {"shape": ["rows", model.num_dense], "dtype": "float32"},
            "bags": {
                one.name: ["values [ids]", "lengths [rows]"]
                + (["weights [ids]"] if one.weighted else [])
                for one in model.features
                if one.name not in names
            },
        },
        "output": "logits [rows]; the probability of a click is their sigmoid",
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
    """``--forms``; ConfigError for what there is not."""
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in FORMS]:
        raise ConfigError(f"--forms: {unknown[0]!r} is not one of {', '.join(FORMS)}")
    return tuple(form for form in FORMS if form in names)


def parse_rows(text: str) -> RowFormat:
    """``--rows``; ConfigError for what there is not."""
    for name in ROW_FORMATS:
        if text == name:
            return name
    raise ConfigError(f"--rows: {text!r} is not one of {', '.join(ROW_FORMATS)}")


def check_unscored(rows: RowFormat, path: Path | None) -> None:
    """ConfigError for rows that must be scored, where ``path`` is not a set to score."""
    if rows != "as_trained":
        raise ConfigError(
            f"--score: rows of {rows} cost some AUC, and {path} is not a set to measure it on; "
            "name one with labels"
        )


def facts_of(checkpoint: Checkpoint, vocabulary_digest: str | None) -> dict[str, Any]:
    """Where the values come from, for model.json."""
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
    """Metrics of the model over labelled rows of one process."""
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
            f"--forms: safetensors is not installed ({error}); pip install 'sbpflow[export]', or "
            "--forms pt2"
        ) from error
    save_file(model.stored(), path, metadata={"format": "pt"})
