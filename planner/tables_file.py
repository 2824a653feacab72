"""Reads ``tables.json``: the tables of a model, for planning without a data set.

    {"batch_size": 8192, "optimizer": "rowwise_adagrad", "device_gb": 16,
     "tables": [{"name": "C1", "rows": 100000, "dim": 16, "ids_per_sample": 1,
                 "zipf": {"s": 1.05, "q": 2.0}}]}

``batch_size`` is global. Four keys are optional: ``optimizer`` (default: rowwise_adagrad),
``device_gb`` (default: no limit), ``speed`` (relative to the calibrated ranks; default: 1), and
``dense`` (default: predict only the time of the tables). ``device_gb`` and ``speed`` are one number
for every rank, or a list with one number per rank.
``"dense": {"parameters": 500000, "macs_per_sample": 500000, "elements_per_sample": 4000}``
describes the dense part. ``macs_per_sample`` is the number of multiply-adds in a forward pass; the
default is the number of parameters. ``elements_per_sample`` is the sum of the layers' inputs and
outputs; the default assumes layers of width 256.

For each table, one of three keys describes the frequency of the ids: ``zipf`` (the k-th row's share
of lookups is proportional to (k + q) ** -s), ``bins`` ({"rows": [17], "lookups": [17]}: fractions
by DreamShard's frequency bins of a batch of 65,536 samples), or ``sample`` (ids of rows, in order).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

from sbpflow.config.parse import brief
from sbpflow.embedding.plan.tables import FeatureConfig, OutputConfig, TableConfig
from sbpflow.embedding.rules.registry import RULES, sparse_optimizer
from sbpflow.errors import ConfigError
from sbpflow.planner.calibration.design import Law
from sbpflow.planner.costs.features import (
    NUM_BINS,
    IdStats,
    from_bins,
    from_sample,
    zipf_mandelbrot,
)
from sbpflow.planner.task import DenseWork, Task
from sbpflow.runtime.files.json_file import JsonError, read_json

KEYS = ("batch_size", "optimizer", "device_gb", "speed", "dense", "tables")
DENSE_KEYS = ("parameters", "macs_per_sample", "elements_per_sample")
MOST = 1e18  # every number must be below this limit
MOST_BYTES = 2**28  # file size limit; a sample of ids may be long
_WIDE = 256  # default layer width without ``elements_per_sample``
TABLE_KEYS = ("name", "rows", "dim", "ids_per_sample", "zipf", "bins", "sample")
LAWS = ("zipf", "bins", "sample")
MOST_IDS = 1_000_000  # per sample and table
# The kinds of numbers.
ABOVE_0, FROM_0 = "a number, above 0", "a number, 0 or more"
WHOLE = "a whole number, 1 or more"
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class TablesFile:
    """The content of the file: the task for a single rank without limits, and the ``zipf``
    parameters by table.
    """

    one_rank: Task
    laws: Mapping[str, Law]
    device_bytes: tuple[int, ...] | None  # for each rank, or one value for all ranks
    speeds: tuple[float, ...] | None  # for each rank, or one value for all ranks

    def task(
        self, world_size: int, device_type: str = "cpu", *, device_bytes: int | None = None
    ) -> Task:
        """Return the task on these ranks; ``device_bytes`` is their limit if the file sets none."""
        limits = self.device_bytes
        if limits is None and device_bytes is not None:
            limits = (device_bytes,)
        return replace(
            self.one_rank,
            world_size=world_size,
            device_type=device_type,
            device_bytes=_for_ranks("device_gb", limits, world_size),
            speeds=_for_ranks("speed", self.speeds, world_size),
        )


def _for_ranks(key: str, values: tuple[Value, ...] | None, size: int) -> tuple[Value, ...] | None:
    if values is not None and len(values) not in (1, size):
        raise ConfigError(
            f"{key}: got {len(values)} numbers for {size} ranks; give one number for all ranks, or "
            "a list with one number per rank"
        )
    return values * size if values is not None and len(values) == 1 else values


def read_tables(path: Path) -> TablesFile:
    """Read a file; for invalid content, raise a ConfigError that names the table and the key."""
    try:
        tree = read_json(path, max_bytes=MOST_BYTES)
    except FileNotFoundError as error:
        raise ConfigError(
            f"--tables: the file {path} does not exist; planner/tables_file.py describes its format"
        ) from error
    except JsonError as error:
        raise ConfigError(
            f"--tables: {error}; planner/tables_file.py describes the format"
        ) from error
    given = _object(f"{path}", tree, KEYS, '{"batch_size": 512, "tables": [..]}')
    listed = given.get("tables")
    if not isinstance(listed, list) or not listed:
        raise ConfigError(
            f"{path}: the list tables is missing or empty; give one or more tables, such as "
            f'[{{"name": "C1", ..}}]'
        )
    parts = [_table(f"{path}: tables[{n}]", table) for n, table in enumerate(cast("Any", listed))]
    names = [table.name for table, *_ in parts]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(
            f"{path}: several tables are named {', '.join(repeated)}; use unique names"
        )
    optimizer = given.get("optimizer", "rowwise_adagrad")
    if not isinstance(optimizer, str) or optimizer not in RULES:
        raise ConfigError(
            f"{path}: optimizer must be one of {', '.join(RULES)}, got {brief(optimizer)}"
        )
    gb = _by_rank(f"{path}: device_gb", given.get("device_gb"))
    one_rank = Task(
        outputs=(OutputConfig(name="tables", tables=tuple(table for table, *_ in parts)),),
        features=tuple(feature for _, feature, *_ in parts),
        ids_per_sample={feature.name: ids for _, feature, ids, _, _ in parts},
        stats={table.name: stats for table, _, _, stats, _ in parts},
        world_size=1,
        batch_size=int(_number(f"{path}: batch_size", given.get("batch_size"), WHOLE)),
        optimizer=sparse_optimizer(optimizer, lr=0.05),
        dense=_dense(f"{path}: dense", given.get("dense")),
    )
    return TablesFile(
        one_rank=one_rank,
        laws={table.name: law for table, _, _, _, law in parts if law is not None},
        device_bytes=None if gb is None else tuple(max(1, int(1e9 * each)) for each in gb),
        speeds=_by_rank(f"{path}: speed", given.get("speed")),
    )


def _by_rank(where: str, given: object) -> tuple[float, ...] | None:
    if given is None:
        return None
    if isinstance(given, list):
        numbers = cast("list[object]", given)
        each = {f"{where}[{n}]": number for n, number in enumerate(numbers)}
    else:
        each = {where: given}
    if not each:
        raise ConfigError(f"{where}: the list is empty; give one number per rank, such as [2, 1]")
    return tuple(_number(name, number, ABOVE_0) for name, number in each.items())


def _dense(where: str, given: object) -> DenseWork:
    if given is None:
        return DenseWork()
    tree = _object(where, given, DENSE_KEYS, '{"parameters": 500000}')
    parameters = int(_number(f"{where}.parameters", tree.get("parameters"), WHOLE))
    macs = tree.get("macs_per_sample", parameters)
    macs = _number(f"{where}.macs_per_sample", macs, ABOVE_0)
    elements = tree.get("elements_per_sample", macs * 2 / _WIDE)
    elements = _number(f"{where}.elements_per_sample", elements, ABOVE_0)
    return DenseWork(macs_per_sample=macs, elements_per_sample=elements, parameters=parameters)


_Table = tuple[TableConfig, FeatureConfig, float, IdStats, Law | None]


def _table(where: str, tree: object) -> _Table:
    given = _object(where, tree, TABLE_KEYS, '{"name": "C1", "rows": 100}')
    name = given.get("name")
    if not isinstance(name, str) or not name:
        raise ConfigError(f'{where}.name must be a non-empty string, such as "C1", got {name!r}')
    rows, dim = (int(_number(f"{where}.{key}", given.get(key), WHOLE)) for key in ("rows", "dim"))
    ids = _number(f"{where}.ids_per_sample", given.get("ids_per_sample", 1.0), ABOVE_0)
    if ids > MOST_IDS:
        raise ConfigError(f"{where}.ids_per_sample must be {MOST_IDS:,} or less, got {ids:g}")
    stats, law = _stats(where, given, rows, ids)
    stats = replace(stats, distinct=min(stats.distinct, float(rows)))
    hotness = max(1, math.ceil(ids))
    feature = FeatureConfig(name=name, hotness=hotness, ragged=hotness != ids)
    table = TableConfig(name=name, features=(name,), num_rows=rows, dim=dim)
    return table, feature, ids, stats, law


def _stats(where: str, given: dict[str, Any], rows: int, ids: float) -> tuple[IdStats, Law | None]:
    laws = [key for key in LAWS if key in given]
    if len(laws) != 1:
        raise ConfigError(
            f"{where} has {' and '.join(laws) or 'no statistics of its ids'}; give exactly one of "
            f'{", ".join(LAWS)} (for example, "zipf": {{"s": 1.05, "q": 2.0}})'
        )
    value = given[laws[0]]
    if laws[0] == "sample":
        return from_sample(_sample(f"{where}.sample", value, rows), ids), None
    if laws[0] == "bins":
        keys = ("rows", "lookups")
        tree = _object(f"{where}.bins", value, keys, '{"rows": [17 shares], "lookups": [..]}')
        by_rows, by_lookups = (_bins(f"{where}.bins.{key}", tree.get(key)) for key in keys)
        if not any(map(min, by_rows, by_lookups)):
            raise ConfigError(
                f"{where}.bins: no bin has both rows and lookups; give shares above 0 for the same "
                "bins (for example, 1.0 for the first bin in both lists)"
            )
        return from_bins(by_rows, by_lookups, ids), None
    tree = _object(f"{where}.zipf", value, ("s", "q"), '{"s": 1.05, "q": 2.0}')
    s = _number(f"{where}.zipf.s", tree.get("s"), FROM_0)
    q = _number(f"{where}.zipf.q", tree.get("q", 0.0), FROM_0)
    return zipf_mandelbrot(rows, s, q, ids), Law(s=s, q=q)


def _number(key: str, value: object, kind: str) -> float:
    """Return a number of this kind; raise ConfigError for any other value."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value < MOST:
        whole = value >= 1 and value == int(value)  # 100.0 is a whole number
        if {ABOVE_0: value > 0, FROM_0: value >= 0, WHOLE: whole}[kind]:
            return value if kind == WHOLE else float(value)  # large whole numbers stay exact
    raise ConfigError(f"{key} must be {kind} and below {MOST:g}, got {value!r}")


