"""Copies messages and sends signals between processes through shared memory.

The functions are compiled with numba and need Linux.
"""

import platform
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from sbpflow.runtime.compute.compiled import Array, Node, compiled

# Number of the futex system call by machine type (Linux: asm/unistd.h).
FUTEX_CALLS = {"x86_64": 202, "aarch64": 98}
_FUTEX = FUTEX_CALLS.get(platform.machine(), -1)
_WAIT, _WAKE = 0, 1
_SPINS = 200  # number of checks before sleeping; all checks together take a few microseconds

# glibc's ``syscall`` with the arguments of futex(2)
_syscall: Any = types.ExternalFunction("syscall", types.int64(*[types.int64] * 7))
_memcpy: Any = types.ExternalFunction("memcpy", types.int64(*[types.int64] * 3))


def _atomic(load: bool) -> Node:
    number = ir.IntType(32)

    def generate(context: Node, builder: Node, signature: Node, args: Node) -> Node:
        pointer = builder.inttoptr(args[0], number.as_pointer())
        if load:
            return builder.load_atomic(pointer, "seq_cst", 4)
        builder.store_atomic(args[1], pointer, "seq_cst", 4)
        return context.get_dummy_value()

    def typed_load(typing: Node, address: Node) -> Node:
        """Read the int32 at ``address`` atomically, ordered with all other accesses."""
        return types.int32(types.int64), generate

    def typed_store(typing: Node, address: Node, value: Node) -> Node:
        """Write the int32 at ``address`` atomically, ordered with all other accesses."""
        return types.void(types.int64, types.int32), generate

    return intrinsic(typed_load if load else typed_store)


_load: Any = _atomic(load=True)
_store: Any = _atomic(load=False)


@compiled
def copy_bytes(target: int, source: int, count: int) -> None:
    """Copy ``count`` bytes from address ``source`` to address ``target``."""
    _memcpy(target, source, count)


@compiled
def publish(sent: int, waiting: int, value: int) -> None:
    """Set the int32 at address ``sent`` to ``value``, and wake the process waiting for it."""
    _store(sent, np.int32(value))
    if _load(waiting) != 0:
        _store(waiting, np.int32(0))
        _syscall(_FUTEX, sent, _WAKE, 1, 0, 0, 0)


@compiled
def wait_until(sent: int, waiting: int, value: int, limit: Array) -> bool:
    """Wait for the int32 count at address ``sent`` to reach ``value``; return whether it has. The
    wait ends after ``limit`` (int64 [2], seconds and nanoseconds) or earlier. The count may wrap
    around.
    """
    for _ in range(_SPINS):
        if np.int32(_load(sent) - np.int32(value)) >= 0:
            return True
    _store(waiting, np.int32(1))
    now = _load(sent)
    if np.int32(now - np.int32(value)) >= 0:
        return True
    _syscall(_FUTEX, sent, _WAIT, np.int64(now), limit.ctypes.data, 0, 0)
    return bool(np.int32(_load(sent) - np.int32(value)) >= 0)
