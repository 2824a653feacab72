"""Starting values of a shard: compiled where that pays, the same numbers everywhere."""

import sys
from importlib.util import find_spec

import torch
from torch import Tensor

from sbpflow.embedding.plan.tables import Shard
from sbpflow.embedding.state import StoredShard
from sbpflow.embedding.storage.store import WEIGHTS
from sbpflow.runtime.streams import fill_uniform, stream_key

# Where the torch loop takes longer than loading numba does (about half a second).
LEAST_ELEMENTS = 1 << 20
_ROWS_AT_A_TIME = 1 << 16


def fill_shard(stored: StoredShard, *, seed: int) -> None:
    """U(-initial_range, initial_range) by (seed, table, row, column), as ``fill_uniform``."""
    store, rows = stored.store, stored.rows
    if store.is_in_place:
        _fill(stored.weights, stored.shard, seed)
        return
    for start in range(rows.start, rows.stop, _ROWS_AT_A_TIME):
        part = slice(start, min(start + _ROWS_AT_A_TIME, rows.stop))
        values = store.read(slice(0, 0))[WEIGHTS].new_empty(part.stop - start, store.width)
        _fill(values, stored.shard, seed, start - rows.start)
        store.write(part, {WEIGHTS: values})


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
