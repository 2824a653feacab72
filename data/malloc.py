"""What the C library does with memory that is freed, for commands that read in large pieces."""

import ctypes

# From malloc.h of glibc: parameters of mallopt.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8


def keep_freed_memory() -> None:
    """Have the process use freed memory again instead of giving it back; does nothing off glibc.

    A piece of 32 MiB is a mapping of its own otherwise, and new at every read: its page faults take
    as long as copying it twice. For the process of a command, not for a library's caller.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)  # the heaps of further arenas are given back whole
        mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
