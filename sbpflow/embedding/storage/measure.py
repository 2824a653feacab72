"""Measures which kernel is fastest for a stack on this machine, and caches the result.

The benchmark does the work of a rank for one batch: deduplication (if the exchange needs it),
lookup, and update. Ids repeat as in the statistics of the data, or by default as in click data
(``costs.ids``). The kernels take turns, and each is judged by its minimum time.
"""

import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor

from sbpflow.costs.ids import CLICKS
from sbpflow.embedding.plan.group_plan import GroupPlan
from sbpflow.embedding.plan.table_batch import TableBatch
from sbpflow.embedding.plan.tables import Shard, TableConfig
from sbpflow.embedding.rules.base import SparseOptimizer
from sbpflow.embedding.rules.kernels import COMPILED, KernelName
from sbpflow.embedding.storage.base import RowKernel
from sbpflow.embedding.storage.choose import KernelChoice, deduplicator, make_kernel
from sbpflow.embedding.storage.lookup import Lookup
from sbpflow.embedding.storage.rounding import RowNoise
from sbpflow.runtime.compute.cpu import cpu_name, machine_key
from sbpflow.runtime.files.atomic_file import replacing
from sbpflow.runtime.files.cache_dir import cache_dir, make_private
from sbpflow.runtime.files.json_file import JsonError, is_number, object_of, read_json

LOG = logging.getLogger(__name__)

# The default kernel is kept unless it takes longer than the fastest by more than this share.
BAND = 0.05
MOST_ELEMENTS = 1 << 25  # Maximum size of the benchmark's table.
LEAST_ROUNDS, MOST_ROUNDS, SECONDS = 3, 40, 0.1
MOST_BYTES = 2**24  # Maximum size of the cache file.
MOST_MS = 1e9  # A cached time above this is invalid.


