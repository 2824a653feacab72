"""Rounds to half precision stochastically, so that updates smaller than the precision accumulate.

The noise that decides the direction is a pure function of (seed, step, table, row or key, column).
It does not depend on which rank stores a row, or on which tables share a store.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sbpflow.embedding.plan.tables import Shard
from sbpflow.runtime.random.streams import GAMMA, mix, step_keys, stream_key

# Number of mantissa bits that float32 has but the narrow dtype lacks.
DROPPED_BITS = {torch.bfloat16: 16, torch.float16: 13}
# Each 64-bit word of random bits is shared by this many columns, which use 16 bits each.
COLUMNS_PER_WORD = 4


class RowNoise:
    """The random bits for the rows of a store; rows are numbered over all shards of the store.

    Each table has a random stream of 64-bit words per step. The element (row, column) uses 16 bits
    of word row * ceil(dim / 4) + column // 4. In growing tables, the address of a row's key takes
    the place of the row's number, and ``addresses_of`` maps ascending rows to these addresses.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        seed: int,
        device: torch.device,
        addresses_of: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.addresses_of = addresses_of
        keys = [stream_key(seed, f"rounding/{shard.table.name}") for shard in shards]
        self.keys = torch.tensor(keys, dtype=torch.int64, device=device)
        self.bases = torch.tensor([s.base for s in shards], dtype=torch.int64, device=device)
        shift = [shard.row_start - shard.base for shard in shards]
        self.shift = torch.tensor(shift, dtype=torch.int64, device=device)
        # All shards of a store have the same dim and columns, so the first shard's are used.
        dim, self.first_column = (shards[0].table.dim, shards[0].col_start) if shards else (1, 0)
        self.words_per_row = -(-dim // COLUMNS_PER_WORD)

    def draw(self, rows: Tensor, width: int, step: int | Tensor) -> Tensor:
        """Return the noise (int32 [n, width] in 0..65535) for ``rows`` (int64 [n]) at ``step``."""
        keys = step_keys(self.keys, step)
        shard = torch.searchsorted(self.bases, rows, right=True).sub_(1)
        first, skipped = divmod(self.first_column, COLUMNS_PER_WORD)
        count = -(-(skipped + width) // COLUMNS_PER_WORD)
        words = torch.arange(first, first + count, device=rows.device)
        if self.addresses_of is None:
            numbers = (rows + self.shift.index_select(0, shard)) * self.words_per_row
        else:
            numbers = self.addresses_of(rows) * self.words_per_row
        counters = (numbers.unsqueeze(1) + words) * GAMMA + keys.index_select(0, shard).unsqueeze(1)
        bits = mix(counters).view(torch.int16)[:, skipped : skipped + width]
        return bits.to(torch.int32).bitwise_and_(0xFFFF)


def round_randomly(values: Tensor, dtype: torch.dtype, noise: Tensor) -> Tensor:
    """Round ``values`` to ``dtype`` stochastically, so that the expected value is exact.

    ``noise`` has the shape of ``values`` and contains int32 values in 0..65535. The expected value
    is exact in the normal range of ``dtype``; float16 subnormals (below 6.1e-5) are rounded to
    nearest afterwards. Infinity and NaN are kept, and a finite value never becomes infinite.
    """
    bits = DROPPED_BITS[dtype]
    narrow = values.to(torch.float32)
    raw = narrow.view(torch.int32)
    finite = torch.isfinite(narrow)
    # Add uniform noise to the dropped bits, then truncate. A carry into the last kept bit occurs
    # with exactly the probability of rounding away from zero.
    moved = (raw + (noise & ((1 << bits) - 1))) & -(1 << bits)
    rounded = torch.where(finite, moved, raw).view(torch.float32)
    top = torch.finfo(dtype).max
    return torch.where(finite, rounded.clamp(-top, top), narrow).to(dtype)
