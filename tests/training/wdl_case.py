"""Defines a small Wide & Deep job for tests: generated batches, any config, any number of ranks,
and no files.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from sbpflow.boxing.executor import Boxing
from sbpflow.config.schema import Adam, AdamW, Config, DataConfig, DenseSgd, OptimizerConfig
from sbpflow.config.table_rules import ParallelConfig, TableRule
from sbpflow.embedding.rules.adagrad import Adagrad
from sbpflow.embedding.rules.ftrl import Ftrl
from sbpflow.embedding.rules.lazy_adam import LazyAdam
from sbpflow.embedding.rules.rowwise_adagrad import RowwiseAdagrad
from sbpflow.embedding.rules.sgd import Sgd
from sbpflow.models.wdl import WdlConfig, WideConfig
from sbpflow.run.execution.job import Job, build_job
from sbpflow.run.model.spec import Fields
from sbpflow.run.planning.build_plan import plan_run
from sbpflow.runtime.ranks.world import World
from sbpflow.sbp.sbp import balanced_sizes
from sbpflow.training.health import check_replicas
from sbpflow.training.saving import Position

# Except for C4, no size is divisible by 2, 3 or 4; C4 has fewer rows than four ranks.
FIELDS = Fields.of(
    ("I1", "I2", "I3"),
    {"C1": 37, "C2": 11, "C3": 53, "C4": 3},
    {"C1xC2": 71, "C3xC4": 29},
)
NUM_ROWS = {one.name: one.rows for one in FIELDS.ids}
SPARSE = {
    "sgd": Sgd(lr=0.1),
    "adagrad": Adagrad(lr=0.05),
    "rowwise_adagrad": RowwiseAdagrad(lr=0.05),
    "lazy_adam": LazyAdam(lr=1e-2),
}
DENSE = {"sgd": DenseSgd(lr=0.1, momentum=0.9), "adam": Adam(lr=1e-3), "adamw": AdamW(lr=1e-3)}


def make_config(
    scheme: str | None,
    sparse: str,
    *,
    dense: str = "sgd",
    dtype: str = "float64",
    kernel: str = "torch",
    dim: int = 5,
    tables: dict[str, TableRule] | None = None,
    batch_size: int = 30,
    dense_layouts: dict[str, str] | None = None,
    wide: Ftrl | None = None,
) -> Config:
    """Return a config for ``FIELDS`` with dropout 0."""
    return Config(
        data=DataConfig(batch_size=batch_size),
        model=WdlConfig(
            embedding_dim=dim, hidden=(7, 6), dropout=0.0, wide=WideConfig(crosses=CROSSES)
        ),
        parallel=ParallelConfig(
            device="cpu",
            scheme=scheme,
            dtype=dtype,
            kernel=kernel,
            tables=tables or {},
            dense=dense_layouts or {},
        ),
        optimizer=OptimizerConfig(
            sparse=SPARSE[sparse], tables={"wide.*": wide} if wide else {}, dense=DENSE[dense]
        ),
    )


CROSSES = (("C1", "C2"), ("C3", "C4"))


@dataclass
class Rows:
    """A batch, or one rank's part of it."""

    labels: torch.Tensor
    dense: torch.Tensor
    ids: torch.Tensor
    batch_size: int = field(default=0)

    def part(self, rank: int, size: int) -> "Rows":
        sizes = balanced_sizes(self.labels.shape[0], size)
        mine = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        return Rows(self.labels[mine], self.dense[mine], self.ids[mine], self.labels.shape[0])


def make_batches(count: int, batch_size: int, seed: int = 3) -> list[Rows]:
    """Return skewed ids with duplicates; every fifth batch is short, every seventh uses only row 0,
    and the last has two samples.
    """
    generator = torch.Generator().manual_seed(seed)
    sizes = list(NUM_ROWS.values())
    batches: list[Rows] = []
    for index in range(count):
        n = batch_size - 7 if index % 5 == 4 else batch_size
        n = 2 if index == count - 1 else n  # fewer rows than ranks, if there are more than two
        ids = torch.stack(
            [(torch.rand(n, generator=generator) ** 3 * size).int() for size in sizes], 1
        )
        if index % 7 == 6:
            ids.zero_()
        dense = torch.randn(n, len(FIELDS.dense), generator=generator)
        score = dense[:, 0] + 0.1 * (ids[:, 0] % 7 - 3)
        labels = (torch.rand(n, generator=generator) < score.sigmoid()).float()
        batches.append(Rows(labels, dense, ids, n))
    return batches


def make_job(world: World, config: Config) -> Job:
    """Build a job as ``train_wdl.py`` does, for generated columns."""
    spec, plan = plan_run(config, FIELDS, world_size=world.size, device_type=world.device.type)
    return build_job(config, spec, plan, Boxing(world))


def to_device(rows: Rows, device: torch.device) -> Rows:
    return Rows(rows.labels.to(device), rows.dense.to(device), rows.ids.to(device), rows.batch_size)


def train(world: World, config: Config, steps: int) -> dict[str, Any]:
    """Return losses, and this rank's shards and dense parameters at the end."""
    job = make_job(world, config)
    losses = [
        float(job.trainer.step(to_device(batch.part(world.rank, world.size), world.device)))
        for batch in make_batches(steps, config.data.batch_size)
    ]
    check_replicas(job.model.parameters, job.embeddings, job.boxing)
    return {"losses": losses, "pieces": pieces_of(job), "dense": dense_of(job)}


def pieces_of(job: Job) -> list[tuple[str, tuple[int, int, int, int], np.ndarray, dict]]:
    return [
        (
            stored.shard.table.name,
            (
                stored.shard.row_start,
                stored.shard.row_stop,
                stored.shard.col_start,
                stored.shard.col_stop,
            ),
            stored.weights.cpu().double().numpy().copy(),
            {name: value.cpu().double().numpy().copy() for name, value in stored.state.items()},
        )
        for stored in job.embeddings.stored()
    ]


def dense_of(job: Job) -> dict[str, np.ndarray]:
    return {
        name: parameter.part.detach().cpu().double().numpy().copy()
        for name, parameter in job.model.parameters.items()
    }


def join_tables(results: Sequence[dict[str, Any]], dim: int) -> dict[str, np.ndarray]:
    """Join whole tables from the ranks' shards; elements that no rank stores become NaN."""
    tables: dict[str, np.ndarray] = {}
    for name, rows in NUM_ROWS.items():
        if "x" in name:
            tables[f"wide.{name}"] = np.full((rows, 1), np.nan)
        else:
            tables[f"deep.{name}"] = np.full((rows, dim), np.nan)
    for result in results:
        for name, (r0, r1, c0, c1), weights, _ in result["pieces"]:
            tables[name][r0:r1, c0:c1] = weights
    return tables


class NoCheckpoints:
    """Starts every run at its first step and never saves."""

    start = Position()
    best_metric = None
    stops = False

    def is_due(self, step: int, *, last: bool, best: bool) -> bool:
        del step, last, best
        return False
