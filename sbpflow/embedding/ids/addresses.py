"""Converts table ids to row addresses.

``LocalAddresses`` is for ranks that look up ids in their own shards. ``OwnerAddresses`` is for
exchanges of individual rows; its addresses also identify the rank that owns the row. Both classes
return a ``Lookup``: addresses, the bags that they form, and a weight per address for weighted sums.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from types import ModuleType

import torch
from torch import Tensor

from sbpflow.embedding.ids.batch_ids import BatchIds, Lists
from sbpflow.embedding.ids.list_loops import find_loops
from sbpflow.embedding.plan.table_batch import FeatureLookup, TableBatch
from sbpflow.embedding.storage.lookup import Lookup

_NO_WEIGHTS = torch.empty(0)
# With at least this many boundaries between row parts, a binary search is faster than a comparison
# with every boundary.
_MOST_COMPARED = 8


class BagShape:
    """Defines how the ids of ``uses`` (lookups of tables) form bags, and the weight of each id in
    its bag.

    If the batch contains only a subset of the columns and lists, ``columns`` and ``places`` map the
    columns and lists of the uses to their positions in the batch.
    """

    def __init__(
        self,
        uses: tuple[FeatureLookup, ...],
        device: torch.device,
        *,
        ragged: bool,
        dtype: torch.dtype,
        columns: Mapping[int, int] | None = None,
        places: Mapping[int, int] | None = None,
    ) -> None:
        self.uses, self._ragged, self._dtype, self._device = uses, ragged, dtype, device
        matrix_columns = [column for use in uses for column in use.columns]
        if columns is not None:
            matrix_columns = [columns[column] for column in matrix_columns]
        self._slice = _as_slice(matrix_columns)
        self._columns = self._index(matrix_columns)
        lists = [use.place for use in uses if use.place is not None]
        lists = [places[p] if places is not None else p for p in lists]
        self._places = self._index(lists)
        self._in_order = lists == list(range(len(lists)))
        hotness = [use.hotness for use in uses]
        self._one_hot = all(count == 1 for count in hotness)
        self.of_use = self._index([n for n, use in enumerate(uses) for _ in range(use.hotness)])
        starts = [0, *accumulate(hotness)][: len(uses)]
        self._starts, self._per_sample = self._index(starts), sum(hotness)
        means = [use.table.averages for use in uses]
        self._mean = any(means) and (ragged or not self._one_hot)
        self._is_mean = torch.tensor(means, device=device)
        shares = [
            1.0 / use.hotness if use.table.averages else 1.0
            for use in uses
            for _ in range(use.hotness)
        ]
        self._shares = torch.tensor(shares, dtype=dtype, device=device)

    def read(
        self, ids: BatchIds, *, pooled: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Return the ids of the uses, and the offsets and weights of their bags: one bag per sample
        and use, or per sample if ``pooled``.

        The ids are [samples, columns] or, from lists, [n]; for lists, the second result is the
        index of each id's use. The offsets are None if every bag has one id, and the weights are
        None if all are 1.
        """
        if self._ragged:
            lists = self.lists(ids)
            lengths = lists.lengths.sum(1) if pooled else lists.lengths.reshape(-1)
            return lists.values, lists.places(), _ends(lengths), self.list_weights(lists)
        if self._slice is not None:
            matrix = ids.matrix[:, self._slice]
        else:
            matrix = ids.matrix.index_select(1, self._columns)
        samples = ids.num_samples
        weights = self._shares.expand(samples, -1).reshape(-1) if self._mean else None
        return matrix, None, self._offsets(samples, pooled=pooled), weights

    def lists(self, ids: BatchIds) -> Lists:
        """Return the lists of the uses for every sample."""
        if ids.lists is None:
            raise RuntimeError(
                "some features have lists of ids, but the batch has none; pass the lists as Bags"
            )
        if self._in_order and ids.lists.lengths.shape[1] == len(self._places):
            return ids.lists
        return ids.lists.take(self._places)

    def _offsets(self, samples: int, *, pooled: bool) -> Tensor | None:
        """Return the offsets of the bags of a matrix, or ``None`` if every bag has one id."""
        total = samples * self._per_sample
        if pooled:
            if self._per_sample == 1:
                return None
            return torch.arange(0, total + 1, self._per_sample, device=self._device)
        if self._one_hot:
            return None
        first = torch.arange(0, total, self._per_sample or 1, device=self._device)
        inner = (first.unsqueeze(1) + self._starts).view(-1)
        return torch.cat([inner, inner.new_full((1,), total)])

    def list_weights(self, lists: Lists) -> Tensor | None:
        """Return the weights of ids in lists, divided by the list length for means, or ``None`` if
        all are 1.
        """
        if not self._mean:
            return lists.weights
        lengths = lists.lengths.to(self._dtype).clamp(min=1)
        share = torch.where(self._is_mean, lengths.reciprocal(), torch.ones_like(lengths))
        shares = torch.repeat_interleave(
            share.reshape(-1), lists.lengths.reshape(-1), output_size=lists.values.numel()
        )
        return shares if lists.weights is None else shares * lists.weights

    def _index(self, places: list[int]) -> Tensor:
        return torch.tensor(places, dtype=torch.int64, device=self._device)


