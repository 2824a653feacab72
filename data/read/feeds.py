"""Feeds turn blocks from a read function into torch tensors: memory map, or DALI external_source.

Threads of the loader read a few blocks ahead of the consumer, and DALI runs in a separate thread.
A feed yields the batches in the blocks, on the device. Both feeds yield identical bits.
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

from sbpflow.data.read.blocks import BatchColumns, Block, Words
from sbpflow.errors import ConfigError

Backend = Literal["memmap", "dali"]
Split = Callable[[Tensor, tuple[int, ...]], list[BatchColumns]]  # views of a block
Feed = Callable[[Iterator[Block], Split, torch.device, "Threads"], Iterator[BatchColumns]]

Group = TypeVar("Group")

_AHEAD = 3
_READERS = 2
_RUNS_AHEAD = 1
# Blocks that are read ahead, in a DALI run, finished by it, being delivered, and being consumed.
_MAX_BUFFERS = _AHEAD + _RUNS_AHEAD + 4
_SPARE_SHARE = 16  # a new buffer gets 1/16 extra room


class Buffers:
    """Arrays for batches, which are reused once nothing refers to them any more.

    Page faults of new memory cost as much as the copy into it. Each array is a view of a lease, an
    object that every further view, of numpy or torch, keeps alive. When the last view is gone, the
    lease is finalized and returns the memory.
    """

    def __init__(self) -> None:
        # Deque operations are atomic: a lease may end in any thread at any time. The memory that
        # was returned last is reused first, because memory in the cache costs a fifth less.
        self._free: deque[Words] = deque()

    def take(self, num_words: int) -> Words:
        """Return an array [num_words] that nothing else uses."""
        for _ in range(len(self._free)):
            try:
                memory = self._free.pop()
            except IndexError:  # another reader took it
                break
            if memory.shape[0] >= num_words:
                return self._lease(memory)[:num_words]
            self._free.appendleft(memory)
        # Lists make batches of unequal sizes; with extra room, most of them fit an old buffer.
        return self._lease(np.empty(num_words + num_words // _SPARE_SHARE, np.int32))[:num_words]

    def _lease(self, memory: Words) -> Words:
        lease = (ctypes.c_int32 * memory.shape[0]).from_buffer(memory)
        weakref.finalize(lease, _give_back, self._free, memory).atexit = False
        return np.frombuffer(lease, dtype=np.int32)


def _give_back(free: deque[Words], memory: Words) -> None:
    if len(free) < _MAX_BUFFERS:
        free.append(memory)


class Threads:
    """The threads of a loader, which end when it is closed or collected."""

    def __init__(self) -> None:
        self.readers = ThreadPoolExecutor(_READERS, thread_name_prefix="read-ahead")
        self.runner = ThreadPoolExecutor(1, thread_name_prefix="dali")

    def close(self) -> None:
        """End the threads; the runner first, because it waits for the readers."""
        for pool in (self.runner, self.readers):
            pool.shutdown(wait=True, cancel_futures=True)


def read_ahead(
    read: Callable[[Group], Block], groups: Iterator[Group], readers: ThreadPoolExecutor
) -> Iterator[Block]:
    """Yield ``read(group)`` for each group in order, while the next few are read in threads.

    An abandoned iterator never waits when it is collected, which may happen in any thread.
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
) -> Iterator[BatchColumns]:
    """Yield the batches of each block; on a GPU through pinned memory, one copy ahead."""
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
        # The consumer's stream waits only for this copy, which overlapped its previous step.
        torch.cuda.current_stream(device).wait_stream(side)
        copied.record_stream(torch.cuda.current_stream(device))
        waiting = (copied, block.sizes)
    if waiting is not None:
        yield waiting


def dali_feed(
    blocks: Iterator[Block], split: Split, device: torch.device, threads: Threads
) -> Iterator[BatchColumns]:
    """Yield each block through a DALI pipeline, where one sample is a whole block of rows.

    A run passes through three of DALI's threads, which costs a consumer that returns from a step
    about 1 ms. So a thread runs the pipeline ahead.
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
    """Batch sizes of the blocks that DALI has and that are not yet split."""
    source = [blocks]
    """Emptied at the end: DALI's operators form a reference cycle that includes this function, so
    what it reads from would otherwise live until the garbage collector runs."""
    del blocks

    def next_block() -> list[Words]:
        """Return the samples of one DALI batch, which has a single sample."""
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

    def run() -> Callable[[], list[BatchColumns]]:
        (output,) = pipe.run()

        def split_block() -> list[BatchColumns]:
            block = torch.from_dlpack(output[0])
            return split(block.clone() if gpu else block, sizes.popleft())

        # On a GPU the consumer must convert and copy: converting joins its stream, and DALI reuses
        # a block's memory in the order of its own stream, which does not wait for the consumer.
        # On a CPU this thread converts, because a consumer's first torch calls after a step of some
        # ms take five times as long.
        if gpu:
            return split_block
        parts = split_block()
        return lambda: parts

    pending: deque[Future[Callable[[], list[BatchColumns]]]] = deque(
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
