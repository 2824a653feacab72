"""What a model is to a run: embedding outputs over given fields, dense parameters, a dense part.

A model is one module with a frozen configuration class, tagged by its field ``name``, whose
``spec(fields)`` gives a ``ModelSpec``. Pure up to ``build``: no ranks, no device, so that plans and
``explain`` can ask it anything. Nothing here knows a model.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from sbpflow.boxing.executor import Boxing
from sbpflow.config.model_tables import TableRules, TableShape, shape_of, table_of
from sbpflow.config.table_rules import Scheme, TableRule
from sbpflow.costs.ids import IdFrequencies
from sbpflow.embedding.plan.tables import (
    INITIAL_RANGE,
    Combine,
    FeatureConfig,
    OutputConfig,
    Pooling,
    TableConfig,
)
from sbpflow.errors import ConfigError
from sbpflow.runtime.random.streams import fill_uniform
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Broadcast
from sbpflow.tensor.global_tensor import GlobalTensor, parameter
from sbpflow.training.dense_part import DensePart


@dataclass(frozen=True, slots=True, kw_only=True)
class IdField:
    """A column of ids, each below ``rows``; hotness as in ``FeatureConfig``.

    Fields of one ``vocabulary`` have the same id for the same value; "" is one of its own.
    ``frequencies`` is what is known of how ids repeat; what a step costs is estimated with it.
    """

    name: str
    rows: int
    hotness: int = 1
    ragged: bool = False
    weighted: bool = False
    vocabulary: str = ""
    frequencies: IdFrequencies | None = None

    def feature(self) -> FeatureConfig:
        """The same, as the embedding engine names it."""
        return FeatureConfig(
            name=self.name, hotness=self.hotness, ragged=self.ragged, weighted=self.weighted
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """The columns of a data set, in the order of its batches: ``sparse`` ids, then ``crosses``.

    ``grouped``: its rows name a group, which GAUC needs.
    """

    dense: tuple[str, ...] = ()
    sparse: tuple[IdField, ...] = ()
    crosses: tuple[IdField, ...] = ()
    grouped: bool = False

    @property
    def ids(self) -> tuple[IdField, ...]:
        """Every column of ids, as a batch has them."""
        return self.sparse + self.crosses

    @staticmethod
    def of(
        dense: Sequence[str],
        sparse: Mapping[str, int],
        crosses: Mapping[str, int] | None = None,
    ) -> "Fields":
        """One id per sample and field; ``sparse`` and ``crosses`` map names to table rows."""
        return Fields(
            dense=tuple(dense),
            sparse=tuple(IdField(name=name, rows=rows) for name, rows in sparse.items()),
            crosses=tuple(IdField(name=name, rows=rows) for name, rows in (crosses or {}).items()),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HashedColumn:
    """A column of ids that the loader computes: those of other columns hashed together."""

    columns: tuple[str, ...]
    rows: int

    @property
    def name(self) -> str:
        """Of the column; another than that of a cross which the set was prepared with."""
        return f"hashed.{'x'.join(self.columns)}"

    def field(self) -> IdField:
        """The column as embeddings know it."""
        return IdField(name=self.name, rows=self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSpec:
    """A dense parameter: its full shape and its initial values, U(-bound, bound) or ``value``."""

    shape: tuple[int, ...]
    bound: float = 0.0
    value: float = 0.0

    def __post_init__(self) -> None:
        if self.bound and self.value:
            raise ConfigError(
                f"parameter of {list(self.shape)}: bound {self.bound} and value {self.value}; "
                "give one of them"
            )
        if self.bound and len(self.shape) not in (1, 2):
            raise ConfigError(
                f"parameter of {list(self.shape)}: bound fills 1 or 2 dims; use value, or a shape "
                "of 2 dims and ops.reshape"
            )


class ModelSpec(Protocol):
    """The shapes of a model over given fields, before anything is allocated."""

    @property
    def outputs(self) -> tuple[OutputConfig, ...]:
        """The embedding outputs that the dense part takes, with their tables."""
        ...

    @property
    def parameters(self) -> Mapping[str, ParameterSpec]:
        """Every dense parameter by name."""
        ...

    @property
    def schemes(self) -> Mapping[Scheme, Mapping[str, TableRule]]:
        """What ``parallel.scheme`` means: rules by pattern of table names; see ``schemes_of``."""
        ...

    @property
    def hashed_columns(self) -> tuple[HashedColumn, ...]:
        """Columns that the loader computes, behind the others in a batch's matrix of ids."""
        ...

    @property
    def splits_parameters(self) -> bool:
        """Whether ``parallel.dense`` may split dense parameters."""
        ...

    def build(
        self, layouts: Mapping[str, Layout], boxing: Boxing, *, seed: int, dtype: torch.dtype
    ) -> DensePart:
        """The dense part on this rank, its parameters in ``layouts``."""
        ...