class LocalAddresses:
    """Converts the ids of a stack's uses to row numbers of this rank's store."""

    def __init__(
        self,
        stack: TableBatch,
        rank: int,
        device: torch.device,
        *,
        dtype: torch.dtype = torch.float32,
        columns: Mapping[int, int] | None = None,
        places: Mapping[int, int] | None = None,
        compiled: bool = True,
    ) -> None:
        uses = stack.uses_on(rank)
        self.bags = BagShape(
            uses, device, ragged=stack.ragged, dtype=dtype, columns=columns, places=places
        )
        self._ragged = stack.ragged
        shards = {shard.table.name: shard for shard in stack.shards(rank)}
        held = [shards.get(use.table.name) for use in uses]
        repeat = [1 if stack.ragged else use.hotness for use in uses]

        def per_column(values: list[int]) -> Tensor:
            spread = [value for value, n in zip(values, repeat, strict=True) for _ in range(n)]
            return torch.tensor(spread, dtype=torch.int64, device=device)

        self._shift = per_column([shard.shift if shard else 0 for shard in held])
        self._firsts = per_column([shard.row_start if shard else 0 for shard in held])
        self._lasts = per_column([shard.row_stop - 1 if shard else -1 for shard in held])
        self._loops = find_loops(device, compiled=compiled)
        self._whole = all(
            shard is not None and shard.num_rows == use.table.num_rows
            for shard, use in zip(held, uses, strict=True)
        )

    @property
    def num_uses(self) -> int:
        """Return the number of vectors that this rank looks up per sample."""
        return len(self.bags.uses)

    def make_lookup(self, ids: BatchIds, *, pooled: bool, absent: int | None = None) -> Lookup:
        """Return a lookup with one bag per (sample, use), or per sample if ``pooled``.

        Ids of rows on other ranks are left out or, if ``absent`` is set, converted to this address.
        """
        loops = self._loops if absent is None else None
        if loops is not None and self._ragged:
            return self._by_loop(loops, self.bags.lists(ids), pooled=pooled)
        wanted, use, offsets, weights = self.bags.read(ids, pooled=pooled)
        tables = [self._shift, self._firsts, self._lasts]
        if use is not None:
            tables = [table.index_select(0, use) for table in tables]
        shift, firsts, lasts = tables
        if self._whole:
            return Lookup((wanted + shift).reshape(-1), offsets, weights)
        if loops is not None:
            addresses = torch.empty(wanted.numel(), dtype=torch.int64)
            ends = torch.empty(wanted.numel() + 1, dtype=torch.int64)
            arrays = (wanted.contiguous(), *tables, addresses, ends)
            count = loops.local_matrix_addresses(*(array.numpy() for array in arrays))
            addresses = addresses[:count].clone()  # frees the rest
        else:
            addresses = (wanted + shift).reshape(-1)
            is_local = ((wanted >= firsts) & (wanted <= lasts)).reshape(-1)
            if absent is not None:
                return Lookup(torch.where(is_local, addresses, absent), offsets, weights)
            addresses = addresses[is_local]  # first, to free the addresses of all ids
            ends = _ends(is_local)
        offsets = ends if offsets is None else ends.index_select(0, offsets)
        weights = None if weights is None else weights[ends.diff() > 0]
        return Lookup(addresses, offsets, weights)

    def _by_loop(self, loops: ModuleType, lists: Lists, *, pooled: bool) -> Lookup:
        """Like ``make_lookup`` for lists, but in one compiled pass."""
        samples, uses = lists.lengths.shape
        total = lists.values.numel()
        weights = self.bags.list_weights(lists)
        all_weights = _NO_WEIGHTS if weights is None else weights.contiguous()
        out_weights = torch.empty_like(all_weights)
        addresses = torch.empty(total, dtype=torch.int64)
        offsets = torch.empty(samples * (1 if pooled else uses) + 1, dtype=torch.int64)
        values = lists.values
        ids = (values, lists.lengths, self._shift, self._firsts, self._lasts)
        arrays = (*ids, all_weights, addresses, out_weights, offsets)
        count = loops.local_addresses(*(array.contiguous().numpy() for array in arrays))
        return Lookup(addresses[:count], offsets, None if weights is None else out_weights[:count])


