"""The slots of a kernel, read and written as records.

On CUDA the mover has a stream of its own. Events order its work with that of training: it waits
for the update of a batch before it moves rows that the batch used, and training waits for the rows
of a batch before their lookup.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from sbpflow.embedding.cache.records import RecordLayout
from sbpflow.embedding.cache.slot_layout import Array
from sbpflow.embedding.storage.base import RowKernel
from sbpflow.embedding.storage.store import WEIGHTS


class SlotBlock:
    """Wraps the tensors of a kernel. ``take`` and ``put`` work in the current stream."""

    def __init__(self, kernel: RowKernel) -> None:
        self._tensors = {WEIGHTS: kernel.weights, **kernel.state}
        self.layout = RecordLayout({name: one[:0] for name, one in self._tensors.items()})
        self._words = {name: self.layout.words(one) for name, one in self._tensors.items()}
        self._device = kernel.weights.device
        is_cuda = self._device.type == "cuda"
        self._stream = torch.cuda.Stream(self._device) if is_cuda else None

    def section(self) -> AbstractContextManager[None]:
        """Return a context in which the mover's stream is the current one."""
        return torch.cuda.stream(self._stream)

    def mark(self) -> torch.cuda.Event | None:
        """Return an event after all work submitted to the current stream so far; None on CPU."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait(self, event: torch.cuda.Event | None, used: Tensor | None = None) -> None:
        """Make the current stream wait for ``event``; keep ``used`` alive for this stream."""
        if event is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(event)
            if used is not None:
                used.record_stream(stream)

    def to_device(self, values: Tensor) -> Tensor:
        """Copy a host tensor to the kernel's device."""
        return values.to(self._device)

    def take(self, slots: Array, out: Array) -> None:
        """Copy the records of ``slots`` to ``out`` [n, words]; on CUDA the host waits for it."""
        if self._stream is None:
            for name, words in self._words.items():
                out[:, self.layout.columns[name]] = words.numpy()[slots]
        elif slots.size:
            at = self.to_device(torch.from_numpy(slots))
            parts = [self._words[name].index_select(0, at) for name in self.layout.columns]
            torch.from_numpy(out).copy_(torch.cat(parts, 1))

    def put(self, slots: Array, records: Array) -> None:
        """Write records to their slots."""
        if self._stream is None:
            for name, words in self._words.items():
                words.numpy()[slots] = records[:, self.layout.columns[name]]
        elif slots.size:
            at = self.to_device(torch.from_numpy(slots).to(torch.int64))
            found = self.to_device(torch.from_numpy(records))
            for name, columns in self.layout.columns.items():
                self._words[name].index_copy_(0, at, found[:, columns])

    def put_values(self, slots: Array, values: Mapping[str, Tensor]) -> None:
        """Write values by name to their slots."""
        at = self.to_device(torch.from_numpy(slots).to(torch.int64))
        for name, value in values.items():
            self._tensors[name].index_copy_(0, at, self.to_device(value))