class ExportableSpec(ModelSpec, Protocol):
    """A ``ModelSpec`` whose dense part also has the form of an ordinary module, for export."""

    def plain(self, *, seed: int) -> nn.Module:
        """A new module with the parameters of ``parameters`` under the same names, to be filled.

        ``forward(vectors, dense)``: {output: [rows, width]}, [rows, fields] -> logits [rows] or
        [rows, 1], equal to those of the part that ``build`` makes. It uses torch alone and can be
        traced by ``torch.export``. What is not in ``parameters`` depends on ``seed`` at most.
        """
        ...


class ModelConfig(Protocol):
    """The ``model`` group of a configuration: a frozen dataclass tagged by ``name``."""

    @property
    def name(self) -> str:
        """What ``model.name`` says to choose it."""
        ...

    def spec(self, fields: Fields) -> ModelSpec:
        """The model over these columns; ConfigError for what does not fit, with what would do."""
        ...


def embedding_output(
    name: str,
    fields: Sequence[IdField],
    *,
    dim: int,
    combine: Combine = "concat",
    pooling: Pooling = "sum",
    rules: TableRules | None = None,
    fixed_dim: str = "",
) -> OutputConfig:
    """An output with a table ``<name>.<field>`` of ``dim`` columns per field.

    ``rules``, a model's configuration with ``fields`` and ``tables``, may say otherwise by pattern;
    ``fixed_dim`` is why this output's dim is not theirs to set, "" if it is. Raises ConfigError.
    """
    tables: list[TableConfig] = []
    for own, members in _tables_of(fields, rules).items():
        table = f"{name}.{own}"
        shape, pattern = shape_of(rules, table) if rules is not None else (TableShape(), "")
        if fixed_dim and shape.dim not in (None, dim):
            raise ConfigError(
                f"model.tables.{pattern}: dim {shape.dim} for {table}, which has {dim}: "
                f"{fixed_dim}; write a pattern that leaves it out"
            )
        initial = INITIAL_RANGE if shape.initial_range is None else shape.initial_range
        tables.append(
            TableConfig(
                name=table,
                features=tuple(one.name for one in members),
                num_rows=members[0].rows,
                dim=shape.dim or dim,
                pooling=shape.pooling or pooling,
                initial_range=initial,
            )
        )
    return OutputConfig(name=name, tables=tuple(tables), combine=combine)


def _tables_of(fields: Sequence[IdField], rules: TableRules | None) -> dict[str, list[IdField]]:
    """The fields of each table, by the table's name, in the order of the first of them."""
    found: dict[str, list[IdField]] = {}
    shared: dict[str, str] = {}
    for one in fields:
        table = table_of(rules, one.name) if rules is not None else None
        if table is not None:
            shared[one.name] = table
        found.setdefault(table or one.name, []).append(one)
    for table, members in found.items():
        _check_shared(table, members, shared)
    return found


def _check_shared(table: str, members: Sequence[IdField], shared: Mapping[str, str]) -> None:
    first = members[0]
    for other in members[1:]:
        pair = f"{first.name} and {other.name} in one table {table}"
        if first.name not in shared or other.name not in shared:
            alone = first.name if first.name not in shared else other.name
            raise ConfigError(
                f"model.fields: {pair}, which is {alone}'s own; let a pattern match both, or call "
                "the table otherwise"
            )
        if first.vocabulary != other.vocabulary or not first.vocabulary:
            raise ConfigError(
                f"model.fields: {pair}, but each has ids of its own: one id would be two values; "
                f"prepare the set with `vocabulary: {table}` for both in its schema"
            )
        if first.rows != other.rows:
            raise ConfigError(
                f"model.fields: {pair}, but they have {first.rows} and {other.rows} rows; fields "
                "of one table have as many"
            )


