"""Defines a row store that keeps all rows as records in slower memory, and some rows in slots.

Batches are announced well before their lookup, so that ``Mover`` has time to move their rows into
slots.
"""

import threading
import weakref
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from torch import Tensor

from sbpflow.embedding.cache.mover import AHEAD, AT_ONCE, MakeRecords, Mover
from sbpflow.embedding.cache.slot_layout import Array
from sbpflow.embedding.cache.slot_planner import LANE_THREADS
from sbpflow.embedding.storage.base import RowKernel
from sbpflow.embedding.storage.lookup import Lookup
from sbpflow.embedding.storage.store import WEIGHTS, StoreRequest


def _end(tasks: "SimpleQueue[Any]", thread: threading.Thread) -> None:
    """End the mover's thread. If the thread were still in C++ code when Python exits, it would
    abort the process.
    """
    tasks.put(None)
    # The garbage collector may call this function in the mover's thread itself, or in a thread for
    # which the mover waits.
    current = threading.current_thread()
    if thread is not current and not current.name.startswith(LANE_THREADS):
        thread.join()


class CachedStore:
    """Keeps all rows of a stack in ``records``, and some of them in ``num_slots`` slots."""

    is_in_place = False
    starts_initial = True

    def __init__(
        self,
        request: StoreRequest,
        records: MakeRecords,
        num_slots: int,
        *,
        ahead: int = AHEAD,
        key: str = "parallel.storage",
        num_threads: int = 1,
    ) -> None:
        self.kernel: RowKernel = request.make_kernel(num_slots)
        self.num_rows, self.width, self.num_slots = request.num_rows, request.width, num_slots
        self._mover = Mover(request, self.kernel, records, num_slots, ahead, key, num_threads)
        self.counts = self._mover.counts
        self._thread = threading.Thread(target=self._mover.run, name="row mover", daemon=True)
        self._thread.start()
        # For each argument of ``read_ahead``: a lookup in a block of rows, the block, and a
        # function that waits for the block.
        self._ahead: WeakKeyDictionary[Lookup, tuple[Lookup, Tensor, Callable[[], None]]]
        self._ahead = WeakKeyDictionary()
        weakref.finalize(self, _end, self._mover.tasks, self._thread)

    @property
    def memory_bytes(self) -> int:
        mover = self._mover
        slots = self.num_slots * mover.layout.num_bytes
        return slots + mover.records.num_bytes + mover.planner.num_bytes

    def announce(self, number: int, addresses: Tensor) -> None:
        self._mover.check()
        self._mover.announce(number, addresses)

    def admit(self, number: int) -> Tensor:
        return self._mover.admit(number)

    def release(self, number: int) -> None:
        self._mover.release(number)

    def read_ahead(self, lookup: Lookup) -> None:
        """Start reading the rows for a later ``peek``; no update may run before that ``peek``."""
        own, block, numbers = self._peeked(lookup)
        self._ahead[lookup] = (own, block, self._mover.read_soon(numbers, block))

    def peek(self, lookup: Lookup) -> Tensor:
        if (ahead := self._ahead.pop(lookup, None)) is not None:
            own, block, wait = ahead
            wait()
        else:
            own, block, numbers = self._peeked(lookup)
            self._mover.read_into(numbers, {WEIGHTS: block})
        return self.kernel.pool(block, own.place(own.inverse()))

    def _peeked(self, lookup: Lookup) -> tuple[Lookup, Tensor, Array]:
        """Return three values: a copy of ``lookup`` without slots, a block of zeros for its unique
        rows, and the numbers of the rows to read into the block.

        The address after the last row stands for an absent row, which reads as zeros.
        """
        own = Lookup(lookup.addresses, lookup.offsets, lookup.weights)
        rows = own.rows()
        block = self.kernel.weights.new_zeros(rows.numel(), self.kernel.weights.shape[1])
        return own, block, self._numbers(rows[rows < self.num_rows])

    def read(
        self, rows: slice | Tensor, into: Mapping[str, Tensor] | None = None
    ) -> Mapping[str, Tensor]:
        numbers = self._numbers(rows)
        if into is None:
            like = self._mover.layout.like
            into = {
                name: one.new_empty((numbers.size, *one.shape[1:])) for name, one in like.items()
            }
        self._mover.read_into(numbers, into)
        return into

    def write(self, rows: slice | Tensor, values: Mapping[str, Tensor]) -> None:
        numbers = self._numbers(rows)
        self._mover.wait_idle()
        for start in range(0, numbers.size, AT_ONCE):
            part = slice(start, min(start + AT_ONCE, numbers.size))
            self._mover.write(numbers[part], {name: value[part] for name, value in values.items()})

    def _numbers(self, rows: slice | Tensor) -> Array:
        if isinstance(rows, slice):
            return np.arange(*rows.indices(self.num_rows))
        return rows.cpu().numpy()
