"""Compiles functions with numba. Import this module only if numba is installed."""

from collections.abc import Callable
from typing import Any, TypeVar, cast, overload

import numba
import numpy as np

from sbpflow.runtime.files.cache_dir import code_cache

Array = np.ndarray[Any, Any]
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


@overload
def compiled(function: FunctionT) -> FunctionT: ...
@overload
def compiled(*, fastmath: bool) -> Callable[[FunctionT], FunctionT]: ...
def compiled(
    function: FunctionT | None = None, *, fastmath: bool = False
) -> FunctionT | Callable[[FunctionT], FunctionT]:
    """Compile ``function`` with numba and cache its machine code in the user's cache folder.

    If other users can write to that folder, every process compiles in memory. With ``fastmath``,
    sums may be reordered.
    """
    if function is None:
        return lambda function: _compiled(function, fastmath=fastmath)
    return _compiled(function, fastmath=fastmath)


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
