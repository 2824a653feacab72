"""From table ids to rows of a storage.

Two maps: ``LocalAddresses`` for ranks that look up ids of the whole batch in their own shards, and
``OwnerAddresses`` for the unique exchange, where an address also says which rank owns the row.
"""

import torch
from torch import Tensor

from sbpflow.embedding.group_plan import Stack
from sbpflow.embedding.storage import Access


class LocalAddresses:
    """Ids [batch, tables] of a stack to local rows of this rank's storage."""

    def __init__(self, stack: Stack, rank: int, device: torch.device) -> None:
        pieces = {piece.table.name: piece for piece in stack.pieces(rank)}
        held = [pieces.get(table.name) for table in stack.tables]
        bases = [piece.base - piece.row_start if piece else 0 for piece in held]
        starts = [piece.row_start if piece else 0 for piece in held]
        stops = [piece.row_stop if piece else 0 for piece in held]
        self._shift = torch.tensor(bases, dtype=torch.int64, device=device)
        self._starts = torch.tensor(starts, dtype=torch.int64, device=device)
        self._stops = torch.tensor(stops, dtype=torch.int64, device=device)
        self._whole = all(
            piece is not None and piece.row_start == 0 and piece.row_stop == table.num_rows
            for piece, table in zip(held, stack.tables, strict=True)
        )

    def access(self, ids: Tensor, *, pooled: bool) -> Access:
        """A bag per (sample, table), or per sample if ``pooled``; rows held elsewhere stay out."""
        batch, tables = ids.shape
        addresses = ids + self._shift
        bag = tables if pooled else 1
        if self._whole:
            if bag == 1:
                return Access(addresses.view(-1))
            offsets = torch.arange(0, batch * tables + 1, bag, device=ids.device)
            return Access(addresses.view(-1), offsets)
        here = (ids >= self._starts) & (ids < self._stops)
        lengths = here.sum(1) if pooled else here.view(-1)
        offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int64, device=ids.device)
        torch.cumsum(lengths, 0, out=offsets[1:])
        return Access(addresses[here], offsets)


class OwnerAddresses:
    """Ids [batch, tables] of a stack to job-wide addresses, consecutive per owning rank.

    Rank r's rows have addresses ``bases[r] .. bases[r + 1] - 1`` in the order of its storage.
    """

    def __init__(self, stack: Stack, world_size: int, device: torch.device) -> None:
        self.bases = [0]
        for rank in range(world_size):
            self.bases.append(self.bases[-1] + stack.num_rows(rank))
        first_rows: list[int] = []
        shifts: list[int] = []
        table_starts: list[int] = []
        start = 0
        for table in stack.tables:
            table_starts.append(start)
            for row_start, shift in _row_parts(stack, table.name, self.bases):
                first_rows.append(start + row_start)
                shifts.append(shift - start)
            start += table.num_rows
        self._table_starts = torch.tensor(table_starts, dtype=torch.int64, device=device)
        self._first_rows = torch.tensor(first_rows, dtype=torch.int64, device=device)
        self._shifts = torch.tensor(shifts, dtype=torch.int64, device=device)

    def of(self, ids: Tensor) -> Tensor:
        """[batch * tables] int64 addresses, sample by sample."""
        stacked = (ids + self._table_starts).view(-1)
        part = torch.searchsorted(self._first_rows, stacked, right=True) - 1
        return stacked + self._shifts.index_select(0, part)


def _row_parts(stack: Stack, table: str, bases: list[int]) -> list[tuple[int, int]]:
    """(first row, address minus row) of each part of a table that has rows, by first row."""
    parts: list[tuple[int, int]] = []
    for rank in range(len(bases) - 1):
        for piece in stack.pieces(rank):
            if piece.table.name == table:
                parts.append((piece.row_start, bases[rank] + piece.base - piece.row_start))
    return sorted(parts)
