"""Reads and writes the slots of a kernel as records.

On CUDA, slots are read and written in the training stream, so these operations run in the order in
which the host submits them. The slower copies between host and device run in the mover's own
stream, and so do all accesses of the GPU to records in host memory.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch
from torch import Tensor

from sbpflow.embedding.cache.records import RecordLayout
from sbpflow.embedding.cache.slot_layout import Array, find_loops, warm_up_copies
from sbpflow.embedding.cache.slot_planner import Admission
from sbpflow.embedding.storage.base import RowKernel
from sbpflow.embedding.storage.initial import RowInitializer
from sbpflow.embedding.storage.store import WEIGHTS
from sbpflow.runtime.compute.devices import upload


class SlotBlock:
    """Wraps the tensors of a kernel. Copies from and to the host use the current stream."""

    def __init__(self, kernel: RowKernel, initial: RowInitializer) -> None:
        self._initial = initial
        self._tensors = {WEIGHTS: kernel.weights, **kernel.state}
        self.layout = RecordLayout({name: one[:0] for name, one in self._tensors.items()})
        self._words = {name: self.layout.words(one) for name, one in self._tensors.items()}
        self._loops = find_loops()
        self._device = kernel.weights.device
        self._is_cuda = self._device.type == "cuda"
        # On the host: each tensor's words as an array.
        self._arrays: dict[str, Array] = {}
        if not self._is_cuda:
            self._arrays = {name: words.numpy() for name, words in self._words.items()}
            warm_up_copies(*self._arrays.values())
            none = np.empty(0, np.int32)
            initial.put(none, none, self._tensors)  # compiles the loops before training
        self._mover = torch.cuda.Stream(self._device) if self._is_cuda else None
        self._training = torch.cuda.current_stream(self._device) if self._is_cuda else None

    def section(self) -> AbstractContextManager[None]:
        """Return a context manager in which the mover's stream is the current stream."""
        return torch.cuda.stream(self._mover)

    def mark(self) -> torch.cuda.Event | None:
        """Record an event after all work submitted to the current stream so far, and return it; on
        CPU, return None.
        """
        if not self._is_cuda:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait(self, event: torch.cuda.Event | None, *used: Tensor) -> None:
        """Make the current stream wait for ``event``; keep ``used`` allocated until the stream has
        finished with these tensors.
        """
        if event is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(event)
            for tensor in used:
                tensor.record_stream(stream)

    def to_device(self, values: Tensor) -> Tensor:
        """Copy a host tensor to the kernel's device."""
        return upload(values, self._device)

    def settle(self) -> None:
        """Wait until the mover's stream has finished all work submitted so far."""
        if self._mover is not None:
            self._mover.synchronize()

    def exchange(self, admission: Admission, memory: Tensor) -> None:
        """Copy evicted rows from their slots to the records in ``memory``, and fill the slots of
        the missing rows; the host does not wait. Only for CUDA, in the mover's stream.
        """
        numbers = self.to_device(torch.from_numpy(np.concatenate(admission))).to(torch.int64)
        sizes = [part.size for part in admission]
        stored, stored_slots, new, new_slots, evicted, evicted_slots = numbers.split(sizes)
        records = memory.index_select(0, stored)
        initial = self._initial(new)
        read = self.mark()
        with torch.cuda.stream(self._training):
            self.wait(read, numbers, records, *initial.values())
            columns = self.layout.columns.items()
            words = [self._words[name].index_select(0, evicted_slots) for name, _ in columns]
            leaving = torch.cat(words, 1)
            for name, at in columns:
                self._words[name].index_copy_(0, stored_slots, records[:, at])
                self._tensors[name].index_copy_(0, new_slots, initial[name])
            taken = self.mark()
        self.wait(taken, leaving)
        memory.index_copy_(0, evicted, leaving)

    def read(self, rows: Array, memory: Tensor, out: Array) -> None:
        """Copy records of ``rows`` [n] from ``memory`` to ``out``, after all earlier exchanges."""
        with self.section():
            records = memory.index_select(0, self.to_device(torch.from_numpy(rows)))
            torch.from_numpy(out).copy_(records)

    def take(self, slots: Array, out: Array) -> None:
        """Copy the records of ``slots`` to ``out`` [n, words]; on CUDA, wait for the copy."""
        if not self._is_cuda:
            for name, array in self._arrays.items():
                self._loops.take(array, slots, out, self.layout.columns[name].start)
        elif slots.size:
            at = self.to_device(torch.from_numpy(slots))
            copied = self.mark()
            with torch.cuda.stream(self._training):
                self.wait(copied, at)
                parts = [self._words[name].index_select(0, at) for name in self.layout.columns]
                records, taken = torch.cat(parts, 1), self.mark()
            self.wait(taken, records)
            torch.from_numpy(out).copy_(records)

    def put(self, slots: Array, records: Array) -> None:
        """Write ``records`` to ``slots``."""
        if not self._is_cuda:
            for name, array in self._arrays.items():
                self._loops.put(array, slots, records, self.layout.columns[name].start)
        elif slots.size:
            on_device = self.to_device(torch.from_numpy(records))
            columns = self.layout.columns.items()
            self._put(slots, [(self._words[name], on_device[:, at]) for name, at in columns])

    def put_values(self, slots: Array, values: Mapping[str, Tensor]) -> None:
        """Write ``values`` (by tensor name) to ``slots``."""
        if self._is_cuda:
            on_device = [
                (self._tensors[name], self.to_device(value)) for name, value in values.items()
            ]
            self._put(slots, on_device)
        elif slots.size:
            for name, value in values.items():
                words = self.layout.words(value.contiguous()).numpy()
                self._loops.put(self._arrays[name], slots, words, 0)

    def put_initial(self, slots: Array, rows: Array) -> None:
        """Write the initial values of ``rows`` to ``slots``."""
        if self._is_cuda:
            self.put_values(slots, self._initial(self.to_device(torch.from_numpy(rows))))
        elif slots.size:
            self._initial.put(rows, slots, self._tensors)

    def _put(self, slots: Array, values: Sequence[tuple[Tensor, Tensor]]) -> None:
        at = self.to_device(torch.from_numpy(slots).to(torch.int64))
        copied = self.mark()
        with torch.cuda.stream(self._training):
            self.wait(copied, at, *(value for _, value in values))
            for target, value in values:
                target.index_copy_(0, at, value)
