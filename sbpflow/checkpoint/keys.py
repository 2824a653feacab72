"""Finds and reads the rows of growing tables by key, even through a chain of deltas.

The rows of a growing table are saved in the order of their keys' addresses (``mix`` of the keys),
so the number of a row may change from one checkpoint to the next. A delta contains all keys but
only the changed rows; all other rows are found by key in the previous checkpoint.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from sbpflow.checkpoint.format import BLOCK_BYTES
from sbpflow.embedding.plan.growth import first_address
from sbpflow.embedding.plan.tables import Place
from sbpflow.errors import CheckpointError
from sbpflow.runtime.random.streams import mix, unmix

if TYPE_CHECKING:
    from sbpflow.checkpoint.read import Checkpoint

_BLOCK_KEYS = BLOCK_BYTES // 8
# Rows are looked up in portions of this size; a lookup needs about 50 bytes per row.
_ROWS = 4 * _BLOCK_KEYS


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyChanges:
    """The difference between a growing table and its state in an earlier checkpoint of the chain.

    ``rows`` (int64 [n], ascending) are the rows of the later checkpoint whose keys are new or whose
    values may have changed; row 0 is the shared row, and row i + 1 belongs to key i of
    ``SavedTensor.keys``. ``is_added`` (bool [n]) marks the rows of new keys. ``removed`` (int64)
    contains the keys whose rows were removed.
    """

    rows: Tensor
    is_added: Tensor
    removed: Tensor


class Addresses:
    """The addresses of the keys in tensor ``name``, ascending. A search reads only a few blocks."""

    def __init__(self, checkpoint: "Checkpoint", name: str) -> None:
        self._checkpoint, self._name = checkpoint, name
        self.count = checkpoint.saved(name).whole.num_rows
        self._firsts: dict[int, int] = {}  # Cache of the first address of each block.
        self._last: tuple[int, Tensor] | None = None  # The block that was read last.

    def read(self, keys: slice | None = None) -> Tensor:
        """Return the addresses of a range of keys or, by default, of all keys."""
        return mix(self._checkpoint.tensor(self._name, keys))

    def at(self, numbers: Tensor) -> Tensor:
        """Return the addresses of the keys with these numbers, which must be ascending."""
        if not numbers.numel():
            return numbers
        first = int(numbers[0])
        return self.read(slice(first, int(numbers[-1]) + 1))[numbers - first]

    def within(self, first: int, last: int) -> slice:
        """Return the range of the keys that are in buckets [first, last)."""
        return slice(self._below(first_address(first)), self._below(first_address(last)))

    def find(self, addresses: Tensor) -> tuple[Tensor, Tensor]:
        """Look up ``addresses``, which must be ascending. For each one, return the number of the
        key with this address, and whether such a key exists.
        """
        if not addresses.numel() or not self.count:
            return torch.zeros_like(addresses), torch.zeros_like(addresses, dtype=torch.bool)
        # Whole blocks, because reading any part of a block verifies all of it.
        first, last = (self._block_of(int(address)) for address in (addresses[0], addresses[-1]))
        start = first * _BLOCK_KEYS
        own = self.read(slice(start, (last + 1) * _BLOCK_KEYS))
        numbers = torch.searchsorted(own, addresses).clamp_(max=own.numel() - 1)
        return numbers + start, own[numbers] == addresses

    def _below(self, address: int) -> int:
        """Return how many addresses are smaller than ``address``."""
        if not self.count:
            return 0
        block = self._block_of(address)
        return block * _BLOCK_KEYS + bisect_left(self._block(block).numpy(), address, key=int)

    def _block_of(self, address: int) -> int:
        """Return the last block whose first address is not above ``address``, or block 0."""
        blocks = range(-(-self.count // _BLOCK_KEYS))
        return max(0, bisect_right(blocks, address, key=self._first) - 1)

    def _first(self, block: int) -> int:
        if block not in self._firsts:
            self._firsts[block] = int(self._block(block)[0])
        return self._firsts[block]

    def _block(self, block: int) -> Tensor:
        if self._last is None or self._last[0] != block:
            start = block * _BLOCK_KEYS
            self._last = block, self.read(slice(start, start + _BLOCK_KEYS))
        return self._last[1]


def key_changes(members: Sequence["Checkpoint"], table: str) -> KeyChanges:
    """Return the changes that consecutive deltas, oldest first, make to a growing table.

    The changes are relative to the checkpoint that the first delta continues.
    """
    name = f"tables/{table}"
    last, before, keys = members[-1], members[0].before, members[-1].saved(name).keys
    if before is None or keys is None:
        raise CheckpointError(f"{last.path} is not a delta, or its {name} has no keys")
    own, earlier = last.addresses(keys), before.addresses(keys)
    is_changed = torch.zeros(own.count + 1, dtype=torch.bool)
    for member in members:
        rows = member.changed_rows(name)
        is_changed[0] |= bool((rows == 0).any())
        numbers, exist = own.find(member.addresses(keys).at(rows[rows > 0] - 1))
        is_changed[numbers[exist] + 1] = True
    addresses, old = own.read(), earlier.read()
    is_added = torch.cat([torch.zeros(1, dtype=torch.bool), ~earlier.find(addresses)[1]])
    rows = is_changed.nonzero().squeeze(1)
    return KeyChanges(rows=rows, is_added=is_added[rows], removed=unmix(old[~own.find(old)[1]]))


def read_by_key(delta: "Checkpoint", name: str, place: Place, target: Tensor) -> None:
    """Read the rectangle ``place`` of a growing table from a delta into ``target`` [rows,
    columns].
    """
    for start in range(place.row_start, place.row_stop, _ROWS):
        rows = torch.arange(start, min(start + _ROWS, place.row_stop))
        read_rows(delta, name, rows, place, target[start - place.row_start :])


def read_rows(
    checkpoint: "Checkpoint", name: str, rows: Tensor, columns: Place, target: Tensor
) -> None:
    """Read ``columns`` of a growing table's ``rows`` ([n], ascending) into ``target[:n]``."""
    keys = checkpoint.saved(name).keys
    if keys is None:
        raise CheckpointError(f"{checkpoint.path}: {name} is not a growing table")
    addresses = checkpoint.addresses(keys).at(rows[rows > 0] - 1)
    at = torch.arange(rows.numel())
    _read(checkpoint, name, _Rows(keys, rows, addresses, at), columns, target)


