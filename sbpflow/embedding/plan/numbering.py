"""How ids name the rows of a table: by number, or as keys of 64 bits, each with a row of its own.

Ids become addresses, and ranks own ranges of addresses. Dense row numbers are the simple case: an
address is the id, and its row is known by counting. The address of a key is an invertible mix of
its bits, so that equal ranges get about equal numbers of rows whatever the keys look like; which
row it has, if any, is known to a map at its owner alone (``storage/keyed.py``).
"""

from typing import Protocol

import torch
from torch import Tensor

from sbpflow.runtime.random.streams import GAMMA, mix, unmix

ANY_ID = 2**63 - 1  # as a number of ids: every id of 64 bits is legal
_FIRST, _COUNT = -(2**63), 2**64  # of addresses of keys


class Numbering(Protocol):
    """All that is to be known of the ids of a table, however they name rows."""

    def num_ids(self, num_rows: int) -> int:
        """Ids are below it and not below 0; with ``ANY_ID`` all are legal."""
        ...

    def addresses(self, ids: Tensor) -> Tensor:
        """The address of each id."""
        ...

    def span(self, start: int, stop: int, num_rows: int) -> tuple[int, int]:
        """First and last address of what holds rows [start, stop) of the table's ``num_rows``.

        The last is of the range, for a range may end with the last number of int64.
        """
        ...

    def shift(self, base: int, start: int) -> int:
        """From addresses to rows of a store that has row ``start`` at ``base``."""
        ...

    def counters(self, addresses: Tensor, dim: int, stream: int) -> Tensor:
        """[n] int64: where in a stream of numbers the initial values of each row begin."""
        ...


class RowNumbers:
    """Ids are row numbers."""

    def num_ids(self, num_rows: int) -> int:
        return num_rows

    def addresses(self, ids: Tensor) -> Tensor:
        return ids

    def span(self, start: int, stop: int, num_rows: int) -> tuple[int, int]:
        del num_rows
        return start, stop - 1

    def shift(self, base: int, start: int) -> int:
        return base - start

    def counters(self, addresses: Tensor, dim: int, stream: int) -> Tensor:
        return addresses.to(torch.int64) * dim * GAMMA + stream


class Keys:
    """Ids are keys. A store numbers its rows itself, so there is nothing to shift.

    The range that goes with some rows is their share of all addresses, whoever holds them, so that
    ranges of parts of rows make up the range of the whole.
    """

    def num_ids(self, num_rows: int) -> int:
        del num_rows
        return ANY_ID

    def addresses(self, ids: Tensor) -> Tensor:
        return mix(ids.to(torch.int64))

    def span(self, start: int, stop: int, num_rows: int) -> tuple[int, int]:
        return _FIRST + _COUNT * start // num_rows, _FIRST + _COUNT * stop // num_rows - 1

    def shift(self, base: int, start: int) -> int:
        del base, start
        return 0

    def counters(self, addresses: Tensor, dim: int, stream: int) -> Tensor:
        # Mixed once more: a product with ``dim`` would lose the upper bits of an address.
        del dim
        return mix(addresses + stream)


def keys_of(addresses: Tensor) -> Tensor:
    """The keys that have these addresses."""
    return unmix(addresses)


NUMBERINGS: dict[bool, Numbering] = {False: RowNumbers(), True: Keys()}  # by ``TableConfig.by_key``
