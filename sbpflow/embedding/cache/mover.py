"""Plans the slots of a cached store and moves its rows in a background thread.

The thread executes ``announce``, ``admit``, and ``release`` in the order in which they are called.
For each batch to admit, the thread copies evicted rows out of their slots, reads the missing rows,
fills the slots, signals the training thread, and writes the evicted rows to the records. Since one
thread does all this, an evicted row is always written before it is read again. Rows that were never
written still have their initial values, which are computed instead of read.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue

import numpy as np
import torch
from torch import Tensor

from sbpflow.embedding.cache.block import SlotBlock
from sbpflow.embedding.cache.records import PinnedRecords, RecordLayout, RecordStore
from sbpflow.embedding.cache.slot_layout import NEW, SLOT, STORED, Array
from sbpflow.embedding.cache.slot_planner import Admission, SlotPlanner, cache_for, name_tables
from sbpflow.embedding.storage.base import RowKernel
from sbpflow.embedding.storage.store import WEIGHTS, StoreRequest
from sbpflow.errors import ConfigError, TrainingError

MakeRecords = Callable[[int, RecordLayout], RecordStore]
AHEAD = 1  # Number of batches admitted ahead of the current lookup.
AT_ONCE = 4096  # Maximum number of rows read or written while the mover waits.

_Task = tuple[Callable[[], None], threading.Event | None]  # (work, event to set after a failure)


@dataclass(slots=True)
class CacheCounts:
    """The numbers of rows that a store has moved, and the seconds that training has waited for
    rows.
    """

    # Three counts: rows brought into slots, rows among these that had never been written, and rows
    # written back. The counts form one tuple, because another thread reads them while the mover
    # updates them.
    moved: tuple[int, int, int] = (0, 0, 0)
    wait_s: float = 0.0

    @property
    def fetched(self) -> int:
        """Return the number of rows brought into slots."""
        return self.moved[0]

    @property
    def new(self) -> int:
        """Return the number of fetched rows that had never been written."""
        return self.moved[1]

    @property
    def written(self) -> int:
        """Return the number of rows written back."""
        return self.moved[2]

    @staticmethod
    def total(counts: Sequence["CacheCounts"]) -> "CacheCounts":
        """Return the sums of the counts of several stores."""
        fetched, new, written = zip(*(store.moved for store in counts), strict=True)
        waits = [store.wait_s for store in counts]
        return CacheCounts((sum(fetched), sum(new), sum(written)), sum(waits))


@dataclass(slots=True)
class _Flight:
    """The state of a batch between its announcement and its release."""

    addresses: Tensor
    known: torch.cuda.Event | None  # recorded once the addresses are known
    ready: threading.Event = field(default_factory=threading.Event)
    slots: Tensor | None = None
    # Recorded once the slots are filled and ``slots`` is on the device.
    placed: torch.cuda.Event | None = None


class Mover:
    """Plans slots and moves rows in a separate thread.

    The thread holds no reference to the store, so the store can be freed, which ends the thread.
    ``_lock`` guards the mapping of rows to slots and the rows that are being moved into or out of
    slots.
    """

    def __init__(
        self,
        request: StoreRequest,
        kernel: RowKernel,
        records: MakeRecords,
        num_slots: int,
        ahead: int,
        key: str,
        num_threads: int,
    ) -> None:
        self._block = SlotBlock(kernel, request.initial)
        self.layout = self._block.layout
        self.records = records(request.num_rows, self.layout)
        # Records that the GPU reads and writes itself, in the mover's stream.
        self._memory = self.records.on_device if isinstance(self.records, PinnedRecords) else None
        self.planner = SlotPlanner(request.num_rows, num_slots, num_threads=num_threads)
        self.counts = CacheCounts()
        self.tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._initial, self._ahead, self._key = request.initial, ahead, key
        self._name = name_tables(shard.table.name for shard in request.shards)
        # Flights by the caller's number for the batch, in announcement order.
        self._flights: dict[int, _Flight] = {}
        # Flights by the planner's number for the batch; used only by the mover's thread.
        self._by_batch: dict[int, _Flight] = {}
        self._demanded = -1  # the last batch that training has asked to admit
        self._lock = threading.Lock()
        self._arriving: Admission | None = None  # The admission whose slots are not filled yet.
        # Evicted rows that are not yet written to the records.
        self._leaving = np.empty(0, np.int64)
        self._leaving_records = self.layout.empty(0)
        self._buffers = [self.layout.empty(0), self.layout.empty(0)]
        self._failure: BaseException | None = None

    # Methods called by the training thread

    def announce(self, number: int, addresses: Tensor) -> None:
        """See ``RowStore.announce``."""
        flight = self._flights[number] = _Flight(addresses, self._block.mark())
        self.tasks.put((partial(self._announce, flight), None))

    def admit(self, number: int) -> Tensor:
        """See ``RowStore.admit``."""
        flight = self._flights[number]
        start = time.perf_counter()
        self.tasks.put((self._demand, flight.ready))
        flight.ready.wait()
        self.counts.wait_s += time.perf_counter() - start
        self.check()
        if flight.slots is None:
            raise RuntimeError(f"batch {number} was admitted, but has no slots; this is a bug")
        self._block.wait(flight.placed, flight.slots)
        return flight.slots

    def release(self, number: int) -> None:
        """See ``RowStore.release``."""
        if next(iter(self._flights)) != number:
            raise RuntimeError(
                f"batch {number} was released before the earlier batch {next(iter(self._flights))}"
            )
        del self._flights[number]
        self.tasks.put((self._release, None))

    def check(self) -> None:
        """Raise the error that stopped the thread, if any."""
        if self._failure is not None:
            raise self._failure

    def wait_idle(self) -> None:
        """Wait until the thread has finished all tasks queued so far."""
        done = threading.Event()
        self.tasks.put((done.set, done))
        done.wait()
        self.check()

    def read_soon(self, rows: Array, block: Tensor) -> Callable[[], None]:
        """Start reading the weights of ``rows`` into ``block`` in the thread.

        Return a function that waits for the result. The rows must not change until that function
        returns.
        """
        flight = _Flight(block, self._block.mark())

        def work() -> None:
            self._block.wait(flight.known, block)
            self.read_into(rows, {WEIGHTS: block})
            flight.placed = self._block.mark()
            flight.ready.set()

        def wait() -> None:
            flight.ready.wait()
            self.check()
            self._block.wait(flight.placed, block)

        self.tasks.put((work, flight.ready))
        return wait

    def read_into(self, rows: Array, into: Mapping[str, Tensor]) -> None:
        """Copy the newest values of ``rows`` [n] to the first n rows of the tensors in ``into``, by
        name.
        """
        for start in range(0, rows.size, AT_ONCE):
            part = slice(start, min(start + AT_ONCE, rows.size))
            records = self.read(rows[part])
            for name, target in into.items():
                target[part].copy_(self.layout.values(records, name))

    def read(self, rows: Array) -> Array:
        """Return the newest records of ``rows``, wherever they are. Any thread can call this
        method.
        """
        self.check()
        out = self.layout.empty(rows.size)
        with self._lock:
            slots = self.planner.records[rows, SLOT]
            here, is_new = slots >= 0, slots == NEW
            if self._arriving is not None:
                is_new |= np.isin(slots, self._arriving.new_slots)
                here &= ~is_new & ~np.isin(slots, self._arriving.stored_slots)
            resident = self.layout.empty(int(here.sum()))
            self._block.take(slots[here], resident)
            out[here] = resident
            away = np.flatnonzero(~here & ~is_new)
            if self._memory is not None and away.size:
                stored = self.layout.empty(away.size)
                self._block.read(rows[away], self._memory, stored)
                out[away] = stored
                away = away[:0]
            if self._leaving.size:
                order = self._leaving.argsort()
                place = np.searchsorted(self._leaving, rows[away], sorter=order)
                place = order[place.clip(max=order.size - 1)]
                leaves = self._leaving[place] == rows[away]
                out[away[leaves]] = self._leaving_records[place[leaves]]
                away = away[~leaves]
        # The lock is released here, so another thread can fetch these rows into slots and update
        # them. Listeners see the old values before any update, so the undo log stays correct.
        if away.size:
            stored = self.layout.empty(away.size)
            self.records.read(rows[away], stored)
            out[away] = stored
        if is_new.any():
            initial = self.layout.empty(int(is_new.sum()))
            self.layout.pack(self._initial_values(rows[is_new]), initial)
            out[is_new] = initial
        return out

    def write(self, rows: Array, values: Mapping[str, Tensor]) -> None:
        """Set the values of ``rows``; a row without a record gets none if the values equal its
        initial values.
        """
        with self._lock, torch.no_grad():
            slots = self.planner.records[rows, SLOT]
            here = torch.from_numpy(slots >= 0)
            self._block.put_values(
                slots[slots >= 0], {name: value[here] for name, value in values.items()}
            )
            away = np.flatnonzero(slots < 0)
            if not away.size:
                return
            self._block.settle()
            records = self.layout.empty(away.size)
            is_new = slots[away] == NEW
            if not is_new.all():
                kept = self.layout.empty(int((~is_new).sum()))
                self.records.read(rows[away[~is_new]], kept)
                records[~is_new] = kept
            if is_new.any():
                first = self.layout.empty(int(is_new.sum()))
                self.layout.pack(self._initial_values(rows[away[is_new]]), first)
                records[is_new] = first
            before = records.copy()
            self.layout.pack({name: value[away] for name, value in values.items()}, records)
            changed = ~is_new | (before != records).any(1)
            self.records.write(rows[away[changed]], records[changed])
            self.planner.records[rows[away[changed]], SLOT] = STORED

    # Methods called by the mover's thread

    def run(self) -> None:
        """Run tasks until the store is freed. After a failure, do nothing but wake waiting
        threads.
        """
        with torch.no_grad(), self._block.section():
            while (task := self.tasks.get()) is not None:
                work, wakes = task
                if self._failure is None:
                    try:
                        work()
                    except OSError as error:
                        self._failure = TrainingError(
                            f"{self._key}: rows of {self._name} could not be moved: {error}; fix "
                            "the cause, and resume from a checkpoint"
                        )
                        self._failure.__cause__ = error
                    except BaseException as error:  # noqa: BLE001  (raised by ``check``)
                        self._failure = error
                if self._failure is not None and wakes is not None:
                    wakes.set()
            self._block.settle()  # before the records are freed

    def _announce(self, flight: _Flight) -> None:
        self._by_batch[self.planner.num_announced] = flight
        self._block.wait(flight.known, flight.addresses)
        flight.addresses = flight.addresses.cpu()
        self.planner.announce(flight.addresses.numpy())
        self._admit_ready()

    def _demand(self) -> None:
        self._demanded = max(self._demanded + 1, self.planner.num_released)
        self._admit_ready()

    def _release(self) -> None:
        del self._by_batch[self.planner.num_released]
        self.planner.release()
        self._admit_ready()

    def _admit_ready(self) -> None:
        """Admit up to ``_ahead`` batches after the one being looked up, as long as there are enough
        slots for their rows.
        """
        planner = self.planner
        last = max(self._demanded, planner.num_released - 1) + self._ahead
        while planner.num_admitted < min(planner.num_announced, last + 1):
            if not self._admit(planner.num_admitted):
                return

    def _admit(self, batch: int) -> bool:
        flight = self._by_batch[batch]
        with self._lock:
            admission = self.planner.admit()
            if isinstance(admission, int):
                if batch > self._demanded:
                    return False
                raise ConfigError(self._capacity_message(batch, admission))
            if self._memory is not None:
                self._block.exchange(admission, self._memory)
            else:
                self._take_out(admission)
        slots = torch.empty_like(flight.addresses)
        if misses := self.planner.translate(flight.addresses.numpy(), slots.numpy()):
            row = int(flight.addresses[slots < 0][0])
            raise RuntimeError(
                f"{self._name}: {misses} ids of batch {batch}, starting with row {row}, have no "
                "slot, although the batch was admitted"
            )
        if self._memory is None:
            self._fill(admission)
        flight.slots = self._block.to_device(slots)
        flight.placed = self._block.mark()
        flight.ready.set()
        if self._leaving.size:
            self.records.write(self._leaving, self._leaving_records)
            with self._lock:
                self._leaving = self._leaving[:0]
        fetched, new, written = self.counts.moved
        self.counts.moved = (
            fetched + admission.num_rows,
            new + admission.new.size,
            written + admission.evicted.size,
        )
        return True

    def _take_out(self, admission: Admission) -> None:
        """Copy the evicted rows from their slots to a buffer."""
        self._leaving = admission.evicted
        self._leaving_records = self._buffer(0, admission.evicted.size)
        self._block.take(admission.evicted_slots, self._leaving_records)
        self._arriving = admission

    def _fill(self, admission: Admission) -> None:
        """Read the stored rows, and write all missing rows to their slots."""
        records = self._buffer(1, admission.stored.size)
        if admission.stored.size:
            self.records.read(admission.stored, records)
        with self._lock:
            self._block.put(admission.stored_slots, records)
            self._block.put_initial(admission.new_slots, admission.new)
            self._arriving = None

    def _initial_values(self, rows: Array) -> Mapping[str, Tensor]:
        return self._initial(torch.from_numpy(rows).to(torch.int64))

    def _buffer(self, number: int, num_rows: int) -> Array:
        """Return a reused buffer for records [num_rows, words]."""
        if len(self._buffers[number]) < num_rows:
            self._buffers[number] = self.layout.empty(num_rows * 5 // 4)
        return self._buffers[number][:num_rows]

    def _capacity_message(self, batch: int, needed: int) -> str:
        num_slots, num_batches = self.planner.num_slots, batch - self.planner.num_released + 1
        batches = "a batch needs" if num_batches == 1 else f"{num_batches} batches in flight need"
        return (
            f"{self._key}.cache: the cache of {self._name} has {num_slots:,} slots for rows on "
            f"this rank, but {batches} {needed:,}; use {cache_for(needed, self.planner.num_rows)} "
            "or more, or a smaller data.batch_size"
        )
