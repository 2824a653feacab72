"""Defines EMBark's workloads, from NVIDIA-Merlin/HugeCTR
benchmarks/embedding_collection/benchmark.sh.
"""

from collections.abc import Mapping

from sbpflow.errors import ConfigError
from sbpflow.planner.task import Task
from sbpflow.planner.workloads import Drawn, make_task


def _ints(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split()))


# {workload: (numbers of tables, their rows, ids per sample, columns)}
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
EMBARK_ALPHA = 1.1  # exponent of the Zipf law in the scripts that generate the data


def embark_task(
    name: str,
    *,
    world_size: int,
    batch_size: int = 8192,
    slack: float | None = None,
) -> Task:
    """Return one of EMBark's workloads; raise ConfigError for an unknown name."""
    if name not in _EMBARK:
        raise ConfigError(f"workload {name!r} is unknown; use one of {', '.join(EMBARK)}")
    drawn: list[Drawn] = []
    dims: list[int] = []
    for count, rows, hotness, dim in zip(*_EMBARK[name], strict=True):
        table = Drawn(num_rows=rows, active=rows, pooling=hotness, s=EMBARK_ALPHA, q=0.0)
        drawn += [table] * count
        dims += [dim] * count
    return make_task(drawn, dims, world_size=world_size, batch_size=batch_size, slack=slack)
