"""Reads the time slices of threads."""

import ctypes
import platform
import struct

import pytest

_SCHED_GETATTR = {"x86_64": 315, "aarch64": 275}
_SIZE = 56


def _has_slices() -> bool:
    version = tuple(map(int, platform.release().split(".")[:2]))
    known = platform.machine() in _SCHED_GETATTR
    return platform.system() == "Linux" and known and version >= (6, 12)


LINUX_SINCE_6_12 = pytest.mark.skipif(
    not _has_slices(), reason="only Linux 6.12 and later have a time slice per thread"
)


def time_slice_ns(tid: int) -> int:
    """Return the time slice of a thread in nanoseconds."""
    buffer = ctypes.create_string_buffer(_SIZE)
    number = _SCHED_GETATTR[platform.machine()]
    assert ctypes.CDLL(None).syscall(number, tid, buffer, _SIZE, 0) == 0
    return struct.unpack_from("=Q", buffer, 24)[0]
