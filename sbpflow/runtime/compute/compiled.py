"""Functions that numba compiles for the machine at hand. Imported only where numba is."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np

from sbpflow.runtime.files.cache_dir import code_cache

Array = np.ndarray[Any, Any]
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def compiled(function: FunctionT) -> FunctionT:
    """``function`` for numba, whose machine code is kept with the user's caches.

    Where the cache is not the user's alone, it is compiled by every process, in memory.
    """
    folder = code_cache("numba")
    config: Any = numba.config
    default, config.CACHE_DIR = config.CACHE_DIR, str(folder or "")
    try:
        jit = numba.njit(cache=folder is not None, nogil=True, error_model="numpy")
        return cast("FunctionT", jit(function))
    finally:
        config.CACHE_DIR = default
