"""From a configuration and the columns of a data set to everything static about a run.

``train_wdl.py`` executes the result and ``python -m sbpflow explain`` prints it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from models.dry_run import dense_steps
from models.wdl import WdlSpec, wdl_spec
from sbpflow.config.checks import check
from sbpflow.config.schema import Config
from sbpflow.config.schema import SparseOptimizer as SparseOptimizerConfig
from sbpflow.config.table_rules import resolve_dense_layouts
from sbpflow.embedding.plan.embedding_plan import plan_embeddings
from sbpflow.embedding.plan.optimizer import SparseOptimizer
from sbpflow.embedding.plan.tables import FeatureConfig, OutputConfig, TableLayout
from sbpflow.embedding.storage.choose import choose_kernels
from sbpflow.errors import ConfigError
from sbpflow.run.plan import DenseParameter, RunPlan
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Broadcast
from sbpflow.tensor.gradient_sync import plan_gradients
from sbpflow.training.dense_optimizers import state_per_element
from sbpflow.training.step_schedule import OVERLAPPED, SERIAL
from sbpflow.training.trainer import LOSS_SHAPE

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


class IdColumn(Protocol):
    """A column of ids and the rows of its table."""

    @property
    def name(self) -> str: ...
    @property
    def rows(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The columns of a prepared set: dense fields, and id columns with their rows, crosses last."""

    dense: tuple[str, ...]
    fields: Mapping[str, int]
    num_sparse: int

    @staticmethod
    def of(
        dense: tuple[str, ...], sparse: Sequence[IdColumn], crosses: Sequence[IdColumn]
    ) -> "Columns":
        """From the three kinds of columns of a manifest."""
        fields = {column.name: column.rows for column in (*sparse, *crosses)}
        return Columns(dense=dense, fields=fields, num_sparse=len(sparse))


def sparse_optimizer(chosen: SparseOptimizerConfig) -> SparseOptimizer:
    """The engine's optimizer from ``optimizer.sparse`` or ``optimizer.wide``."""
    return SparseOptimizer(**{key: getattr(chosen, key) for key in chosen.__dataclass_fields__})


def _with_optimizers(
    outputs: Sequence[OutputConfig], wide: SparseOptimizerConfig | None
) -> Sequence[OutputConfig]:
    if wide is None:
        return outputs
    if all(output.name != "wide" for output in outputs):
        raise ConfigError(
            "optimizer.wide: the model has no wide part, model.wide.crosses is empty; remove "
            "optimizer.wide, or name crosses, for example model.wide.crosses: [[C1, C2]]"
        )
    return [
        replace(output, optimizer=sparse_optimizer(wide)) if output.name == "wide" else output
        for output in outputs
    ]


def plan_run(
    config: Config, columns: Columns, *, world_size: int, device_type: str
) -> tuple[WdlSpec, RunPlan]:
    """The model's shapes and the plan of the run; ConfigError for what does not fit together."""
    spec = wdl_spec(
        config.model,
        num_dense=len(columns.dense),
        fields=columns.fields,
        num_sparse=columns.num_sparse,
    )
    shapes = {name: table.shape for name, table in spec.tables().items()}
    chosen = check(config, shapes, world_size, device_type)
    layouts = {
        name: TableLayout(
            layout=table.layout, exchange=table.exchange, wire=DTYPES[table.exchange_dtype]
        )
        for name, table in chosen.items()
    }
    world = Placement.line(device_type, world_size)
    dtype = DTYPES[config.parallel.dtype]
    backend = "nccl" if device_type == "cuda" else "gloo"
    embeddings = plan_embeddings(
        _with_optimizers(spec.outputs, config.optimizer.wide),
        layouts,
        features=[FeatureConfig(name=name) for name in spec.features],
        optimizer=sparse_optimizer(config.optimizer.sparse),
        dtype=dtype,
        world=world,
        backend=backend,
        batch_size=config.data.batch_size,
        row_dtype=DTYPES[config.parallel.table_dtype or config.parallel.dtype],
        out_of_range=config.data.out_of_range,
    )
    dense_layouts = resolve_dense_layouts(
        config.parallel, spec.parameters(), device_type, world_size
    )
    dense = tuple(
        DenseParameter(
            name=name,
            shape=shape,
            layout=dense_layouts[name],
            dtype=dtype,
            state_per_element=state_per_element(config.optimizer.dense),
        )
        for name, shape in spec.parameters().items()
    )
    loss = DenseParameter(
        name="loss",
        shape=LOSS_SHAPE,
        layout=Layout(world, (Broadcast(),)),
        dtype=dtype,
        state_per_element=0,
    )
    forward, backward = dense_steps(
        spec,
        dense_layouts,
        world,
        dtype=dtype,
        backend=backend,
        batch_size=config.data.batch_size,
    )
    return spec, RunPlan(
        embeddings=embeddings,
        layouts=layouts,
        kernels=choose_kernels(embeddings, config.parallel.kernel),
        dense=dense,
        dense_forward=forward,
        dense_backward=backward,
        dense_gradients=plan_gradients([*dense, loss], backend=backend),
        schedule=OVERLAPPED if config.parallel.overlap else SERIAL,
        batch_size=config.data.batch_size,
        accumulate=config.train.accumulate,
    )