def _sample(key: str, value: object, rows: int) -> list[int]:
    """Return a list of two or more row ids of the table; raise ConfigError for any other value."""
    ids = cast("list[Any]", value)
    if not isinstance(value, list) or len(ids) < 2:
        raise ConfigError(
            f"{key} must be a list of 2 or more ids in the order of their occurrence (for "
            "example, [3, 17, 3])"
        )
    for place, row in enumerate(ids):
        if isinstance(row, bool) or not isinstance(row, int) or not 0 <= row < rows:
            raise ConfigError(
                f"{key}[{place}] must be the id of a row, 0 to {rows - 1}, got {row!r}"
            )
    return ids


def _bins(key: str, value: object) -> list[float]:
    values = cast("list[Any]", value)
    if not isinstance(value, list) or len(values) != NUM_BINS:
        raise ConfigError(f"{key} must be a list of {NUM_BINS} numbers, one share for each bin")
    shares = [_number(f"{key}[{n}]", share, FROM_0) for n, share in enumerate(values)]
    if not any(shares):
        raise ConfigError(
            f"{key}: all shares are 0, but at least one must be above 0 (for example, the first "
            "could be 1.0)"
        )
    return shares


def _object(where: str, value: object, keys: tuple[str, ...], example: str) -> dict[str, Any]:
    """Return an object that has only these keys; raise ConfigError for any other value."""
    if not isinstance(value, dict):
        raise ConfigError(f"{where} must be an object such as {example}, got {brief(value)}")
    tree = cast("dict[str, Any]", value)
    if unknown := sorted(set(tree) - set(keys)):
        raise ConfigError(
            f"{where} has unknown keys {', '.join(unknown)}; the valid keys are {', '.join(keys)}"
        )
    return tree
