"""Shortens the time slice of a thread, so that it runs as soon as it has something to do.

Since Linux 6.6, a thread that wakes up may wait until the thread on its CPU has used its time slice
of about 3 ms, even if another CPU is idle. Since Linux 6.12, a thread can request a shorter slice,
and then interrupts threads that have longer ones. docs/decisions/export.md reports the measured
effect.
"""

import ctypes
import os
import platform
import struct
import sys

# The number of the system call ``sched_setattr``, for which glibc has no function before 2.41.
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
# The fields of ``struct sched_attr``: size, policy, flags, nice, priority, runtime, deadline,
# period, and the limits of utilization.
_ATTRIBUTES = struct.Struct("=IIQiIQQQII")


def shorten_time_slice(slice_s: float) -> bool:
    """Request a time slice of ``slice_s`` seconds (at least 0.0001) for the calling thread.

    Threads that it creates later inherit the slice. Returns whether the system accepted the
    request; older Linux versions accept and ignore it.
    """
    number = _SCHED_SETATTR.get(platform.machine())
    if sys.platform != "linux" or number is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return False
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    runtime_ns = round(slice_s * 1e9)
    attributes = _ATTRIBUTES.pack(
        _ATTRIBUTES.size, os.SCHED_OTHER, 0, nice, 0, runtime_ns, 0, 0, 0, 0
    )
    return ctypes.CDLL(None).syscall(number, 0, attributes, 0) == 0
