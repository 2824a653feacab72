"""Memory for table rows: on Linux CPUs in huge pages, where the system grants them on request.

Rows are read at random, so with pages of 4 KiB nearly every row of a large table costs a miss of
the address translation besides that of the cache. Activations stay with torch's allocator: there
huge pages cost more in clearing than they save.
"""

import mmap

import torch
from torch import Tensor

LEAST_BYTES = 4 << 20  # two huge pages; smaller blocks are not worth a mapping of their own


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that stay in place for the life of a table."""
    numel = torch.Size(shape).numel()
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if device.type != "cpu" or advice is None or numel * dtype.itemsize < LEAST_BYTES:
        return torch.zeros(shape, dtype=dtype, device=device)
    # Private: Python's default is shared memory, which gets no huge pages. Paged in when touched.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    block = mmap.mmap(-1, numel * dtype.itemsize, flags=flags)
    block.madvise(advice)
    return torch.frombuffer(block, dtype=dtype).view(shape)  # keeps the mapping alive
