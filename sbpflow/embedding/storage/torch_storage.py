"""Rows with plain torch kernels: the reference, for any device, width, dtype and optimizer."""

import torch
from torch import Tensor

from sbpflow.embedding.rules.base import RowBlock, SparseOptimizer, StepNumbers, SumOverColumns
from sbpflow.embedding.storage import huge_pages
from sbpflow.embedding.storage.access import Access, sum_bags
from sbpflow.embedding.storage.base import BeforeUpdate
from sbpflow.embedding.storage.rounding import RowNoise, round_randomly
from sbpflow.embedding.storage.step_numbers import KeptNumbers

# Rows of one pass of an update: gradients, states and weights of a pass stay in cache (4096 rows of
# 16 columns are 256 KiB each), which makes Adam 2.4 times faster on 200,000 rows.
CHUNK_ROWS = 4096


class TorchStorage:
    """Device-resident rows with plain torch kernels: any width, dtype and optimizer.

    ``dtype`` is that of the arithmetic and of the state, ``dim`` the width of the logical table.
    Rows of half precision (``row_dtype``) are widened to it on reading and rounded at random, with
    the exact value as the mean, on writing; ``noise`` draws for them. ``fixed_size`` is for CUDA,
    and the default there: no op has a size that the addresses decide.
    """

    kernel = "torch"
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
    ) -> None:
        if fixed_size is None:
            fixed_size = self.always_fixed or device.type == "cuda"
        # Then what is not stored here is not left out: it has a row of zeros behind the others.
        self.absent = rows if fixed_size else None
        kept = rows if self.absent is None else rows + 1
        self._weights = huge_pages.zeros((kept, width), row_dtype or dtype, device)
        self._state = {
            name: huge_pages.zeros(optimizer.state_shape(name, kept, width), dtype, device)
            for name in optimizer.state
        }
        for name, state in self._state.items():
            if start := optimizer.initial_state(name):
                state.fill_(start)
        self.weights = self._weights[:rows]
        self.state = {name: state[:rows] for name, state in self._state.items()}
        self.dtype = dtype
        self.optimizer = optimizer
        self.before_update: BeforeUpdate | None = None
        self.kept: KeptNumbers | None = None
        self._dim = dim
        self._sum_over_columns = sum_over_columns
        self._noise = noise

    def prefetch(self, addresses: Tensor) -> None:
        """Nothing to do: the rows are on the device."""

    def release(self, addresses: Tensor) -> None:
        """Nothing to do: the rows stay on the device."""

    def sort_ahead(self, access: Access) -> None:
        if self.absent is not None and access.addresses.numel():
            access.runs()

    def lookup(self, access: Access, lr: float | None = None) -> Tensor:
        del lr
        if self.weights.dtype == self.dtype:
            return sum_bags(self._weights, access)
        rows = self._weights.index_select(0, access.addresses).to(self.dtype)
        if access.offsets is None and access.weights is None:
            return rows
        return sum_bags(rows, access, torch.arange(rows.shape[0], device=rows.device))

    def access(
        self, addresses: Tensor, offsets: Tensor | None = None, weights: Tensor | None = None
    ) -> Access:
        return Access(addresses, offsets, weights)

    def update(self, access: Access, grads: Tensor, lr: float, step: int) -> None:
        rows, summed = self.row_gradients(access, grads)
        self.step_rows(rows, summed, self._squares(summed), lr, step)

    def row_gradients(self, access: Access, grads: Tensor) -> tuple[Tensor, Tensor]:
        """(unique rows ascending, their gradients summed over the batch); of a fixed size the last
        row and its sum come again and again.
        """
        fixed = self.absent is not None
        return access.spread_gradients(grads) if fixed else access.row_gradients(grads)

    def row_squares(self, grads: Tensor) -> Tensor:
        """[touched]: each row's sum of squares over the columns that are here.

        Not as a product with ones: BLAS works on blocks of rows, so that the last bit of a row
        would depend on which rows stand around it.
        """
        return (grads * grads).sum(1)

    def step_rows(
        self, rows: Tensor, grads: Tensor, squares: Tensor | None, lr: float, step: int
    ) -> None:
        """One step of the rule on unique ``rows``; ``squares`` are means, for state by row."""
        rows = rows.to(torch.int64)
        if tell := self.before_update:  # which another thread may take away
            tell(rows)
        numbers = self.numbers(lr, step)
        count = CHUNK_ROWS if self.absent is None else max(rows.numel(), 1)
        for start in range(0, rows.numel(), count):
            part = slice(start, start + count)
            weights = self._weights.index_select(0, rows[part]).to(self.dtype)
            block = RowBlock(
                weights=weights,
                state=self._state,
                rows=rows[part],
                grads=grads[part],
                numbers=numbers,
                squares=None if squares is None else squares[part],
            )
            self.optimizer.apply(block)
            self._weights.index_copy_(0, rows[part], self._as_stored(weights, rows[part], numbers))
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
