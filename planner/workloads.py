"""Generates random tables for planning without data.

The distributions were fitted to published statistics of the 856 tables of 2021 in
facebookresearch/dlrm_datasets (``locality_stats.txt`` at 6f46ba7: 468,084,223 lookups in a batch of
65,536 samples, and unique rows in 17 bins), not to the tables themselves. The published totals do
not show how a table's rows and pooling are related, or how many rows are never looked up; both are
assumed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from sbpflow.embedding.plan.tables import FeatureConfig, OutputConfig, TableConfig
from sbpflow.embedding.rules.rowwise_adagrad import RowwiseAdagrad
from sbpflow.planner.costs.features import IdStats, zipf_mandelbrot
from sbpflow.planner.task import Task

POOL_TABLES = 856
POOL_LOOKUPS = 468_084_223.0  # total lookups of all tables in a batch of 65,536 samples
POOL_BATCH = 65_536
DIMS = (8, 16, 32, 64, 128)
OPTIMIZER = RowwiseAdagrad(lr=0.05)

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A random table: its rows, the active rows among them (those that are looked up), its ids per
    sample (``pooling``), and the distribution of the ids. The k-th active row's share of lookups is
    proportional to (k + q) ** -s.
    """

    num_rows: int
    active: int
    pooling: float
    s: float
    q: float

    @property
    def hotness(self) -> int:
        return max(1, round(self.pooling))


@cache
def pool() -> tuple[Drawn, ...]:
    """Return the pool of 856 tables; a fifth of them have tiny vocabularies."""
    sobol = torch.quasirandom.SobolEngine(8)
    sobol.fast_forward(1)  # the first point is 0 and has no normal quantile
    u = sobol.draw(POOL_TABLES, dtype=torch.float64)
    normal = torch.distributions.Normal(0.0, 1.0).icdf(u.clamp(1e-9, 1 - 1e-9)).numpy()
    uniform = u.numpy()
    pooling = _pooling(uniform, normal)
    logs = np.log(pooling)
    z = 0.371 * (logs - logs.mean()) / logs.std() + 0.929 * normal[:, 2]
    small = uniform[:, 3] < 0.192
    log_rows = np.where(small, 1.76 + (3.198 - 1.76) * uniform[:, 2], 5.0 + 0.521 * z)
    exponent = np.where(small, 0.805 + 0.15 * normal[:, 4], 0.792 + 0.211 * normal[:, 4])
    return tuple(
        Drawn(
            num_rows=int(10 ** (log_rows[n] + uniform[n, 6])),
            active=int(10 ** log_rows[n]),
            pooling=float(pooling[n]),
            s=float(np.clip(exponent[n], 0.05, 2.0)),
            q=float(10 ** (0.42 + (1.714 - 0.42) * uniform[n, 5])),
        )
        for n in range(POOL_TABLES)
    )


def _pooling(uniform: Floats, normal: Floats) -> Floats:
    """Return the mean ids per sample of each table: at most 1 for 38% of the tables, log-normal for
    the others, and scaled to sum to the pool's total.
    """
    few = uniform[:, 0] < 0.382
    below_one = np.clip((0.02 + 0.98 * uniform[:, 1]) ** 2.277, 0.01, 1.0)
    many = np.exp(0.699 + 0.654 * normal[:, 1])
    rest = POOL_LOOKUPS / POOL_BATCH - below_one[few].sum()
    scaled = np.minimum(many * rest / many[~few].sum(), 300.0)
    return np.where(few, below_one, scaled)


def split_pool(held_out: bool) -> tuple[Drawn, ...]:
    """Return one half of the pool: for training, or held out for comparisons."""
    order = np.random.default_rng(2022).permutation(POOL_TABLES)
    half = order[POOL_TABLES // 2 :] if held_out else order[: POOL_TABLES // 2]
    tables = pool()
    return tuple(tables[int(n)] for n in half)


@cache
def _stats(drawn: Drawn) -> IdStats:
    return zipf_mandelbrot(drawn.active, drawn.s, drawn.q, drawn.hotness)


def make_task(
    tables: Sequence[Drawn],
    dims: Sequence[int],
    *,
    world_size: int,
    batch_size: int,
    slack: float | None = None,
) -> Task:
    """Return a task with these tables, with one feature per table and one common output.

    With ``slack``, a rank's memory limit is ``slack`` times an even share of rows and optimizer
    state; tables that are too large for a rank can be split.
    """
    configs = tuple(
        TableConfig(name=f"t{n}", features=(f"f{n}",), num_rows=table.num_rows, dim=dim)
        for n, (table, dim) in enumerate(zip(tables, dims, strict=True))
    )
    features = tuple(
        FeatureConfig(name=f"f{n}", hotness=table.hotness) for n, table in enumerate(tables)
    )
    limits = None
    if slack is not None:
        held = sum(4.0 * (table.dim + 1) * table.num_rows for table in configs)
        limits = (int(slack * held / world_size),) * world_size
    return Task(
        outputs=(OutputConfig(name="deep", tables=configs),),
        features=features,
        stats={f"t{n}": _stats(table) for n, table in enumerate(tables)},
        world_size=world_size,
        batch_size=batch_size,
        optimizer=OPTIMIZER,
        device_bytes=limits,
    )


def random_task(
    seed: int,
    *,
    num_tables: int,
    world_size: int,
    held_out: bool,
    batch_size: int = 8192,
    slack: float | None = None,
) -> Task:
    """Return a task with tables from one half of the pool, sampled with replacement only if the
    half has fewer tables than the task.
    """
    random = np.random.default_rng([seed, num_tables, world_size, int(held_out)])
    half = split_pool(held_out)
    chosen = random.choice(len(half), num_tables, replace=num_tables > len(half))
    return make_task(
        [half[int(n)] for n in chosen],
        [int(d) for d in random.choice(DIMS, num_tables)],
        world_size=world_size,
        batch_size=batch_size,
        slack=slack,
    )
