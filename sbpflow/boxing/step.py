"""Defines a step of a conversion: its collective, its groups of ranks, and the bytes it sends.

Steps are pure values. ``plan`` creates lists of steps, and ``executor`` runs them.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

import torch

from sbpflow.boxing.moves import BoxTransfer, elements_sent, find_moves, numel
from sbpflow.errors import SbpError, unknown_value
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.sbp import Broadcast, Partial, Sbp, Split, balanced_sizes

Collective = Literal["none", "all_gather", "all_to_all", "reduce_scatter", "all_reduce"]
Groups = tuple[tuple[int, ...], ...]

# An all-gather pads all parts to the size of the largest part. If padding would exceed this share,
# an all-to-all sends exact sizes instead. The parts of balanced splits, whose lengths differ by at
# most one, are always padded.
MAX_PADDING = 0.25

# Dtypes that gloo and NCCL can reduce (torch 2.13). Terms of other dtypes are exchanged as bits and
# combined locally.
WIRE_DTYPES = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int8,
        torch.uint8,
    }
)
# P needs one of these dtypes, which torch can add and compare on all devices.
TERM_DTYPES = WIRE_DTYPES | {torch.int16}
# For some dtypes that P does not support, a supported dtype that represents all their values.
_WIDER = {torch.bool: torch.int8, torch.uint16: torch.int32, torch.uint32: torch.int64}


@dataclass(frozen=True, kw_only=True)
class BoxingStep:
    """One step of a conversion; ``shape`` and ``dtype`` are those of the full tensor.

    ``groups`` are disjoint, and each is in rank order; ranks communicate only within their group.
    ``collective`` is the collective that the backend runs. ``id`` names the conversion to which the
    step belongs, as in "linear.0/fwd", followed by the step's number if there are several steps.

    The columns (dim 1) of the source's or the destination's parts may have another order than
    those of the full tensor: column i of the full tensor is column ``src_columns[i]`` or
    ``dst_columns[i]`` of a part. Only one of the two may be set, for a tensor with two dims, and
    its layout must not split the columns. Otherwise, SbpError is raised.
    """

    id: str
    src: Layout
    dst: Layout
    shape: tuple[int, ...]
    dtype: torch.dtype
    collective: Collective
    groups: Groups
    src_columns: tuple[int, ...] | None = None
    dst_columns: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for layout, columns in ((self.src, self.src_columns), (self.dst, self.dst_columns)):
            if columns is None:
                continue
            splits = any(isinstance(sbp, Split) and sbp.dim == 1 for sbp in layout.nd_sbp)
            if splits or len(self.shape) != 2 or sorted(columns) != list(range(self.shape[1])):
                raise SbpError(
                    f"{self.id}: an order of columns needs two dims, a layout that does not split "
                    f"columns, and every column once; got shape {list(self.shape)}, {layout}, and "
                    f"{len(columns)} columns"
                )
        if self.src_columns is not None and self.dst_columns is not None:
            raise SbpError(f"{self.id}: set src_columns or dst_columns, not both")

    def bytes_sent(self, rank: int) -> int:
        """Return the bytes that ``rank`` sends to other ranks; 0 for a rank outside the step."""
        return self._bytes_by_rank.get(rank, 0)

    @property
    def total_bytes(self) -> int:
        """Return the bytes sent by all ranks."""
        return sum(self._bytes_by_rank.values())

    @cached_property
    def moves(self) -> tuple[BoxTransfer, ...]:
        """Return all transfers, including those from a rank to itself."""
        return find_moves(self.src, self.dst, self.shape)

    def group_of(self, rank: int) -> tuple[int, ...] | None:
        """Return the group of ``rank``, or None if the rank does not communicate."""
        return next((group for group in self.groups if rank in group), None)

    @cached_property
    def _bytes_by_rank(self) -> dict[int, int]:
        return {
            rank: self.dtype.itemsize * elements
            for group in self.groups
            for rank, elements in zip(group, self._elements_sent(group), strict=True)
        }

    def _elements_sent(self, group: tuple[int, ...]) -> tuple[int, ...]:
        size = len(group)
        if self.collective == "all_to_all":
            sent = elements_sent(self.src, self.dst, self.shape)
            return tuple(sent.get(rank, 0) for rank in group)
        if self.collective == "all_gather":
            return ((size - 1) * padded_part(self.src, self.shape, group),) * size
        if self.collective in ("reduce_scatter", "all_reduce"):
            # A ring all-reduce sends (size - 1) / size of the part twice: once to reduce and once
            # to gather.
            rounds = 2 if self.collective == "all_reduce" else 1
            whole = numel(self.src.part_slices(self.shape, group[0]) or ())
            return balanced_sizes(rounds * (size - 1) * whole, size)
        if self.collective == "none":
            raise RuntimeError(f"{self.id}: a step with groups needs a collective")
        raise unknown_value("collective", self.collective, Collective)

    def __str__(self) -> str:
        where = " ".join(str(list(group)) for group in self.groups)
        arrow = f"{self.src} -> {self.dst}"
        dtype = str(self.dtype).removeprefix("torch.")
        traffic = f"{self.collective} {where} {self.total_bytes:,} B" if self.groups else "none"
        return f"{self.id}: {arrow} {dtype}{list(self.shape)}: {traffic}"


def check_ranks(layout: Layout, size: int) -> None:
    """Raise SbpError if ``layout`` contains ranks outside a world of ``size`` ranks."""
    if max(layout.placement.ranks) >= size:
        raise SbpError(f"{layout} names ranks outside this world of {size}; use 0..{size - 1}")


@lru_cache(maxsize=4096)
def check_dtype(layout: Layout, dtype: torch.dtype) -> None:
    """Raise SbpError for P with a dtype whose terms cannot be added or compared."""
    if dtype in TERM_DTYPES or not any(isinstance(sbp, Partial) for sbp in layout.nd_sbp):
        return
    raise SbpError(
        f"{layout} cannot have dtype {dtype}, because P needs a dtype that supports addition "
        "(float16 to float64, bfloat16, int8 to int64, or uint8); convert to "
        f"{_WIDER.get(dtype, torch.float64)} first, or use S or B"
    )


def make_step(
    id: str, src: Layout, dst: Layout, shape: tuple[int, ...], dtype: torch.dtype, backend: str
) -> BoxingStep:
    """Return a step with a collective that ``backend`` supports."""
    collective: Collective = "none"
    groups: Groups = ()
    if any(elements_sent(src, dst, shape).values()):
        if dtype.itemsize > 8:
            raise SbpError(
                f"gloo and NCCL cannot send {dtype}; convert the tensor, or send its real and "
                "imaginary parts"
            )
        groups, changes = _groups_of(src, dst, shape)
        collective = _choose_collective(src, dst, shape, dtype, backend, groups, changes)
    return BoxingStep(
        id=id,
        src=src,
        dst=dst,
        shape=shape,
        dtype=dtype,
        collective=collective,
        groups=groups,
    )


def _groups_of(
    src: Layout, dst: Layout, shape: tuple[int, ...]
) -> tuple[Groups, set[tuple[Sbp, Sbp]]]:
    """Return the groups, and the (src, dst) sbps of the axes along which each group extends.

    Within a placement, the groups are the lines (or planes) along the axes that change, or the
    whole placement if some transfer would leave its line. Between two placements, the only group
    contains the ranks of both, and the set of sbps is empty. Where possible, the groups do not
    depend on sizes, so that a short batch needs no new process groups.
    """
    if src.placement != dst.placement:
        return (tuple(sorted({*src.placement.ranks, *dst.placement.ranks})),), set()
    pairs = list(zip(src.nd_sbp, dst.nd_sbp, strict=True))
    axes = {axis for axis, (a, b) in enumerate(pairs) if a != b}
    while True:
        groups = src.placement.plane_groups(axes)
        home = {rank: n for n, group in enumerate(groups) for rank in group}
        if len(groups) == 1 or all(
            home[move.src] == home[move.dst] for move in find_moves(src, dst, shape)
        ):
            ordered = tuple(tuple(sorted(group)) for group in groups)
            return ordered, {pairs[axis] for axis in axes}
        axes = set(range(src.placement.ndim))


def _choose_collective(
    src: Layout,
    dst: Layout,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    backend: str,
    groups: Groups,
    changes: set[tuple[Sbp, Sbp]],
) -> Collective:
    if not changes:
        return "all_to_all"
    if all(isinstance(a, Partial) and isinstance(b, Broadcast) for a, b in changes):
        return "all_reduce" if dtype in WIRE_DTYPES else "all_to_all"
    if all(isinstance(a, Split) and isinstance(b, Broadcast) for a, b in changes):
        return "all_gather" if _worth_padding(src, shape, groups, changes) else "all_to_all"
    scatters = all(isinstance(a, Partial) and isinstance(b, Split) for a, b in changes)
    ready = backend == "nccl" and dtype in WIRE_DTYPES
    if scatters and ready and _even(dst, shape, groups):
        return "reduce_scatter"
    return "all_to_all"


def padded_part(layout: Layout, shape: tuple[int, ...], group: tuple[int, ...]) -> int:
    """Return the number of elements in the largest part of ``group``."""
    return max(numel(layout.part_slices(shape, rank) or ()) for rank in group)


def _worth_padding(
    src: Layout, shape: tuple[int, ...], groups: Groups, changes: set[tuple[Sbp, Sbp]]
) -> bool:
    if all(isinstance(a, Split) and a.sizes is None for a, _ in changes):
        return True
    padded = sum(padded_part(src, shape, group) * len(group) for group in groups)
    exact = sum(numel(src.part_slices(shape, rank) or ()) for g in groups for rank in g)
    return padded <= (1 + MAX_PADDING) * exact


def _even(dst: Layout, shape: tuple[int, ...], groups: Groups) -> bool:
    counts = {numel(dst.part_slices(shape, rank) or ()) for group in groups for rank in group}
    return len(counts) == 1
