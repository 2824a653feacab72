"""Computes the initial values of shards and of individual rows; numba and torch give equal
values.
"""

import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec

import torch
from torch import Tensor

from sbpflow.embedding.plan.tables import Shard
from sbpflow.embedding.rules.base import SparseOptimizer
from sbpflow.embedding.state import StoredShard
from sbpflow.embedding.storage.selected_rows import SelectedRows
from sbpflow.embedding.storage.store import WEIGHTS
from sbpflow.runtime.random.streams import GAMMA, fill_uniform, mix, stream_key, uniform_rows

# Above this number of elements, torch takes longer than loading numba does (0.5 s).
LEAST_ELEMENTS = 1 << 20
_ROWS_AT_A_TIME = 1 << 16


def fill_shard(stored: StoredShard, *, seed: int) -> None:
    """Fill a shard with its initial values, which depend only on (seed, table, row, column).

    They are distributed as U(-initial_range, initial_range). In a growing table, only the shared
    row starts with these values.
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


def initial_values(
    shards: Sequence[Shard],
    *,
    seed: int,
    optimizer: SparseOptimizer,
    width: int,
    dtype: torch.dtype,
    row_dtype: torch.dtype,
) -> Callable[..., dict[str, Tensor]]:
    """Return a function that returns the initial values and state of rows [n], by name.

    The values are those of ``fill_shard``; rows are numbered over all shards of the store. If the
    addresses of keys are passed as the second argument, the values depend only on (seed, table,
    key, column).
    """
    bases = torch.tensor([shard.base for shard in shards])
    shifts = torch.tensor([shard.shift * shard.table.dim for shard in shards])
    streams = torch.tensor([stream_key(seed, shard.table.name) for shard in shards])
    offsets = streams - shifts * GAMMA
    ranges = torch.tensor([shard.table.initial_range for shard in shards], dtype=torch.float64)

    def values(rows: Tensor, addresses: Tensor | None = None) -> dict[str, Tensor]:
        first = shards[0]  # all shards of a store have the same columns
        rows, device = rows.to(torch.int64), rows.device
        shard_of = torch.searchsorted(bases[1:].to(device), rows, right=True)
        if addresses is None:
            counters = rows * first.table.dim * GAMMA + offsets.to(device)[shard_of]
        else:  # Multiplying by the dim would lose the upper bits of the address.
            counters = mix(addresses + streams.to(device)[shard_of])
        bounds = ranges.to(device)[shard_of]
        weights = _uniform_rows(counters, width, bounds, first.col_start, row_dtype)
        state = {
            name: torch.full(
                optimizer.state_shape(name, rows.numel(), width),
                optimizer.initial_state(name),
                dtype=dtype,
                device=device,
            )
            for name in optimizer.state
        }
        return {WEIGHTS: weights, **state}

    return values


def _uniform_rows(
    counters: Tensor, width: int, bounds: Tensor, first_column: int, dtype: torch.dtype
) -> Tensor:
    """Return ``uniform_rows`` with a bound per row. Use the compiled loop if numba is already
    loaded.
    """
    if counters.device.type != "cpu" or "numba" not in sys.modules:
        return uniform_rows(counters, width, bounds.unsqueeze(1), first_column).to(dtype)
    from sbpflow.embedding.storage import compiled

    is_exact = dtype in (torch.float32, torch.float64)
    values = torch.empty(counters.numel(), width, dtype=dtype if is_exact else torch.float64)
    compiled.fill_uniform_rows(values.numpy(), counters.numpy(), bounds.numpy(), first_column)
    return values.to(dtype)


def _fill(out: Tensor, shard: Shard, seed: int, skipped: int = 0) -> None:
    """Fill ``out``, which is the shard without its first ``skipped`` rows."""
    bound, first_row, dim = shard.table.initial_range, shard.row_start + skipped, shard.table.dim
    worth_compiling = "numba" in sys.modules or out.numel() >= LEAST_ELEMENTS
    if out.device.type != "cpu" or not worth_compiling or find_spec("numba") is None:
        fill_uniform(
            out,
            seed=seed,
            name=shard.table.name,
            bound=bound,
            num_columns=dim,
            first_row=first_row,
            first_column=shard.col_start,
        )
        return
    from sbpflow.embedding.storage import compiled

    key = stream_key(seed, shard.table.name)
    for start in range(0, out.shape[0], _ROWS_AT_A_TIME):
        part = out[start : start + _ROWS_AT_A_TIME]
        is_exact = out.dtype in (torch.float32, torch.float64) and part.is_contiguous()
        values = part if is_exact else torch.empty(part.shape, dtype=torch.float64)
        row = first_row + start
        compiled.fill_uniform(values.numpy(), key, bound, dim, row, shard.col_start)
        if not is_exact:
            part.copy_(values)
