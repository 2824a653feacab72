"""Rounding at random to half precision, so that updates smaller than half a step still add up.

Up or down is a pure function of (seed, step, table, row, column): it depends neither on which rank
holds a row nor on which tables lie beside it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from sbpflow.embedding.plan.tables import Shard
from sbpflow.runtime.random.streams import GAMMA, mix, step_keys, stream_key

# Mantissa bits that float32 has and the narrow dtype has not.
_DROPPED_BITS = {torch.bfloat16: 16, torch.float16: 13}
# Columns that share the 64 bits of one draw, 16 bits each.
COLUMNS_PER_WORD = 4


class RowNoise:
    """The random bits of a storage's rows, whose shards lie one after the other.

    Bits of (table, row, column) at a step: 16 of the word with the number
    row * ceil(dim / 4) + column // 4 in the table's stream of that step.
    """

    def __init__(self, shards: Sequence[Shard], seed: int, device: torch.device) -> None:
        keys = [stream_key(seed, f"rounding/{shard.table.name}") for shard in shards]
        self.keys = torch.tensor(keys, dtype=torch.int64, device=device)
        self.bases = torch.tensor([s.base for s in shards], dtype=torch.int64, device=device)
        shift = [shard.row_start - shard.base for shard in shards]
        self.shift = torch.tensor(shift, dtype=torch.int64, device=device)
        # Shards of one storage have equal dims and columns.
        dim, self.first_column = (shards[0].table.dim, shards[0].col_start) if shards else (1, 0)
        self.words_per_row = -(-dim // COLUMNS_PER_WORD)

    def draw(self, rows: Tensor, width: int, step: int | Tensor) -> Tensor:
        """[rows, width] int32 in 0 .. 65535, for storage rows [rows] int64 at a step of the job."""
        keys = step_keys(self.keys, step)
        of = torch.searchsorted(self.bases, rows, right=True).sub_(1)
        first, skipped = divmod(self.first_column, COLUMNS_PER_WORD)
        count = -(-(skipped + width) // COLUMNS_PER_WORD)
        words = torch.arange(first, first + count, device=rows.device)
        numbers = (rows + self.shift.index_select(0, of)) * self.words_per_row
        counters = (numbers.unsqueeze(1) + words) * GAMMA + keys.index_select(0, of).unsqueeze(1)
        bits = mix(counters).view(torch.int16)[:, skipped : skipped + width]
        return bits.to(torch.int32).bitwise_and_(0xFFFF)


def round_randomly(values: Tensor, dtype: torch.dtype, noise: Tensor) -> Tensor:
    """``values`` in ``dtype``, up or down with the chances that make the exact value the mean.

    ``noise`` is int32 in 0 .. 65535, of the shape of ``values``. Exact for numbers in the normal
    range of ``dtype``; float16 rounds its subnormals (below 6.1e-5) to the nearest once more.
    Infinity and NaN stay; a finite value never becomes infinite.
    """
    bits = _DROPPED_BITS[dtype]
    narrow = values.to(torch.float32)
    raw = narrow.view(torch.int32)
    finite = torch.isfinite(narrow)
    moved = (raw + (noise & ((1 << bits) - 1))) & -(1 << bits)
    rounded = torch.where(finite, moved, raw).view(torch.float32)
    top = torch.finfo(dtype).max
    return torch.where(finite, rounded.clamp(-top, top), narrow).to(dtype)
