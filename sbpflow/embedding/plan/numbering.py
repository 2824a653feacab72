"""Defines how ids identify the rows of a table: by row number or by 64-bit key.

Ids are converted to addresses, and each rank owns a range of addresses. For row numbers, the
address is the id itself. The address of a key is an invertible mix of its bits, so that equal
address ranges contain about equal numbers of keys for any distribution of the keys. Only a map on
the owner knows which row a key has (``storage/keyed.py``).
"""

import torch
from torch import Tensor

from sbpflow.runtime.random.streams import GAMMA, mix, unmix

ANY_ID = 2**63 - 1  # as ``num_ids``, it makes every 64-bit id valid
_FIRST, _COUNT = -(2**63), 2**64  # range of key addresses


class Numbering:
    """The id-dependent operations of a table; in this base class, ids are row numbers."""

    def num_ids(self, num_rows: int) -> int:
        """Return the limit of ids: ids must be in ``range(num_ids)``, unless it is ``ANY_ID``."""
        return num_rows

    def addresses(self, ids: Tensor) -> Tensor:
        """Return the address of each id."""
        return ids

    def span(self, start: int, stop: int, num_rows: int) -> tuple[int, int]:
        """Return the first and last address of rows [start, stop) of ``num_rows``.

        The span is inclusive, because the last address can be the largest int64.
        """
        return start, stop - 1

    def shift(self, base: int, start: int) -> int:
        """Return a row's number minus its address in a store with row ``start`` at ``base``."""
        return base - start

    def counters(self, addresses: Tensor, dim: int, stream: int | Tensor) -> Tensor:
        """Return the position [n] int64 in a random stream where rows' initial values start."""
        return addresses.to(torch.int64) * dim * GAMMA + stream


class Keys(Numbering):
    """Identifies rows by key. A store of keys numbers its rows itself, so addresses are not
    shifted.

    A range of n % of the table's rows has n % of the address space on any rank, so the ranges of
    all shards cover the address space.
    """

    def num_ids(self, num_rows: int) -> int:
        return ANY_ID

    def addresses(self, ids: Tensor) -> Tensor:
        return mix(ids.to(torch.int64))

    def span(self, start: int, stop: int, num_rows: int) -> tuple[int, int]:
        return _FIRST + _COUNT * start // num_rows, _FIRST + _COUNT * stop // num_rows - 1

    def shift(self, base: int, start: int) -> int:
        return 0

    def counters(self, addresses: Tensor, dim: int, stream: int | Tensor) -> Tensor:
        # Mix again, because multiplying by ``dim`` would lose the upper bits of the address.
        return mix(addresses + stream)


def keys_of(addresses: Tensor) -> Tensor:
    """Return the keys that have these addresses: the inverse of ``Keys.addresses``."""
    return unmix(addresses)


NUMBERINGS: dict[bool, Numbering] = {False: Numbering(), True: Keys()}  # by ``TableConfig.by_key``
