"""Keeps freed memory in processes that allocate the same sizes repeatedly.

The GNU C library returns large freed blocks to the system, which must zero each page before its
next use. docs/decisions/engine.md and docs/decisions/data.md report the measured cost.
"""

import ctypes

# These parameters of ``mallopt`` are defined in glibc's ``malloc.h``.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8


def keep_freed_memory() -> None:
    """Reuse freed memory instead of returning it to the system. Has no effect without glibc.

    Call this function before the process starts threads. Memory use stays at its peak afterwards,
    so only commands may call this function, not libraries.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)  # Only the main arena keeps its heap.
        mallopt(_M_MMAP_THRESHOLD, 1 << 30)  # Blocks above the threshold are mapped separately.
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
