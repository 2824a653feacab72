"""The numba kernel: CPU loops that make a single pass over the rows where torch makes several.

Lookups and updates give the same results as ``TorchStorage``; the docstring of ``compiled`` says
when they are bit-equal. Import this module only if numba is installed.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from functools import cache, cached_property
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sbpflow.embedding.rules.base import SparseOptimizer, StepNumbers
from sbpflow.embedding.rules.registry import kernel_function
from sbpflow.embedding.storage import compiled, compiled_half
from sbpflow.embedding.storage.base import notify
from sbpflow.embedding.storage.lookup import Lookup
from sbpflow.embedding.storage.numba_rules import RowArrays, rowwise_adagrad
from sbpflow.embedding.storage.rounding import DROPPED_BITS
from sbpflow.embedding.storage.torch_storage import CHUNK_ROWS, TorchStorage
from sbpflow.runtime.compute.compiled import numba_cache
from sbpflow.runtime.random.streams import step_keys, stream_key

_LOG = logging.getLogger(__name__)
_NOTICE_AFTER_S = 2.0  # compilations that take longer are logged
# Deduplication scans a bitmap of all possible addresses. If there are more than this many possible
# addresses per id of the batch, deduplication uses a hash table instead.
MOST_BITS_PER_ID = 512
# Functions that convert a number to the scalar type of an array's elements.
_NUMBERS = cast(
    "dict[torch.dtype, Callable[[float | Tensor], float]]",
    {torch.float32: np.float32, torch.float64: np.float64},
)
# To measure a copy, read this many rows from a block of this many elements.
_COPIED_ROWS, _BLOCK_ELEMENTS = 8192, 1 << 22
# To measure sums, pool this many ids in bags of this many ids from a block of this many rows.
_POOLED_IDS, _BAG_IDS, _POOLED_ROWS = 1 << 19, 8, 1 << 17
_EMPTY = {torch.float32: np.empty(0, np.float32), torch.float64: np.empty(0, np.float64)}


def take(block: Tensor, at: Tensor) -> Tensor:
    """Return ``block[at]`` [n, width], using torch or the compiled loop, whichever is faster."""
    if (
        block.is_contiguous()
        and block.dtype in _EMPTY
        and _loop_is_faster(block.shape[1], block.dtype, at.dtype)
    ):
        return _take_in_loop(block, at)
    return block.index_select(0, at)


def _take_in_loop(block: Tensor, at: Tensor) -> Tensor:
    out = block.new_empty(at.numel(), block.shape[1])
    compiled.take_rows(block.numpy(), at.contiguous().numpy(), out.numpy())
    return out


@cache
def _loop_is_faster(width: int, dtype: torch.dtype, index_dtype: torch.dtype) -> bool:
    """Return False if torch copies rows of this width at least 1.25 times as fast as the loop on
    this CPU.

    A measurement, which takes a few milliseconds, is necessary because CPUs differ.
    ``index_select`` was up to three times faster than a loop without prefetch on an Intel Xeon, but
    takes 1.2 to 1.7 times as long as the loop on an AMD EPYC. The measured rows are in the cache,
    so the measurement underestimates the gain from prefetching. Both methods give the same bits, so
    ranks need not agree.
    """
    rows = max(_BLOCK_ELEMENTS // max(width, 1), 1)
    block = torch.ones(rows, width, dtype=dtype)
    at = (torch.arange(_COPIED_ROWS) * 7919 % rows).to(index_dtype)
    return _is_faster(
        lambda: _take_in_loop(block, at), lambda: block.index_select(0, at), tolerance=1.25
    )


@cache
def _pool_loop_is_faster(width: int, dtype: torch.dtype, index_dtype: torch.dtype) -> bool:
    """Return whether the loop sums bags of eight rows faster than torch on this CPU. Like copies,
    both methods give the same bits.

    The ids are as many as in a batch, and skewed. With few ids, or without skew, the other method
    may be faster.
    """
    block = torch.ones(_POOLED_ROWS, width, dtype=dtype)
    share = torch.rand(_POOLED_IDS, generator=torch.Generator().manual_seed(0))
    at = (share.pow(4) * _POOLED_ROWS).to(index_dtype)
    ends = torch.arange(0, _POOLED_IDS + 1, _BAG_IDS)
    lookup = CompiledLookup(at, ends, indexer=Indexer(0))
    return _is_faster(lambda: lookup.pool_in_loop(block, at), lambda: Lookup.pool(lookup, block))


def _is_faster(
    loop: Callable[[], object], other: Callable[[], object], *, tolerance: float = 1.0
) -> bool:
    """Return whether the best of five times of ``loop`` is less than ``tolerance`` times that of
    ``other``. Stop as soon as ``other`` takes more than twice as long.
    """

    def seconds(call: Callable[[], object]) -> float:
        start = time.thread_time()
        call()
        return time.thread_time() - start

    best_loop = best_other = math.inf
    for _ in range(5):
        best_loop, best_other = min(best_loop, seconds(loop)), min(best_other, seconds(other))
        if 2 * best_loop < best_other:
            return True
    return best_loop < tolerance * best_other


class Indexer:
    """Deduplicates addresses below ``num_addresses``, with scratch memory that all calls share."""

    def __init__(self, num_addresses: int) -> None:
        self._num_addresses = num_addresses
        self._words = self._before = np.empty(0)

    def index(self, addresses: Tensor) -> tuple[Tensor, Tensor]:
        """Return the unique addresses, ascending, and the index of each address among them (int32
        [n]).
        """
        array = addresses.contiguous().numpy()
        rows, inverse = np.empty(array.size + 2, array.dtype), np.empty(array.size, np.int32)
        if self._num_addresses > MOST_BITS_PER_ID * array.size:
            count = compiled.index_by_hash(array, rows, inverse)
        else:
            if not self._words.size:
                words = -(-self._num_addresses // 64)
                self._words, self._before = np.zeros(words, np.uint64), np.empty(words, np.int32)
            count = compiled.index_by_bits(array, self._words, self._before, rows, inverse)
        return torch.from_numpy(rows[:count]), torch.from_numpy(inverse)

    def wrap(self, lookup: Lookup) -> "CompiledLookup":
        """Return an equal lookup that deduplicates with this indexer."""
        uses = (lookup.addresses, lookup.offsets, lookup.weights)
        return CompiledLookup(*uses, indexer=self).place(lookup.placed)


class CompiledLookup(Lookup):
    """A ``Lookup`` that deduplicates addresses and sums gradients in compiled loops."""

    def __init__(
        self,
        addresses: Tensor,
        offsets: Tensor | None = None,
        weights: Tensor | None = None,
        *,
        indexer: Indexer,
    ) -> None:
        super().__init__(addresses, offsets, weights)
        self._indexer = indexer
        self._indexed: tuple[Tensor, Tensor] | None = None
        self._merged: Tensor | None = None

    def rows(self) -> Tensor:
        return self._index()[0] if self._merged is None else self._merged

    def row_slots(self) -> Tensor:
        if self.placed is None:
            return self.rows()
        rows, inverse = self._index()
        # A row has the same slot wherever it occurs, so the order of these writes does not matter.
        return torch.empty_like(rows).scatter_(
            0, inverse.to(torch.int64), self.placed.to(rows.dtype)
        )

    def inverse(self) -> Tensor:
        return self._index()[1]

    def row_gradients(self, grads: Tensor) -> tuple[Tensor, Tensor]:
        array = grads.contiguous().numpy()
        if (merged := self._merge(array)) is not None:
            return merged
        rows, inverse = self._index()
        sums = grads.new_empty(rows.numel(), grads.shape[1])
        if self.offsets is None and self.weights is None:
            compiled.sum_rows(array, inverse.numpy(), sums.numpy())
        else:
            ends, weights = _ends_and_weights(self, grads.dtype)
            compiled.sum_bags(array, inverse.numpy(), ends, weights, sums.numpy())
        return rows, sums

    def _merge(self, grads: NDArray[Any]) -> tuple[Tensor, Tensor] | None:
        """Like ``row_gradients``, if the addresses are two ascending lists, such as the requests of
        two ranks, that are not deduplicated yet; otherwise, return ``None``.
        """
        if any(x is not None for x in (self._indexed, self.placed, self.offsets, self.weights)):
            return None
        addresses = self.addresses.contiguous().numpy()
        first = compiled.length_of_first_list(addresses)
        if first < 0:
            return None
        rows, sums = np.empty_like(addresses), np.empty_like(grads)
        count = compiled.merge_rows(addresses, first, grads, rows, sums)
        self._merged = torch.from_numpy(rows[:count])
        return self._merged, torch.from_numpy(sums[:count])

    def take(self, rows: Tensor, at: Tensor) -> Tensor:
        return take(rows, at)

    def pool(self, rows: Tensor, positions: Tensor | None = None) -> Tensor:
        at = self.slots if positions is None else positions
        if (
            self.offsets is not None
            and rows.is_contiguous()
            and rows.dtype in _EMPTY
            and rows.shape[1] <= compiled.MOST_COLUMNS
            and at.numel() >= compiled.LEAST_LIST * self.num_bags
            # The loop uses fma; torch rounds products of float64 before it adds them.
            and (self.weights is None or rows.dtype == torch.float32)
            and _pool_loop_is_faster(rows.shape[1], rows.dtype, at.dtype)
        ):
            return self.pool_in_loop(rows, at)
        return super().pool(rows, at)

    def pool_in_loop(self, rows: Tensor, at: Tensor) -> Tensor:
        """Like ``pool``, but always use the compiled loop."""
        out = rows.new_empty(self.num_bags, rows.shape[1])
        ends, weights = _ends_and_weights(self, rows.dtype)
        compiled.pool(rows.numpy(), at.contiguous().numpy(), ends, weights, out.numpy())
        return out

    def _index(self) -> tuple[Tensor, Tensor]:
        if self._indexed is None:
            self._indexed = self._indexer.index(self.addresses)
        return self._indexed


def _ends_and_weights(lookup: Lookup, dtype: torch.dtype) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Return the ends of the bags, and the weights in ``dtype`` (empty if all are 1)."""
    weights = _EMPTY[dtype]
    if lookup.weights is not None:
        weights = lookup.weights.to(dtype).contiguous().numpy()
    return lookup.explicit_offsets().contiguous().numpy(), weights


