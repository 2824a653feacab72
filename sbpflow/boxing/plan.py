"""Plans conversions: a printable list of steps, each with at most one collective and its bytes.

Pure: no rank runs, no tensor is touched, so ``explain`` and the planner call it for any world. The
executor follows the list and adds nothing. The search over several steps, needed for n-D layouts
and for partial sums that change placement, is in ``search``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from sbpflow.boxing.moves import elements_sent, one_step_legal
from sbpflow.boxing.search import COLLECTIVE_COST_BYTES, cheapest_route, layouts_before
from sbpflow.boxing.step import BoxingStep, Collective, check_dtype, make_step
from sbpflow.errors import SbpError
from sbpflow.sbp.layout import Layout

__all__ = ["BoxingStep", "Collective", "Conversion", "format_steps", "plan_boxing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """A conversion that was asked for, and the steps it takes; ``id`` names who asks."""

    id: str
    src: Layout
    dst: Layout
    shape: tuple[int, ...]
    dtype: torch.dtype
    steps: tuple[BoxingStep, ...]

    @property
    def asked(self) -> "Asked":
        """What it is looked up by."""
        return (self.id, self.src, self.dst, self.shape, self.dtype)


Asked = tuple[str, Layout, Layout, tuple[int, ...], torch.dtype]


def plan_boxing(
    src: Layout,
    dst: Layout,
    shape: Sequence[int],
    dtype: torch.dtype,
    *,
    id: str,
    backend: str,
) -> tuple[BoxingStep, ...]:
    """The cheapest steps that turn ``src`` into ``dst``, value kept.

    Empty if the layouts are equal. A list of several steps numbers their ids: "<id>.0", "<id>.1".
    ``backend`` is "gloo" or "nccl". Raises SbpError when a split does not fit ``shape``, or
    P is asked of a dtype that does not add up.
    """
    if backend not in ("gloo", "nccl"):
        raise SbpError(f"backend {backend!r} is not known; use gloo or nccl")
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
    """Whether one step is certainly the best plan, so that no search is needed."""
    if not one_step_legal(src, dst):
        return False
    same = src.placement == dst.placement
    if same and src.placement.ndim == 1:
        return True
    return not any(elements_sent(src, dst, shape).values())


@lru_cache(maxsize=4096)
def last_linear_layout(
    src: Layout, dst: Layout, shape: tuple[int, ...], dtype: torch.dtype, backend: str
) -> Layout:
    """The layout without P(max) or P(min) that ``dst``, which has them, is made from locally.

    ``src`` itself if it is such a layout; else one on the placement of ``dst`` that has S or B in
    place of P(max), the one that is reached with the fewest bytes. A gradient is taken to there and
    from there: each element of ``dst`` is then a copy of one on the same rank, or neutral.
    """
    if not src.has_extremum and not any(elements_sent(src, dst, shape).values()):
        return src

    def price(layout: Layout) -> int:
        steps = plan_boxing(src, layout, shape, dtype, id="", backend=backend)
        return sum(step.total_bytes + COLLECTIVE_COST_BYTES * bool(step.groups) for step in steps)

    # The one with B alone is always among them; of equals the first, so that all ranks agree.
    return min(layouts_before(src, dst, shape), key=price)


def format_steps(steps: Sequence[BoxingStep]) -> str:
    """One line per step, or a line that says there is nothing to do."""
    return "\n".join(str(step) for step in steps) or "nothing to do: the layouts are equal"
