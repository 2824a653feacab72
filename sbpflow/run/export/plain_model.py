"""A trained model as one ordinary torch module: its tables and its dense part, in one process.

It takes a batch as a prepared set has it and gives logits. What it computes is what a job computes
(``EmbeddingCollection``, then the dense part), by operators that ``torch.export`` can trace. Where
values come from is the caller's: modules are made empty of meaning and filled.
"""

from collections.abc import Callable, Container, Mapping, Sequence

import torch
from torch import Tensor, nn

from sbpflow.embedding.ids.batch_ids import BatchIds
from sbpflow.embedding.plan.embedding_plan import EmbeddingPlan, OutOfRange
from sbpflow.embedding.plan.tables import FeatureConfig, OutputConfig, TableConfig
from sbpflow.errors import ConfigError, unknown_value
from sbpflow.run.export.row_formats import RowFormat, Rows, make_rows
from sbpflow.run.model.spec import ExportableSpec, HashedColumn, ModelSpec
from sbpflow.runtime.random.splitmix import signed
from sbpflow.runtime.random.streams import GAMMA, MIX_1, MIX_2, mix

NUM_RESERVED_IDS = 2  # of a hashed column: 0 is missing, 1 is no hash
Bag = tuple[Tensor, ...]  # values [n], lengths [rows], and weights [n] of a weighted feature
Bags = dict[str, Bag]
ReadState = Callable[[str], Tensor]


class PlainModel(nn.Module):
    """Tables and dense part of a trained model.

    ``forward(ids, dense, bags)``: ids [rows, columns] int32 or int64, the columns of all features
    with a fixed number of ids, in order; dense [rows, fields]; ``bags`` {ragged feature: (values
    [n], lengths [rows])}, with weights [n] behind them where the feature has some. -> logits
    [rows]. Columns that a loader hashes are computed here. Raises IndexError for an id that its
    table has no row for, where the run refused such ids too.
    """

    def __init__(
        self,
        plan: EmbeddingPlan,
        hashed: Sequence[HashedColumn],
        tables: Mapping[str, Rows],
        dense: nn.Module,
        num_dense: int,
    ) -> None:
        super().__init__()
        self.num_dense = num_dense
        self._dtype = plan.dtype
        self._outputs = plan.outputs
        self._out_of_range: OutOfRange = plan.out_of_range
        own = plan.features[: len(plan.features) - len(hashed)]
        self.features: tuple[FeatureConfig, ...] = own  # of a batch
        self.columns: dict[str, slice] = _columns(own)
        self._hashed = {
            column.name: ([self.columns[name].start for name in column.columns], column.rows)
            for column in hashed
        }
        for name, rows in tables.items():
            self.add_module(_module_name(name), rows)
        self.dense = dense

    @property
    def tables(self) -> tuple[TableConfig, ...]:
        """Of all outputs, in order."""
        return tuple(table for output in self._outputs for table in output.tables)

    def rows_of(self, table: str) -> Rows:
        """The rows of the table of this name."""
        rows = self.get_submodule(_module_name(table))
        if not isinstance(rows, Rows):
            raise RuntimeError(f"{table}: is no table of this model")
        return rows

    def stored(self) -> dict[str, Tensor]:
        """All values by logical name: ``tables/T``, and ``dense/P``, buffers among them."""
        found = {
            f"tables/{table.name}{behind}": value
            for table in self.tables
            for behind, value in self.rows_of(table.name).stored().items()
        }
        own = {f"dense/{name}": value for name, value in self.dense.state_dict().items()}
        return found | {name: value.contiguous() for name, value in own.items()}

    def forward(self, ids: Tensor, dense: Tensor, bags: Mapping[str, Bag]) -> Tensor:
        """Logits [rows]."""
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
        """[rows, dim] of one feature in one table."""
        rows = self.rows_of(table.name)
        if name in bags:
            values, lengths, *weights = bags[name]
            vectors = rows(self._in_range(values, table.num_rows))
            if weights:
                vectors = vectors * weights[0].to(self._dtype).unsqueeze(1)
            # Which sample each value belongs to: no operator whose result has a size of its own.
            ends = torch.cumsum(lengths.to(torch.int64), 0)
            places = torch.arange(values.shape[0], device=values.device)
            sample = torch.searchsorted(ends, places, right=True)
            pooled = vectors.new_zeros(lengths.shape[0], table.dim).index_add(0, sample, vectors)
            if table.averages:
                pooled = pooled / lengths.clamp(min=1).to(pooled).unsqueeze(1)
            return pooled
        columns = self._ids(name, ids)
        vectors = rows(self._in_range(columns, table.num_rows))
        if columns.shape[1] == 1:
            return vectors.squeeze(1)
        return vectors.mean(1) if table.averages else vectors.sum(1)

    def _ids(self, name: str, ids: Tensor) -> Tensor:
        """[rows, hotness] of a feature that comes as a matrix, or is computed from one."""
        if name in self._hashed:
            columns, rows = self._hashed[name]
            return hashed_ids([ids[:, column] for column in columns], rows).unsqueeze(1)
        return ids[:, self.columns[name]]

    def _in_range(self, ids: Tensor, num_rows: int) -> Tensor:
        """As ``IdReader`` replaces ids, by the same policy."""
        ids = ids.to(torch.int64)
        if self._out_of_range == "clamp":
            return ids.clamp(0, num_rows - 1)
        if self._out_of_range == "hash":
            bad = (ids < 0) | (ids >= num_rows)
            return torch.where(bad, mix(ids).remainder(num_rows), ids)
        if self._out_of_range == "error":  # the lookup raises
            return ids
        raise unknown_value("out_of_range", self._out_of_range, OutOfRange)

    def arguments_of(self, ids: Tensor | BatchIds, dense: Tensor) -> tuple[Tensor, Tensor, Bags]:
        """What ``forward`` takes, from a batch of a loader."""
        fixed = sum(one.hotness for one in self.features if one.name in self.columns)
        ragged = [one for one in self.features if one.name not in self.columns]
        if isinstance(ids, Tensor):
            return ids[:, :fixed], dense, {}
        bags: dict[str, Bag] = {}
        for place, one in enumerate(ragged):
            if ids.lists is None:
                raise ConfigError(f"feature {one.name}: is ragged, and the batch has no lists")
            own = ids.lists.take(torch.tensor([place], device=ids.matrix.device))
            bags[one.name] = (own.values, own.lengths.reshape(-1))
            if one.weighted and own.weights is not None:
                bags[one.name] += (own.weights,)
        return ids.matrix[:, :fixed], dense, bags


