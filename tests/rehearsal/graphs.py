"""Rehearses CUDA graphs on the simulated device: what a captured region may contain, and replays.

During a capture, ops run only to determine shapes, and their effects are then undone: existing
memory is restored, and memory allocated in the capture has no contents before the first replay. A
replay runs the same ops on the same memory. During a capture, the following are rejected: host
waits, copies from or to the host, collectives, waits for outside work, and generators that are
reseeded or unknown to the graph. A replay is rejected if some of its memory has been freed.
"""

import threading
import weakref
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from tests.rehearsal import streams
from tests.rehearsal.journal import count_op, note
from tests.rehearsal.memory import RefusedError, check_access
from tests.rehearsal.trees import tensors_of


class _Capturing(threading.local):
    graph: "Graph | None" = None


_capturing = _Capturing()


def capturing() -> "Graph | None":
    """Return the graph that this thread is capturing."""
    return _capturing.graph


def refuse(what: str) -> None:
    """Raise RefusedError during a capture."""
    if _capturing.graph is not None:
        raise RefusedError(f"in a captured region: {what}")


class Graph:
    """Replaces ``torch.cuda.CUDAGraph``."""

    def __init__(self, *_: object, **__: object) -> None:
        self.generators: list[torch.Generator] = []
        self.calls: list[Callable[[], None]] = []
        self._made: dict[int, tuple[streams.Block, Tensor]] = {}  # the private pool, by block
        self._outside: dict[object, tuple[Callable[[], Any], Tensor, bool]] = {}
        self._before: dict[int, tuple[Tensor, Tensor]] = {}
        self._done = False

    def register_generator_state(self, generator: torch.Generator) -> None:
        self.generators.append(generator)

    def add(self, func: Any, hosts: Any, kwargs: Any, out: Any) -> None:
        """Record an op on host tensors, for replays."""
        drawn = kwargs.get("generator")
        # Compare generators by address, because dispatch creates a new wrapper for a generator.
        known = [generator._cdata for generator in self.generators]
        if drawn is not None and drawn._cdata not in known:
            raise RefusedError(
                f"in a captured region: {func} uses a generator that the graph does not know"
            )
        made = tensors_of(out)

        def again() -> None:
            for target, value in zip(made, tensors_of(func(*hosts, **kwargs)), strict=True):
                if target.data_ptr() != value.data_ptr():
                    target.copy_(value)

        self.calls.append(again)

    def made(self, block: streams.Block | None, host: Tensor) -> None:
        """Keep memory in the graph's pool alive as long as the graph."""
        if block is not None and block not in [kept for kept, _ in self._made.values()]:
            self._made[id(block)] = block, _bytes_of(host)

    def uses(self, block: streams.Block | None, host: Tensor, *, writes: bool) -> None:
        """Before an op accesses memory, save the memory's contents if it existed before the
        capture.
        """
        if block is None or id(block) in self._made:
            return
        key = (writes, host.data_ptr(), host.shape, host.stride())
        self._outside[key] = (weakref.ref(block), host, writes)
        if writes and id(block) not in self._before:
            whole = _bytes_of(host)
            self._before[id(block)] = whole, whole.clone()

    def begin(self) -> None:
        if self._done or _capturing.graph is not None:
            raise RefusedError("a capture within a capture, or a graph captured twice")
        if streams.current() is streams.MAIN:
            raise RefusedError("a capture on the main stream; use another")
        _capturing.graph = self

    def end(self) -> None:
        _capturing.graph, self._done = None, True
        for whole, before in self._before.values():
            whole.copy_(before)
        for block, whole in self._made.values():
            block.used.clear()  # a capture must leave no trace
            whole.fill_(255)  # NaN in every floating dtype
        self._before.clear()

    def replay(self) -> None:
        """Run all ops again, on the current stream."""
        if not self._done:
            raise RefusedError("a replay without a capture")
        refuse("a replay")
        streams.current().tick()
        count_op("graph.replay")
        for find, host, writes in self._outside.values():
            block = find()
            if block is None:
                raise RefusedError("a replay uses memory that was freed since its capture")
            check_access("a replay", host, writes=writes)
            block.use("a replay", host, writes=writes)
        for block, host in self._made.values():
            block.use("a replay", host, writes=True)
        with _disable_current_modes(), torch.no_grad():
            for call in self.calls:
                call()

    def reset(self) -> None:
        self.__init__()


def _bytes_of(host: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(host.untyped_storage())


@contextmanager
def capture(
    graph: Graph, *, stream: Any = None, capture_error_mode: str = "global", **_: object
) -> Any:
    """Replaces ``torch.cuda.graph``; requires the capture mode ``thread_local``, because NCCL's
    threads query events.
    """
    if capture_error_mode != "thread_local":
        raise RefusedError(f"capture_error_mode {capture_error_mode} fails in NCCL's threads")
    note("sync", "torch.cuda.graph synchronizes")
    streams.host_waits_for_all()
    with streams.on(stream.clock if stream is not None else streams.Clock("a capture's stream")):
        graph.begin()
        try:
            yield
        finally:
            graph.end()
