"""Plans a run: computes all of its static properties from the configuration and the set's columns.

``run.execution.job`` executes the plan, and ``sbpflow explain`` prints it.
"""

from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import cast

from sbpflow.config.checks import check, check_layouts
from sbpflow.config.metrics import METRICS
from sbpflow.config.model_tables import TableRules, check_matches
from sbpflow.config.schema import Config, TableChanges, TableOptimizer
from sbpflow.config.table_layouts import resolve_dense_layouts, resolve_table_layouts
from sbpflow.config.table_plan import read_table_plan
from sbpflow.config.table_rules import DTYPES, Schemes, TableRule
from sbpflow.config.topology_file import read_topology
from sbpflow.embedding.plan.embedding_plan import EmbeddingPlan, plan_embeddings
from sbpflow.embedding.plan.growth import has_idle_time
from sbpflow.embedding.plan.id_statistics import IdFrequencies, exponent_of_table
from sbpflow.embedding.plan.tables import OutputConfig, TableConfig, TableLayout
from sbpflow.embedding.rules.base import SparseOptimizer
from sbpflow.embedding.rules.registry import with_constants
from sbpflow.embedding.storage.choose import choose_kernels
from sbpflow.errors import ConfigError, SbpError
from sbpflow.run.model.spec import Fields, ModelConfig, ModelSpec
from sbpflow.run.planning.auto_scheme import candidates, rank_candidates
from sbpflow.run.planning.dense_steps import dense_steps
from sbpflow.run.planning.early_rows import with_early_rows
from sbpflow.run.planning.plan import DenseParameter, PricedPlan, RunPlan
from sbpflow.run.planning.storage import check_storage, lookahead_of, with_storage
from sbpflow.runtime.compute.devices import backend_of_device
from sbpflow.runtime.ranks.hosts import assumed_topology
from sbpflow.runtime.ranks.topology import Topology
from sbpflow.sbp.placement import Placement
from sbpflow.tensor.gradient_sync import Total, plan_gradients
from sbpflow.training.clipping import clip_steps
from sbpflow.training.dense_optimizers import state_per_element
from sbpflow.training.evaluate import slice_columns
from sbpflow.training.step_schedule import OVERLAPPED, SERIAL, clipped, with_early_moves


def _with_patterns(outputs: tuple[OutputConfig, ...], config: Config) -> tuple[OutputConfig, ...]:
    """Apply ``optimizer.tables`` and ``parallel.kernels`` to the tables whose names match.

    Patterns apply in order. A later optimizer or kernel replaces an earlier one; ``TableChanges``
    modify the optimizer that earlier patterns set.
    """
    optimizers, kernels = config.optimizer.tables, config.parallel.kernels
    names = [table.name for output in outputs for table in output.tables]
    check_matches("optimizer.tables", optimizers, names, "table")
    check_matches("parallel.kernels", kernels, names, "table")

    def changed(table: TableConfig) -> TableConfig:
        for pattern, given in optimizers.items():
            if fnmatchcase(table.name, pattern):
                key = f"optimizer.tables.{pattern}"
                table = _with_optimizer(table, key, given, config.optimizer.sparse)
        for pattern, kernel in kernels.items():
            if fnmatchcase(table.name, pattern):
                table = replace(table, kernel=kernel)
        return table

    return tuple(replace(out, tables=tuple(map(changed, out.tables))) for out in outputs)


def _with_optimizer(
    table: TableConfig, key: str, given: TableOptimizer, sparse: SparseOptimizer
) -> TableConfig:
    """Apply one pattern's settings; ``sparse`` is the optimizer of unmatched tables."""
    if not isinstance(given, TableChanges):
        return replace(table, optimizer=given)
    rule = table.optimizer or sparse
    settings = {"lr": given.lr, "weight_decay": given.weight_decay}
    changes = {name: value for name, value in settings.items() if value is not None}
    try:
        rule = with_constants(rule, changes)
    except ConfigError as error:
        raise ConfigError(f"{key}: {table.name}: {error}") from error
    start = table.initial_range if given.initial_range is None else given.initial_range
    return replace(table, optimizer=rule, initial_range=start)