class NumbaStorage(TorchStorage):
    """Like ``TorchStorage``, but with compiled loops; it runs only on CPU."""

    name = "numba"

    @cached_property
    def _indexer(self) -> Indexer:
        return Indexer(self._num_rows)

    @cached_property
    def _rule(self) -> Callable[[SparseOptimizer, RowArrays], None]:
        return kernel_function(self.optimizer, "numba")

    def _indexed(self, lookup: Lookup) -> Lookup:
        return lookup if isinstance(lookup, CompiledLookup) else self._indexer.wrap(lookup)

    def pool(self, block: Tensor, lookup: Lookup) -> Tensor:
        """Like ``TorchStorage.pool``, but copy rows with ``take``, and widen and sum half-precision
        rows in one pass.
        """
        if block.dtype == self.dtype:
            return self._indexed(lookup).pool(block)
        if self.dtype != torch.float32:
            return super().pool(block, lookup)
        dropped = DROPPED_BITS[block.dtype]
        bits, at = block.view(torch.int16).numpy(), lookup.slots.contiguous().numpy()
        out = torch.empty(lookup.num_bags, block.shape[1])
        if lookup.offsets is None:
            compiled_half.widen(bits, at, out.numpy(), dropped)
            return out if lookup.weights is None else out * lookup.weights.unsqueeze(1)
        ends, shares = _ends_and_weights(lookup, self.dtype)
        compiled_half.pool(bits, at, ends, shares, out.numpy(), dropped)
        return out

    def _squares(self, grads: Tensor) -> Tensor | None:
        # The loop of rowwise Adagrad computes them itself if the rows have all their columns.
        is_whole = self._sum_over_columns is None and grads.shape[1] > 0
        return None if is_whole and self._rule is rowwise_adagrad else super()._squares(grads)

    def row_squares(self, grads: Tensor) -> Tensor:
        squares = grads.new_zeros(grads.shape[0])
        if grads.shape[1]:
            compiled.add_squares(grads.numpy(), squares.numpy())
        return squares

    def step_rows(
        self,
        rows: Tensor,
        slots: Tensor,
        grads: Tensor,
        squares: Tensor | None,
        lr: float,
        step: int,
    ) -> None:
        notify(self.listeners, rows)
        numbers = self.optimizer.numbers(lr, step)
        if self.weights.dtype == self.dtype:
            self._step(self.weights, slots, slots, grads, squares, numbers)
            return
        noise = self.noise_of_rows()
        keys = step_keys(noise.keys, step).numpy().view(np.uint64)
        addresses = np.empty(0, np.int64)
        if noise.addresses_of is not None:
            addresses = noise.addresses_of(rows.to(torch.int64)).numpy()
        for start in range(0, rows.numel(), CHUNK_ROWS):
            part = slice(start, start + CHUNK_ROWS)
            block = self.weights.index_select(0, slots[part]).to(self.dtype)
            own = None if squares is None else squares[part]
            at = torch.arange(block.shape[0], dtype=rows.dtype)
            self._step(block, at, slots[part], grads[part], own, numbers)
            compiled_half.store_rounded(
                block.to(torch.float32).view(torch.int32).numpy(),
                self.weights.view(torch.int16).numpy(),
                slots[part].numpy(),
                rows[part].numpy(),
                keys,
                noise.bases.numpy(),
                noise.shift.numpy(),
                addresses[part] if addresses.size else addresses,
                noise.words_per_row,
                noise.first_column,
                DROPPED_BITS[self.weights.dtype],
            )

    def _step(
        self,
        weights: Tensor,
        at: Tensor,
        slots: Tensor,
        grads: Tensor,
        squares: Tensor | None,
        numbers: StepNumbers,
    ) -> None:
        positions = slots.numpy()
        arrays = RowArrays(
            weights.numpy(),
            positions if at is slots else at.numpy(),
            positions,
            grads.numpy(),
            [state.numpy() for state in self.state.values()],
            _EMPTY[self.dtype] if squares is None else squares.numpy(),
            numbers,
            _NUMBERS[self.dtype],
        )
        self._rule(self.optimizer, arrays)


