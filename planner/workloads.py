"""Tables to plan for when there is no data: drawn by a recipe, or those of public benchmarks.

The recipe was fitted to what facebookresearch/dlrm_datasets publishes of its 856 tables of 2021
(``locality_stats.txt`` at 6f46ba7: 468,084,223 lookups of a batch of 65,536, unique rows and their
17 bins); the tables themselves are not at hand. Not identified by those sums, and so assumed: how
rows and pooling of one table go together, and how many rows are never looked up.
EMBark's workloads are those of NVIDIA-Merlin/HugeCTR benchmarks/embedding_collection/benchmark.sh.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from sbpflow.embedding.plan.tables import FeatureConfig, OutputConfig, TableConfig
from sbpflow.embedding.rules.rowwise_adagrad import RowwiseAdagrad
from sbpflow.errors import ConfigError
from sbpflow.planner.costs.features import IdStats, zipf_mandelbrot
from sbpflow.planner.task import DenseWork, Task

POOL_TABLES = 856
POOL_LOOKUPS = 468_084_223.0  # of a batch of 65,536 samples, over all tables
POOL_BATCH = 65_536
DIMS = (8, 16, 32, 64, 128)
OPTIMIZER = RowwiseAdagrad(lr=0.05)

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A table as the recipe draws it: rows that exist, rows looked up, lookups, and their law.

    The k-th of ``active`` rows has a share proportional to (k + q) ** -s.
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
def pool(small_tables: bool = True) -> tuple[Drawn, ...]:
    """856 tables; without ``small_tables`` the component of tiny vocabularies is left out."""
    sobol = torch.quasirandom.SobolEngine(8)
    sobol.fast_forward(1)  # the first point is 0, which has no normal quantile
    u = sobol.draw(POOL_TABLES, dtype=torch.float64)
    normal = torch.distributions.Normal(0.0, 1.0).icdf(u.clamp(1e-9, 1 - 1e-9)).numpy()
    uniform = u.numpy()
    pooling = _pooling(uniform, normal)
    logs = np.log(pooling)
    z = 0.371 * (logs - logs.mean()) / logs.std() + 0.929 * normal[:, 2]
    small = (uniform[:, 3] < 0.192) & small_tables
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
    """[tables] mean ids per sample: one or fewer for 38 %, else log-normal, scaled to the total."""
    few = uniform[:, 0] < 0.382
    below_one = np.clip((0.02 + 0.98 * uniform[:, 1]) ** 2.277, 0.01, 1.0)
    many = np.exp(0.699 + 0.654 * normal[:, 1])
    wanted = POOL_LOOKUPS / POOL_BATCH - below_one[few].sum()
    scaled = np.minimum(many * wanted / many[~few].sum(), 300.0)
    return np.where(few, below_one, scaled)


def split_pool(held_out: bool, small_tables: bool = True) -> tuple[Drawn, ...]:
    """Half of the pool: to train on, or the other half, to judge with."""
    order = np.random.default_rng(2022).permutation(POOL_TABLES)
    half = order[POOL_TABLES // 2 :] if held_out else order[: POOL_TABLES // 2]
    tables = pool(small_tables)
    return tuple(tables[int(n)] for n in half)


@cache
def _law(drawn: Drawn) -> IdStats:
    return zipf_mandelbrot(drawn.active, drawn.s, drawn.q, drawn.hotness)


def make_task(
    tables: Sequence[Drawn],
    dims: Sequence[int],
    *,
    world_size: int,
    batch_size: int,
    slack: float | None = None,
) -> Task:
    """A model of these tables, one feature each, joined in one output.

    With ``slack`` a rank may hold that many times its even share of rows and state; a table too
    large for a rank can be split.
    """
    configs = tuple(
        TableConfig(name=f"t{n}", features=(f"f{n}",), num_rows=one.num_rows, dim=dim)
        for n, (one, dim) in enumerate(zip(tables, dims, strict=True))
    )
    features = tuple(
        FeatureConfig(name=f"f{n}", hotness=one.hotness) for n, one in enumerate(tables)
    )
    limit = None
    if slack is not None:
        held = sum(4.0 * (table.dim + 1) * table.num_rows for table in configs)
        limit = int(slack * held / world_size)
    return Task(
        outputs=(OutputConfig(name="deep", tables=configs),),
        features=features,
        stats={f"t{n}": _law(one) for n, one in enumerate(tables)},
        world_size=world_size,
        batch_size=batch_size,
        optimizer=OPTIMIZER,
        device_bytes=limit,
        dense=DenseWork(),
    )


def random_task(
    seed: int,
    *,
    num_tables: int,
    world_size: int,
    held_out: bool,
    batch_size: int = 8192,
    slack: float | None = None,
    dims: Sequence[int] = DIMS,
    small_tables: bool = True,
) -> Task:
    """Tables drawn from half of the pool, without replacement while it lasts; dims at random."""
    random = np.random.default_rng([seed, num_tables, world_size, int(held_out)])
    half = split_pool(held_out, small_tables)
    chosen = random.choice(len(half), num_tables, replace=num_tables > len(half))
    return make_task(
        [half[int(n)] for n in chosen],
        [int(d) for d in random.choice(dims, num_tables)],
        world_size=world_size,
        batch_size=batch_size,
        slack=slack,
    )


def _ints(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split()))


# How many tables, rows, ids per sample, columns. From ``benchmark.sh`` (the module's docstring).
_EMBARK: Mapping[str, tuple[tuple[int, ...], ...]] = {
    "dcnv2": (
        (1,) * 26,
        _ints(
            "40000000 39060 17295 7424 20265 3 7122 1543 63 40000000 3067956 405282 10 2209 11938"
        )
        + _ints("155 4 976 14 40000000 40000000 40000000 590152 12973 108 36"),
        (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1),
        (128,) * 26,
    ),
    "t180": (
        (5, 5, 5, 5, 20, 30, 10, 20, 10, 10, 10, 5, 40, 1, 1),
        _ints("10000 4000000 4000000 50000000 1000 10000 5000000 4000000 10 1000 10000 100000")
        + _ints("4000000 50000000 500000000"),
        (100, 50, 30, 50, 50, 30, 20, 20, 100, 10, 100, 100, 200, 100, 100),
        (128,) * 15,
    ),
    "t200": (
        (10, 10, 10, 10, 20, 10, 10, 10, 10, 10, 10, 20, 20, 10, 10, 10, 10),
        _ints("100 1000 1000 10000 10000 10000 100000 1000000 2000000 2000000 4000000 4000000")
        + _ints("2000000 4000000 4000000 4000000 50000000"),
        (1, 1, 5, 20, 100, 1, 1, 1, 1, 1, 1, 1, 10, 20, 30, 50, 100),
        (*(128,) * 12, 64, *(128,) * 4),
    ),
    "t510": (
        (100, 150, 20, 50, 150, 20, 20),
        (1000, 100_000, 1_000_000, 2_000_000, 4_000_000, 4_000_000, 4_000_000),
        (1, 1, 1, 1, 1, 10, 100),
        (128,) * 7,
    ),
}
EMBARK = tuple(_EMBARK)
EMBARK_ALPHA = 1.1  # of the Zipf law in the scripts that generate their data


def embark_task(
    name: str,
    *,
    world_size: int,
    batch_size: int = 8192,
    slack: float | None = None,
    row_share: float = 1.0,
) -> Task:
    """One of EMBark's workloads; ``row_share`` scales rows to what a small machine holds."""
    if name not in _EMBARK:
        raise ConfigError(f"workload {name!r}; use {', '.join(EMBARK)}")
    if not 0.0 < row_share <= 1.0 or math.isnan(row_share):
        raise ConfigError(f"workload {name}: row_share {row_share}; above 0 and at most 1, as 0.01")
    drawn: list[Drawn] = []
    dims: list[int] = []
    for count, rows, hotness, dim in zip(*_EMBARK[name], strict=True):
        scaled = max(3, round(rows * row_share))
        one = Drawn(num_rows=scaled, active=scaled, pooling=hotness, s=EMBARK_ALPHA, q=0.0)
        drawn += [one] * count
        dims += [dim] * count
    return make_task(drawn, dims, world_size=world_size, batch_size=batch_size, slack=slack)
