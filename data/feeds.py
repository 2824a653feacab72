"""How words get from a read function into torch tensors: memory map, or DALI external_source.

A feed calls ``read(i)`` for i in [0, count) and yields the result as an int32 tensor on the device.
Both feeds yield the same bits; DALI adds its prefetch queue and its way to a GPU.
"""

from collections.abc import Callable, Iterator
from typing import Literal

import torch
from torch import Tensor

from data.shards import Words
from sbpflow.errors import ConfigError

Backend = Literal["memmap", "dali"]
Read = Callable[[int], Words]


def memmap_feed(read: Read, count: int, device: torch.device) -> Iterator[Tensor]:
    """Yield each read as a tensor; to a GPU through pinned memory, asynchronously."""
    for index in range(count):
        words = torch.from_numpy(read(index))
        if device.type == "cuda":
            words = words.pin_memory().to(device, non_blocking=True)
        yield words


def dali_feed(read: Read, count: int, device: torch.device) -> Iterator[Tensor]:
    """Yield each read through a DALI pipeline; one sample is a whole block, never a row."""
    try:
        from nvidia.dali import fn, pipeline_def
    except ImportError as error:
        raise ConfigError(
            "data.loader: dali needs nvidia-dali (`pip install nvidia-dali-cuda130`), or use "
            "data.loader=memmap"
        ) from error

    def source(info: object) -> Words:
        index = info.iteration  # pyright: ignore[reportAttributeAccessIssue]
        if index >= count:
            raise StopIteration
        return read(index)[None]

    gpu = device.type == "cuda"

    @pipeline_def(batch_size=1, num_threads=1, device_id=device.index or 0 if gpu else None)
    def pipeline() -> object:
        words = fn.external_source(source=source, batch=True, batch_info=True, no_copy=True, ndim=2)
        return words.gpu() if gpu else words

    pipe = pipeline()
    pipe.build()
    for _ in range(count):
        (out,) = pipe.run()
        yield torch.from_dlpack(out[0])


FEEDS: dict[Backend, Callable[[Read, int, torch.device], Iterator[Tensor]]] = {
    "memmap": memmap_feed,
    "dali": dali_feed,
}