def plan_run(
    config: Config,
    fields: Fields,
    *,
    world_size: int,
    device_type: str,
    planned: Mapping[str, TableRule] | None = None,
    topology: Topology | None = None,
    traced: bool = True,
) -> tuple[ModelSpec, RunPlan]:
    """Return the model's shapes and the plan of the run; raise ConfigError if the configuration
    does not fit the set.

    ``planned`` contains the rules to use for ``parallel.plan``: the planner's rules for ``auto``,
    or the rules of a saved run. By default, the rules are read from the file that ``parallel.plan``
    names. ``topology`` defaults to the contents of ``parallel.topology`` or, without this key, to a
    single host like this machine. If not ``traced``, the plan omits the steps of the dense part,
    which a single rank does not need, and the skew of the ids, which only measurements need.
    """
    spec = _checked_spec(config, fields)
    _check_table_rules(config.model, fields, spec)
    _check_event_time(fields, spec.outputs)
    world = Placement.line(device_type, world_size)
    dtype = DTYPES[config.parallel.dtype]
    planned = _planned_rules(config, planned, world_size)
    topology = topology or given_topology(config, world_size)
    topology = topology or assumed_topology(world_size, device_type)
    if config.parallel.link_gb_per_s is not None:
        topology = topology.with_link(config.parallel.link_gb_per_s)
    layouts, embeddings, priced = _plan_tables(config, spec, fields, world, planned, topology)
    check_storage(embeddings)
    embeddings, early = with_early_rows(embeddings, config, topology, frequencies_of(fields))
    dense = _dense_parameters(config, spec, device_type, world_size)
    forward, backward, conversions = (), (), ()
    if traced:  # for a large model, this takes a second
        forward, backward, conversions = dense_steps(
            spec,
            fields,
            {parameter.name: parameter.layout for parameter in dense},
            world,
            dtype=dtype,
            batch_size=config.data.batch_size,
            loss=config.train.loss,
        )
    slice_columns(config.train.slices, embeddings)
    _check_metrics(config, fields)
    clip = config.optimizer.clip
    schedule = OVERLAPPED if config.parallel.overlap else SERIAL
    if any(not group.reason for group in early):
        late = any(not group.late_reason for group in early)
        schedule = with_early_moves(schedule, late=late)
    return spec, RunPlan(
        embeddings=embeddings,
        layouts=layouts,
        kernels=choose_kernels(embeddings, config.parallel.kernel),
        dense=dense,
        dense_forward=forward,
        dense_backward=backward,
        dense_conversions=conversions,
        dense_gradients=plan_gradients(dense, total=Total.over(world, dtype)),
        clip=() if clip is None else clip_steps(clip, [p.layout for p in dense], world),
        schedule=schedule if clip is None else clipped(schedule, rows=clip.rows),
        topology=topology,
        batch_size=config.data.batch_size,
        accumulate=config.train.accumulate,
        lookahead=lookahead_of(config, embeddings),
        early_rows=early,
        priced=priced,
        skew=_skew(embeddings, fields, config.data.batch_size) if traced else {},
    )


def _checked_spec(config: Config, fields: Fields) -> ModelSpec:
    """Return the model's shapes. Raises SbpError or ConfigError if the spec is incomplete."""
    spec = cast("ModelConfig", config.model).spec(fields)
    parts = ("outputs", "parameters", "schemes", "hashed_columns", "splits_parameters", "build")
    if missing := [part for part in parts if not hasattr(spec, part)]:
        raise SbpError(
            f"model {config.model.name}: spec(fields) returned a {type(spec).__name__} without "
            f"{', '.join(missing)}; return a TorchModel, or the spec shown in docs/embeddings.md"
        )
    if not spec.outputs:
        raise ConfigError(
            f"model {config.model.name}: its spec has no embedding outputs; give at least one, "
            'such as embedding_output("fields", fields.sparse, dim=8)'
        )
    return spec


def given_topology(config: Config, world_size: int) -> Topology | None:
    """Read the file of ``parallel.topology``, if given."""
    path = config.parallel.topology
    return None if path is None else read_topology(path, world_size=world_size)


def _check_table_rules(model: object, fields: Fields, spec: ModelSpec) -> None:
    """Raise ConfigError if a pattern of ``model.fields`` or ``model.tables`` matches nothing."""
    if isinstance(model, TableRules):
        names = [table.name for output in spec.outputs for table in output.tables]
        columns = [column.name for column in (*fields.ids, *spec.hashed_columns)]
        check_matches("model.fields", model.fields, columns, "field")
        check_matches("model.tables", model.tables, names, "table")


def _check_event_time(fields: Fields, outputs: tuple[OutputConfig, ...]) -> None:
    """Raise ConfigError if a table needs event times that the rows of the set do not have."""
    for table in (table for output in outputs for table in output.tables):
        if has_idle_time(table.growth) and not fields.timed:
            raise ConfigError(
                f"model.fields.{table.features[0]}.evict.idle_time needs event times, but the "
                "rows of this set have no time; prepare the set with a time in its schema, such as "
                "`time: ts`, or use evict.idle_samples"
            )


def _check_metrics(config: Config, fields: Fields) -> None:
    """Raise ConfigError if a metric that affects the run needs groups, which its set lacks."""
    for key, metric in config.watched.items():
        if METRICS[metric].needs_groups and not fields.grouped:
            raise ConfigError(
                f"{key}: {metric} needs a group, but the rows of this set have none; prepare the "
                f"set with a group in its schema, such as `group: {{user: string}}`, or use "
                f"{key}=auc"
            )