@dataclass(frozen=True, slots=True, kw_only=True)
class StackShape:
    """The properties of a stack that determine how long its work takes on a rank.

    ``ids`` is the number of ids looked up, in bags of ``per_bag``. If unique rows are exchanged,
    each of ``lists`` ranks instead requests the distinct rows of ``ids / lists**2`` ids, and each
    rank first deduplicates ``home_ids`` ids; otherwise, ``lists`` and ``home_ids`` are 0. ``skew``
    describes how ids repeat (``costs.ids``).
    """

    rows: int
    width: int
    dim: int
    ids: int
    per_bag: int
    lists: int
    home_ids: int
    optimizer: SparseOptimizer
    dtype: torch.dtype
    row_dtype: torch.dtype
    skew: float = CLICKS
    device: str = "cpu"  # "cpu", or the name of a CUDA device

    @staticmethod
    def of(
        group: GroupPlan,
        stack: TableBatch,
        batch_size: int,
        row_dtype: torch.dtype,
        skew: Mapping[str, float] | None = None,
        device: str = "cpu",
    ) -> "StackShape | None":
        """Return the ``StackShape`` for the rank with the most rows, or ``None`` if that rank looks
        up nothing.
        """
        rank = max(stack.holders(), key=stack.num_rows)
        size = group.world.size
        whole = batch_size * sum(use.hotness for use in stack.uses_on(rank))
        if not whole:
            return None
        ids = whole // size if group.kind.shares_lookups else whole
        # The last transfer of row ids ends at the ranks that store the rows.
        id_steps = [stage.rows for stage in group.stages(batch_size) if stage.purpose == "ids"]
        lists = len(id_steps[-1].groups[0]) if id_steps else 0
        if id_steps and id_steps[-1].collective == "all_gather":
            ids = whole * lists  # every rank receives the requests of all ranks
        return StackShape(
            rows=stack.num_rows(rank),
            width=stack.width(rank),
            dim=stack.dim,
            ids=ids,
            per_bag=max(use.hotness for use in stack.uses),
            lists=lists,
            home_ids=-(-batch_size // size) * stack.lookups() if lists else 0,
            optimizer=stack.optimizer,
            dtype=group.dtype,
            row_dtype=row_dtype,
            skew=_mean_skew(stack, rank, skew or {}),
            device=device,
        )

    def key(self) -> str:
        """Return a string that is equal for equal shapes, software versions, and thread counts."""
        facts = asdict(self) | {"threads": torch.get_num_threads(), **_software()}
        if self.device == "cpu":
            del facts["device"]  # older cache files, which are only for CPUs, lack this field
        return json.dumps(facts, default=str, sort_keys=True)


def _mean_skew(stack: TableBatch, rank: int, skew: Mapping[str, float]) -> float:
    """Return the mean skew of a rank's lookups, rounded to the nearest half."""
    uses = [(use.hotness, skew.get(use.table.name, CLICKS)) for use in stack.uses_on(rank)]
    return round(2 * sum(n * e for n, e in uses) / sum(n for n, _ in uses)) / 2


class Profile:
    """Stores measured times by ``StackShape``. Each kind of machine has one file, which several
    processes may write.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or cache_dir() / f"kernels-{machine_key()}.json"
        self._warned = False

    def find(
        self, shape: StackShape, kernels: Sequence[KernelName]
    ) -> dict[KernelName, float] | None:
        """Return the measured milliseconds of ``kernels``. Return ``None`` unless there is a valid
        entry with exactly these kernels, and log a warning if the entry is invalid.
        """
        entry = self._entries().get(shape.key())
        if entry is None:
            return None
        times: object = entry.get("ms") if isinstance(entry, dict) else None
        if _are_times(times):
            return {name: times[name] for name in kernels} if set(times) == set(kernels) else None
        self._warn("an entry does not contain milliseconds by kernel")
        return None

    def keep(self, shape: StackShape, times_ms: Mapping[KernelName, float]) -> None:
        """Add an entry and replace the file. Log a warning if the file cannot be written."""
        entries = self._entries()
        taken = datetime.now(UTC).isoformat(timespec="seconds")
        entries[shape.key()] = {"ms": dict(times_ms), "taken": taken, "cpu": cpu_name()}
        try:
            make_private(self.path.parent)
            with replacing(self.path) as partial:
                partial.write_text(json.dumps(entries, indent=1))
        except OSError as error:
            LOG.warning(
                "cannot cache kernel times, so the next start measures again: %s; set "
                "XDG_CACHE_HOME to a folder that you can write to",
                error,
            )

    def _entries(self) -> dict[str, Any]:
        """Return all entries, or {} if there is no file. Log a warning if the file is invalid."""
        try:
            return object_of(read_json(self.path, max_bytes=MOST_BYTES), str(self.path))
        except FileNotFoundError:
            return {}
        except JsonError as error:
            self._warn(str(error).removeprefix(f"{self.path}: "))
            return {}

    def _warn(self, why: str) -> None:
        if not self._warned:
            LOG.warning("%s: %s; kernels are measured again", self.path, why)
        self._warned = True


def _are_times(value: object) -> TypeGuard[dict[str, float]]:
    if not isinstance(value, dict) or not value:
        return False
    times = cast("dict[str, Any]", value).values()
    return all(is_number(ms) and 0 < ms < MOST_MS for ms in times)


def choose_by_times(unmeasured: KernelChoice, times_ms: Mapping[KernelName, float]) -> KernelChoice:
    """Choose the fastest kernel, but keep ``unmeasured`` (the choice made without measurements) if
    its time is within ``BAND`` of the minimum.
    """
    name = min(times_ms, key=times_ms.__getitem__)
    if times_ms.get(unmeasured.name, float("inf")) <= (1.0 + BAND) * times_ms[name]:
        name = unmeasured.name
    others = [f"{key} {ms:.2f}" for key, ms in sorted(times_ms.items()) if key != name]
    return KernelChoice(name, f"measured {times_ms[name]:.2f} ms ({', '.join(others)})")


def measure(shape: StackShape, kernels: Sequence[KernelName]) -> dict[KernelName, float]:
    """Return, by kernel, the minimum time of one batch on the current device in milliseconds."""
    device = torch.device("cpu")
    if shape.device != "cpu":
        device = torch.device("cuda", torch.cuda.current_device())
    generator = torch.Generator().manual_seed(1)
    rows = min(shape.rows, max(1, MOST_ELEMENTS // max(shape.width, 1)))
    lookup = _ids(shape, rows, generator, device)
    home = _draw(shape.home_ids, rows, shape.skew, generator).to(device)
    grads, home_grads = (
        torch.randn(count, shape.width, dtype=shape.dtype, generator=generator).to(device)
        for count in (lookup.num_bags, shape.home_ids)
    )
    turns: dict[KernelName, Callable[[], None]] = {
        name: _turn(_storage(name, shape, rows, device), lookup, grads, home, home_grads, rows)
        for name in kernels
    }
    times: dict[KernelName, float] = dict.fromkeys(kernels, float("inf"))
    for turn in turns.values():
        turn()  # warm-up: compiles the kernel and touches all pages
    end = time.perf_counter() + SECONDS * len(kernels)
    for number in range(MOST_ROUNDS):
        for name, turn in turns.items():
            times[name] = min(times[name], _timed_ms(turn, device))
        if number + 1 >= LEAST_ROUNDS and time.perf_counter() > end:
            break
    return times


def _timed_ms(turn: Callable[[], None], device: torch.device) -> float:
    """Return the milliseconds that a call to ``turn`` takes. On CUDA, measure device time, because
    the host runs ahead.
    """
    if device.type == "cpu":
        start = time.perf_counter()
        turn()
        return 1e3 * (time.perf_counter() - start)
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    turn()
    after.record()
    after.synchronize()
    return before.elapsed_time(after)


def _turn(
    storage: RowKernel, lookup: Lookup, grads: Tensor, home: Tensor, home_grads: Tensor, rows: int
) -> Callable[[], None]:
    """Return a function that processes one batch. Each call makes new lookups, because lookups
    cache results.
    """
    lr, deduplicated = 0.01, deduplicator(storage.name, rows)

    def turn() -> None:
        if home.numel():
            wanted = deduplicated(Lookup(home))
            wanted.row_gradients(home_grads)
            wanted.pool(home_grads, wanted.inverse())
        fresh = Lookup(lookup.addresses, lookup.offsets, lookup.weights)
        storage.lookup(fresh, lr)
        storage.update(fresh, grads, lr, 1)

    return turn


def _storage(name: KernelName, shape: StackShape, rows: int, device: torch.device) -> RowKernel:
    table = TableConfig(name="measured", features=("f",), num_rows=rows, dim=shape.dim)
    shard = Shard(0, rows, 0, shape.width, table=table, rank=0)
    return make_kernel(
        KernelChoice(name, "measured"),
        rows,
        shape.width,
        dim=shape.dim,
        optimizer=shape.optimizer,
        dtype=shape.dtype,
        row_dtype=shape.row_dtype,
        device=device,
        noise=RowNoise([shard], 1, device) if shape.row_dtype != shape.dtype else None,
    )


def _ids(shape: StackShape, rows: int, generator: torch.Generator, device: torch.device) -> Lookup:
    if shape.lists:
        each = max(1, shape.ids // shape.lists**2)  # ids that a rank requests from an owner
        parts = [torch.unique(_draw(each, rows, shape.skew, generator)) for _ in range(shape.lists)]
        return Lookup(torch.cat(parts).to(device))
    ids = _draw(shape.ids, rows, shape.skew, generator).to(device)
    if shape.per_bag == 1:
        return Lookup(ids)
    ends = range(0, shape.ids + 1, shape.per_bag)
    return Lookup(ids[: ends[-1]], torch.tensor(ends, device=device))


def _draw(count: int, rows: int, skew: float, generator: torch.Generator) -> Tensor:
    ids = (torch.rand(count, generator=generator, dtype=torch.float64) ** skew * rows).long()
    return (ids * spread_of(rows)).remainder(rows).to(torch.int32)


def spread_of(num_rows: int) -> int:
    """Return a number without a factor in common with ``num_rows``. Row IDs that are multiplied by
    it, modulo ``num_rows``, stay distinct, and hot rows are spread over the table, as in prepared
    sets.
    """
    return next(n for n in range(7919, 2 * 7919) if math.gcd(n, num_rows) == 1)


def _software() -> dict[str, str]:
    versions = {"torch": str(torch.__version__)}
    for name in (package for kernel in COMPILED.values() for package in kernel.packages):
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions
