"""Load the compiled loops if numba is installed and the task is large enough."""

import sys
from importlib.util import find_spec
from types import ModuleType


def find_loops(size: int, least: int) -> ModuleType | None:
    """Return ``data.loops``, or None if numba is not installed, or if ``size`` is below ``least``
    and numba is not yet loaded.

    Loading numba takes half a second, which is more than a small task would save.
    """
    if (size < least and "numba" not in sys.modules) or find_spec("numba") is None:
        return None
    from sbpflow.data import loops

    return loops