def schemes_of(
    outputs: Sequence[OutputConfig],
) -> dict[Scheme, dict[str, TableRule]]:
    """The four schemes for these outputs, as OneFlow's three and data parallelism.

    dp: B. 1: S(1), which exchanges whole vectors, but S(0) for tables of one column, which cannot
    be split by columns. 2: S(0), terms added up. 3: S(0), unique rows fetched from their owners.
    """
    narrow = TableRule(sbp="S(0)", exchange="reduce")
    by_columns = TableRule(sbp="S(1)", exchange="columns")
    tables = [table for output in outputs for table in output.tables]
    return {
        "dp": {table.name: TableRule(sbp="B", exchange="local") for table in tables},
        "1": {table.name: narrow if table.dim == 1 else by_columns for table in tables},
        "2": {table.name: TableRule(sbp="S(0)", exchange="reduce") for table in tables},
        "3": {table.name: TableRule(sbp="S(0)", exchange="unique") for table in tables},
    }


def count_parameters(spec: ModelSpec) -> int:
    """Trained numbers of a model: the rows of its tables and its dense parameters."""
    tables = {table.name: table for output in spec.outputs for table in output.tables}
    dense = sum(math.prod(one.shape) for one in spec.parameters.values())
    return dense + sum(table.num_rows * table.dim for table in tables.values())


def make_parameters(
    specs: Mapping[str, ParameterSpec],
    layouts: Mapping[str, Layout],
    boxing: Boxing,
    *,
    seed: int,
    dtype: torch.dtype,
) -> dict[str, GlobalTensor]:
    """This rank's part of each dense parameter, filled without the rest of it."""
    return {
        name: _parameter(name, spec, layouts[name], boxing, seed=seed, dtype=dtype)
        for name, spec in specs.items()
    }


def make_buffers(
    specs: Mapping[str, ParameterSpec],
    placement: Placement,
    boxing: Boxing,
    *,
    dtype: torch.dtype,
) -> dict[str, GlobalTensor]:
    """The whole of each buffer on every rank of ``placement``, B."""
    layout = Layout(placement, (Broadcast(),) * placement.ndim)
    device = boxing.world.device
    return {
        name: GlobalTensor(
            torch.full(spec.shape, spec.value, dtype=dtype, device=device),
            layout,
            spec.shape,
            boxing,
        )
        for name, spec in specs.items()
    }


def initial_values(
    name: str, spec: ParameterSpec, *, seed: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The whole of a parameter as a run of this seed starts with it, on the CPU."""
    whole = torch.empty(spec.shape, dtype=dtype)
    _fill(whole, name, spec, tuple(slice(0, size) for size in spec.shape), seed)
    return whole


def _parameter(
    name: str,
    spec: ParameterSpec,
    layout: Layout,
    boxing: Boxing,
    *,
    seed: int,
    dtype: torch.dtype,
) -> GlobalTensor:
    world = boxing.world
    slices = layout.part_slices(spec.shape, world.rank)
    if slices is None:
        part = torch.empty(0, dtype=dtype, device=world.device)
        return parameter(part, layout, spec.shape, boxing)
    sizes = [extent.stop - extent.start for extent in slices]
    part = torch.empty(sizes, dtype=dtype, device=world.device)
    _fill(part, name, spec, slices, seed)
    return parameter(part, layout, spec.shape, boxing)


def _fill(part: Tensor, name: str, spec: ParameterSpec, slices: Sequence[slice], seed: int) -> None:
    """Initial values of the part of a parameter that ``slices`` cut out of it."""
    if not spec.bound:
        part.fill_(spec.value)
        return
    rows, columns = slices if len(slices) == 2 else (slice(0, 1), slices[0])
    fill_uniform(
        part.view(-1, part.shape[-1]),
        seed=seed,
        name=name,
        bound=spec.bound,
        num_columns=spec.shape[-1],
        first_row=rows.start,
        first_column=columns.start,
    )
