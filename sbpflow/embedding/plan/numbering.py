"""How ids identify the rows of a table: by row number or by 64-bit key.

Ids are converted to addresses, and ranks own ranges of addresses. For row numbers, the address is
the id itself. The address of a key is an invertible mix of its bits, so that equal address ranges
hold about equal numbers of keys, whatever the distribution of the keys. Which row a key has is
known only to a map on the owner (``storage/keyed.py``).
"""

import torch
from torch import Tensor

from sbpflow.runtime.random.streams import GAMMA, mix, unmix

ANY_ID = 2**63 - 1  # as ``num_ids``: every 64-bit id is valid
_FIRST, _COUNT = -(2**63), 2**64  # of the addresses of keys


class Numbering:
    """The id-dependent operations of a table; in this class, ids are row numbers."""

    def num_ids(self, num_rows: int) -> int:
        """Ids must be in ``range(num_ids)``; all ids are valid if it is ``ANY_ID``."""
        return num_rows

    def addresses(self, ids: Tensor) -> Tensor:
        """The address of each id."""
        return ids

    def span(self, start: int, stop: int, num_rows: int) -> tuple[int, int]:
        """First and last address of rows [start, stop) of ``num_rows``.

        Inclusive, because the last address can be the largest int64.
        """
        return start, stop - 1

    def shift(self, base: int, start: int) -> int:
        """Row minus address in a store that has row ``start`` at ``base``."""
        return base - start

    def counters(self, addresses: Tensor, dim: int, stream: int) -> Tensor:
        """[n] int64: the position in a random stream where each row's initial values start."""
        return addresses.to(torch.int64) * dim * GAMMA + stream


class Keys(Numbering):
    """Ids are keys. A store numbers its rows itself, so addresses are not shifted.

    A range of rows has the same share of the address space as of the table's rows, whichever rank
    holds it, so the ranges of all shards cover the address space.
    """

    def num_ids(self, num_rows: int) -> int:
        return ANY_ID

    def addresses(self, ids: Tensor) -> Tensor:
        return mix(ids.to(torch.int64))

    def span(self, start: int, stop: int, num_rows: int) -> tuple[int, int]:
        return _FIRST + _COUNT * start // num_rows, _FIRST + _COUNT * stop // num_rows - 1

    def shift(self, base: int, start: int) -> int:
        return 0

    def counters(self, addresses: Tensor, dim: int, stream: int) -> Tensor:
        # Mixed again, because multiplying by ``dim`` would lose the upper bits of the address.
        return mix(addresses + stream)


def keys_of(addresses: Tensor) -> Tensor:
    """The keys that have these addresses: the inverse of ``Keys.addresses``."""
    return unmix(addresses)


NUMBERINGS: dict[bool, Numbering] = {False: Numbering(), True: Keys()}  # by ``TableConfig.by_key``
