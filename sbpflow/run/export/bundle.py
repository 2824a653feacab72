"""Writes a trained model as a bundle: a folder that scores raw rows without sbpflow.

A bundle contains ``model.json``, ``model.safetensors``, ``sample.json``, for raw rows
``vocabulary.safetensors``, and ``scorer.py`` (``sbpflow.serving``), which reads them.
docs/decisions/export.md explains the format. Tables are copied from the checkpoint in blocks, so
memory use does not depend on their size.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sbpflow.embedding.plan.embedding_plan import EmbeddingPlan
from sbpflow.run.export.graph import graph_of
from sbpflow.run.export.plain_model import (
    Addresses,
    PlainModel,
    ReadRows,
    id_columns,
    missing_ids,
)
from sbpflow.run.export.row_formats import RowFormat, Rows, SavedRows, make_rows, to_stored
from sbpflow.run.model.spec import HashedColumn
from sbpflow.runtime.compute.versions import SBPFLOW_VERSION
from sbpflow.runtime.files.json_file import read_json
from sbpflow.runtime.files.tensors_file import TensorsFile
from sbpflow.serving.deltas import DTYPE_CODES
from sbpflow.serving.scorer import FORMAT, VERSION, file_digest

TESTED_TORCH = "2.11 to 2.13"
BUNDLE_FILES = re.compile(
    r"model\.(json|safetensors|pt2)|vocabulary\.safetensors|sample\.json|scorer\.py|dense\.(pt2|onnx)"
)
"""Files of a bundle, with those of ``sbpflow.run.export.forms``"""
# Rows are copied in blocks of this size. A checkpoint verifies blocks of 8 MiB, so reading a few
# rows of it and of the deltas in its chain takes as long as reading a block of each.
_BLOCK_BYTES = 1 << 24
_SOURCES = ("cells", "columns", "encoder", "operations", "row_store", "lookups", "scorer")


@dataclass(frozen=True, kw_only=True)
class RawInput:
    """How a bundle encodes raw rows: the ``input`` of model.json, and the vocabularies."""

    content: Mapping[str, Any]
    write_vocabularies: Callable[[Path], None]


@dataclass(frozen=True, kw_only=True)
class BundleModel:
    """The trained model to write: tables, which are read in blocks, and the dense part with its
    values.
    """

    plan: EmbeddingPlan
    hashed: Sequence[HashedColumn]
    dense: nn.Module
    num_dense: int
    read: ReadRows
    row_format: RowFormat = "as_trained"
    keyed: Collection[str] = ()
    """The columns that have keys in the data"""
    raw: RawInput | None = None
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def plain(self, addresses: Addresses, *, in_memory: bool) -> PlainModel:
        """Build the model as a torch module. Without ``in_memory``, it reads only the rows that it
        looks up instead of loading whole tables, for scoring a few rows.
        """
        plan, tables = self.plan, dict[str, Rows | SavedRows]()
        for table in plan.tables:
            read = partial(self.read, f"tables/{table.name}")
            if in_memory:
                tables[table.name] = make_rows(table.name, read(), self.row_format, plan.dtype)
            else:
                tables[table.name] = SavedRows(
                    table.name, read, table.num_rows, self.row_format, plan.dtype
                )
        return PlainModel(plan, self.hashed, tables, self.dense, self.num_dense, addresses).eval()


def write_bundle(
    folder: Path, model: BundleModel, origin: Mapping[str, Any], sample: Mapping[str, Any]
) -> None:
    """Write the files of a bundle into the existing ``folder``."""
    widths = {output.name: output.width for output in model.plan.outputs}
    graph, weights = graph_of(model.dense, widths, model.num_dense, model.plan.dtype)
    stores, tables = _stores(model)
    tensors: dict[str, tuple[str, Sequence[int]]] = {}
    for store in stores:
        for names in store["arrays"]:
            for name in names:
                tensors[name] = store["shapes"][name]
    tensors |= {f"dense/{n}": (DTYPE_CODES[v.dtype], list(v.shape)) for n, v in weights.items()}
    with TensorsFile(folder / "model.safetensors", tensors) as out:
        for table in model.plan.tables:
            step = max(1, _BLOCK_BYTES // (table.dim * model.plan.row_dtype.itemsize))
            for first in range(0, table.num_rows, step):
                rows = range(first, min(first + step, table.num_rows))
                block = model.read(f"tables/{table.name}", slice(rows.start, rows.stop))
                stored = to_stored(table.name, block, rows, model.row_format)
                for suffix, values in stored.items():
                    out.put(f"tables/{table.name}{suffix}", first, array_of(values))
        for name, value in weights.items():
            out.put(f"dense/{name}", 0, array_of(value))
    written = ["model.safetensors"]
    if model.raw is not None:
        written.append("vocabulary.safetensors")
        model.raw.write_vocabularies(folder / written[1])
    content = {
        "format": FORMAT,
        "version": VERSION,
        "origin": origin,
        "sha256": {name: file_digest(folder / name) for name in written},
        "input": None if model.raw is None else model.raw.content,
        **_lookup_content(model),
        "stores": [{"arrays": store["arrays"]} for store in stores],
        "tables": tables,
        "graph": graph,
        "output": "logits [rows]; the sigmoid of a logit is the probability of a click",
        "versions": {
            "sbpflow": SBPFLOW_VERSION,
            "torch": torch.__version__,
            "tested_torch": TESTED_TORCH,
        },
        **model.facts,
    }
    _write_json(folder / "model.json", content)
    _write_json(folder / "sample.json", sample)
    (folder / "scorer.py").write_text(scorer_source(), encoding="ascii")


def add_facts(folder: Path, facts: Mapping[str, Any]) -> None:
    """Add facts to the model.json of a bundle."""
    file = folder / "model.json"
    content = cast("dict[str, Any]", read_json(file))
    _write_json(file, {**content, **facts})


def scorer_source() -> str:
    """Merge the modules of ``scorer.py`` into one file, without their imports of each other."""
    room = files("sbpflow.serving")
    texts = [files("sbpflow.runtime.random").joinpath("splitmix.py").read_text(encoding="ascii")]
    texts += [room.joinpath(f"{name}.py").read_text(encoding="ascii") for name in _SOURCES]
    return "\n\n".join(_without_own_imports(text) for text in texts)


def _without_own_imports(text: str) -> str:
    kept: list[str] = []
    skipping = False
    for line in text.splitlines():
        if line.startswith("from sbpflow."):
            skipping = line.endswith("(")
        elif skipping:
            skipping = line != ")"
        else:
            kept.append(line)
    return "\n".join(kept) + "\n"


def array_of(tensor: Tensor) -> NDArray[Any]:
    """Return a tensor as an array; bfloat16, which numpy lacks, is returned as raw bits."""
    tensor = tensor.detach().contiguous()
    return tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


def _stores(model: BundleModel) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Group the tables of equal width and format, so that a single gather reads a group's rows."""
    stores: dict[tuple[object, ...], dict[str, Any]] = {}
    tables: dict[str, Any] = {}
    for table in model.plan.tables:
        first_row = model.read(f"tables/{table.name}", slice(0, 1))
        parts = to_stored(table.name, first_row, [0], model.row_format)
        kinds = {suffix: (DTYPE_CODES[v.dtype], list(v.shape[1:])) for suffix, v in parts.items()}
        key = (table.dim, *(dtype for dtype, _ in kinds.values()))
        number = list(stores).index(key) if key in stores else len(stores)
        store = stores.setdefault(key, {"rows": 0, "arrays": [[] for _ in kinds], "shapes": {}})
        for names, (suffix, (dtype, tail)) in zip(store["arrays"], kinds.items(), strict=True):
            names.append(name := f"tables/{table.name}{suffix}")
            store["shapes"][name] = (dtype, [table.num_rows, *tail])
        tables[table.name] = {
            "rows": table.num_rows,
            "dim": table.dim,
            "features": list(table.features),
            "pooling": table.pooling,
            "stored": "int8" if len(kinds) > 1 else str(parts[""].dtype).removeprefix("torch."),
            "store": number,
            "first": store["rows"],
        }
        store["rows"] += table.num_rows
    return list(stores.values()), tables


def _lookup_content(model: BundleModel) -> dict[str, Any]:
    """Return the part of model.json that describes id columns, features, and outputs."""
    plan = model.plan
    given = plan.features[: len(plan.features) - len(model.hashed)]
    columns = id_columns(given)
    width = sum(place.stop - place.start for place in columns.values())
    places = {name: [place.start, place.stop] for name, place in columns.items()}
    hashed = [
        {
            "columns": [columns[name].start for name in each.columns],
            "rows": each.rows,
            "missing": missing_ids(each, model.keyed),
        }
        for each in model.hashed
    ]
    places |= {each.name: [width + n, width + n + 1] for n, each in enumerate(model.hashed)}
    return {
        "columns": places,
        "hashed": hashed,
        "features": [feature.name for feature in given],
        "weighted": [feature.name for feature in given if feature.weighted],
        "num_dense": model.num_dense,
        "outputs": [
            {
                "name": output.name,
                "sums": output.sums,
                "width": output.width,
                "tables": [table.name for table in output.tables],
            }
            for output in plan.outputs
        ],
        "dtype": str(plan.dtype).removeprefix("torch."),
        "out_of_range": plan.out_of_range,
    }


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")