def _planned_rules(
    config: Config, chosen: Mapping[str, TableRule] | None, world_size: int
) -> Mapping[str, TableRule] | None:
    """Return the rules of ``parallel.plan``, if given."""
    plan = config.parallel.plan
    if plan is None or chosen is not None:
        return None if plan is None else chosen
    if plan != "auto":
        return read_table_plan(Path(plan), world_size=world_size)
    raise ConfigError(
        "parallel.plan: auto is supported by `sbpflow train` and `sbpflow explain`, which run the "
        "planner, but not by this program; use parallel.plan: plan.yaml with a file that "
        "`sbpflow plan` wrote, or parallel.scheme: auto"
    )


def _plan_tables(
    config: Config,
    spec: ModelSpec,
    fields: Fields,
    world: Placement,
    planned: Mapping[str, TableRule] | None,
    topology: Topology,
) -> tuple[dict[str, TableLayout], EmbeddingPlan, tuple[PricedPlan, ...]]:
    """Return the layouts and the plan of the tables and, for ``scheme: auto``, the names and prices
    of all plans that fit in memory.
    """
    tables = [table for output in spec.outputs for table in output.tables]
    shapes = {table.name: table.shape for table in tables}
    features = [
        *(field.feature() for field in fields.ids),
        *(cross.field().feature() for cross in spec.hashed_columns),
    ]
    parallel, sparse = config.parallel, config.optimizer.sparse

    def resolve(schemes: Schemes) -> dict[str, TableLayout]:
        layouts = resolve_table_layouts(
            parallel, shapes, schemes, world.size, world.device_type, planned, topology.hosts
        )
        check_layouts(config, layouts, world.size)
        return layouts

    outputs = _with_patterns(spec.outputs, config)
    outputs = with_storage(outputs, config, world.size, world.device_type)

    def plan(layouts: Mapping[str, TableLayout]) -> EmbeddingPlan:
        return plan_embeddings(
            outputs,
            layouts,
            features=features,
            optimizer=sparse,
            dtype=DTYPES[parallel.dtype],
            world=world,
            backend=backend_of_device(world.device_type),
            batch_size=config.data.batch_size,
            row_dtype=DTYPES[parallel.table_dtype or parallel.dtype],
            out_of_range=config.data.out_of_range,
        )

    check(config, world.size, world.device_type)
    if parallel.scheme != "auto":
        layouts = resolve(spec.schemes)
        return layouts, plan(layouts), ()
    frequencies = frequencies_of(fields)
    ranked = rank_candidates(
        candidates(
            tables,
            features,
            world.size,
            config.data.batch_size,
            frequencies,
            two_level=parallel.row_buffer_fraction is None and _has_equal_hosts(topology),
            speeds=topology.speeds,
        ),
        lambda rules: plan(resolve({"auto": rules})),
        batch_size=config.data.batch_size,
        topology=topology,
        frequencies=frequencies,
        accumulate=config.train.accumulate,
    )
    priced = tuple(PricedPlan(name=each.name, ms=each.price.ms) for each in ranked)
    return resolve({"auto": ranked[0].rules}), ranked[0].plan, priced


def _has_equal_hosts(topology: Topology) -> bool:
    """Return whether there are several hosts with equal numbers of ranks, at least two each."""
    return len(topology.hosts) > 1 and (topology.ranks_per_host or 1) > 1


def frequencies_of(fields: Fields) -> dict[str, IdFrequencies]:
    """Return each column's id frequencies, if the set has statistics."""
    return {field.name: field.frequencies for field in fields.ids if field.frequencies is not None}


def _skew(embeddings: EmbeddingPlan, fields: Fields, batch_size: int) -> dict[str, float]:
    """Return the exponent of each table whose id statistics are known."""
    known = frequencies_of(fields)
    exponents = {t.name: exponent_of_table(t, batch_size, known) for t in embeddings.tables}
    return {name: exponent for name, exponent in exponents.items() if exponent is not None}


def _dense_parameters(
    config: Config, spec: ModelSpec, device_type: str, world_size: int
) -> tuple[DenseParameter, ...]:
    if config.parallel.dense and not spec.splits_parameters:
        pattern = next(iter(config.parallel.dense))
        raise ConfigError(
            f"parallel.dense.{pattern}: the parameters of {config.model.name}, a torch module, "
            "are whole on every rank (B); remove parallel.dense, or write the model with global "
            "tensors, whose ops accept split parameters"
        )
    shapes = {name: parameter.shape for name, parameter in spec.parameters.items()}
    layouts = resolve_dense_layouts(config.parallel, shapes, device_type, world_size)
    return tuple(
        DenseParameter(
            name=name,
            shape=shape,
            layout=layouts[name],
            dtype=DTYPES[config.parallel.dtype],
            state_per_element=state_per_element(config.optimizer.dense),
        )
        for name, shape in shapes.items()
    )
