"""Defines layouts. A layout consists of a placement (the ranks that store a logical tensor) and one
sbp per placement axis.

Only this module computes the shapes and slices of parts.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

from sbpflow.errors import SbpError
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import (
    NdSbp,
    Partial,
    Sbp,
    Split,
    as_nd_sbp,
    balanced_sizes,
    dual,
    format_nd_sbp,
)


@dataclass(frozen=True, init=False)
class Layout:
    """Combines a placement with ``nd_sbp``, one sbp per axis; a string such as "(S(0), B)" is also
    accepted.

    If several axes split the same dim, axis 0 splits it first, and axis 1 then splits each piece.
    """

    placement: Placement
    nd_sbp: NdSbp

    def __init__(self, placement: Placement, nd_sbp: NdSbp | Sbp | str) -> None:
        object.__setattr__(self, "placement", placement)
        object.__setattr__(self, "nd_sbp", as_nd_sbp(nd_sbp))
        if len(self.nd_sbp) != self.placement.ndim:
            raise SbpError(
                f"{format_nd_sbp(self.nd_sbp)} has {len(self.nd_sbp)} entries, but the placement "
                f"has {self.placement.ndim} axes {self.placement.shape}"
            )
        for axis, sbp in enumerate(self.nd_sbp):
            if isinstance(sbp, Split) and sbp.sizes is not None:
                if len(sbp.sizes) != self.placement.shape[axis]:
                    raise SbpError(
                        f"{sbp} has {len(sbp.sizes)} sizes, but axis {axis} of the placement needs "
                        f"{self.placement.shape[axis]} sizes"
                    )
        if len({sbp.op for sbp in self.nd_sbp if isinstance(sbp, Partial)}) > 1:
            raise SbpError(
                f"{format_nd_sbp(self.nd_sbp)} mixes different reductions, so the value would "
                "depend on their order; convert one of them to B or S first"
            )

    def __str__(self) -> str:
        """Format as ``S(0)@[0, 1]``, or as ``S(0)[3, 5]@[0, 1]`` with explicit sizes."""
        return f"{format_nd_sbp(self.nd_sbp)}@{self.placement}"

    def __hash__(self) -> int:
        return self._hash  # cached, because every plan lookup hashes layouts

    @cached_property
    def _hash(self) -> int:
        return hash((self.placement, self.nd_sbp))

    @property
    def split_dims(self) -> tuple[int | None, ...]:
        """Return the dim that each axis splits, or ``None`` for an axis that splits none."""
        return tuple(sbp.dim if isinstance(sbp, Split) else None for sbp in self.nd_sbp)

    def part_slices(self, shape: tuple[int, ...], rank: int) -> tuple[slice, ...] | None:
        """Return the slices of a rank's part of a tensor, or ``None`` outside the placement.

        Only S axes divide the tensor. Along B and P axes, each rank stores the full shape.
        """
        coord = self.placement.coord(rank)
        if coord is None:
            return None
        starts, lengths = [0] * len(shape), list(shape)
        for axis, sbp in enumerate(self.nd_sbp):
            if isinstance(sbp, Split):
                if sbp.dim >= len(shape):
                    raise SbpError(
                        f"{sbp} needs a tensor with at least {sbp.dim + 1} dims, got shape {shape}"
                    )
                bounds = split_bounds(sbp, lengths[sbp.dim], self.placement.shape[axis])
                first, last = bounds[coord[axis]], bounds[coord[axis] + 1]
                starts[sbp.dim] += first
                lengths[sbp.dim] = last - first
        return tuple(slice(s, s + n) for s, n in zip(starts, lengths, strict=True))

    def part_shape(self, shape: tuple[int, ...], rank: int) -> tuple[int, ...] | None:
        """Return the shape of a rank's part, or ``None`` outside the placement."""
        slices = self.part_slices(shape, rank)
        return None if slices is None else tuple(s.stop - s.start for s in slices)

    def check_user(self, shape: tuple[int, ...]) -> None:
        """Raise SbpError on every rank if a user's tensor of ``shape`` cannot have this layout.

        A tensor cannot have a layout if a split dim does not exist, if explicit sizes do not add up
        to the length of the dim, or if a balanced split would leave some ranks empty. A dim of
        length 0 and explicit sizes of 0 are legal.
        """
        lengths = [{length} for length in shape]
        for axis, sbp in enumerate(self.nd_sbp):
            if not isinstance(sbp, Split):
                continue
            if sbp.dim >= len(shape):
                dims = "S(0)" if len(shape) == 1 else f"S(0)..S({len(shape) - 1})"
                raise SbpError(
                    f"{self} splits dim {sbp.dim}, but the shape {list(shape)} has only "
                    f"{len(shape)} dim{'s' * (len(shape) > 1)}; use {dims}, B, or P"
                    if shape
                    else f"{self} splits a tensor without dims; use B or P"
                )
            parts = self.placement.shape[axis]
            # Lengths of the pieces after the earlier axes have split the dim.
            to_split = lengths[sbp.dim]
            if short := [n for n in to_split if sbp.sizes is None and 0 < n < parts]:
                raise SbpError(
                    f"{self} splits dim {sbp.dim} of {list(shape)} into {parts} parts, but the "
                    f"length is only {min(short)}; use fewer ranks, another dim, B, or explicit "
                    "sizes"
                )
            lengths[sbp.dim] = {size for n in to_split for size in split_sizes(sbp, n, parts)}

    def accepts(self, shape: tuple[int, ...]) -> bool:
        """Return whether ``check_user`` accepts ``shape``."""
        try:
            self.check_user(shape)
        except SbpError:
            return False
        return True

    @cached_property
    def has_extremum(self) -> bool:
        """Return True if any axis is P(max) or P(min), which are not linear and have no dual."""
        return any(isinstance(sbp, Partial) and sbp.op != "sum" for sbp in self.nd_sbp)

    def dual(self) -> "Layout":
        """Return the layout of the gradient, in which S stays S, B becomes P, and P becomes B."""
        return self._dual

    @cached_property
    def _dual(self) -> "Layout":
        return Layout(self.placement, tuple(dual(sbp) for sbp in self.nd_sbp))


def split_sizes(sbp: Split, size: int, parts: int) -> tuple[int, ...]:
    """Return the lengths of the pieces into which ``sbp`` splits a dim of length ``size``."""
    if sbp.sizes is None:
        return balanced_sizes(size, parts)
    if sum(sbp.sizes) != size:
        raise SbpError(
            f"the sizes of {sbp} add up to {sum(sbp.sizes)}, but the length of the dim is {size}"
        )
    return sbp.sizes


@lru_cache(maxsize=1024)
def split_bounds(sbp: Split, size: int, parts: int) -> tuple[int, ...]:
    """Return the start of each piece, followed by the end of the last piece.

    Results are cached, because planning calls this function for every rank.
    """
    return (0, *accumulate(split_sizes(sbp, size, parts)))
