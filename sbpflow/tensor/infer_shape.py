"""The full shape of a tensor from the shapes of its parts, for those who know only their own."""

import torch
from torch import Tensor

from sbpflow.boxing.executor import Boxing
from sbpflow.boxing.plan import plan_boxing
from sbpflow.errors import SbpError
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Broadcast, Split

MAX_DIMS = 8


def infer_shape(part: Tensor | None, layout: Layout, boxing: Boxing) -> tuple[int, ...]:
    """The full shape of the tensor whose parts these are; every rank of the world calls it.

    Gathers the parts' shapes, at most MAX_DIMS dims. Raises SbpError on all ranks if no shape fits
    them under ``layout``.
    """
    world = boxing.world
    world.check_ranks(layout)
    known = () if part is None else part.shape[:MAX_DIMS]
    mine = [0 if part is None else part.ndim, *known, *(0,) * (MAX_DIMS - len(known))]
    everyone = Placement.line(world.device.type, world.size)
    rows, table = Layout(everyone, (Split(0),)), Layout(everyone, (Broadcast(),))
    steps = plan_boxing(
        rows,
        table,
        (world.size, MAX_DIMS + 1),
        torch.int64,
        id="infer_shape",
        backend=world.backend_of(table),
    )
    gathered = boxing.run(steps, torch.tensor([mine], device=world.device))
    given = [] if gathered is None else gathered.tolist()
    if deep := [rank for rank, row in enumerate(given) if row[0] > MAX_DIMS]:
        raise SbpError(
            f"infer_shape: the part of rank {deep[0]} has {given[deep[0]][0]} dims; at most "
            f"{MAX_DIMS} are gathered, so reshape it or give the shape to from_local"
        )
    parts = {rank: tuple(given[rank][1 : 1 + given[rank][0]]) for rank in layout.placement.ranks}
    return full_shape(parts, layout)


def full_shape(parts: dict[int, tuple[int, ...]], layout: Layout) -> tuple[int, ...]:
    """The full shape from the parts' shapes by rank; raises SbpError naming what does not fit."""
    first = parts[layout.placement.ranks[0]]
    lengths = list(first)
    for dim in range(len(first)):
        axes = [a for a, s in enumerate(layout.nd_sbp) if isinstance(s, Split) and s.dim == dim]
        line = layout.placement.plane_groups(axes)[0]
        lengths[dim] = sum(parts[rank][dim] for rank in line if dim < len(parts[rank]))
    shape = tuple(lengths)
    for rank, given in parts.items():
        expected = _expected(layout, shape, rank)
        if given != expected:
            shown = {r: list(sizes) for r, sizes in parts.items()}
            raise SbpError(
                f"parts of shapes {shown} do not make a tensor laid out {layout}: rank {rank} "
                f"would hold {list(expected or ())} of {list(shape)}. A split without sizes is "
                "balanced, the first parts one longer; for other sizes use Split(dim, sizes=(..))"
            )
    return shape


def _expected(layout: Layout, shape: tuple[int, ...], rank: int) -> tuple[int, ...] | None:
    try:
        return layout.part_shape(shape, rank)
    except SbpError:  # a dim that is not there, or sizes that do not add up
        return None
