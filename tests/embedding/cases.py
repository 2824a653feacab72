"""Defines small embedding cases for several ranks and computes their single-process results."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sbpflow.boxing.executor import Boxing
from sbpflow.embedding.collection import EmbeddingCollection
from sbpflow.embedding.plan.embedding_plan import EmbeddingPlan, plan_embeddings
from sbpflow.embedding.plan.tables import (
    FeatureConfig,
    OutputConfig,
    TableConfig,
    TableLayout,
)
from sbpflow.embedding.rules.base import SparseOptimizer
from sbpflow.runtime.ranks.world import World
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import NdSbp, Split, balanced_sizes, parse_nd_sbp

SEED = 11


@dataclass(frozen=True)
class Spec:
    """The layout of one table: sbp and exchange as text, and optional ranks and sizes."""

    sbp: str
    exchange: str
    ranks: tuple[int | tuple[int, ...], ...] | None = None
    sizes: tuple[int, ...] | None = None
    grid_sizes: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    def layout(self, world_size: int, device_type: str = "cpu") -> TableLayout:
        ranks = self.ranks if self.ranks is not None else tuple(range(world_size))
        nd_sbp: NdSbp = parse_nd_sbp(self.sbp)
        if self.sizes is not None:
            assert isinstance(nd_sbp[0], Split)
            nd_sbp = (Split(nd_sbp[0].dim, self.sizes),)
        if self.grid_sizes is not None:
            nd_sbp = (Split(0, self.grid_sizes[0]), Split(1, self.grid_sizes[1]))
        placement = Placement.of(device_type, ranks)
        return TableLayout(layout=Layout(placement, nd_sbp), exchange=self.exchange)


@dataclass(frozen=True)
class Case:
    """Describes tables per output, their layouts, the optimizer and the batches."""

    tables: dict[str, tuple[tuple[str, int, int], ...]]  # output -> (name, rows, dim)
    specs: dict[str, Spec]
    optimizer: SparseOptimizer
    sums: tuple[str, ...] = ()
    dtype: torch.dtype = torch.float64
    batch_sizes: tuple[int, ...] = (16, 16, 13)
    row_dtype: torch.dtype | None = None
    kernel: str = "torch"

    def outputs(self) -> tuple[OutputConfig, ...]:
        return tuple(
            OutputConfig(
                name=output,
                tables=tuple(
                    TableConfig(name=name, features=(name,), num_rows=rows, dim=dim)
                    for name, rows, dim in tables
                ),
                combine="sum" if output in self.sums else "concat",
            )
            for output, tables in self.tables.items()
        )

    def features(self) -> tuple[str, ...]:
        return tuple(name for tables in self.tables.values() for name, _, _ in tables)

    def plan(
        self, world_size: int, backend: str = "gloo", device_type: str = "cpu"
    ) -> EmbeddingPlan:
        return plan_embeddings(
            self.outputs(),
            {name: spec.layout(world_size, device_type) for name, spec in self.specs.items()},
            features=[FeatureConfig(name=name) for name in self.features()],
            optimizer=self.optimizer,
            dtype=self.dtype,
            world=Placement.line(device_type, world_size),
            backend=backend,
            batch_size=self.batch_sizes[0],
            row_dtype=self.row_dtype,
        )

    def batches(self) -> list[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
        """Return, for each step, the ids ([batch, features]) and each output's coefficients in the
        loss.
        """
        generator = torch.Generator().manual_seed(5)
        sizes = {name: rows for tables in self.tables.values() for name, rows, _ in tables}
        batches = []
        for batch in self.batch_sizes:
            columns = [
                # squares make small ids frequent, so that batches contain duplicates
                (torch.rand(batch, generator=generator) ** 2 * sizes[name]).int()
                for name in self.features()
            ]
            weights = {
                out.name: torch.randn(batch, out.width, generator=generator, dtype=torch.float64)
                for out in self.outputs()
            }
            batches.append((torch.stack(columns, 1), weights))
        return batches


def train(world: World, case: Case) -> dict[str, Any]:
    """Run the case on this rank; return this rank's outputs, pieces, and log. The parent joins the
    outputs and pieces of all ranks.
    """
    boxing = Boxing(world)
    plan = case.plan(world.size, world.backend, world.device.type)
    collection = EmbeddingCollection(plan, boxing, seed=SEED, kernel=case.kernel)
    outputs: list[dict[str, np.ndarray]] = []
    for step, (ids, weights) in enumerate(case.batches(), 1):
        sizes = balanced_sizes(ids.shape[0], world.size)
        mine = slice(sum(sizes[: world.rank]), sum(sizes[: world.rank + 1]))
        vectors = collection.forward(ids[mine].to(world.device), ids.shape[0], training=True)
        loss = sum(
            (vectors[name].tanh() * weight[mine].to(world.device, case.dtype)).sum()
            for name, weight in weights.items()
        )
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        collection.apply_gradients(step)
        outputs.append({name: v.detach().double().cpu().numpy() for name, v in vectors.items()})
    return {
        "outputs": outputs,
        "pieces": [
            (
                s.shard.table.name,
                (s.shard.row_start, s.shard.row_stop, s.shard.col_start, s.shard.col_stop),
                s.weights.double().cpu().numpy().copy(),
                {key: value.double().cpu().numpy().copy() for key, value in s.state.items()},
            )
            for s in collection.stored()
        ],
        "records": [(r.step_id, r.collective, r.bytes_sent) for r in world.log.records],
    }


def join_outputs(results: list[dict[str, Any]]) -> list[dict[str, np.ndarray]]:
    """Return the outputs of the whole batch, per step."""
    return [
        {name: np.concatenate([r["outputs"][step][name] for r in results]) for name in first}
        for step, first in enumerate(results[0]["outputs"])
    ]


def join_tables(
    case: Case, results: list[dict[str, Any]]
) -> dict[str, tuple[np.ndarray, dict[str, np.ndarray]]]:
    """Assemble whole tables and state from the ranks' pieces; elements that no rank stores are
    NaN.
    """
    tables: dict[str, tuple[np.ndarray, dict[str, np.ndarray]]] = {}
    for out in case.outputs():
        for table in out.tables:
            rule = case.optimizer
            tables[table.name] = (
                np.full(table.shape, np.nan),
                {key: np.full(rule.state_shape(key, *table.shape), np.nan) for key in rule.state},
            )
    for result in results:
        for name, (r0, r1, c0, c1), weights, state in result["pieces"]:
            tables[name][0][r0:r1, c0:c1] = weights
            for key, value in state.items():
                if value.ndim == 1:
                    tables[name][1][key][r0:r1] = value
                else:
                    tables[name][1][key][r0:r1, c0:c1] = value
    return tables
