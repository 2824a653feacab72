"""How blocks get from a read function into torch tensors: memory map, or DALI external_source.

Blocks are read in threads of the loader, a few ahead of the consumer, and DALI runs in one
of its own; a feed yields them as tensors on the device. Both feeds yield the same bits.
"""

import ctypes
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from data.read.blocks import Block, Parts, Words
from sbpflow.errors import ConfigError

Backend = Literal["memmap", "dali"]
Read = Callable[[int], Block]
Split = Callable[[Tensor, int], Parts]  # views of a block of so many rows
Feed = Callable[[Iterator[Block], Split, torch.device, "Threads"], Iterator[Parts]]

_AHEAD = 4
_READERS = 2
_RUNS_AHEAD = 2
_BLOCKS_PER_RUN = 4
# Blocks read, in runs of DALI, in the group that is being delivered, and in the consumer's hands.
_MOST_BUFFERS = _AHEAD + (_RUNS_AHEAD + 1) * _BLOCKS_PER_RUN + 2


class Buffers:
    """Arrays for batches, used again once nobody refers to them any more.

    Fresh memory costs as much in page faults as the copy into it. Each array handed out lies on a
    lease, an object of its own that every view of it, numpy's or torch's, keeps alive; when the
    last view goes, the lease goes and gives the memory back.
    """

    def __init__(self) -> None:
        # Its append and popleft are atomic: a lease may end in any thread, at any moment.
        self._free: deque[Words] = deque()

    def take(self, num_words: int) -> Words:
        """An array [num_words] that no one else uses."""
        for _ in range(len(self._free)):
            try:
                memory = self._free.popleft()
            except IndexError:  # taken by another reader
                break
            if memory.shape[0] >= num_words:
                return self._lease(memory)[:num_words]
            self._free.append(memory)
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


def read_ahead(read: Read, count: int, readers: ThreadPoolExecutor) -> Iterator[Block]:
    """Yield ``read(0)``, ``read(1)``, ... with the next few already being read.

    An abandoned iterator waits for nothing when it is collected, which may happen in any thread.
    """
    pending: deque[Future[Block]] = deque()
    try:
        for index in range(count):
            while len(pending) < _AHEAD and index + len(pending) < count:
                pending.append(readers.submit(read, index + len(pending)))
            yield pending.popleft().result()
    finally:
        for future in pending:
            future.cancel()


def memmap_feed(
    blocks: Iterator[Block], split: Split, device: torch.device, threads: Threads
) -> Iterator[Parts]:
    """Yield each block as a tensor; to a GPU through pinned memory, one copy ahead."""
    if device.type == "cuda":
        for words, num_rows in _to_gpu(blocks, device):
            yield split(words, num_rows)
    else:
        for block in blocks:
            yield split(torch.from_numpy(block.words), block.num_rows)


def _to_gpu(blocks: Iterator[Block], device: torch.device) -> Iterator[tuple[Tensor, int]]:
    side = torch.cuda.Stream(device)
    waiting: tuple[Tensor, int] | None = None
    for block in blocks:
        with torch.cuda.stream(side):
            copied = torch.from_numpy(block.words).pin_memory().to(device, non_blocking=True)
        if waiting is not None:
            yield waiting
        # The consumer's stream waits for this copy only, which ran beside its last step.
        torch.cuda.current_stream(device).wait_stream(side)
        copied.record_stream(torch.cuda.current_stream(device))
        waiting = (copied, block.num_rows)
    if waiting is not None:
        yield waiting


def dali_feed(
    blocks: Iterator[Block], split: Split, device: torch.device, threads: Threads
) -> Iterator[Parts]:
    """Yield each block through a DALI pipeline; one sample is a whole block, never a row.

    A run passes through three threads of DALI's, which takes a consumer that comes back from a step
    about 1 ms. So it happens in a thread, ahead, and for several blocks at once: an output of the
    pipeline for each, since DALI copies the samples of one output into one buffer.
    """
    try:
        from nvidia.dali import fn, pipeline_def, types
    except ImportError as error:
        raise ConfigError(
            "data.loader: dali needs nvidia-dali (`pip install nvidia-dali-cuda130`), or use "
            "data.loader=memmap"
        ) from error

    gpu = device.type == "cuda"

    rows: deque[int] = deque()
    """Of the blocks handed to DALI and not yet split."""
    source = [blocks]
    """Emptied at the end: DALI's operators refer to each other, and one of them to this function,
    so what it reads from would stay until the garbage collector runs."""
    del blocks

    def next_blocks() -> list[list[Words]]:
        """A batch of one sample for every output; without rows where the epoch is over."""
        if not source:
            raise StopIteration
        found = [next(source[0])]
        found += islice(source[0], _BLOCKS_PER_RUN - 1)
        rows.extend(block.num_rows for block in found)
        none = [found[0].words[:0]] * (_BLOCKS_PER_RUN - len(found))
        return [[words] for words in (*(block.words for block in found), *none)]

    @pipeline_def(batch_size=1, num_threads=1, device_id=device.index or 0 if gpu else None)
    def pipeline() -> object:
        outputs = fn.external_source(
            source=next_blocks,
            num_outputs=_BLOCKS_PER_RUN,
            no_copy=True,
            ndim=1,
            dtype=types.INT32,
        )
        return tuple(words.gpu() for words in outputs) if gpu else tuple(outputs)

    pipe = pipeline()
    pipe.build()

    def run() -> Iterator[Parts]:
        words = (output[0] for output in pipe.run())
        blocks = (torch.from_dlpack(block) for block in words if block.shape()[0])
        # On a GPU the consumer converts, which joins its stream, and copies: DALI reuses a block's
        # memory in the order of its own stream, which knows nothing of the consumer's reads.
        # Elsewhere this thread converts: right after a step of some ms a consumer's first calls of
        # torch take five times as long.
        parts = (split(block.clone() if gpu else block, rows.popleft()) for block in blocks)
        return parts if gpu else iter(list(parts))

    pending: deque[Future[Iterator[Parts]]] = deque(
        threads.runner.submit(run) for _ in range(_RUNS_AHEAD)
    )
    try:
        while True:
            try:
                parts = pending.popleft().result()
            except StopIteration:
                return
            pending.append(threads.runner.submit(run))
            yield from parts
    finally:
        for future in pending:
            future.cancel()
        source.clear()


FEEDS: dict[Backend, Feed] = {"memmap": memmap_feed, "dali": dali_feed}
