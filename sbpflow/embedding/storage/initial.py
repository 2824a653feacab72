"""Computes the initial values of shards and of individual rows; numba and torch give equal
values.
"""

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

from sbpflow.embedding.plan.tables import Shard
from sbpflow.embedding.rules.base import SparseOptimizer
from sbpflow.embedding.state import StoredShard
from sbpflow.embedding.storage.selected_rows import SelectedRows
from sbpflow.embedding.storage.store import WEIGHTS, Array
from sbpflow.runtime.compute.devices import upload
from sbpflow.runtime.random.splitmix import signed
from sbpflow.runtime.random.streams import GAMMA, mix, stream_key, uniform_rows

# For more elements than this, initialization with torch takes longer than loading numba (0.5 s).
LEAST_ELEMENTS = 1 << 20
_ROWS_AT_A_TIME, _ELEMENTS_AT_A_TIME = 1 << 16, 1 << 17  # these elements fit in a core's cache
_EXACT = {torch.float32, torch.float64}  # dtypes that the compiled loops write


def fill_shard(stored: StoredShard, *, seed: int) -> None:
    """Fill a shard with its initial values, which depend only on (seed, table, row, column).

    Initial values are distributed as U(-initial_range, initial_range). In a growing table, only the
    shared row starts with these values.
    """
    store, rows = stored.store, stored.rows
    if isinstance(store, SelectedRows) or store.starts_initial:
        return
    if stored.shard.table.growth is not None:
        rows = slice(rows.start, rows.start + (stored.shard.row_start == 0))
    if store.is_in_place:
        _fill(store.read(rows)[WEIGHTS], stored.shard, seed)
        return
    for start in range(rows.start, rows.stop, _ROWS_AT_A_TIME):
        part = slice(start, min(start + _ROWS_AT_A_TIME, rows.stop))
        values = store.read(slice(0, 0))[WEIGHTS].new_empty(part.stop - start, store.width)
        _fill(values, stored.shard, seed, start - rows.start)
        store.write(part, {WEIGHTS: values})


class RowInitializer:
    """Computes the initial values and state of rows, which are numbered over all ``shards`` of a
    store.

    The values are those of ``fill_shard``. If the addresses of keys are passed, the values depend
    only on (seed, table, key, column).
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        *,
        seed: int,
        optimizer: SparseOptimizer,
        width: int,
        dtype: torch.dtype,
        row_dtype: torch.dtype,
    ) -> None:
        self._optimizer, self._width = optimizer, width
        self._dtype, self._row_dtype = dtype, row_dtype
        # All shards of a store have the same columns, but a store may have no shards.
        self._dim, self._first_column = 0, 0
        if shards:
            self._dim, self._first_column = shards[0].table.dim, shards[0].col_start
        self._bases = torch.tensor([shard.base for shard in shards])
        shifts = torch.tensor([shard.shift * shard.table.dim for shard in shards])
        self._streams = torch.tensor([stream_key(seed, shard.table.name) for shard in shards])
        self._offsets = self._streams - shifts * GAMMA
        ranges = [shard.table.initial_range for shard in shards]
        self._ranges = torch.tensor(ranges, dtype=torch.float64)
        self._copies: dict[torch.device, tuple[Tensor, ...]] = {}  # see ``_on``

    def __call__(self, rows: Tensor, addresses: Tensor | None = None) -> dict[str, Tensor]:
        """Return the initial values and state of ``rows`` [n], by name."""
        rows, device = rows.to(torch.int64), rows.device
        bases, offsets, streams, ranges = self._on(device)
        shard_of = torch.searchsorted(bases[1:], rows, right=True)
        if addresses is None:
            counters = rows * self._dim * GAMMA + offsets[shard_of]
        else:  # Multiplying by the dim would lose the upper bits of the address.
            counters = mix(addresses + streams[shard_of])
        bounds = ranges[shard_of]
        values = {
            WEIGHTS: _uniform_rows(
                counters, self._width, bounds, self._first_column, self._row_dtype
            )
        }
        for name in self._optimizer.state:
            shape = self._optimizer.state_shape(name, rows.numel(), self._width)
            start = self._optimizer.initial_state(name)
            values[name] = torch.full(shape, start, dtype=self._dtype, device=device)
        return values

    def _on(self, device: torch.device) -> tuple[Tensor, ...]:
        """Return bases, offsets, streams, and ranges on ``device``, which are copied only once."""
        if device not in self._copies:
            tensors = (self._bases, self._offsets, self._streams, self._ranges)
            self._copies[device] = tuple(upload(tensor, device) for tensor in tensors)
        return self._copies[device]

    def put(self, rows: Array, slots: Array, tensors: Mapping[str, Tensor]) -> None:
        """Set ``tensors[name][slots]`` to the values of ``rows``; tensors must be on the host."""
        if "numba" not in sys.modules or not {self._row_dtype, self._dtype} <= _EXACT:
            index = torch.from_numpy(slots).to(torch.int64)
            for name, values in self(torch.from_numpy(rows)).items():
                tensors[name].index_copy_(0, index, values)
            return
        from sbpflow.embedding.storage import compiled

        compiled.put_uniform_rows(
            tensors[WEIGHTS].numpy(),
            slots,
            rows,
            self._bases.numpy(),
            self._offsets.numpy(),
            self._ranges.numpy(),
            signed(self._dim * GAMMA % (1 << 64)),
            self._first_column,
        )
        for name in self._optimizer.state:
            block = tensors[name].view(tensors[name].shape[0], -1).numpy()
            compiled.put_value(block, slots, self._optimizer.initial_state(name))


def _uniform_rows(
    counters: Tensor, width: int, bounds: Tensor, first_column: int, dtype: torch.dtype
) -> Tensor:
    """Return the values of ``uniform_rows``, with a separate bound for each row. Use the compiled
    loop if numba is already loaded.
    """
    if counters.device.type != "cpu" or "numba" not in sys.modules:
        return uniform_rows(counters, width, bounds.unsqueeze(1), first_column).to(dtype)
    from sbpflow.embedding.storage import compiled

    is_exact = dtype in _EXACT
    values = torch.empty(counters.numel(), width, dtype=dtype if is_exact else torch.float64)
    compiled.fill_uniform_rows(values.numpy(), counters.numpy(), bounds.numpy(), first_column)
    return values.to(dtype)


def _fill(out: Tensor, shard: Shard, seed: int, skipped: int = 0) -> None:
    """Fill ``out``, which is the shard without its first ``skipped`` rows."""
    if not out.numel() or out.is_meta:  # tensors of a dry run have no values
        return
    if out.device.type == "cpu" and out.numel() >= LEAST_ELEMENTS and find_spec("numba"):
        import_module("numba")  # ``_uniform_rows`` then uses the compiled loop
    table, first = shard.table, shard.row_start + skipped
    key = stream_key(seed, table.name)
    for part in out.split(max(1, _ELEMENTS_AT_A_TIME // out.shape[1])):
        rows = torch.arange(first, first + part.shape[0], device=out.device)
        bounds = torch.full(rows.shape, table.initial_range, dtype=torch.float64, device=out.device)
        counters = rows.mul_(table.dim).mul_(GAMMA).add_(key)
        part.copy_(_uniform_rows(counters, out.shape[1], bounds, shard.col_start, out.dtype))
        first += part.shape[0]