class OwnerAddresses:
    """Converts the ids of a stack's uses to addresses that are unique over all ranks.

    Addresses are in the order of the owning ``ranks``. Rank ``ranks[n]`` owns the addresses after
    ``lasts[n - 1]`` up to ``lasts[n]``; an address minus ``bases[n]`` is a row number of its store.
    ``num_addresses`` is the total number.
    """

    def __init__(
        self,
        stack: TableBatch,
        ranks: Sequence[int],
        device: torch.device,
        *,
        dtype: torch.dtype = torch.float32,
        address_dtype: torch.dtype = torch.int64,
        compiled: bool = True,
    ) -> None:
        self.bags = BagShape(stack.uses, device, ragged=stack.ragged, dtype=dtype)
        self._ragged, self._dtype = stack.ragged, address_dtype
        *self.bases, self.num_addresses = accumulate(map(stack.num_rows, ranks), initial=0)
        self.lasts = [stop - 1 for stop in (*self.bases[1:], self.num_addresses)]
        parts = _row_parts(stack, dict(zip(ranks, self.bases, strict=True)))
        most = max(len(table_parts) for table_parts in parts.values())
        end = torch.iinfo(address_dtype).max
        for table_parts in parts.values():  # pad all tables to the same number of parts
            table_parts.extend([(end, table_parts[-1][1])] * (most - len(table_parts)))
        all_parts = [parts[use.table.name] for use in stack.uses]
        of_use = self.bags.of_use if not stack.ragged else torch.arange(len(stack.uses))
        of_use = of_use.to(device)

        def by_part(values: list[list[int]]) -> Tensor:
            table = torch.tensor(values, dtype=address_dtype, device=device)
            return table.index_select(0, of_use).t().contiguous()

        # The first row of every part but the first, and the shifts of all parts ([parts, columns]).
        self._firsts = by_part([[first for first, _ in own[1:]] for own in all_parts])
        self._totals = by_part([[shift for _, shift in own] for own in all_parts])
        self._shift, self._steps = self._totals[0], self._totals.diff(dim=0)
        self._loops = find_loops(device, compiled=compiled)
        if self._loops is not None:
            tables = (self._shift, self._firsts, self._steps)
            self._arrays = [table.numpy() for table in tables]
        self._by_use = [table.t().contiguous() for table in (self._firsts, self._totals)]

    def make_lookup(self, ids: BatchIds) -> Lookup:
        """Return a lookup with one bag per (sample, use); addresses have the address dtype."""
        if self._loops is not None and self._ragged:
            return self._by_loop(self._loops, self.bags.lists(ids))
        wanted, use, offsets, weights = self.bags.read(ids, pooled=False)
        if self._loops is not None and self._firsts.shape[0] < _MOST_COMPARED:
            addresses = torch.empty(wanted.shape, dtype=self._dtype)
            arrays = wanted.contiguous().numpy(), *self._arrays, addresses.numpy()
            self._loops.matrix_addresses(*arrays)
        else:
            addresses = self._address(wanted, use)
        return Lookup(addresses.reshape(-1), offsets, weights)

    def _by_loop(self, loops: ModuleType, lists: Lists) -> Lookup:
        """Like ``make_lookup`` for lists, but in one compiled pass."""
        addresses = torch.empty(lists.values.shape, dtype=self._dtype)
        offsets = torch.empty(lists.lengths.numel() + 1, dtype=torch.int64)
        values = lists.values
        arrays = (values, lists.lengths, *self._by_use, addresses, offsets)
        loops.owner_addresses(*(array.contiguous().numpy() for array in arrays))
        return Lookup(addresses, offsets, self.bags.list_weights(lists))

    def _address(self, ids: Tensor, column: Tensor | None) -> Tensor:
        """Return the addresses of ``ids`` [samples, columns], or of ``ids`` [n], whose columns are
        ``column`` [n].
        """
        ids = ids.to(self._dtype)

        def of(table: Tensor) -> Tensor:
            return table if column is None else table.index_select(-1, column)

        # The shift of an id depends on its row part. If there are few parts, compare with every
        # part boundary, and add the changes in the shift at all boundaries up to the id.
        if self._firsts.shape[0] < _MOST_COMPARED:
            addresses = ids + of(self._shift)
            for first, step in zip(self._firsts, self._steps, strict=True):
                addresses += (ids >= of(first)) * of(step)
            return addresses
        # For a matrix with many parts, run one binary search per column over the first rows of the
        # parts, which are sorted. For lists, count the boundaries up to each id.
        if column is None:
            part = torch.searchsorted(
                self._firsts.t().contiguous(), ids.t().contiguous(), right=True
            )
            return ids + self._totals.gather(0, part.t())
        part = (ids.unsqueeze(0) >= of(self._firsts)).sum(0)
        return ids + self._totals[part, column]


def _row_parts(stack: TableBatch, bases: Mapping[int, int]) -> dict[str, list[tuple[int, int]]]:
    """For each table, return a sorted list of (first row, address minus row), with one entry per
    non-empty part.

    ``bases`` is the first address of each rank.
    """
    parts: dict[str, list[tuple[int, int]]] = {table.name: [] for table in stack.tables}
    for rank, base in bases.items():
        for shard in stack.shards(rank):
            parts[shard.table.name].append((shard.row_start, base + shard.shift))
    return {name: sorted(table_parts) for name, table_parts in parts.items()}


def _ends(lengths: Tensor) -> Tensor:
    """Return int64 offsets [n + 1] of bags with ``lengths``; bool lengths count as 0 or 1."""
    ends = torch.zeros(lengths.numel() + 1, dtype=torch.int64, device=lengths.device)
    torch.cumsum(lengths, 0, out=ends[1:])
    return ends


def _as_slice(columns: list[int]) -> slice | None:
    """Return the columns as a slice if they are consecutive, else ``None``."""
    if not columns or columns != list(range(columns[0], columns[0] + len(columns))):
        return None
    return slice(columns[0], columns[0] + len(columns))
