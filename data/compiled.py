"""Whether compiled loops serve a task: where numba is installed and there is enough to do."""

import sys
from importlib.util import find_spec
from types import ModuleType


def find_loops(size: int, least: int) -> ModuleType | None:
    """``data.loops`` for a task of ``size``; None where numba is not there, or loading it
    (half a second) would cost more than a task below ``least`` takes.
    """
    if (size < least and "numba" not in sys.modules) or find_spec("numba") is None:
        return None
    from sbpflow.data import loops

    return loops
