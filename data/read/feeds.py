"""How blocks get from a read function into torch tensors: memory map, or DALI external_source.

Blocks are read in threads of the loader, a few ahead of the consumer, and DALI runs in one
of its own; a feed yields the batches in them, on the device. Both feeds yield the same bits.
"""

import ctypes
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from sbpflow.data.read.blocks import Block, Parts, Words
from sbpflow.errors import ConfigError

Backend = Literal["memmap", "dali"]
Split = Callable[[Tensor, tuple[int, ...]], list[Parts]]  # views of a block
Feed = Callable[[Iterator[Block], Split, torch.device, "Threads"], Iterator[Parts]]

Group = TypeVar("Group")

_AHEAD = 3
_READERS = 2
_RUNS_AHEAD = 1
# Blocks read, in a run of DALI, done by it, being delivered, and in the consumer's hands.
_MOST_BUFFERS = _AHEAD + _RUNS_AHEAD + 4


class Buffers:
    """Arrays for batches, used again once nobody refers to them any more.

    Fresh memory costs as much in page faults as the copy into it. Each array handed out lies on a
    lease, an object of its own that every view of it, numpy's or torch's, keeps alive; when the
    last view goes, the lease goes and gives the memory back.
    """

    def __init__(self) -> None:
        # Its calls are atomic: a lease may end in any thread, at any moment. The last one given
        # back is taken first: a few that are in the cache cost a fifth less than all in turn.
        self._free: deque[Words] = deque()

    def take(self, num_words: int) -> Words:
        """An array [num_words] that no one else uses."""
        for _ in range(len(self._free)):
            try:
                memory = self._free.pop()
            except IndexError:  # taken by another reader
                break
            if memory.shape[0] >= num_words:
                return self._lease(memory)[:num_words]
            self._free.appendleft(memory)
        # Lists make batches of unequal sizes: with some room, most fit into what is there.
        return self._lease(np.empty(num_words + num_words // _ROOM, dtype=np.int32))[:num_words]

    def _lease(self, memory: Words) -> Words:
        lease = (ctypes.c_int32 * memory.shape[0]).from_buffer(memory)
        weakref.finalize(lease, _give_back, self._free, memory).atexit = False
        return np.frombuffer(lease, dtype=np.int32)


_ROOM = 16  # a part of so many is added


def _give_back(free: deque[Words], memory: Words) -> None:
    if len(free) < _MOST_BUFFERS:
        free.append(memory)


class Threads:
    """The threads of a loader; they end when it is closed or collected."""

    def __init__(self) -> None:
        self.readers = ThreadPoolExecutor(_READERS, thread_name_prefix="read-ahead")
        self.runner = ThreadPoolExecutor(1, thread_name_prefix="dali")

    def close(self) -> None:
        """End them; the runner first, it waits for the readers."""
        for pool in (self.runner, self.readers):
            pool.shutdown(wait=True, cancel_futures=True)


def read_ahead(
    read: Callable[[Group], Block], groups: Iterator[Group], readers: ThreadPoolExecutor
) -> Iterator[Block]:
    """Yield ``read(group)`` of each, in order, with the next few already being read.

    An abandoned iterator waits for nothing when it is collected, which may happen in any thread.
    """
    pending: deque[Future[Block]] = deque()
    try:
        while True:
            more = islice(groups, _AHEAD - len(pending))
            pending.extend(readers.submit(read, group) for group in more)
            if not pending:
                return
            yield pending.popleft().result()
    finally:
        for future in pending:
            future.cancel()


def memmap_feed(
    blocks: Iterator[Block], split: Split, device: torch.device, threads: Threads
) -> Iterator[Parts]:
    """Yield the batches of each block; to a GPU through pinned memory, one copy ahead."""
    if device.type == "cuda":
        for words, sizes in _to_gpu(blocks, device):
            yield from split(words, sizes)
    else:
        for block in blocks:
            yield from split(torch.from_numpy(block.words), block.sizes)


def _to_gpu(
    blocks: Iterator[Block], device: torch.device
) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
    side = torch.cuda.Stream(device)
    waiting: tuple[Tensor, tuple[int, ...]] | None = None
    for block in blocks:
        with torch.cuda.stream(side):
            copied = torch.from_numpy(block.words).pin_memory().to(device, non_blocking=True)
        if waiting is not None:
            yield waiting
        # The consumer's stream waits for this copy only, which ran beside its last step.
        torch.cuda.current_stream(device).wait_stream(side)
        copied.record_stream(torch.cuda.current_stream(device))
        waiting = (copied, block.sizes)
    if waiting is not None:
        yield waiting


def dali_feed(
    blocks: Iterator[Block], split: Split, device: torch.device, threads: Threads
) -> Iterator[Parts]:
    """Yield each block through a DALI pipeline; one sample is a whole block, never a row.

    A run passes through three threads of DALI's, which takes a consumer that comes back from a step
    about 1 ms. So it happens in a thread, ahead.
    """
    try:
        from nvidia.dali import fn, pipeline_def, types
    except ImportError as error:
        raise ConfigError(
            "data.loader: dali needs nvidia-dali (`pip install nvidia-dali-cuda130`), or use "
            "data.loader=memmap"
        ) from error

    gpu = device.type == "cuda"

    sizes: deque[tuple[int, ...]] = deque()
    """Of the blocks handed to DALI and not yet split."""
    source = [blocks]
    """Emptied at the end: DALI's operators refer to each other, and one of them to this function,
    so what it reads from would stay until the garbage collector runs."""
    del blocks

    def next_block() -> list[Words]:
        """A batch of one sample."""
        if not source:
            raise StopIteration
        block = next(source[0])
        sizes.append(block.sizes)
        return [block.words]

    @pipeline_def(batch_size=1, num_threads=1, device_id=device.index or 0 if gpu else None)
    def pipeline() -> object:
        words = fn.external_source(source=next_block, no_copy=True, ndim=1, dtype=types.INT32)
        return words.gpu() if gpu else words

    pipe = pipeline()
    pipe.build()

    def run() -> Callable[[], list[Parts]]:
        (output,) = pipe.run()

        def split_block() -> list[Parts]:
            block = torch.from_dlpack(output[0])
            return split(block.clone() if gpu else block, sizes.popleft())

        # On a GPU the consumer converts, which joins its stream, and copies: DALI reuses a block's
        # memory in the order of its own stream, which knows nothing of the consumer's reads.
        # Elsewhere this thread converts: right after a step of some ms a consumer's first calls of
        # torch take five times as long.
        if gpu:
            return split_block
        parts = split_block()
        return lambda: parts

    pending: deque[Future[Callable[[], list[Parts]]]] = deque(
        threads.runner.submit(run) for _ in range(_RUNS_AHEAD)
    )
    try:
        while True:
            try:
                parts = pending.popleft().result()
            except StopIteration:
                return
            pending.append(threads.runner.submit(run))
            yield from parts()
    finally:
        for future in pending:
            future.cancel()
        source.clear()


FEEDS: dict[Backend, Feed] = {"memmap": memmap_feed, "dali": dali_feed}
