"""Generates random mixes of features, tables, layouts, and optimizers, and trains them."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sbpflow.boxing.executor import Boxing
from sbpflow.embedding.collection import EmbeddingCollection
from sbpflow.embedding.ids.batch_ids import Bags
from sbpflow.embedding.plan.embedding_plan import plan_embeddings
from sbpflow.embedding.plan.tables import INITIAL_RANGE, FeatureConfig, OutputConfig, TableConfig
from sbpflow.embedding.rules.base import SparseOptimizer
from sbpflow.embedding.storage.store import StoreFactory, device_store
from sbpflow.runtime.random.streams import fill_uniform
from sbpflow.runtime.ranks.world import World
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import balanced_sizes
from tests.embedding.cases import Spec
from tests.embedding.reference import Bag, ReferenceTable

SEED = 5


@dataclass(frozen=True)
class Mix:
    """Describes a collection and its batches, which depend on these fields alone."""

    features: tuple[FeatureConfig, ...]
    outputs: tuple[OutputConfig, ...]
    specs: dict[str, Spec]
    optimizer: SparseOptimizer
    world_size: int
    batch_sizes: tuple[int, ...] = (13, 8, 0, 17, 5, 1, 9, 4, 12, 3) * 2
    seed: int = 0
    accumulate: int = 1
    overlap: bool = True
    dtype: torch.dtype = torch.float64
    ids_dtype: torch.dtype = torch.int32
    comm_dtype: torch.dtype | None = None
    row_dtype: torch.dtype | None = None
    kernel: str = "torch"

    def lr_factor(self, step: int) -> float:
        """Return a learning-rate factor that rises and falls."""
        return (1.0, 0.5, 1.0, 0.2)[step % 4]

    def tables(self) -> list[TableConfig]:
        return [table for output in self.outputs for table in output.tables]

    def bags(self, step: int) -> dict[str, list[Bag]]:
        """Return one bag per sample of the global batch for each feature; small ids are
        frequent.
        """
        random = np.random.default_rng((self.seed, step))
        made: dict[str, list[Bag]] = {}
        for feature in self.features:
            rows = min([t.num_rows for t in self.tables() if feature.name in t.features] or [9])
            bags: list[Bag] = []
            for _ in range(self.batch_sizes[step]):
                most = feature.hotness
                count = random.integers(0, most + 1) if feature.ragged else most
                ids = (random.random(count) ** 2 * rows).astype(int).tolist()
                weights = random.normal(size=count).tolist() if feature.weighted else [1.0] * count
                bags.append((ids, weights))
            made[feature.name] = bags
        return made

    def coefficients(self, step: int, output: OutputConfig) -> np.ndarray:
        """Return the coefficients of an output ([batch, width]). They depend on the names of the
        output, its tables, and its features, not on positions.
        """
        if output.combine == "sum":
            return self._coefficients(step, output.name, output.width)
        uses = [(table, name) for table in output.tables for name in table.features]
        parts = [self._coefficients(step, f"{t.name}/{name}", t.dim) for t, name in uses]
        return np.concatenate(parts, 1)

    def _coefficients(self, step: int, name: str, width: int) -> np.ndarray:
        random = np.random.default_rng((self.seed, step, *name.encode()))
        return random.normal(size=(self.batch_sizes[step], width))


def as_input(
    mix: Mix, bags: dict[str, list[Bag]], mine: slice, device: torch.device | str = "cpu"
) -> dict[str, Any]:
    """Return this rank's samples in the form that the collection accepts."""
    ids: dict[str, Any] = {}
    for feature in mix.features:
        part = bags[feature.name][mine]
        flat = [row for rows, _ in part for row in rows]
        values = torch.tensor(flat, dtype=mix.ids_dtype, device=device)
        if feature.ragged or feature.weighted:
            lengths = torch.tensor([0, *(len(rows) for rows, _ in part)], device=device)
            weights = torch.tensor(
                [w for _, ws in part for w in ws], dtype=mix.dtype, device=device
            )
            given = weights if feature.weighted else None
            ids[feature.name] = Bags(values, lengths.cumsum(0), given)
        else:
            ids[feature.name] = values.view(len(part), feature.hotness)
    return ids


