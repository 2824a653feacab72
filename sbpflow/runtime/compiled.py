"""Functions that numba compiles for the machine at hand. Imported only where numba is."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np

from sbpflow.runtime.cache_dir import cache_dir

Array = np.ndarray[Any, Any]
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def compiled(function: FunctionT) -> FunctionT:
    """``function`` for numba, whose machine code is kept with the user's caches."""
    config: Any = numba.config
    default, config.CACHE_DIR = config.CACHE_DIR, str(cache_dir() / "numba")
    try:
        jit = numba.njit(cache=True, nogil=True, error_model="numpy")
        return cast("FunctionT", jit(function))
    finally:
        config.CACHE_DIR = default
