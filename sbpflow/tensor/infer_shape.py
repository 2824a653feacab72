"""Infers the full shape of a tensor from the shapes of all ranks' parts."""

from torch import Tensor

from sbpflow.boxing.agreement import gather_values
from sbpflow.boxing.executor import Boxing
from sbpflow.boxing.step import check_ranks
from sbpflow.errors import SbpError
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.sbp import Split


def infer_shape(part: Tensor | None, layout: Layout, boxing: Boxing) -> tuple[int, ...]:
    """Return the full shape of the tensor whose part on this rank is ``part``; all ranks must call
    this function.

    Raise SbpError on all ranks if the shapes of the parts do not fit ``layout``.
    """
    check_ranks(layout, boxing.world.size)
    shapes = gather_values(boxing, [] if part is None else list(part.shape))
    return full_shape({rank: tuple(shapes[rank]) for rank in layout.placement.ranks}, layout)


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
