"""Infers the full shape of a tensor from the shapes of all ranks' parts."""

import torch
from torch import Tensor

from sbpflow.boxing.agreement import combine_parts
from sbpflow.boxing.executor import Boxing
from sbpflow.errors import SbpError
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.sbp import Split

MAX_DIMS = 8


def infer_shape(part: Tensor | None, layout: Layout, boxing: Boxing) -> tuple[int, ...]:
    """Return the full shape of the tensor whose part on this rank is ``part``; all ranks must call
    this function.

    This function gathers the shapes of all parts, which may have at most MAX_DIMS dims. Raise
    SbpError on all ranks if the shapes do not fit ``layout``.
    """
    world = boxing.world
    boxing.check_ranks(layout)
    shape = () if part is None else part.shape[:MAX_DIMS]
    row = [0 if part is None else part.ndim, *shape, *(0,) * (MAX_DIMS - len(shape))]
    mine = torch.tensor([row], device=world.device)
    rows = combine_parts(boxing, mine, Split(0), "infer_shape").tolist()
    for rank, (ndim, *_) in enumerate(rows):
        if ndim > MAX_DIMS:
            raise SbpError(
                f"infer_shape: at most {MAX_DIMS} dims are supported, but the part of rank {rank} "
                f"has {ndim}; reshape the part, or pass the shape to from_local"
            )
    parts = {rank: tuple(rows[rank][1 : 1 + rows[rank][0]]) for rank in layout.placement.ranks}
    return full_shape(parts, layout)


def full_shape(parts: dict[int, tuple[int, ...]], layout: Layout) -> tuple[int, ...]:
    """Return the full shape, given the shapes of the parts by rank. Raise SbpError if a part does
    not fit ``layout``.
    """
    first = parts[layout.placement.ranks[0]]
    lengths = list(first)
    for dim in range(len(first)):
        axes = [a for a, s in enumerate(layout.nd_sbp) if isinstance(s, Split) and s.dim == dim]
        line = layout.placement.plane_groups(axes)[0]
        lengths[dim] = sum(parts[rank][dim] for rank in line if dim < len(parts[rank]))
    shape = tuple(lengths)
    for rank, part in parts.items():
        try:
            expected = layout.part_shape(shape, rank)
        except SbpError:  # no split dim, or its length is not the sum of the explicit sizes
            expected = None
        if part != expected:
            shown = {r: list(sizes) for r, sizes in parts.items()}
            problem = f"the layout cannot split {list(shape)}"
            if expected is not None:
                problem = f"rank {rank} would have {list(expected)} of {list(shape)}"
            raise SbpError(
                f"parts of shapes {shown} do not fit layout {layout}: {problem}. A split without "
                "sizes is balanced, with the longer parts first; for other sizes, use "
                "Split(dim, sizes=(..))"
            )
    return shape
