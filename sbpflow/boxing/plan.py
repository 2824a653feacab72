"""Plans conversions as lists of steps; each step has at most one collective and states how many
bytes it sends.

The functions are pure and need no tensors or running ranks, so ``explain`` and the planner can call
them for any world. The executor runs exactly these steps. Conversions on n-D placements, between
placements, or between different reductions may need several steps, which ``search`` finds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from sbpflow.boxing.moves import elements_sent, one_step_legal
from sbpflow.boxing.search import COLLECTIVE_COST_BYTES, cheapest_route, layouts_before
from sbpflow.boxing.step import BoxingStep, check_dtype, make_step
from sbpflow.errors import SbpError
from sbpflow.runtime.compute.devices import backend_of_device
from sbpflow.sbp.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """A requested conversion and its steps; ``id`` names the caller."""

    id: str
    src: Layout
    dst: Layout
    shape: tuple[int, ...]
    dtype: torch.dtype
    steps: tuple[BoxingStep, ...]

    @property
    def key(self) -> "ConversionKey":
        """Return the fields that identify the conversion."""
        return (self.id, self.src, self.dst, self.shape, self.dtype)


ConversionKey = tuple[str, Layout, Layout, tuple[int, ...], torch.dtype]


def plan_boxing(
    src: Layout,
    dst: Layout,
    shape: Sequence[int],
    dtype: torch.dtype,
    *,
    id: str,
    backend: str | None = None,
) -> tuple[BoxingStep, ...]:
    """Return the cheapest steps that convert ``src`` to ``dst`` without changing the full value.

    Equal layouts need no steps. If there are several steps, their ids are "<id>.0", "<id>.1", and
    so on. ``backend`` is "gloo" or "nccl"; by default, it is that of the device type of ``dst``.
    Raise SbpError for any other backend, if a split does not fit ``shape``, if P is used with a
    dtype that does not support addition, or if elements of more than 8 bytes must be sent.
    """
    if backend is None:
        backend = backend_of_device(dst.placement.device_type)
    if backend not in ("gloo", "nccl"):
        raise SbpError(f"backend {backend!r} is unknown; use gloo or nccl")
    return _plan(src, dst, tuple(shape), dtype, id, backend)


@lru_cache(maxsize=16384)
def _plan(
    src: Layout, dst: Layout, shape: tuple[int, ...], dtype: torch.dtype, id: str, backend: str
) -> tuple[BoxingStep, ...]:
    if src == dst:
        return ()
    check_dtype(src, dtype)
    check_dtype(dst, dtype)
    route = (src, dst)
    if not is_direct(src, dst, shape):
        route = cheapest_route(src, dst, shape, dtype, backend)
    names = [id] if len(route) == 2 else [f"{id}.{n}" for n in range(len(route) - 1)]
    return tuple(
        make_step(name, a, b, shape, dtype, backend)
        for name, a, b in zip(names, route, route[1:], strict=False)
    )


def is_direct(src: Layout, dst: Layout, shape: tuple[int, ...]) -> bool:
    """Return True if a single step is known to be the best plan, so no search is needed."""
    if not one_step_legal(src, dst):
        return False
    if src.placement == dst.placement and src.placement.ndim == 1:
        return True
    return not any(elements_sent(src, dst, shape).values())


@lru_cache(maxsize=4096)
def last_linear_layout(
    src: Layout, dst: Layout, shape: tuple[int, ...], dtype: torch.dtype
) -> Layout:
    """Return a layout without P(max) or P(min) from which ``dst`` can be made without
    communication.

    The result is ``src`` itself if possible. Otherwise, it is the layout on the placement of
    ``dst``, with S or B in place of P(max), that is cheapest to reach. The backward pass of the
    conversion goes through this layout: each element of ``dst`` is then either the neutral element
    or a copy of an element on the same rank.
    """
    if not src.has_extremum and not any(elements_sent(src, dst, shape).values()):
        return src

    def price(layout: Layout) -> int:
        steps = plan_boxing(src, layout, shape, dtype, id="")
        return sum(step.total_bytes + COLLECTIVE_COST_BYTES * bool(step.groups) for step in steps)

    # There is always a candidate: the layout with only B. All ranks choose the same one, because
    # `min` returns the first of several candidates with equal prices.
    return min(layouts_before(src, dst, shape), key=price)


def format_steps(steps: Sequence[BoxingStep]) -> str:
    """Return one line per step, or one line for a plan without steps."""
    return "\n".join(str(step) for step in steps) or "nothing to do: the layouts are equal"
