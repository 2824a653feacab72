"""Compiles functions with numba. Import this module only if numba is installed."""

import fcntl
import hashlib
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, sigutils, types
from numba.extending import intrinsic

from sbpflow.runtime.files.cache_dir import code_cache, warn_once

Array = np.ndarray[Any, Any]
Node = Any  # part of an expression that numba compiles, or a compiled function
MOST_WAIT_S = 60.0  # how long a process waits while another process compiles a function
_HELD: set[Path] = set()  # file locks that threads of this process hold, or no longer wait for
# Files whose intrinsics, functions, or constants become part of compiled functions in other files.
_PARTS = (
    *("runtime/compute/*.py", "embedding/storage/*.py", "embedding/vocabulary/*.py"),
    *("embedding/cache/*.py", "embedding/ids/*.py", "embedding/plan/growth.py", "serving/*.py"),
)
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def numba_cache() -> Path | None:
    """Return the folder in which compiled functions are cached, or None if it is not safe.

    The folder belongs to one version of ``_PARTS``: numba compiles a function again if its own file
    changes, but not if an intrinsic, a called function, or a constant of another file does, which
    become part of the function.
    """
    return code_cache(f"numba-{_version()}")


@cache
def _version() -> str:
    package = Path(__file__).parents[2]
    files = sorted(file for pattern in _PARTS for file in package.glob(pattern))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:8]


def compiled(function: FunctionT) -> FunctionT:
    """Compile ``function`` with numba and cache its machine code in the user's cache folder.

    If the folder cannot be created, or another user could have written to it, the code is not
    cached.
    """
    return _compiled(function, fastmath=False)


def compiled_fast(function: FunctionT) -> FunctionT:
    """Compile like ``compiled``, but allow the compiler to reorder the terms of a sum, to fuse
    multiplications with additions, and to ignore the sign of zero.
    """
    return _compiled(function, fastmath=True)


def _compiled(function: FunctionT, *, fastmath: bool) -> FunctionT:
    folder = numba_cache()
    config: Any = numba.config
    default, config.CACHE_DIR = config.CACHE_DIR, str(folder or "")
    try:
        options: Any = {"reassoc", "contract", "nsz"} if fastmath else False
        jit = numba.njit(
            cache=folder is not None, nogil=True, error_model="numpy", fastmath=options
        )
        dispatcher: Any = jit(function)
    finally:
        config.CACHE_DIR = default
    if folder is not None:
        name = f"{function.__module__}.{function.__qualname__}.lock"
        dispatcher.compile = _one_at_a_time(dispatcher, folder / name)
        dispatcher._cache.save_overload = _saved_if_possible(dispatcher._cache, folder)
    return cast("FunctionT", dispatcher)


def _one_at_a_time(dispatcher: Node, lock: Path) -> Callable[[Any], Any]:
    """Return the dispatcher's ``compile`` with a lock, so that only one of several processes
    compiles a function, and the others load it from the cache.
    """
    compile_now = dispatcher.compile

    def compile_once(signature: object) -> object:
        types_of_args, _ = sigutils.normalize_signature(signature)
        if types_of_args in dispatcher.overloads:
            return compile_now(signature)
        with _locked(lock):
            return compile_now(signature)

    return compile_once


def _saved_if_possible(cache: Node, folder: Path) -> Callable[[Any, Any], None]:
    """Return the ``save_overload`` of numba's cache, but with a warning instead of an OSError: the
    compiled function can be used even if the disk is full.
    """
    save = cache.save_overload

    def save_overload(signature: object, code: object) -> None:
        try:
            save(signature, code)
        except OSError as error:
            warn_once(
                f"compiled code is not cached in {folder}, so code is recompiled at every start: "
                f"{error.strerror or error}; free some space, or set XDG_CACHE_HOME to a folder "
                "on another disk"
            )

    return save_overload


