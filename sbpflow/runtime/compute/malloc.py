"""Keep freed memory in the process, for commands that allocate the same sizes again and again.

The GNU C library returns large freed blocks to the system, which clears every page again at its
next use. docs/decisions/engine.md and data.md have what that costs.
"""

import ctypes

# From malloc.h of glibc: parameters of mallopt.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8


def keep_freed_memory() -> None:
    """Have the process reuse freed memory instead of returning it; has no effect off glibc.

    Call it before the process starts threads. It is for the process of a command, whose memory
    then stays at its peak, not for a library's caller.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)  # the heaps of further arenas are given back whole
        mallopt(_M_MMAP_THRESHOLD, 1 << 30)  # larger pieces would be mappings of their own
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
