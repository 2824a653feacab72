"""A trained model as an ordinary torch module that contains the tables and the dense part.

The module maps a batch of a prepared set to logits in one process. The logits are the same as in a
job (``EmbeddingCollection``, then the dense part), but computed with operators that
``torch.export`` can trace.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from sbpflow.embedding.ids.batch_ids import BatchIds
from sbpflow.embedding.plan.embedding_plan import EmbeddingPlan
from sbpflow.embedding.plan.out_of_range import SUBSTITUTES, OutOfRange
from sbpflow.embedding.plan.tables import FeatureConfig, OutputConfig, TableConfig
from sbpflow.errors import ConfigError
from sbpflow.run.export.row_formats import Rows, SavedRows
from sbpflow.run.model.spec import ExportableSpec, HashedColumn, ModelSpec, check_buffers
from sbpflow.runtime.random.streams import GAMMA, mix
from sbpflow.serving.cells import MISSING_ID, MISSING_KEY, NUM_RESERVED_IDS, RARE_ID

# For each group of features that share keys: the addresses (``mix``) of the keys that have rows, in
# ascending order.
Addresses = Mapping[tuple[str, ...], Tensor]
Bag = tuple[Tensor, ...]  # values [n], lengths [rows], and weights [n] of a weighted feature
Bags = dict[str, Bag]
ReadState = Callable[[str], Tensor]


class ReadRows(Protocol):
    """Reads a logical tensor, or some of its rows, like ``Checkpoint.tensor``."""

    def __call__(self, name: str, rows: slice | None = None) -> Tensor: ...


class PlainModel(nn.Module):
    """Computes logits from the tables and the dense part of a trained model.

    ``forward(ids, dense, bags)`` returns logits [rows]. ``ids`` (int32 or int64 [rows, columns])
    contains the columns of all features with a fixed number of ids, in order. ``dense``
    is [rows, fields]. ``bags`` maps a ragged feature to (values [n], lengths [rows]), or, if it is
    weighted, to (values [n], lengths [rows], weights [n]). The model itself computes the columns
    that a loader would hash. Out-of-range ids are handled as in the run; if the run rejected them,
    they raise IndexError. For features in ``addresses``, ids are keys, and tables are arranged as
    in ``GrowingTables``.
    """

    def __init__(
        self,
        plan: EmbeddingPlan,
        hashed: Sequence[HashedColumn],
        tables: Mapping[str, Rows | SavedRows],
        dense: nn.Module,
        num_dense: int,
        addresses: Addresses,
    ) -> None:
        super().__init__()
        self.num_dense = num_dense
        self._dtype = plan.dtype
        self._outputs, self.tables = plan.outputs, plan.tables
        self._out_of_range: OutOfRange = plan.out_of_range
        features = plan.features[: len(plan.features) - len(hashed)]
        self.features: tuple[FeatureConfig, ...] = features  # the features in a batch
        self.columns: dict[str, slice] = id_columns(features)
        self.ids_dtype = torch.int64 if addresses else torch.int32
        self._addresses: dict[str, str] = {}
        for number, (names, each) in enumerate(addresses.items()):
            self._addresses |= dict.fromkeys(names, f"addresses_{number}")
            # A search for an address larger than all others returns this extra element.
            end = torch.full((1,), torch.iinfo(torch.int64).max)
            self.register_buffer(f"addresses_{number}", torch.cat([each, end]))
        self._hashed = {
            column.name: (
                [self.columns[name].start for name in column.columns],
                column.rows,
                missing_ids(column, self._addresses),
            )
            for column in hashed
        }
        for name, rows in tables.items():
            self.add_module(_module_name(name), rows)
        self.dense = dense

    def forward(self, ids: Tensor, dense: Tensor, bags: Mapping[str, Bag]) -> Tensor:
        """Compute logits [rows]."""
        vectors = {output.name: self._output(output, ids, bags) for output in self._outputs}
        logits = self.dense(vectors, dense.to(self._dtype))
        return logits.reshape(-1)

    def _output(self, output: OutputConfig, ids: Tensor, bags: Mapping[str, Bag]) -> Tensor:
        parts = [
            self._pooled(table, name, ids, bags)
            for table in output.tables
            for name in table.features
        ]
        if not output.sums:
            return torch.cat(parts, 1)
        return torch.stack(parts).sum(0) if len(parts) > 1 else parts[0]

    def _pooled(
        self, table: TableConfig, name: str, ids: Tensor, bags: Mapping[str, Bag]
    ) -> Tensor:
        """Look up one feature in one table; return the pooled vectors [rows, dim]."""
        rows = self.get_submodule(_module_name(table.name))
        if name in bags:
            values, lengths, *weights = bags[name]
            vectors = rows(self._rows(name, values, table.num_rows))
            if weights:
                vectors = vectors * weights[0].to(self._dtype).unsqueeze(1)
            # ``sample`` is the index of each value's sample. ``repeat_interleave`` would be
            # simpler, but the size of its result depends on the data, which ``torch.export`` does
            # not support well. With ``to``, ``torch.export`` would hard-code the argument's type;
            # ``cumsum`` accepts any integer type.
            ends = torch.cumsum(lengths, 0, dtype=torch.int64)
            places = torch.arange(values.shape[0], device=values.device)
            sample = torch.searchsorted(ends, places, right=True)
            pooled = vectors.new_zeros(lengths.shape[0], table.dim).index_add(0, sample, vectors)
            if table.averages:
                pooled = pooled / lengths.clamp(min=1).unsqueeze(1)
            return pooled
        columns = self._ids(name, ids)
        vectors = rows(self._rows(name, columns, table.num_rows))
        if columns.shape[1] == 1:
            return vectors.squeeze(1)
        return vectors.mean(1) if table.averages else vectors.sum(1)

    def _ids(self, name: str, ids: Tensor) -> Tensor:
        """Return a feature's ids [rows, hotness]: columns of the matrix, or hashes of several
        columns.
        """
        if name in self._hashed:
            columns, rows, missing = self._hashed[name]
            parts = [ids[:, column] for column in columns]
            return hashed_ids(parts, rows, missing).unsqueeze(1)
        return ids[:, self.columns[name]]

    def _rows(self, name: str, ids: Tensor, num_rows: int) -> Tensor:
        """Return the row of each key or id; ids out of range are treated as in ``IdReader``."""
        ids = ids.to(torch.int64)
        if name in self._addresses:
            addresses = self.get_buffer(self._addresses[name])
            wanted = mix(ids).contiguous()
            at = torch.searchsorted(addresses, wanted)
            is_known = (addresses[at] == wanted) & (at < addresses.shape[0] - 1)
            return torch.where(is_known, at + NUM_RESERVED_IDS, RARE_ID)
        if self._out_of_range == "error":  # the lookup raises the error
            return ids
        return SUBSTITUTES[self._out_of_range](ids, num_rows)

    def arguments_of(self, ids: Tensor | BatchIds, dense: Tensor) -> tuple[Tensor, Tensor, Bags]:
        """Convert a loader's batch to the arguments of ``forward``."""
        fixed = sum(s.stop - s.start for s in self.columns.values())
        ragged = [feature for feature in self.features if feature.name not in self.columns]
        weighted = {feature.name for feature in ragged if feature.weighted}
        matrix, bags = matrix_and_bags(ids, [feature.name for feature in ragged], weighted)
        return matrix[:, :fixed], dense, bags


