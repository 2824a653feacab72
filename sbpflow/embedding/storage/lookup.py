"""Defines ``Lookup``, the rows that one batch uses: addresses, bags, and derived data."""

from collections.abc import Sequence
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from sbpflow.embedding.storage.sorted_segments import SortedSegments


class Lookup:
    """Addresses, the bags they form, and their weights; sorted and deduplicated once, on demand.

    ``addresses`` is int32 or int64 [n]. ``offsets`` is int64 [bags + 1], or ``None`` if every bag
    has one address. ``weights`` is [n], or ``None`` if all weights are 1. On CUDA, deduplication
    makes the host wait for the number of unique rows unless ``num_unique`` is set. Addresses are
    row numbers of a store or, before an exchange, numbers that are unique over all ranks. They
    determine the order in which rows are sorted and summed, and how they are rounded. The slots of
    the rows, which the row store chooses, affect none of this.
    """

    def __init__(
        self, addresses: Tensor, offsets: Tensor | None = None, weights: Tensor | None = None
    ) -> None:
        self.addresses = addresses
        self.offsets = offsets
        self.weights = weights
        # [n] from ``RowStore.admit``; ``None`` if each row's slot number is its row number.
        self.placed: Tensor | None = None
        self.graph: Tensor | None = None  # output of TBE, whose backward is the fused update
        self.num_unique: int | None = None
        self._sorted: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
        self._runs: SortedSegments | None = None

    @staticmethod
    def merge(lookups: Sequence["Lookup"]) -> "Lookup":
        """Join the lookups of several batches; keep the order of their bags."""
        if len(lookups) == 1:
            return lookups[0]
        addresses = torch.cat([lookup.addresses for lookup in lookups])
        placed = None
        if any(lookup.placed is not None for lookup in lookups):
            placed = torch.cat([lookup.slots for lookup in lookups])
        weights = None
        if any(lookup.weights is not None for lookup in lookups):
            like = next(a.weights for a in lookups if a.weights is not None)
            parts = [
                like.new_ones(a.addresses.numel()) if a.weights is None else a.weights
                for a in lookups
            ]
            weights = torch.cat(parts)
        if all(lookup.offsets is None for lookup in lookups):
            return Lookup(addresses, None, weights).place(placed)
        lengths = torch.cat([lookup.explicit_offsets().diff() for lookup in lookups])
        offsets = F.pad(torch.cumsum(lengths, 0), (1, 0))
        return Lookup(addresses, offsets, weights).place(placed)

    def tensors(self) -> list[Tensor | None]:
        """Return the tensors of the lookup, including the sorted ones if they exist."""
        ordered = () if self._runs is None else self._runs.tensors()
        return [self.addresses, self.offsets, self.weights, *ordered]

    def new_like(self) -> "Lookup":
        """Return a lookup whose tensors have the same sizes but uninitialized values."""
        offsets, weights = (
            None if tensor is None else torch.empty_like(tensor)
            for tensor in (self.offsets, self.weights)
        )
        lookup = Lookup(torch.empty_like(self.addresses), offsets, weights)
        if self._runs is not None:
            lookup._runs = SortedSegments(*map(torch.empty_like, self._runs.tensors()))
        return lookup

    def place(self, slots: Tensor | None) -> Self:
        """Set the slots [n] of the rows. ``None`` means that slots equal addresses."""
        self.placed = slots
        return self

    @property
    def slots(self) -> Tensor:
        """Return the slots [n] of the rows in a kernel's block."""
        return self.addresses if self.placed is None else self.placed

    @property
    def num_bags(self) -> int:
        if self.offsets is None:
            return self.addresses.numel()
        return self.offsets.numel() - 1

    def explicit_offsets(self) -> Tensor:
        """Return offsets (int64 [bags + 1]), even if every bag has one address."""
        if self.offsets is not None:
            return self.offsets
        return torch.arange(self.addresses.numel() + 1, device=self.addresses.device)

    def rows(self) -> Tensor:
        """Return the unique addresses in ascending order."""
        return self._dedup()[0]

    def row_slots(self) -> Tensor:
        """Return the slots of ``rows``."""
        rows, order, starts, _ = self._dedup()
        if self.placed is None:
            return rows
        return self.placed.index_select(0, order.index_select(0, starts))

    def inverse(self) -> Tensor:
        """Return the index [n] of each address among the unique addresses."""
        _, order, _, run = self._dedup()
        return torch.empty_like(order).scatter_(0, order, run)

    def row_gradients(self, grads: Tensor) -> tuple[Tensor, Tensor]:
        """Return the unique rows and, for each row, the sum of its bags' ``grads`` ([unique,
        width]), added in order.
        """
        rows, order, starts, _ = self._dedup()
        if rows.numel() == 0:
            return rows, grads.new_zeros(0, grads.shape[1])
        return rows, self._segment_sums(grads, order, starts)

    def spread_gradients(self, grads: Tensor) -> tuple[Tensor, Tensor]:
        """Like ``row_gradients``, but padded to [n] and [n, width] with copies of the last row.

        Writing the same row again has no effect, so the host need not know the number of unique
        rows.
        """
        if self.addresses.numel() == 0:
            return self.addresses, grads.new_zeros(0, grads.shape[1])
        runs = self.runs()
        sums = self._segment_sums(grads, runs.order, runs.starts)
        rows = runs.keys.index_select(0, runs.starts.index_select(0, runs.slots))
        return rows, sums.index_select(0, runs.slots)

    def spread_slots(self, rows: Tensor) -> Tensor:
        """Return the slots of the rows returned by ``spread_gradients``."""
        if self.placed is None or self.addresses.numel() == 0:
            return rows
        runs = self.runs()
        heads = runs.starts.index_select(0, runs.slots)
        return self.placed.index_select(0, runs.order.index_select(0, heads))

    def unique_up_to(self, lasts: Tensor) -> Tensor:
        """Return the number of unique rows up to each of the ascending ``lasts``, as int64."""
        if self.addresses.numel() == 0:
            return torch.zeros(lasts.shape, dtype=torch.int64, device=lasts.device)
        if not self.addresses.is_cuda:
            return torch.searchsorted(self.rows(), lasts, right=True)
        runs = self.runs()
        numbers = torch.cat([runs.number, runs.number[-1:] + 1])
        return numbers.index_select(0, torch.searchsorted(runs.keys, lasts, right=True))

    def bags_of(self, order: Tensor) -> Tensor:
        """Return the bags (int64 [n]) of the addresses at positions ``order``."""
        if self.offsets is None:
            return order
        total = self.addresses.numel()
        bag = torch.arange(self.num_bags, device=order.device)
        bag = bag.repeat_interleave(self.offsets.diff(), output_size=total)
        return bag.index_select(0, order)

    def runs(self) -> SortedSegments:
        """Return the sorted addresses and their runs, without making the host wait. The lookup must
        have at least one address.
        """
        if self._runs is None:
            self._runs = SortedSegments.of(self.addresses)
        return self._runs

    def take(self, rows: Tensor, at: Tensor) -> Tensor:
        """Return ``rows[at]`` [n, width]."""
        return rows.index_select(0, at)

    def pool(self, rows: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return the weighted sum of the rows in each bag ([bags, width]), in the dtype of
        ``rows``.

        ``rows`` is [m, width], and ``positions`` [n] are the positions of the addresses in
        ``rows``; by default, their slots.
        """
        at = self.slots if positions is None else positions
        if self.offsets is None:
            bags = self.take(rows, at)
            return bags if self.weights is None else bags * self.weights.unsqueeze(1)
        # With several threads, ``embedding_bag`` fails for rows without columns.
        if at.numel() == 0 or rows.shape[1] == 0:
            return rows.new_zeros(self.num_bags, rows.shape[1])
        # The offsets, of which there are fewer, are converted to the dtype of the positions.
        if at.numel() >= 1 << 31:
            at = at.to(torch.int64)
        return F.embedding_bag(
            at,
            rows,
            self.offsets.to(at.dtype),
            mode="sum",
            include_last_offset=True,
            per_sample_weights=self.weights,
        )

    def _segment_sums(self, grads: Tensor, order: Tensor, starts: Tensor) -> Tensor:
        weights = None if self.weights is None else self.weights.index_select(0, order)
        # On CPU, ``embedding_bag`` is 5 to 10 times faster than ``index_add_``, and the results are
        # bit-equal.
        return F.embedding_bag(
            self.bags_of(order), grads, starts, mode="sum", per_sample_weights=weights
        )

    def _dedup(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the unique rows, the sorting order, the start of each row's run, and the run of
        each sorted position.
        """
        if self._sorted is None and self.num_unique is not None and self.addresses.numel():
            runs = self.runs()
            starts = runs.starts[: self.num_unique]
            rows = runs.keys.index_select(0, starts)
            self._sorted = (rows, runs.order, starts, runs.number)
        elif self._sorted is None:
            ordered, order = torch.sort(self.addresses, stable=True)
            rows, run, counts = torch.unique_consecutive(
                ordered, return_inverse=True, return_counts=True
            )
            starts = torch.cumsum(counts, 0) - counts
            self._sorted = (rows, order, starts, run)
        return self._sorted
