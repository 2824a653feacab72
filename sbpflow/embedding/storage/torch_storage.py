"""The plain torch kernel: the reference for any device, width, dtype, and optimizer."""

import torch
from torch import Tensor

from sbpflow.embedding.rules.base import RowBlock, SparseOptimizer, StepNumbers, SumOverColumns
from sbpflow.embedding.storage import huge_pages
from sbpflow.embedding.storage.base import RowListener, notify
from sbpflow.embedding.storage.lookup import Lookup
from sbpflow.embedding.storage.rounding import RowNoise, round_randomly
from sbpflow.embedding.storage.step_numbers import DeviceNumbers

# An update processes this many rows at a time, so that their gradients, state, and weights stay in
# cache (each is 256 KiB for 4096 rows of 16 columns). The chunks make Adam 2.4 times faster on
# 200,000 rows.
CHUNK_ROWS = 4096


class TorchStorage:
    """A block of slots in plain torch, for any width, dtype, and optimizer.

    ``dtype`` is the dtype of arithmetic and state; ``dim`` is the width of the logical table.
    Half-precision rows (``row_dtype``) are widened to ``dtype`` when read and rounded
    stochastically, with ``noise``, when written. With ``fixed_size``, the default on CUDA, tensor
    sizes do not depend on the addresses. The block has ``slots`` slots; by default, one for each of
    ``rows``.
    """

    name = "torch"
    always_fixed = False  # set to True to make ``fixed_size`` the default on every device

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
        # With fixed sizes, lookups keep the ids of rows on other ranks, and read an extra slot of
        # zeros for these ids.
        self.absent = rows if fixed_size else None
        block_slots = slots if self.absent is None else slots + 1
        self._weights = huge_pages.zeros((block_slots, width), row_dtype or dtype, device)
        self._state = {
            name: huge_pages.zeros(optimizer.state_shape(name, block_slots, width), dtype, device)
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
        self.device_numbers: DeviceNumbers | None = None
        self._num_rows, self._dim = rows, dim
        self._sum_over_columns = sum_over_columns
        self._noise = noise

    def sort_ahead(self, lookup: Lookup) -> None:
        if self.absent is not None and lookup.addresses.numel():
            lookup.runs()

    def lookup(self, lookup: Lookup, lr: float | None = None) -> Tensor:
        return self.pool(self._weights, lookup)

    def pool(self, block: Tensor, lookup: Lookup) -> Tensor:
        if block.dtype == self.dtype:
            return lookup.pool(block)
        rows = block.index_select(0, lookup.slots).to(self.dtype)
        if lookup.offsets is None and lookup.weights is None:
            return rows
        return lookup.pool(rows, torch.arange(rows.shape[0], device=rows.device))

    def update(self, lookup: Lookup, grads: Tensor, lr: float, step: int) -> None:
        lookup = self._indexed(lookup)
        rows, sums = self.row_gradients(lookup, grads)
        slots = lookup.row_slots() if self.absent is None else lookup.spread_slots(rows)
        self.step_rows(rows, slots, sums, self._squares(sums), lr, step)

    def row_gradients(self, lookup: Lookup, grads: Tensor) -> tuple[Tensor, Tensor]:
        lookup = self._indexed(lookup)
        if self.absent is None:
            return lookup.row_gradients(grads)
        return lookup.spread_gradients(grads)

    def _indexed(self, lookup: Lookup) -> Lookup:
        """Return a lookup that deduplicates with this kernel's method."""
        return lookup

    def row_squares(self, grads: Tensor) -> Tensor:
        """Return each row's sum of squares over the columns on this rank ([touched]).

        A product with a vector of ones would be faster, but BLAS works on blocks of rows, so the
        last bit of a result would depend on the neighboring rows.
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
        """Take a step on the unique ``rows`` in ``slots``. ``squares`` are the mean squares of
        their gradients, needed only for row state.
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
        """From now on, make updates read their ``StepNumbers`` from device memory, for CUDA graphs.

        A replayed update uses the numbers of the last ``write_numbers``.
        """
        self.device_numbers = self.device_numbers or DeviceNumbers(self.weights.device, self.dtype)

    def write_numbers(self, lr: float, step: int) -> None:
        """Set the numbers of the next replay to this learning rate and training step."""
        if self.device_numbers is None:
            raise RuntimeError(
                "write_numbers: the numbers are not in device memory; call keep_numbers first"
            )
        self.device_numbers.write(self.optimizer.numbers(lr, step))

    def numbers(self, lr: float, step: int) -> StepNumbers:
        """Return the ``StepNumbers`` of an update. If they are in device memory, first set them,
        except during a capture.
        """
        if self.device_numbers is None:
            return self.optimizer.numbers(lr, step)
        if not (self.weights.is_cuda and torch.cuda.is_current_stream_capturing()):
            self.write_numbers(lr, step)
        return self.device_numbers.read()

    def noise_of_rows(self) -> RowNoise:
        """Return the noise for rounding half-precision rows."""
        if self._noise is None:
            raise RuntimeError("half-precision rows need noise, got None; pass noise=RowNoise(...)")
        return self._noise

    def _as_stored(self, weights: Tensor, rows: Tensor, numbers: StepNumbers) -> Tensor:
        if self.weights.dtype == self.dtype:
            return weights
        noise = self.noise_of_rows().draw(rows, weights.shape[1], numbers.step)
        return round_randomly(weights, self.weights.dtype, noise)

    def _squares(self, grads: Tensor) -> Tensor | None:
        """Return the mean square of each row's gradient over all ranks that share the row, or
        ``None`` without row state.
        """
        if not self.optimizer.has_row_state:
            return None
        squares = self.row_squares(grads)
        if self._sum_over_columns is not None:
            squares = self._sum_over_columns(squares)
        width = self._dim if self.optimizer.shares_row_state else grads.shape[1]
        return squares.mul_(1.0 / max(width, 1))  # a shard may have no columns