def matrix_and_bags(
    ids: Tensor | BatchIds, ragged: Sequence[str], weighted: Container[str]
) -> tuple[Tensor, Bags]:
    """Divide the ids of a loader's batch into the matrix of all features with a fixed number of
    ids, and the bags of the features ``ragged``, of which ``weighted`` have weights.
    """
    matrix, lists = (ids, None) if isinstance(ids, Tensor) else (ids.matrix, ids.lists)
    bags: Bags = {}
    for number, name in enumerate(ragged):
        if lists is None:
            raise ConfigError(
                f"feature {name} is ragged, but the batch has no lists; use the set that the model "
                "was trained on"
            )
        own = lists.take(torch.tensor([number], device=matrix.device))
        bags[name] = (own.values, own.lengths.reshape(-1))
        if name in weighted and own.weights is not None:
            bags[name] += (own.weights,)
    return matrix, bags


def dense_part(
    spec: ModelSpec, plan: EmbeddingPlan, read: ReadState, saved: Container[str], seed: int
) -> nn.Module:
    """Build the dense part as an ordinary module with the trained values.

    ``read`` returns the whole tensor with a logical name, ``dense/P``. ``saved`` contains all
    names; buffers that ``saved`` does not contain keep their values. Raises ConfigError if the
    model has no ``plain`` method, or one that does not match its spec.
    """
    if not hasattr(spec, "plain"):
        raise ConfigError(
            f"model: {type(spec).__name__} has no method plain(seed), which must return its dense "
            "part as an ordinary torch module; add one, as shown in models/ and "
            "docs/embeddings.md"
        )
    exportable: ExportableSpec = spec  # pyright: ignore[reportAssignmentType]  (checked above)
    module = exportable.plain(seed=seed)
    check_buffers(module)
    module = module.to(plan.dtype)
    parameters = dict(module.named_parameters())
    if missing := sorted(set(spec.parameters) - set(parameters)):
        raise ConfigError(
            f"model: plain() of {type(spec).__name__} must have all parameters of the spec, but "
            f"has no {missing[0]} (it has {', '.join(sorted(parameters)) or 'none'})"
        )
    with torch.no_grad():
        for name, expected in spec.parameters.items():
            if tuple(parameters[name].shape) != expected.shape:
                raise ConfigError(
                    f"model: {name} has shape {list(parameters[name].shape)} in plain() of "
                    f"{type(spec).__name__}, but {list(expected.shape)} in its spec; use the "
                    "shape of the spec"
                )
            parameters[name].copy_(read(f"dense/{name}").reshape(expected.shape))
        for name, value in (*parameters.items(), *module.named_buffers()):
            if name not in spec.parameters and f"dense/{name}" in saved:
                constant = read(f"dense/{name}")
                if constant.numel() != value.numel():
                    raise ConfigError(
                        f"model: {name} has shape {list(value.shape)} in plain() of "
                        f"{type(spec).__name__}, but {list(constant.shape)} in the checkpoint; use "
                        "the model of the run that saved it"
                    )
                value.copy_(constant.reshape(value.shape))
    return module.requires_grad_(False)


