"""Starting values of a shard or of single rows: compiled where that pays, the same everywhere."""

import sys
from collections.abc import Sequence
from importlib.util import find_spec

import torch
from torch import Tensor

from sbpflow.embedding.plan.tables import Shard
from sbpflow.embedding.rules.base import SparseOptimizer
from sbpflow.embedding.state import StoredShard
from sbpflow.embedding.storage.keyed import KeyedStore, TrainedRows
from sbpflow.embedding.storage.store import WEIGHTS
from sbpflow.runtime.random.streams import fill_uniform, stream_key, uniform_rows

# Where the torch loop takes longer than loading numba does (about half a second).
LEAST_ELEMENTS = 1 << 20
_ROWS_AT_A_TIME = 1 << 16


def fill_shard(stored: StoredShard, *, seed: int) -> None:
    """U(-initial_range, initial_range) by (seed, table, row, column), as ``fill_uniform``.

    Rows by key are filled when their keys come.
    """
    store, rows = stored.store, stored.rows
    if isinstance(store, KeyedStore | TrainedRows):
        return
    if store.is_in_place:
        _fill(stored.weights, stored.shard, seed)
        return
    for start in range(rows.start, rows.stop, _ROWS_AT_A_TIME):
        part = slice(start, min(start + _ROWS_AT_A_TIME, rows.stop))
        values = store.read(slice(0, 0))[WEIGHTS].new_empty(part.stop - start, store.width)
        _fill(values, stored.shard, seed, start - rows.start)
        store.write(part, {WEIGHTS: values})


def initial_rows(
    rows: Tensor,
    shards: Sequence[Shard],
    *,
    seed: int,
    optimizer: SparseOptimizer,
    width: int,
    dtype: torch.dtype,
    row_dtype: torch.dtype,
) -> dict[str, Tensor]:
    """What ``fill_shard`` writes to these rows [n] of a rank's shards, which lie one after the
    other, and their state; of a keyed table, by (seed, table, key, column), rows are addresses.
    """
    rows = rows.to(torch.int64)
    weights = torch.empty(rows.numel(), width, dtype=row_dtype, device=rows.device)
    bases = torch.tensor([shard.base for shard in shards], dtype=torch.int64, device=rows.device)
    of = torch.searchsorted(bases[1:], rows, right=True)
    for number, shard in enumerate(shards):
        here = (of == number).nonzero().squeeze(1)
        table = shard.table
        counters = table.numbering.counters(
            rows[here] - shard.shift, table.dim, stream_key(seed, table.name)
        )
        values = uniform_rows(counters, width, table.initial_range, shard.col_start)
        weights[here] = values.to(row_dtype)
    state = {
        name: torch.full(
            optimizer.state_shape(name, rows.numel(), width),
            optimizer.initial_state(name),
            dtype=dtype,
            device=rows.device,
        )
        for name in optimizer.state
    }
    return {WEIGHTS: weights, **state}


def _fill(out: Tensor, shard: Shard, seed: int, skipped: int = 0) -> None:
    """``out`` are the shard's rows after the first ``skipped``."""
    bound, first_row = shard.table.initial_range, shard.row_start + skipped
    compiled_here = "numba" in sys.modules or out.numel() >= LEAST_ELEMENTS
    if out.device.type != "cpu" or not compiled_here or find_spec("numba") is None:
        fill_uniform(
            out,
            seed=seed,
            name=shard.table.name,
            bound=bound,
            num_columns=shard.table.dim,
            first_row=first_row,
            first_column=shard.col_start,
        )
        return
    from sbpflow.embedding.storage import compiled

    key = stream_key(seed, shard.table.name)
    for start in range(0, out.shape[0], _ROWS_AT_A_TIME):
        part = out[start : start + _ROWS_AT_A_TIME]
        whole = out.dtype in (torch.float32, torch.float64) and part.is_contiguous()
        values = part if whole else torch.empty(part.shape, dtype=torch.float64)
        compiled.fill_uniform(
            values.numpy(),
            key,
            bound,
            shard.table.dim,
            first_row + start,
            shard.col_start,
        )
        if not whole:
            part.copy_(values)
