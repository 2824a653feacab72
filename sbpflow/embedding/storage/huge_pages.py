"""Allocates memory for table rows on the CPU, in huge pages if Linux grants them.

Lookups access rows at random, so with 4 KiB pages, nearly every row of a large table costs a TLB
miss in addition to a cache miss. Activations use torch's allocator instead: clearing huge pages for
them would cost more than it saves.
"""

import mmap

import torch
from torch import Tensor

from sbpflow.errors import ConfigError

LEAST_BYTES = 4 << 20  # two huge pages; smaller blocks are not worth a mapping of their own


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of zeros for the rows of a table.

    Raise ConfigError if memory for a large tensor on CPU cannot be reserved.
    """
    numel = torch.Size(shape).numel()
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if device.type != "cpu" or advice is None or numel * dtype.itemsize < LEAST_BYTES:
        return torch.zeros(shape, dtype=dtype, device=device)
    # The mapping must be private: Python's default is a shared mapping, for which Linux does not
    # use huge pages. The pages are allocated, and zeroed, on first use.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        block = mmap.mmap(-1, numel * dtype.itemsize, flags=flags)
    except OSError as error:
        raise ConfigError(
            f"tables: a block of {numel * dtype.itemsize / 1e9:.2f} GB for {shape[0]:,} rows does "
            "not fit in memory; use more ranks, or parallel.storage with kind: file"
        ) from error
    block.madvise(advice)
    return torch.frombuffer(block, dtype=dtype).view(shape)  # the tensor keeps the mapping alive
