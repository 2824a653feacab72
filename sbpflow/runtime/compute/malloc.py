"""Keeps freed memory in processes that allocate the same sizes repeatedly.

The GNU C library returns large freed blocks to the system, which must zero each page before its
next use. docs/decisions/engine.md and docs/decisions/data.md report the measured cost.
"""

import ctypes
from collections.abc import Mapping

# These parameters of ``mallopt`` are defined in glibc's ``malloc.h``.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_ARENAS = 1  # Only the main arena keeps its heap.
_MMAP_THRESHOLD = 1 << 30  # Blocks above the threshold are mapped separately.
_TRIM_THRESHOLD = 2**31 - 1

KEEP_FREED_MEMORY: Mapping[str, str] = {
    "MALLOC_ARENA_MAX": str(_ARENAS),
    "MALLOC_MMAP_THRESHOLD_": str(_MMAP_THRESHOLD),
    "MALLOC_TRIM_THRESHOLD_": str(_TRIM_THRESHOLD),
}
"""Environment variables that make a new process keep freed memory from its start"""


def keep_freed_memory() -> None:
    """Reuse freed memory instead of returning it to the system. Has no effect without glibc.

    Call this function before the process starts threads. Memory use stays at its peak afterwards,
    so only commands may call this function, not libraries.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, _ARENAS)
        mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD)
        mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD)
