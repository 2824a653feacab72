"""The plain torch kernel: the reference, for any device, width, dtype and optimizer."""

import torch
from torch import Tensor

from sbpflow.embedding.rules.base import RowBlock, SparseOptimizer, StepNumbers, SumOverColumns
from sbpflow.embedding.storage import huge_pages
from sbpflow.embedding.storage.base import RowListener, notify
from sbpflow.embedding.storage.lookup import Lookup, sum_bags
from sbpflow.embedding.storage.rounding import RowNoise, round_randomly
from sbpflow.embedding.storage.step_numbers import KeptNumbers

# Rows of one pass of an update: gradients, states and weights of a pass stay in cache (4096 rows of
# 16 columns are 256 KiB each), which makes Adam 2.4 times faster on 200,000 rows.
CHUNK_ROWS = 4096


class TorchStorage:
    """A block of slots in plain torch: any width, dtype and optimizer.

    ``dtype`` is that of the arithmetic and of the state, ``dim`` the width of the logical table.
    Rows of half precision (``row_dtype``) are widened to it on reading and rounded at random, with
    the exact value as the mean, on writing; ``noise`` draws for them. ``fixed_size`` is for CUDA,
    and the default there: no op has a size that the addresses decide. ``slots`` of the ``rows`` fit
    at a time; by default all.
    """

    name = "torch"
    always_fixed = False  # whether ``fixed_size`` is the default on every device

    def __init__(
        self,
        rows: int,
        width: int,
        *,
        dim: int,
        optimizer: SparseOptimizer,
        dtype: torch.dtype,
        device: torch.device,
        row_dtype: torch.dtype | None = None,
        sum_over_columns: SumOverColumns | None = None,
        noise: RowNoise | None = None,
        fixed_size: bool | None = None,
        slots: int | None = None,
    ) -> None:
        slots = rows if slots is None else slots
        if fixed_size is None:
            fixed_size = self.always_fixed or device.type == "cuda"
        # Then what is not stored here is not left out: it has a slot of zeros behind the others.
        self.absent = rows if fixed_size else None
        kept = slots if self.absent is None else slots + 1
        self._weights = huge_pages.zeros((kept, width), row_dtype or dtype, device)
        self._state = {
            name: huge_pages.zeros(optimizer.state_shape(name, kept, width), dtype, device)
            for name in optimizer.state
        }
        for name, state in self._state.items():
            if start := optimizer.initial_state(name):
                state.fill_(start)
        self.weights = self._weights[:slots]
        self.state = {name: state[:slots] for name, state in self._state.items()}
        self.dtype = dtype
        self.optimizer = optimizer
        self.listeners: list[RowListener] = []
        self.kept: KeptNumbers | None = None
        self._num_rows, self._dim = rows, dim
        self._sum_over_columns = sum_over_columns
        self._noise = noise

    def sort_ahead(self, lookup: Lookup) -> None:
        if self.absent is not None and lookup.addresses.numel():
            lookup.runs()

    def lookup(self, lookup: Lookup, lr: float | None = None) -> Tensor:
        del lr
        return self.pool(self._weights, lookup)

    def pool(self, block: Tensor, lookup: Lookup) -> Tensor:
        if block.dtype == self.dtype:
            return sum_bags(block, lookup)
        rows = block.index_select(0, lookup.slots).to(self.dtype)
        if lookup.offsets is None and lookup.weights is None:
            return rows
        return sum_bags(rows, lookup, torch.arange(rows.shape[0], device=rows.device))

    def make_lookup(
        self, addresses: Tensor, offsets: Tensor | None = None, weights: Tensor | None = None
    ) -> Lookup:
        return Lookup(addresses, offsets, weights)

    def update(self, lookup: Lookup, grads: Tensor, lr: float, step: int) -> None:
        fixed = self.absent is not None
        lookup = self._indexed(lookup)
        rows, summed = lookup.spread_gradients(grads) if fixed else lookup.row_gradients(grads)
        slots = lookup.spread_slots(rows) if fixed else lookup.row_slots()
        self.step_rows(rows, slots, summed, self._squares(summed), lr, step)

    def row_gradients(self, lookup: Lookup, grads: Tensor) -> tuple[Tensor, Tensor]:
        """(unique rows ascending, their gradients summed over the batch); of a fixed size the last
        row and its sum come again and again.
        """
        fixed, lookup = self.absent is not None, self._indexed(lookup)
        return lookup.spread_gradients(grads) if fixed else lookup.row_gradients(grads)

    def _indexed(self, lookup: Lookup) -> Lookup:
        """The lookup, with this kernel's way to find unique rows."""
        return lookup

    def row_squares(self, grads: Tensor) -> Tensor:
        """[touched]: each row's sum of squares over the columns that are here.

        Not as a product with ones: BLAS works on blocks of rows, so that the last bit of a row
        would depend on which rows stand around it.
        """
        return (grads * grads).sum(1)

    def step_rows(
        self,
        rows: Tensor,
        slots: Tensor,
        grads: Tensor,
        squares: Tensor | None,
        lr: float,
        step: int,
    ) -> None:
        """One step of the rule on unique ``rows`` in ``slots``; ``squares`` are means, for state by
        row.
        """
        in_place = slots is rows
        rows = rows.to(torch.int64)
        slots = rows if in_place else slots.to(torch.int64)
        notify(self.listeners, rows)
        numbers = self.numbers(lr, step)
        count = CHUNK_ROWS if self.absent is None else max(rows.numel(), 1)
        for start in range(0, rows.numel(), count):
            part = slice(start, start + count)
            at = slots[part]
            weights = self._weights.index_select(0, at).to(self.dtype)
            block = RowBlock(
                weights=weights,
                state=self._state,
                rows=at,
                grads=grads[part],
                numbers=numbers,
                squares=None if squares is None else squares[part],
            )
            self.optimizer.apply(block)
            self._weights.index_copy_(0, at, self._as_stored(weights, rows[part], numbers))
        if self.absent is not None:
            self._weights[-1:].zero_()

    def keep_numbers(self) -> None:
        """From now on what an ``update`` takes of its step is in memory of the device, for CUDA
        graphs: one that holds an update has the numbers of the last ``write_numbers``.
        """
        self.kept = self.kept or KeptNumbers(self.weights.device, self.dtype)

    def write_numbers(self, lr: float, step: int) -> None:
        """Before a replay: the numbers of ``update`` at this learning rate and step of the job."""
        if self.kept is None:
            raise RuntimeError("numbers for the device, which keeps none")
        self.kept.write(self.optimizer.numbers(lr, step))

    def numbers(self, lr: float, step: int) -> StepNumbers:
        """What an update takes of its step; written here, unless a graph is captured."""
        if self.kept is None:
            return self.optimizer.numbers(lr, step)
        if not (self.weights.is_cuda and torch.cuda.is_current_stream_capturing()):
            self.write_numbers(lr, step)
        return self.kept.read()

    def noise_of_rows(self) -> RowNoise:
        """What rounds rows of half precision."""
        if self._noise is None:
            raise RuntimeError("rows of half precision need the noise that rounds them")
        return self._noise

    def _as_stored(self, weights: Tensor, rows: Tensor, numbers: StepNumbers) -> Tensor:
        if self.weights.dtype == self.dtype:
            return weights
        noise = self.noise_of_rows().draw(rows, weights.shape[1], numbers.step)
        return round_randomly(weights, self.weights.dtype, noise)

    def _squares(self, grads: Tensor) -> Tensor | None:
        """Mean squares over the row that has one state; all ranks that share it take part."""
        if not self.optimizer.has_row_state:
            return None
        squares = self.row_squares(grads)
        if self._sum_over_columns is not None:
            squares = self._sum_over_columns(squares)
        width = self._dim if self.optimizer.shares_row_state else grads.shape[1]
        return squares.mul_(1.0 / max(width, 1))  # a shard of no columns has squares of nothing
