"""Defines the model interface: embedding outputs over given fields, and a dense part.

A model is a Python module with a frozen configuration class. The class's field ``name`` identifies
the model, and its ``spec(fields)`` returns a ``ModelSpec``. All methods except ``build`` are pure
functions, without ranks or devices, so that planning and ``explain`` can call them. This module
does not depend on any particular model.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from sbpflow.boxing.executor import Boxing
from sbpflow.config.model_tables import (
    HASHED,
    TableRules,
    TableShape,
    growth_of,
    shape_of,
    table_of,
)
from sbpflow.config.schema import ModelGroup
from sbpflow.config.table_rules import Scheme, TableRule
from sbpflow.embedding.plan.growth import Growth
from sbpflow.embedding.plan.id_statistics import IdFrequencies
from sbpflow.embedding.plan.tables import (
    INITIAL_RANGE,
    Combine,
    FeatureConfig,
    OutputConfig,
    Pooling,
    TableConfig,
)
from sbpflow.errors import ConfigError, SbpError
from sbpflow.runtime.random.streams import fill_uniform
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Broadcast
from sbpflow.tensor.global_tensor import GlobalTensor, parameter
from sbpflow.training.dense_part import DensePart


@dataclass(frozen=True, slots=True, kw_only=True)
class IdField(FeatureConfig):
    """A column of ids below ``rows``; see ``FeatureConfig`` for ``hotness``.

    If ``keyed``, the ids are arbitrary 64-bit keys, and ``rows`` is 0. Fields with the same
    ``vocabulary`` map a value to the same id; "" means a private vocabulary. ``frequencies``
    describes how often ids repeat, if known, and is used for cost estimates.
    """

    rows: int
    vocabulary: str = ""
    frequencies: IdFrequencies | None = None
    keyed: bool = False

    def feature(self) -> FeatureConfig:
        """Return the field as a feature of the embedding engine."""
        return FeatureConfig(
            name=self.name, hotness=self.hotness, ragged=self.ragged, weighted=self.weighted
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """A data set's columns; a batch contains the ids of ``sparse``, then of ``crosses``.

    ``grouped`` is True if rows belong to groups, which GAUC requires. ``timed`` is True if rows
    have event times, which ``evict.idle_time`` requires.
    """

    dense: tuple[str, ...] = ()
    sparse: tuple[IdField, ...] = ()
    crosses: tuple[IdField, ...] = ()
    grouped: bool = False
    timed: bool = False

    @property
    def ids(self) -> tuple[IdField, ...]:
        """Return all id columns, in the order of a batch."""
        return self.sparse + self.crosses

    @staticmethod
    def of(
        dense: Sequence[str],
        sparse: Mapping[str, int],
        crosses: Mapping[str, int] | None = None,
    ) -> "Fields":
        """Return fields with one id per sample; the mappings give each id field's number of
        rows.
        """
        return Fields(
            dense=tuple(dense),
            sparse=tuple(IdField(name=name, rows=rows) for name, rows in sparse.items()),
            crosses=tuple(IdField(name=name, rows=rows) for name, rows in (crosses or {}).items()),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HashedColumn:
    """A column that the loader computes by hashing ids of other columns together."""

    columns: tuple[str, ...]
    rows: int

    @property
    def name(self) -> str:
        """Return the column's name, which never equals the name of a stored cross."""
        return HASHED + "x".join(self.columns)

    def field(self) -> IdField:
        """Return the column as an id field."""
        return IdField(name=self.name, rows=self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSpec:
    """Describes a dense parameter by its shape and initial values: U(-bound, bound) or ``value``.

    Raises ConfigError if both are given, or if ``bound`` is given for a shape that does not have 1
    or 2 dims.
    """

    shape: tuple[int, ...]
    bound: float = 0.0
    value: float = 0.0

    def __post_init__(self) -> None:
        if self.bound and self.value:
            raise ConfigError(
                f"parameter of shape {list(self.shape)}: bound ({self.bound}) and value "
                f"({self.value}) are both given; give only one of them"
            )
        if self.bound and len(self.shape) not in (1, 2):
            raise ConfigError(
                f"parameter of shape {list(self.shape)}: bound supports only 1 or 2 dims; use "
                "value, or a shape of 2 dims and ops.reshape"
            )


class ModelSpec(Protocol):
    """Describes a model for given fields, by shapes only, before any memory is allocated."""

    @property
    def outputs(self) -> tuple[OutputConfig, ...]:
        """Return the embedding outputs that the dense part uses, with their tables."""
        ...

    @property
    def parameters(self) -> Mapping[str, ParameterSpec]:
        """Return all dense parameters by name."""
        ...

    @property
    def schemes(self) -> Mapping[Scheme, Mapping[str, TableRule]]:
        """Return the layout rules of each ``parallel.scheme``, by table name pattern; see
        ``schemes_of``.
        """
        ...

    @property
    def hashed_columns(self) -> tuple[HashedColumn, ...]:
        """Return the columns that the loader computes; a batch's ids end with these columns."""
        ...

    @property
    def splits_parameters(self) -> bool:
        """Return whether ``parallel.dense`` may split dense parameters."""
        ...

    def build(
        self, layouts: Mapping[str, Layout], boxing: Boxing, *, seed: int, dtype: torch.dtype
    ) -> DensePart:
        """Build the dense part on this rank, with its parameters in ``layouts``."""
        ...


class ExportableSpec(ModelSpec, Protocol):
    """A ``ModelSpec`` that, for export, can also build its dense part as an ordinary module."""

    def plain(self, *, seed: int) -> nn.Module:
        """Return a new module whose parameters have the names and shapes in ``parameters``.

        ``forward(vectors, dense)`` takes {output: [rows, width]} and [rows, fields]. The result
        equals the logits, [rows] or [rows, 1], of the dense part from ``build``. The module must
        use only torch, and ``torch.export`` must be able to trace it. The caller fills the
        parameters, and the buffers that checkpoints contain; all other tensors may depend only on
        ``seed``.
        """
        ...


class ModelConfig(ModelGroup, Protocol):
    """The interface of a configuration's ``model`` group, a frozen dataclass identified by
    ``name``."""

    def spec(self, fields: Fields) -> ModelSpec:
        """Return the model for these columns.

        Raises ConfigError, with a suggestion, for unsuitable columns.
        """
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
    """Return an output that, without ``rules``, has one table per field, named ``<name>.<field>``,
    with ``dim`` columns.

    ``rules`` is a model configuration whose ``fields`` and ``tables`` may change tables by pattern;
    fields with keys need such rules. ``fixed_dim`` is the reason why rules must not change the dim,
    or "". Raises ConfigError for rules that change a fixed dim, and for fields that cannot share a
    table.
    """
    tables: list[TableConfig] = []
    for suffix, members in _tables_of(fields, rules).items():
        table = f"{name}.{suffix}"
        shape, pattern = shape_of(rules, table) if rules is not None else (TableShape(), "")
        if fixed_dim and shape.dim not in (None, dim):
            raise ConfigError(
                f"model.tables.{pattern}: dim is {shape.dim}, but the dim of {table} must be "
                f"{dim}, because {fixed_dim}; use a pattern that does not match {table}"
            )
        growth = _growth_of(members, rules, suffix)
        initial = INITIAL_RANGE if shape.initial_range is None else shape.initial_range
        tables.append(
            TableConfig(
                name=table,
                features=tuple(field.name for field in members),
                num_rows=members[0].rows if growth is None else growth.evict.max_rows,
                dim=shape.dim or dim,
                pooling=shape.pooling or pooling,
                initial_range=initial,
                growth=growth,
            )
        )
    return OutputConfig(name=name, tables=tuple(tables), combine=combine)


def _growth_of(members: Sequence[IdField], rules: TableRules | None, table: str) -> Growth | None:
    """Return the growth settings of the fields' table; raise ConfigError if their rules differ."""
    first, *others = members
    growth = growth_of(rules, first.name, keyed=first.keyed)
    for other in others:
        if growth_of(rules, other.name, keyed=other.keyed) != growth:
            raise ConfigError(
                f"model.fields: {first.name} and {other.name} share table {table}, but their "
                "vocabulary settings differ; set vocabulary, admit_count, forget_after_samples, "
                "and evict under one pattern that matches both fields"
            )
    return growth


def _tables_of(fields: Sequence[IdField], rules: TableRules | None) -> dict[str, list[IdField]]:
    """Return the fields of each table by table name, ordered by the table's first field."""
    by_table: dict[str, list[IdField]] = {}
    shared: set[str] = set()
    for field in fields:
        table = table_of(rules, field.name) if rules is not None else None
        if table is not None:
            shared.add(field.name)
        by_table.setdefault(table or field.name, []).append(field)
    for table, members in by_table.items():
        _check_shared(table, members, shared)
    return by_table


def _check_shared(table: str, members: Sequence[IdField], shared: Collection[str]) -> None:
    """Raise ConfigError if the fields of a table cannot share the table."""
    first = members[0]
    for other in members[1:]:
        pair = f"{first.name} and {other.name} share table {table}"
        if first.name not in shared or other.name not in shared:
            alone = first.name if first.name not in shared else other.name
            raise ConfigError(
                f"model.fields: {pair}, which is the default table of {alone}; use a pattern that "
                f"matches both, or another name (for example, table: {table}_shared)"
            )
        if first.vocabulary != other.vocabulary or not first.vocabulary:
            raise ConfigError(
                f"model.fields: {pair}, but their vocabularies differ, so one id would stand for "
                f"two values; prepare the set with `vocabulary: {table}` for both in its schema"
            )
        if first.rows != other.rows:
            raise ConfigError(
                f"model.fields: {pair}, but they have {first.rows} and {other.rows} rows; fields "
                "that share a table must have the same number of rows"
            )


def schemes_of(
    outputs: Sequence[OutputConfig],
) -> dict[Scheme, dict[str, TableRule]]:
    """Return the rules of every scheme except ``auto``; schemes 1 to 3 follow OneFlow.

    In scheme dp, all tables are B. In scheme 1, tables are S(1), and ranks exchange the columns of
    vectors; tables with one column, which cannot be split, are S(0). In scheme 2, tables are S(0),
    and ranks sum partial results. In scheme 3, tables are S(0), and ranks fetch unique rows from
    their owners.
    """
    narrow = TableRule(sbp="S(0)", exchange="reduce")
    by_columns = TableRule(sbp="S(1)", exchange="columns")
    tables = [table for output in outputs for table in output.tables]
    return {
        "dp": {table.name: TableRule(sbp="B", exchange="local") for table in tables},
        "1": {table.name: narrow if table.dim == 1 else by_columns for table in tables},
        "2": {table.name: narrow for table in tables},
        "3": {table.name: TableRule(sbp="S(0)", exchange="unique") for table in tables},
    }


def make_parameters(
    specs: Mapping[str, ParameterSpec],
    layouts: Mapping[str, Layout],
    boxing: Boxing,
    *,
    seed: int,
    dtype: torch.dtype,
) -> dict[str, GlobalTensor]:
    """Return this rank's part of each dense parameter, without allocating the other parts."""
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
    """Return each buffer with layout B on the ranks of ``placement``."""
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


def check_buffers(module: nn.Module) -> None:
    """Raise SbpError for complex buffers, which cannot be converted to the dtype of a run."""
    for name, value in module.named_buffers():
        if value.is_complex():
            raise SbpError(
                f"buffer {name} has dtype {value.dtype}, but a run converts buffers to the real "
                "parallel.dtype, which would drop the imaginary part; use a real buffer, such as "
                "torch.view_as_real of the values"
            )


def initial_values(
    name: str, spec: ParameterSpec, *, seed: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return a parameter's full initial value for this seed, on the CPU."""
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
    """Fill ``part``, the slice ``slices`` of a parameter, with the parameter's initial values."""
    if not spec.bound:
        part.fill_(spec.value)
        return
    if not part.numel():  # ``view`` cannot infer a dim of an empty part
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
