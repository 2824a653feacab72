"""Where lists of ids are worked on by compiled loops: on CPU, where numba is installed."""

from importlib.util import find_spec
from types import ModuleType

import torch


def find_loops(device: torch.device) -> ModuleType | None:
    """``ids.loops``, or ``None`` where torch does it. Loads numba (half a second)."""
    if device.type != "cpu" or find_spec("numba") is None:
        return None
    from sbpflow.embedding.ids import loops

    return loops