class _Rows(NamedTuple):
    """Rows to read from a checkpoint ([n]), and their indices in the result ([n]).

    ``addresses`` are the addresses of the rows' keys, which are in tensor ``keys``. The shared row
    has no key.
    """

    keys: str
    rows: Tensor
    addresses: Tensor
    at: Tensor


def _selected(wanted: _Rows, mask: Tensor) -> _Rows:
    """Return the rows that ``mask`` (bool [n]) marks."""
    has_shared = wanted.rows.numel() - wanted.addresses.numel()
    addresses = wanted.addresses[mask[has_shared:]]
    return _Rows(wanted.keys, wanted.rows[mask], addresses, wanted.at[mask])


def _read(
    checkpoint: "Checkpoint", name: str, wanted: _Rows, columns: Place, target: Tensor
) -> None:
    # For each delta, keep only the rows that it contains. With all rows, the memory would be
    # proportional to the length of the chain.
    later: list[tuple[Checkpoint, _Rows]] = []
    while wanted.rows.numel() and (before := checkpoint.before) is not None:
        rows = wanted.rows
        place = replace(columns, row_start=int(rows[0]), row_stop=int(rows[-1]) + 1)
        counts = checkpoint.num_changed(name, place, rows)
        later.append((checkpoint, _selected(wanted, counts > 0)))
        wanted = _in_previous(
            checkpoint, before, name, _selected(wanted, counts < place.width), place
        )
        checkpoint = before
    if wanted.rows.numel():
        _read_full(checkpoint, name, wanted.rows, wanted.at, columns, target)
    for delta, (_, rows, _, at) in reversed(later):
        if not rows.numel():
            continue
        place = replace(columns, row_start=int(rows[0]), row_stop=int(rows[-1]) + 1)
        for changed, part, values in delta.changes(name, place):
            index = torch.searchsorted(rows, changed)
            is_wanted = rows[index] == changed
            columns_at = slice(part.start - columns.col_start, part.stop - columns.col_start)
            _put(target[:, columns_at], at[index[is_wanted]], values[is_wanted])


def _in_previous(
    delta: "Checkpoint", before: "Checkpoint", name: str, wanted: _Rows, columns: Place
) -> _Rows:
    """Return those of the rows ``wanted`` whose keys are in the previous checkpoint, as rows of
    that checkpoint. Raise CheckpointError if the delta lacks values of the other rows.
    """
    has_shared = wanted.rows.numel() - wanted.addresses.numel()
    numbers, exist = before.addresses(wanted.keys).find(wanted.addresses)
    is_old = torch.cat([torch.ones(has_shared, dtype=torch.bool), exist])
    new = wanted.rows[~is_old]
    num_missing = new.numel() * columns.width
    if num_missing:
        num_missing -= int(delta.num_changed(name, columns, new).sum())
    if num_missing:
        raise CheckpointError(
            f"{delta.path}: {num_missing} values of {name} are missing, and {before.path} "
            "does not have their keys either; use another checkpoint"
        )
    rows = torch.cat([wanted.rows[:has_shared], numbers[exist] + 1])
    return _Rows(wanted.keys, rows, wanted.addresses[exist], wanted.at[is_old])


def _read_full(
    checkpoint: "Checkpoint", name: str, rows: Tensor, at: Tensor, columns: Place, target: Tensor
) -> None:
    """Read rows of a full checkpoint. Rows more than a block apart are read separately, because all
    rows between the first and the last row would take memory.
    """
    saved = checkpoint.saved(name)
    most = BLOCK_BYTES // max(1, saved.whole.width * saved.dtype.itemsize)
    ends = (rows.diff() > most).nonzero().squeeze(1) + 1
    for own, own_at in zip(rows.tensor_split(ends), at.tensor_split(ends), strict=True):
        first = int(own[0])
        place = replace(columns, row_start=first, row_stop=int(own[-1]) + 1)
        values = torch.empty(place.num_rows, place.width, dtype=saved.dtype)
        checkpoint.read_into(name, place, values)
        _put(target, own_at, values.index_select(0, own - first))


def _put(target: Tensor, at: Tensor, values: Tensor) -> None:
    target.index_copy_(0, at.to(target.device), values.to(target.device, target.dtype))