def warm_up(rules: Iterable[SparseOptimizer], dtype: torch.dtype, row_dtype: torch.dtype) -> None:
    """Compile the loops of these optimizers, or load them from the cache."""
    message = "loading numba kernels; the first start on a machine compiles them ..."
    notice = threading.Timer(_NOTICE_AFTER_S, _LOG.info, [message])
    notice.start()
    start = time.perf_counter()
    try:
        for rule in rules:
            _warm_up_loops(rule, dtype, row_dtype)
    finally:
        notice.cancel()
    seconds, place = time.perf_counter() - start, numba_cache() or "memory"
    _LOG.info("numba kernels ready in %.1f s, cached in %s", seconds, place)


def _warm_up_loops(rule: SparseOptimizer, dtype: torch.dtype, row_dtype: torch.dtype) -> None:
    from sbpflow.embedding.plan.tables import Shard, TableConfig
    from sbpflow.embedding.storage.rounding import RowNoise

    cpu = torch.device("cpu")
    table = TableConfig(name="warm_up", features=("f",), num_rows=2, dim=4)
    shard = Shard(0, 2, 0, 4, table=table, rank=0)
    noise = RowNoise([shard], stream_key(0, "warm_up"), cpu)
    storage = NumbaStorage(
        2, 4, dim=4, optimizer=rule, dtype=dtype, device=cpu, row_dtype=row_dtype, noise=noise
    )
    for address_dtype in (torch.int32, torch.int64):
        addresses = torch.tensor([1, 0, 1], dtype=address_dtype)  # two ascending lists
        bags = Lookup(addresses, torch.tensor([0, 1, 3]))
        for lookup in (Lookup(addresses), Lookup(addresses.repeat(2)), bags):
            storage.lookup(lookup)
            storage.update(lookup, torch.zeros(lookup.num_bags, 4, dtype=dtype), 0.1, 1)
        compiled.index_by_hash(addresses.numpy(), addresses.clone().numpy(), np.zeros(3, np.int32))