@contextmanager
def _locked(lock: Path) -> Generator[None]:
    """Hold a file lock, unless another thread of this process holds it, the file system has no
    locks, or another process has held it for ``MOST_WAIT_S``, because it may have been stopped.

    The threads of a process must not wait for each other, because one of them may hold numba's own
    lock.
    """
    with ExitStack() as stack, suppress(OSError):
        file = stack.enter_context(lock.open("ab"))
        end = time.monotonic() + MOST_WAIT_S
        while lock not in _HELD:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > end:
                    _HELD.add(lock)  # do not wait for this lock again
                time.sleep(0.01)
            else:
                _HELD.add(lock)
                stack.callback(_HELD.discard, lock)
                stack.callback(fcntl.flock, file, fcntl.LOCK_UN)  # also for forked children
                break
        stack = stack.pop_all()
    with stack:
        yield


@intrinsic
def _pointer(_: Node, address: Node, like: Node) -> Node:
    def generate(context: Node, builder: Node, signature: Node, values: Node) -> Node:
        return builder.inttoptr(values[0], context.get_value_type(signature.return_type))

    return types.CPointer(like.dtype)(address, like), generate


pointer_to = cast("Callable[[Any, Array], Any]", _pointer)
"""In compiled functions, ``pointer_to(address, like)`` is a pointer to values with the dtype of
``like``; it is indexed like an array. A function that took a tuple of arrays instead would be
compiled again for each length of the tuple.
"""


def _pointer_to_word(context: Node, builder: Node, kind: Node, array: Node, at: Node) -> Node:
    """Return the address of element ``at`` as a pointer to 64-bit integers."""
    view = context.make_array(kind)(context, builder, array)
    # Use numba's own helper to compute the address of the element without reading it.
    pointer = cast(Any, cgutils).get_item_pointer(context, builder, kind, view, [at])
    return builder.bitcast(pointer, ir.IntType(64).as_pointer())


@intrinsic
def _load_word(_: Node, array: Node, at: Node) -> Node:
    def generate(context: Node, builder: Node, signature: Node, values: Node) -> Node:
        word = builder.load(_pointer_to_word(context, builder, signature.args[0], *values))
        word.align = 1
        return word

    return types.uint64(array, types.intp), generate


@intrinsic
def _store_word(_: Node, array: Node, at: Node, word: Node) -> Node:
    def generate(context: Node, builder: Node, signature: Node, values: Node) -> Node:
        at = _pointer_to_word(context, builder, signature.args[0], *values[:2])
        builder.store(values[2], at).align = 1
        return context.get_dummy_value()

    return types.void(array, types.intp, types.uint64), generate


load_word = cast("Callable[[Array, Any], Any]", _load_word)
"""In compiled functions, ``load_word(array, at)`` is the uint64 that consists of the 8 bytes of
``array`` (uint8) from ``at`` on, in the CPU's byte order.
"""
store_word = cast("Callable[[Array, Any, Any], None]", _store_word)
"""In compiled functions, ``store_word(array, at, word)`` writes the uint64 ``word`` to the 8 bytes
of ``array`` (uint8) from ``at`` on.
"""


def _prefetch(write: int) -> Callable[[Array, Any], None]:
    @intrinsic
    def start(_: Node, array: Node, row: Node) -> Node:
        def generate(context: Node, builder: Node, signature: Node, values: Node) -> Node:
            kind = signature.args[0]
            place = [values[1], *[context.get_constant(types.intp, 0)] * (kind.ndim - 1)]
            view = context.make_array(kind)(context, builder, values[0])
            # Use numba's own helpers to compute the address of the element without reading it.
            pointer = cast(Any, cgutils).get_item_pointer(context, builder, kind, view, place)
            number, byte = ir.IntType(32), ir.IntType(8).as_pointer()
            call = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
            function = cast(Any, cgutils).get_or_insert_function(
                builder.module, call, "llvm.prefetch.p0"
            )
            # Arguments of llvm.prefetch: read or write, keep in all cache levels, data cache.
            hints = [ir.Constant(number, hint) for hint in (write, 3, 1)]
            builder.call(function, [builder.bitcast(pointer, byte), *hints])
            return context.get_dummy_value()

        return types.void(array, types.intp), generate

    return cast("Callable[[Array, Any], None]", start)


prefetch = _prefetch(0)
"""In compiled functions, ``prefetch(array, row)`` starts loading the beginning of ``array[row]``.
"""
prefetch_to_write = _prefetch(1)
"""Like ``prefetch``, for rows that will be changed."""
DISTANCE = 48  # Loops prefetch a row this many rows before they use it.
