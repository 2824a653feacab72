"""Packs boxes of a part into a flat buffer before a collective, and unpacks them afterwards.

``packer`` and ``assembler`` inspect the pieces once and return the cheapest function for them: it
copies nothing if the pieces are already in order, copies all pieces in one call where it can (for
example, if they divide a dim evenly), and otherwise copies them one by one. Below about 100 KiB,
the number of tensor calls matters more than the bytes: a call costs at least 1 us, or 10 us after a
context switch.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from sbpflow.boxing.buffers import Loan
from sbpflow.boxing.moves import Box, numel
from sbpflow.errors import unknown_value
from sbpflow.sbp.sbp import Reduction

Shape = tuple[int, ...]
LocalFn = Callable[[Tensor], Tensor]
Unpack = Callable[[Tensor], Tensor | None]
# shape of the receive buffer, and the function that unpacks the buffer
Landing = tuple[Shape, Unpack]
Pack = Callable[[Tensor, Loan], Tensor]


@dataclass(frozen=True, slots=True)
class Piece:
    """A range of a flat buffer: it starts at ``offset`` and contains the elements of ``box``."""

    offset: int
    box: Box

    @property
    def numel(self) -> int:
        return numel(self.box)

    @property
    def shape(self) -> Shape:
        return lengths(self.box)

    def of(self, flat: Tensor) -> Tensor:
        """Return a view of this range of ``flat``, in the shape of the box."""
        return flat[self.offset : self.offset + self.numel].view(self.shape)


def keep(part: Tensor) -> Tensor:
    """Return the part itself."""
    return part


def nothing(part: Tensor) -> None:
    """Return None, the result of a rank outside the destination."""
    del part


def as_it_is(part: Tensor, loan: Loan) -> Tensor:
    """Return the part itself, or a copy if the part is not contiguous (for example, an expanded
    gradient)."""
    return loan.copy(part)


def pad_to(total: int) -> Pack:
    """Return a function that copies the flat part to the start of a buffer of ``total`` elements.

    The rest of the buffer is uninitialized.
    """

    def pad(part: Tensor, loan: Loan) -> Tensor:
        padded = loan.take((total,), part)
        padded.narrow(0, 0, part.numel()).copy_(part.reshape(-1))
        return padded

    return pad


def lengths(box: Box) -> Shape:
    """Return the shape of a box."""
    return tuple(extent.stop - extent.start for extent in box)


def whole(shape: Shape) -> Box:
    """Return the box that covers all of ``shape``."""
    return tuple(slice(0, length) for length in shape)


def neutral(op: Reduction, dtype: torch.dtype) -> float | int:
    """Return the neutral element of a reduction: 0 for a sum, the lowest value for a max, and the
    highest for a min.
    """
    if op == "sum":
        return 0
    floats = dtype.is_floating_point
    if op == "max":
        return float("-inf") if floats else torch.iinfo(dtype).min
    if op == "min":
        return float("inf") if floats else torch.iinfo(dtype).max
    raise unknown_value("reduction", op, Reduction)


def cutter(inside: Box, shape: Shape) -> LocalFn:
    """Return a function that takes a part of ``shape`` and returns a view of its box ``inside``."""
    dims = [dim for dim, extent in enumerate(inside) if extent != slice(0, shape[dim])]
    if not dims:
        return keep
    if len(dims) > 1:
        return lambda part: part[inside]
    (dim,) = dims
    start, length = inside[dim].start, inside[dim].stop - inside[dim].start
    return lambda part: part.narrow(dim, start, length)


def packer(pieces: list[Piece], shape: Shape) -> Pack:
    """Return a function that packs the boxes of ``pieces``, cut from a part of ``shape``, into a
    buffer in list order.
    """
    total = sum(piece.numel for piece in pieces)
    if lie_in_order(pieces, shape, total):
        return as_it_is
    if len(pieces) == 1:
        cut = cutter(pieces[0].box, shape)
        return lambda part, loan: loan.copy(cut(part))
    dim = _even_dim(pieces, shape)
    if dim is not None:
        # If the pieces divide one dim evenly, a strided view [piece, *shape of a piece] lists the
        # pieces in order, so a single copy packs them all. Copying the pieces one by one would take
        # a torch call per piece, and for small parts a call costs more than copying the bytes.
        strides, length = _strides(shape), shape[dim] // len(pieces)
        view = (len(pieces), *shape[:dim], length, *shape[dim + 1 :])
        strides = (length * strides[dim], *strides)
        return lambda part, loan: loan.copy(part.contiguous().as_strided(view, strides))
    sizes = [piece.numel for piece in pieces]

    def pack(part: Tensor, loan: Loan) -> Tensor:
        flat = loan.take((total,), part)
        for piece, target in zip(pieces, flat.split(sizes), strict=True):
            target.view(piece.shape).copy_(part[piece.box])
        return flat

    return pack


def _strides(shape: Shape) -> Shape:
    """Return the strides of a contiguous tensor."""
    return tuple(math.prod(shape[n + 1 :]) for n in range(len(shape)))


def assembler(pieces: list[Piece], shape: Shape, total: int) -> Landing:
    """Return the shape of a receive buffer of ``total`` elements, and a function that assembles a
    part of ``shape`` from it.

    The pieces of the buffer cover every element of the part exactly once. If the pieces
    ``lie_in_order``, the buffer itself is the result.
    """
    if lie_in_order(pieces, shape, total):
        return shape, keep
    dim = _joining_dim(pieces, shape)
    if dim is None:
        return (total,), _scatterer(pieces, shape)
    if _even_dim(pieces, shape) == dim and total == numel(whole(shape)):
        # gloo and NCCL divide the first dim by rank, so equal pieces arrive as a stack.
        # Concatenating the stacked pieces writes the result in one pass over memory; copying each
        # piece to its strided position would take one pass per piece.
        count, (first, *rest) = len(pieces), pieces[0].shape
        each = (count, first, *rest)
        return (count * first, *rest), lambda stack: torch.cat(stack.view(each).unbind(), dim)
    ordered = sorted(pieces, key=lambda piece: piece.box[dim].start)
    return (total,), lambda flat: torch.cat([piece.of(flat) for piece in ordered], dim)


def combiner(pieces: list[Piece], shape: Shape, total: int, op: Reduction) -> Landing:
    """Return the shape of the receive buffer, and a function that combines the pieces in it with
    ``op``, in list order.

    Half-precision values are combined in float32.
    """
    box = whole(shape)
    if all(piece.box == box for piece in pieces) and len(pieces) > 1:
        # Terms arrive in the rank order of the group; ``pieces`` gives the order in which to
        # combine them.
        places = [piece.offset // max(1, numel(box)) for piece in pieces]
        return (len(pieces), *shape), lambda stack: combined(stack.unbind(), places, op)

    def combine(flat: Tensor) -> Tensor:
        out = flat.new_full(shape, neutral(op, flat.dtype), dtype=_wide(flat.dtype))
        for piece in pieces:
            target = out[piece.box]
            _COMBINE[op](target, piece.of(flat).to(out.dtype), out=target)
        return out.to(flat.dtype)

    return (total,), combine


_COMBINE: dict[Reduction, Callable[..., Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


def combined(
    terms: Sequence[Tensor], places: Sequence[int], op: Reduction, out: Tensor | None = None
) -> Tensor:
    """Combine two or more terms of the same shape with ``op``, in the order of their ``places`` in
    ``terms``. Half-precision values are combined in float32; other values in ``out``, if given,
    which may be one of the first two terms.
    """
    combine, dtype = _COMBINE[op], terms[0].dtype
    wide = _wide(dtype)
    first, *others = (terms[place] for place in places)
    total = first.to(wide)
    out = out if wide == dtype else total
    for term in others:
        total = out = combine(total, term.to(wide), out=out)
    return total.to(dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _scatterer(pieces: list[Piece], shape: Shape) -> LocalFn:
    def scatter(flat: Tensor) -> Tensor:
        out = flat.new_empty(shape)
        for piece in pieces:
            out[piece.box] = piece.of(flat)
        return out

    return scatter


def closed_up(pieces: list[Piece]) -> list[Piece]:
    """Return pieces with the same boxes, at new offsets that leave no gaps in the buffer."""
    offsets = accumulate((piece.numel for piece in pieces), initial=0)
    return [Piece(offset, piece.box) for offset, piece in zip(offsets, pieces, strict=False)]


def run_of(pieces: list[Piece], shape: Shape) -> slice | None:
    """Return the range of the flat part that consists of exactly these pieces, in order.

    Return None if there is no such range.
    """
    start = _run_start(pieces[0].box, shape) if pieces else None
    if start is None:
        return None
    in_buffer = closed_up(pieces)
    if any(_run_start(piece.box, shape) != start + piece.offset for piece in in_buffer):
        return None
    return slice(start, start + in_buffer[-1].offset + in_buffer[-1].numel)


def run_taker(run: slice) -> Pack:
    """Return a function that returns the range ``run`` of a flattened part; it copies the part only
    if the part is not contiguous.
    """
    return lambda part, loan: loan.copy(part).view(-1)[run]


def lie_in_order(pieces: list[Piece], shape: Shape, total: int) -> bool:
    """Return True if the buffer is the flat part: each piece lies at its offset in the part."""
    return total == numel(whole(shape)) and all(
        _run_start(piece.box, shape) == piece.offset for piece in pieces
    )


def _run_start(box: Box, shape: Shape) -> int | None:
    """Return the offset of the box in the flat part, or None if the box is not a contiguous
    range."""
    sizes = lengths(box)
    first = next((dim for dim, n in enumerate(sizes) if n != 1), len(shape))
    if sizes[first + 1 :] != shape[first + 1 :]:
        return None
    return sum(extent.start * stride for extent, stride in zip(box, _strides(shape), strict=True))


def _joining_dim(pieces: list[Piece], shape: Shape) -> int | None:
    """Return the dim along which the pieces are split, or None unless they are split along exactly
    one dim.
    """
    dims = [
        dim
        for dim, length in enumerate(shape)
        if any(piece.box[dim] != slice(0, length) for piece in pieces)
    ]
    return dims[0] if len(dims) == 1 else None


def _even_dim(pieces: list[Piece], shape: Shape) -> int | None:
    """Return the dim along which the pieces are equally long and in order, or None if no dim is
    like that.
    """
    dim = _joining_dim(pieces, shape)
    if dim is None or shape[dim] % len(pieces):
        return None
    length = shape[dim] // len(pieces)
    in_order = all(
        piece.box[dim] == slice(n * length, (n + 1) * length) for n, piece in enumerate(pieces)
    )
    return dim if in_order else None
