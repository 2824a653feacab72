"""Simulates slow storage, and defines a store that fetches rows on demand, for ``cache_store``."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sbpflow.embedding.cache.records import RecordLayout, RecordStore
from sbpflow.embedding.storage.store import WEIGHTS, StoreRequest

MBIT = 1e6 / 8  # bytes per second
Array = np.ndarray[Any, Any]


class PacedRecords:
    """Simulates records behind a link: each call takes as long as the link needs for its bytes. If
    writes are ``buffered``, a write returns when the previous write has been sent; otherwise it
    returns when its own records have been sent. Written records can be read immediately.
    """

    def __init__(
        self, inner: RecordStore, record_bytes: int, rate: float, *, duplex: bool, buffered: bool
    ) -> None:
        self._inner, self._second_per_row = inner, record_bytes / rate
        self._buffered = buffered
        self._free = {"read": 0.0, "write": 0.0} if duplex else {"both": 0.0}
        self.busy_s = {"read": 0.0, "write": 0.0}

    @property
    def num_bytes(self) -> int:
        """Return the size of all records."""
        return self._inner.num_bytes

    def read(self, rows: Array, out: Array) -> None:
        """Read the records, then wait until the transfer ends."""
        _, end = self._reserve("read", rows.size)
        self._inner.read(rows, out)
        _sleep_until(end)

    def write(self, rows: Array, records: Array) -> None:
        """Write the records, then wait until this transfer ends or, if writes are ``buffered``,
        until it starts.
        """
        self._inner.write(rows, records)
        start, end = self._reserve("write", rows.size)
        _sleep_until(start if self._buffered else end)

    def _reserve(self, direction: str, num_rows: int) -> tuple[float, float]:
        link = direction if direction in self._free else "both"
        start = max(time.perf_counter(), self._free[link])
        end = start + num_rows * self._second_per_row
        self._free[link] = end
        self.busy_s[direction] += end - start
        return start, end


def _sleep_until(end: float) -> None:
    while (left := end - time.perf_counter()) > 0:
        time.sleep(left)


class DemandStore:
    """Fetches the rows of a batch when the batch is looked up, as a baseline.

    If ``keeps`` is true, rows stay until they are evicted as least recently used; otherwise every
    row is written back after its batch. The records contain all initial values, as in stores that
    cannot compute them.
    """

    is_in_place = False
    starts_initial = True

    def __init__(
        self,
        request: StoreRequest,
        make_records: Callable[[int, RecordLayout], RecordStore],
        paced: Callable[[RecordStore, RecordLayout], RecordStore],
        num_slots: int,
        *,
        keeps: bool,
    ) -> None:
        self.kernel = request.make_kernel(num_slots)
        self.num_rows, self.width, self._num_slots = request.num_rows, request.width, num_slots
        tensors = {WEIGHTS: self.kernel.weights, **self.kernel.state}
        self._layout = RecordLayout({name: tensor[:0] for name, tensor in tensors.items()})
        self._words = {name: self._layout.words(t).numpy() for name, t in tensors.items()}
        inner = make_records(request.num_rows, self._layout)
        for start in range(0, request.num_rows, 1 << 16):
            rows = np.arange(start, min(start + (1 << 16), request.num_rows))
            records = self._layout.empty(rows.size)
            self._layout.pack(request.initial(torch.from_numpy(rows)), records)
            inner.write(rows, records)
        self._records, self._keeps = paced(inner, self._layout), keeps
        self._slot_of = np.full(request.num_rows + 1, -1, np.int64)
        self._slot_of[-1] = num_slots
        self._row_in = np.full(num_slots, -1, np.int64)
        self._last_use = np.full(num_slots, -1, np.int64)
        self._addresses: dict[int, Tensor] = {}
        self.fetched, self.wait_s = 0, 0.0

    @property
    def memory_bytes(self) -> int:
        """Return the size of the slots and the records."""
        return self._num_slots * self._layout.num_bytes + self._records.num_bytes

    def announce(self, number: int, addresses: Tensor) -> None:
        """Store the addresses. Nothing is fetched before the lookup."""
        self._addresses[number] = addresses

    def admit(self, number: int) -> Tensor:
        """Fetch the missing rows while training waits."""
        begin = time.perf_counter()
        addresses = self._addresses[number].numpy()
        rows = np.unique(addresses)
        rows = rows[rows < self.num_rows]
        held = self._slot_of[rows]
        missing = rows[held < 0]
        self._last_use[held[held >= 0]] = number
        slots = np.argpartition(self._last_use, missing.size)[: missing.size]
        self._write_back(slots[self._row_in[slots] >= 0])
        records = self._layout.empty(missing.size)
        self._records.read(missing, records)
        for name, words in self._words.items():
            words[slots] = records[:, self._layout.columns[name]]
        self._slot_of[missing], self._row_in[slots] = slots, missing
        self._last_use[slots] = number
        self.fetched += missing.size
        self.wait_s += time.perf_counter() - begin
        return torch.from_numpy(self._slot_of[addresses]).to(self._addresses[number].dtype)

    def release(self, number: int) -> None:
        """Write back the rows of the batch unless the rows are kept."""
        del self._addresses[number]
        if not self._keeps:
            begin = time.perf_counter()
            self._write_back(np.flatnonzero(self._row_in >= 0))
            self.wait_s += time.perf_counter() - begin

    def _write_back(self, slots: Array) -> None:
        if not slots.size:
            return
        records = self._layout.empty(slots.size)
        for name, words in self._words.items():
            records[:, self._layout.columns[name]] = words[slots]
        self._records.write(self._row_in[slots], records)
        self._slot_of[self._row_in[slots]] = -1
        self._row_in[slots], self._last_use[slots] = -1, -1
