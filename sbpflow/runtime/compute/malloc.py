"""Keeps freed memory in processes that allocate the same sizes repeatedly.

The GNU C library returns large freed blocks to the system, which must zero each page before its
next use. docs/decisions/engine.md and data.md have measurements of the cost.
"""

import ctypes

# These parameters of mallopt are defined in glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8


def keep_freed_memory() -> None:
    """Reuse freed memory instead of returning it to the system; no effect without glibc.

    Call this function before the process starts threads. Memory use then stays at its peak, so call
    this function only in a command's own process, never from a library.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)  # only the main arena keeps its heap
        mallopt(_M_MMAP_THRESHOLD, 1 << 30)  # blocks above the threshold are mapped separately
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
