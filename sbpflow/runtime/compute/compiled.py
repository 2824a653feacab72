"""Compiles functions with numba. Import this module only if numba is installed."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numba.core import types
from numba.extending import intrinsic

from sbpflow.runtime.files.cache_dir import code_cache

Array = np.ndarray[Any, Any]
_Node = Any  # part of an expression that numba compiles
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def compiled(function: FunctionT) -> FunctionT:
    """Compile ``function`` with numba and cache its machine code in the user's cache folder.

    If other users can write to that folder, the code is not cached.
    """
    return _compiled(function, fastmath=False)


def compiled_fast(function: FunctionT) -> FunctionT:
    """Compile like ``compiled``, but allow the compiler to reorder the terms of a sum."""
    return _compiled(function, fastmath=True)


def _compiled(function: FunctionT, *, fastmath: bool) -> FunctionT:
    folder = code_cache("numba")
    config: Any = numba.config
    default, config.CACHE_DIR = config.CACHE_DIR, str(folder or "")
    try:
        options: Any = {"reassoc", "contract", "nsz"} if fastmath else False
        jit = numba.njit(
            cache=folder is not None, nogil=True, error_model="numpy", fastmath=options
        )
        return cast("FunctionT", jit(function))
    finally:
        config.CACHE_DIR = default


@intrinsic
def _pointer(_: _Node, address: _Node, like: _Node) -> _Node:
    def generate(context: _Node, builder: _Node, signature: _Node, values: _Node) -> _Node:
        return builder.inttoptr(values[0], context.get_value_type(signature.return_type))

    return types.CPointer(like.dtype)(address, like), generate


pointer_to = cast("Callable[[Any, Array], Any]", _pointer)
"""In compiled functions, ``pointer_to(address, like)`` is a pointer to values with the dtype of
``like``; it is indexed like an array. A function that took a tuple of arrays instead would be
compiled for each length.
"""