def make_collection(
    world: World, mix: Mix, stores: StoreFactory = device_store
) -> EmbeddingCollection:
    layouts = {name: spec.layout(world.size, world.device.type) for name, spec in mix.specs.items()}
    if mix.comm_dtype is not None:
        layouts = {
            name: type(layout)(
                layout=layout.layout, exchange=layout.exchange, comm_dtype=mix.comm_dtype
            )
            for name, layout in layouts.items()
        }
    plan = plan_embeddings(
        mix.outputs,
        layouts,
        features=mix.features,
        optimizer=mix.optimizer,
        dtype=mix.dtype,
        world=Placement.line(world.device.type, world.size),
        backend=world.backend,
        batch_size=max(mix.batch_sizes),
        row_dtype=mix.row_dtype,
    )
    return EmbeddingCollection(plan, Boxing(world), seed=SEED, kernel=mix.kernel, stores=stores)


def train(world: World, mix: Mix, stores: StoreFactory = device_store) -> dict[str, Any]:
    """Train a mix; return the outputs of each step, and this rank's pieces at the end."""
    collection = make_collection(world, mix, stores)
    outputs: list[dict[str, np.ndarray]] = []

    def begin(step: int):
        sizes = balanced_sizes(mix.batch_sizes[step], world.size)
        mine = slice(sum(sizes[: world.rank]), sum(sizes[: world.rank + 1]))
        ids = as_input(mix, mix.bags(step), mine, world.device)
        return collection.start_id_exchange(ids, mix.batch_sizes[step], training=True), mine

    coming = begin(0)
    for step in range(len(mix.batch_sizes)):
        batch, mine = coming if coming is not None else begin(step)
        coming = None
        collection.scale_lr(mix.lr_factor(step))
        collection.lookup(batch)
        if mix.overlap and step + 1 < len(mix.batch_sizes):
            coming = begin(step + 1)
        vectors = collection.gather_outputs(batch)
        if coming is not None:
            collection.exchange_ids(coming[0])
        for output in mix.outputs:
            factors = torch.tensor(
                mix.coefficients(step, output)[mine], dtype=mix.dtype, device=world.device
            )
            (vectors[output.name].tanh() * factors).sum().backward()
        collection.send_grads(batch)
        collection.receive_grads(batch)
        if (step + 1) % mix.accumulate == 0:
            collection.update((step + 1) // mix.accumulate)
        outputs.append({name: v.detach().double().cpu().numpy() for name, v in vectors.items()})
    pieces = [
        (
            s.shard.table.name,
            (s.shard.row_start, s.shard.row_stop, s.shard.col_start, s.shard.col_stop),
            s.weights.double().cpu().numpy().copy(),
            {key: value.double().cpu().numpy().copy() for key, value in s.state.items()},
        )
        for s in collection.stored()
    ]
    return {"outputs": outputs, "pieces": pieces}


def expected(mix: Mix) -> tuple[list[dict[str, np.ndarray]], dict[str, ReferenceTable]]:
    """Return the reference's outputs per step, and its trained tables."""
    tables: dict[str, ReferenceTable] = {}
    rules = {t.name: t.optimizer or mix.optimizer for out in mix.outputs for t in out.tables}
    for table in mix.tables():
        weights = torch.empty(table.shape, dtype=mix.row_dtype or torch.float64)
        fill_uniform(
            weights, seed=SEED, name=table.name, bound=INITIAL_RANGE, num_columns=table.dim
        )
        tables[table.name] = ReferenceTable(weights.double().numpy(), table.pooling)
    outputs: list[dict[str, np.ndarray]] = []
    sums: dict[str, dict[int, np.ndarray]] = {name: {} for name in tables}
    num_steps = 0
    for step, size in enumerate(mix.batch_sizes):
        bags = mix.bags(step)
        made: dict[str, np.ndarray] = {}
        for output in mix.outputs:
            uses = [(t, feature) for t in output.tables for feature in t.features]
            vectors = [
                np.array([tables[t.name].vector(bag) for bag in bags[f]]).reshape(size, t.dim)
                for t, f in uses
            ]
            is_sum = output.combine == "sum"
            made[output.name] = sum(vectors) if is_sum else np.concatenate(vectors, 1)
            grad = mix.coefficients(step, output) * (1 - np.tanh(made[output.name]) ** 2)
            column = 0
            for table, feature in uses:
                mine = grad if is_sum else grad[:, column : column + table.dim]
                column += table.dim
                found = tables[table.name].gradients(bags[feature], mine)
                for row, value in found.items():
                    sums[table.name][row] = sums[table.name].get(row, 0.0) + value
        if (step + 1) % mix.accumulate == 0:
            num_steps += 1
            for name, rows in sums.items():
                rule = rules[name]
                tables[name].update(rule, rows, num_steps, rule.lr * mix.lr_factor(step))
            sums = {name: {} for name in tables}
        outputs.append(made)
    return outputs, tables