def plain_model(
    spec: ModelSpec,
    plan: EmbeddingPlan,
    read: ReadState,
    *,
    saved: Container[str],
    num_dense: int,
    seed: int,
    row_format: RowFormat = "as_trained",
) -> PlainModel:
    """The model over ``num_dense`` dense fields, with the values that ``read`` gives.

    ``read`` gets logical names, ``tables/T`` [rows, dim] and ``dense/P``, and gives whole tensors;
    ``saved`` has all of these names: buffers of the dense part that are not among them stay.
    A table is asked for once, and let go when it is in ``row_format``. Raises ConfigError for a
    model without a plain form.
    """
    for table in (table for output in plan.outputs for table in output.tables if table.by_key):
        raise ConfigError(
            f"table {table.name}: has its rows by key, for which an exported model has no form; "
            "score batches with the run's own job, Job.trainer.predict(batch)"
        )
    dense = _dense_part(spec, plan, read, saved, seed)
    tables = {
        table.name: make_rows(table.name, read(f"tables/{table.name}"), row_format, plan.dtype)
        for output in plan.outputs
        for table in output.tables
    }
    return PlainModel(plan, spec.hashed_columns, tables, dense, num_dense).eval()


def _dense_part(
    spec: ModelSpec, plan: EmbeddingPlan, read: ReadState, saved: Container[str], seed: int
) -> nn.Module:
    if not hasattr(spec, "plain"):
        raise ConfigError(
            f"model: {type(spec).__name__} has no method plain(seed), which gives its dense part "
            "as an ordinary torch module; add one, as models/ and docs/embeddings.md show"
        )
    exportable: ExportableSpec = spec  # pyright: ignore[reportAssignmentType]  (has it, see above)
    module = exportable.plain(seed=seed).to(plan.dtype)
    found = dict(module.named_parameters())
    if absent := sorted(set(spec.parameters) - set(found)):
        raise ConfigError(
            f"model: plain() of {type(spec).__name__} has no parameter {absent[0]}; it has "
            f"{', '.join(sorted(found)) or 'none'}, and needs those of the spec by name"
        )
    with torch.no_grad():
        for name, one in spec.parameters.items():
            value = read(f"dense/{name}")
            if tuple(found[name].shape) != one.shape:
                raise ConfigError(
                    f"model: plain() of {type(spec).__name__} has {name} "
                    f"{list(found[name].shape)}; its spec says {list(one.shape)}"
                )
            found[name].copy_(value.reshape(one.shape))
        for name, buffer in module.named_buffers():
            if f"dense/{name}" in saved:
                buffer.copy_(read(f"dense/{name}").reshape(buffer.shape))
    return module.requires_grad_(False)


def hashed_ids(parts: Sequence[Tensor], rows: int) -> Tensor:
    """[n] ids of a ``HashedColumn`` from those of its columns, as ``data.read.crosses`` has them.

    That one works on unsigned numbers of numpy; here int64 wraps alike, and the remainder of an
    unsigned number is put together from that of the signed one.
    """
    state = torch.zeros_like(parts[0], dtype=torch.int64)
    for part in parts:
        state = (state + GAMMA) ^ part.to(torch.int64)
        state = (state ^ _shift_right(state, 30)) * MIX_1
        state = (state ^ _shift_right(state, 27)) * MIX_2
        state = state ^ _shift_right(state, 31)
    size = rows - NUM_RESERVED_IDS
    over = torch.where(state < 0, (1 << 64) % size, 0)
    found = (state.remainder(size) + over).remainder(size) + NUM_RESERVED_IDS
    missing = torch.stack([part == 0 for part in parts]).any(0)
    return torch.where(missing, 0, found)


def _shift_right(values: Tensor, bits: int) -> Tensor:
    return (values >> bits) & signed((1 << (64 - bits)) - 1)


def _columns(features: Sequence[FeatureConfig]) -> dict[str, slice]:
    """Where the matrix of a batch has each feature that is in it."""
    found: dict[str, slice] = {}
    column = 0
    for one in features:
        if not one.ragged and not one.weighted:
            found[one.name] = slice(column, column + one.hotness)
            column += one.hotness
    return found


def _module_name(table: str) -> str:
    """A slash keeps it apart from every attribute of a module, and a dot would nest it."""
    return "tables/" + table.replace(".", "/")
