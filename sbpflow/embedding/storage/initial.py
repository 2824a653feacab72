"""Starting values of a shard: compiled where that pays, the same numbers everywhere."""

import sys
from importlib.util import find_spec

import torch

from sbpflow.embedding.state import StoredShard
from sbpflow.runtime.streams import fill_uniform, stream_key

# Where the torch loop takes longer than loading numba does (about half a second).
LEAST_ELEMENTS = 1 << 20
_ROWS_AT_A_TIME = 1 << 16


def fill_shard(stored: StoredShard, *, seed: int) -> None:
    """U(-initial_range, initial_range) by (seed, table, row, column), as ``fill_uniform``."""
    out, shard = stored.weights, stored.shard
    bound = shard.table.initial_range
    compiled_here = "numba" in sys.modules or out.numel() >= LEAST_ELEMENTS
    if out.device.type != "cpu" or not compiled_here or find_spec("numba") is None:
        fill_uniform(
            out,
            seed=seed,
            name=shard.table.name,
            bound=bound,
            num_columns=shard.table.dim,
            first_row=shard.row_start,
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
            shard.row_start + start,
            shard.col_start,
        )
        if not whole:
            part.copy_(values)