def missing_ids(column: HashedColumn, keyed: Container[str]) -> list[int]:
    """Return the id or key of missing values for each column that ``column`` hashes."""
    return [MISSING_KEY if name in keyed else MISSING_ID for name in column.columns]


def hashed_ids(parts: Sequence[Tensor], rows: int, missing: Sequence[int]) -> Tensor:
    """Hash the ids of several columns to ids of a ``HashedColumn``, like ``data.read.crosses``.

    ``data.read.crosses`` uses numpy's unsigned integers, which torch lacks. int64 arithmetic wraps
    identically, but the remainder must account for the sign: a negative number stands for itself
    plus 2**64.
    """
    state = torch.zeros_like(parts[0], dtype=torch.int64)
    for part in parts:
        state = mix((state + GAMMA) ^ part.to(torch.int64))
    size = rows - NUM_RESERVED_IDS
    over = torch.where(state < 0, (1 << 64) % size, 0)
    ids = (state.remainder(size) + over).remainder(size) + NUM_RESERVED_IDS
    absent = [part == value for part, value in zip(parts, missing, strict=True)]
    return torch.where(torch.stack(absent).any(0), MISSING_ID, ids)


def id_columns(features: Sequence[FeatureConfig]) -> dict[str, slice]:
    """Return the columns of each feature, except ragged features, in the id matrix of a batch."""
    columns: dict[str, slice] = {}
    start = 0
    for feature in features:
        if not feature.ragged and not feature.weighted:
            columns[feature.name] = slice(start, start + feature.hotness)
            start += feature.hotness
    return columns


def _module_name(table: str) -> str:
    """Return a submodule name: "/" avoids clashes with attributes, and torch forbids "."."""
    return "tables/" + table.replace(".", "/")
