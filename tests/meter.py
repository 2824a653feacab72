"""Records the traffic between ranks, independently of the code under test.

The recorder is a dispatch mode below ``torch.distributed``. The mode sees every collective that
reaches a process group, whoever calls it, and counts the bytes that this rank sends to other ranks.
The recorder also sees messages in shared memory, and collectives made of point-to-point messages.
"""

import math
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sbpflow.boxing import collectives, pairs
from sbpflow.runtime.ranks.shared_memory import SharedChannel
from sbpflow.runtime.ranks.world import HEADER_BYTES


class Call(NamedTuple):
    """One collective on this rank."""

    collective: str
    bytes_sent: float


class Meter(TorchDispatchMode):
    """Records ``calls`` inside a ``with`` block, without the checked mode's headers."""

    def __init__(self):
        super().__init__()
        self.calls = []
        self._patches = ExitStack()
        self._parts = None  # the messages of a collective that is being started
        self._reductions = []  # all-reduces, and their places in ``calls``

    def __enter__(self):
        def wrap(owner, name, record):
            original = getattr(owner, name)

            def recorded(*args):
                return record(original, args)

            self._patches.enter_context(patch.object(owner, name, recorded))

        wrap(SharedChannel, "write", self._shared_write)
        wrap(SharedChannel, "read", self._shared_read)
        wrap(collectives, "_exchange_directly", self._directly)
        wrap(pairs, "all_gather", partial(self._of_messages, "all_gather"))
        wrap(pairs, "all_to_all", partial(self._of_messages, "all_to_all"))
        wrap(pairs, "all_reduce", partial(self._of_messages, "all_reduce"))
        wrap(pairs.AllReduce, "wait", self._end_of_reduction)
        return super().__enter__()

    def __exit__(self, *error):
        self._patches.close()
        return super().__exit__(*error)

    def _shared_write(self, write, args):
        self._add(Call("send", args[2]))
        return write(*args)

    def _shared_read(self, read, args):
        self._add(_receive())
        return read(*args)

    def _of_messages(self, name, collective, args):
        messages, sent = self._collected(collective, args)
        if messages is not None:
            if isinstance(messages, pairs.AllReduce):
                self._reductions.append((messages, len(self.calls)))
            self._add(Call(name, sent))
        return messages

    def _directly(self, exchange, args):
        result, sent = self._collected(exchange, args)
        self._add(Call(args[0].step.collective, sent))
        return result

    def _end_of_reduction(self, wait, args):
        """Add what a reduction sends at its end to its call."""
        _, sent = self._collected(wait, args)
        place = next(place for messages, place in self._reductions if messages is args[0])
        self.calls[place] = Call("all_reduce", self.calls[place].bytes_sent + sent)

    def _collected(self, collective, args):
        self._parts = parts = []
        try:
            return collective(*args), sum(call.bytes_sent for call in parts)
        finally:
            self._parts = None

    def _add(self, call):
        (self.calls if self._parts is None else self._parts).append(call)

    @property
    def names(self):
        return [call.collective for call in self.calls]

    @property
    def bytes_sent(self):
        return sum(call.bytes_sent for call in self.calls)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        namespace, name = func._schema.name.split("::")
        if namespace == "c10d" and name in _READERS and not _is_header(args):
            self._add(_READERS[name](*args))
        return func(*args, **(kwargs or {}))


def _is_header(args):
    sent = args[1]
    return isinstance(sent, Tensor) and (sent.dtype, sent.numel()) == (torch.uint8, HEADER_BYTES)


def _group(boxed):
    group = dist.ProcessGroup.unbox(boxed)
    return group.rank(), group.size()


def _nbytes(tensor):
    return tensor.numel() * tensor.element_size()


def _all_to_all(output, sent, group, output_sizes, input_sizes, *_):
    rank, size = _group(group)
    rows = input_sizes or [sent.shape[0] // size] * size
    row_bytes = math.prod(sent.shape[1:]) * sent.element_size()
    return Call("all_to_all", (sum(rows) - rows[rank]) * row_bytes)


def _all_gather(output, sent, group, *_):
    return Call("all_gather", (_group(group)[1] - 1) * _nbytes(sent))


def _all_reduce(tensors, group, *_):
    size = _group(group)[1]
    return Call("all_reduce", 2 * (size - 1) / size * sum(_nbytes(t) for t in tensors))


def _reduce_scatter(output, sent, group, *_):
    size = _group(group)[1]
    return Call("reduce_scatter", (size - 1) / size * _nbytes(sent))


def _send(tensors, *_):
    return Call("send", sum(_nbytes(tensor) for tensor in tensors))


def _receive(*_):
    return Call("recv", 0)


def _unpriced(*args):
    return Call("other", math.nan)


_READERS = {
    "alltoall_base_": _all_to_all,
    "_allgather_base_": _all_gather,
    "allreduce_": _all_reduce,
    "_reduce_scatter_base_": _reduce_scatter,
    "allgather_": _unpriced,
    "alltoall_": _unpriced,
    "broadcast_": _unpriced,
    "gather_": _unpriced,
    "reduce_": _unpriced,
    "reduce_scatter_": _unpriced,
    "scatter_": _unpriced,
    "send": _send,
    "recv_": _receive,
}
