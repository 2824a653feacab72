"""Read blocks ahead, and convert them to torch tensors, directly or through DALI's external_source.

Reader threads read a few blocks ahead of the consumer, and DALI runs in another thread. A feed
yields the batches of the blocks on the device. Both kinds of feeds yield bit-identical batches.
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
from sbpflow.runtime.compute.devices import upload

Backend = Literal["memmap", "dali"]
Split = Callable[[Tensor, tuple[int, ...]], list[BatchColumns]]  # divides a block into batches
Feed = Callable[[Iterator[Block], Split, torch.device, "Threads"], Iterator[BatchColumns]]

Group = TypeVar("Group")

_AHEAD = 3
_READERS = 2
_RUNS_AHEAD = 1
# A block in use is in one of five states: read ahead, in a DALI run, finished by DALI, being
# delivered, or being consumed.
_MAX_BUFFERS = _AHEAD + _RUNS_AHEAD + 4
_SPARE_SHARE = 16  # a new buffer is larger than needed by 1/16


class Buffers:
    """A pool of arrays for blocks. An array is reused when no reference to it remains, because the
    page faults of new memory would cost as much as copying the data. Each array is a view of a
    lease object, which all numpy or torch views of the array keep alive. When the last view is
    gone, the finalizer of the lease returns the memory to the pool.
    """

    def __init__(self) -> None:
        # Leases may end in any thread at any time, so the pool is a deque, whose operations are
        # atomic. The most recently returned memory is reused first, because writing to memory
        # that is still in a CPU cache is faster.
        self._free: deque[Words] = deque()

    def take(self, num_words: int) -> Words:
        """Return an unused array [num_words]."""
        for _ in range(len(self._free)):
            try:
                memory = self._free.pop()
            except IndexError:  # another reader took the last array
                break
            if memory.shape[0] >= num_words:
                return self._lease(memory)[:num_words]
            self._free.appendleft(memory)
        # Batches with lists vary in size. Because of the extra room, most of these batches fit into
        # an old buffer.
        return self._lease(np.empty(num_words + num_words // _SPARE_SHARE, np.int32))[:num_words]

    def _lease(self, memory: Words) -> Words:
        lease = (ctypes.c_int32 * memory.shape[0]).from_buffer(memory)
        weakref.finalize(lease, _give_back, self._free, memory).atexit = False
        return np.frombuffer(lease, dtype=np.int32)


def _give_back(free: deque[Words], memory: Words) -> None:
    if len(free) < _MAX_BUFFERS:
        free.append(memory)


class Threads:
    """The threads of a loader, which end when the loader is closed or garbage-collected."""

    def __init__(self) -> None:
        self.readers = ThreadPoolExecutor(_READERS, thread_name_prefix="read-ahead")
        self.runner = ThreadPoolExecutor(1, thread_name_prefix="dali")

    def close(self) -> None:
        """First end the thread that runs DALI, which waits for the readers, and then end the
        readers.
        """
        for pool in (self.runner, self.readers):
            pool.shutdown(wait=True, cancel_futures=True)


def read_ahead(
    read: Callable[[Group], Block], groups: Iterator[Group], readers: ThreadPoolExecutor
) -> Iterator[Block]:
    """Yield ``read(group)`` for each group, in order, while threads read the next few groups.

    An abandoned iterator may be garbage-collected in any thread; its cleanup never blocks.
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
    """Yield the batches of each block. Copies to a GPU use pinned memory and run one block
    ahead.
    """
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
            copied = upload(torch.from_numpy(block.words), device)
        if waiting is not None:
            yield waiting
        # The consumer's stream waits only for this copy, which ran while the previous block was
        # consumed.
        torch.cuda.current_stream(device).wait_stream(side)
        copied.record_stream(torch.cuda.current_stream(device))
        waiting = (copied, block.sizes)
    if waiting is not None:
        yield waiting


def dali_feed(
    blocks: Iterator[Block], split: Split, device: torch.device, threads: Threads
) -> Iterator[BatchColumns]:
    """Yield the batches of each block, which passes through a DALI pipeline as one sample.

    A DALI run involves three threads, so the consumer would wait about 1 ms for the run in each
    step. To avoid this delay, another thread runs the pipeline ahead.
    """
    try:
        from nvidia.dali import fn, pipeline_def, types
    except ImportError as error:
        raise ConfigError(
            "data.loader: dali needs nvidia-dali; run `pip install nvidia-dali-cuda130`, or use "
            "data.loader=memmap"
        ) from error

    gpu = device.type == "cuda"

    sizes: deque[tuple[int, ...]] = deque()
    """The batch sizes of the blocks that are in the DALI pipeline"""
    source = [blocks]
    """The iterator of blocks, which is removed at the end, because a reference cycle between DALI's
    operators and ``next_block`` would otherwise keep it alive until garbage collection
    """
    del blocks

    def next_block() -> list[Words]:
        """Return one DALI batch, whose only sample is the next block."""
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

        # On a GPU, the consumer must convert and copy the block, because the conversion uses the
        # current stream, and DALI reuses a block without waiting for the consumer's stream. On a
        # CPU, this thread converts the block, because the consumer's first torch calls after a step
        # of a few ms would be five times as slow.
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
