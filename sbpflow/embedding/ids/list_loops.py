"""Selects compiled loops for ids on CPU, if numba is installed."""

from importlib.util import find_spec
from types import ModuleType

import torch

from sbpflow.embedding.plan.embedding_plan import EmbeddingPlan


def find_loops(device: torch.device, *, compiled: bool = True) -> ModuleType | None:
    """Return the module ``ids.loops``, or ``None`` if torch must be used: if the device is not a
    CPU, if numba is not installed, or if ``compiled`` is false (loading numba takes 0.5 s).
    """
    if not compiled or device.type != "cpu" or find_spec("numba") is None:
        return None
    from sbpflow.embedding.ids import loops

    return loops


def warm_up_loops(plan: EmbeddingPlan, device: torch.device, *, compiled: bool = True) -> None:
    """Before the first step, compile the loops that a plan needs, or load them from the cache."""
    if (loops := find_loops(device, compiled=compiled)) is None:
        return
    for kind in {group.address_dtype() for group in plan.groups}:
        loops.warm_up_matrix(plan.ids_dtype, kind)
        if plan.ids.lists:
            loops.warm_up(plan.ids_dtype, kind, plan.dtype)
