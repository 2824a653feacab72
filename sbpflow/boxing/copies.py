"""Local copies around a collective: boxes of a part to stretches of a buffer, and back.

Each factory looks at the pieces once and returns the cheapest function for them: nothing where they
already lie in order, one strided copy where they are equal, a loop otherwise. Fewer tensor calls
matter more than fewer bytes below some 100 KiB: each costs 1 us at best, after a context switch 10.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sbpflow.boxing.moves import Box, numel
from sbpflow.errors import unknown_value
from sbpflow.sbp.sbp import Reduction

Shape = tuple[int, ...]
LocalFn = Callable[[Tensor], Tensor]
Unpack = Callable[[Tensor], Tensor | None]
Landing = tuple[Shape, Unpack]  # the shape to receive in, and what to do with it then


class Lender(Protocol):
    """Where buffers come from; ``staging`` has one."""

    def take(self, shape: Shape, like: Tensor) -> Tensor:
        """A contiguous buffer of ``shape``, of the dtype and device of ``like``."""
        ...

    def copy(self, view: Tensor) -> Tensor:
        """A contiguous tensor equal to ``view``: a copy, or itself if it is contiguous."""
        ...


Pack = Callable[[Tensor, Lender], Tensor]


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a flat buffer, from ``offset``, and the box of a part that it holds."""

    offset: int
    box: Box

    @property
    def numel(self) -> int:
        return numel(self.box)

    @property
    def shape(self) -> Shape:
        return lengths(self.box)

    def of(self, flat: Tensor) -> Tensor:
        """The stretch of ``flat``, in the shape of the box."""
        return flat[self.offset : self.offset + self.numel].view(self.shape)


def keep(part: Tensor) -> Tensor:
    """Nothing to do."""
    return part


def as_it_is(part: Tensor, lender: Lender) -> Tensor:
    """The part itself; a copy only if it is not contiguous, as an expanded gradient."""
    return lender.copy(part)


def pad_to(total: int) -> Pack:
    """The part, flattened, at the start of a buffer of ``total`` elements; the rest is not set."""

    def pad(part: Tensor, lender: Lender) -> Tensor:
        padded = lender.take((total,), part)
        padded.narrow(0, 0, part.numel()).copy_(part.reshape(-1))
        return padded

    return pad


def lengths(box: Box) -> Shape:
    """The shape of a box."""
    return tuple(extent.stop - extent.start for extent in box)


def whole(shape: Shape) -> Box:
    """The box that is all of ``shape``."""
    return tuple(slice(0, length) for length in shape)


def neutral(op: Reduction, dtype: torch.dtype) -> float | int:
    """What a rank without a term contributes: 0 to a sum, the lowest value to a max."""
    if op == "sum":
        return 0
    floats = dtype.is_floating_point
    if op == "max":
        return float("-inf") if floats else torch.iinfo(dtype).min
    if op == "min":
        return float("inf") if floats else torch.iinfo(dtype).max
    raise unknown_value("reduction", op, Reduction)


def cutter(inside: Box, shape: Shape) -> LocalFn:
    """A view of a box of a tensor of ``shape``."""
    dims = [dim for dim, extent in enumerate(inside) if extent != slice(0, shape[dim])]
    if not dims:
        return keep
    if len(dims) > 1:
        return lambda part: part[inside]
    (dim,) = dims
    start, length = inside[dim].start, inside[dim].stop - inside[dim].start
    return lambda part: part.narrow(dim, start, length)


def slicer(inside: Box, shape: Shape) -> LocalFn:
    """Cut a box out of a part of ``shape``, contiguous."""
    cut = cutter(inside, shape)
    return keep if cut is keep else lambda part: cut(part).contiguous()


def padder(inside: Box, at: Box, src_shape: Shape, shape: Shape, fill: float | int) -> LocalFn:
    """Set a box of a part of ``src_shape`` into a part of ``shape`` that is ``fill`` elsewhere."""
    take_out, put_in = cutter(inside, src_shape), cutter(at, shape)

    def pad(part: Tensor) -> Tensor:
        out = part.new_full(shape, fill)
        put_in(out).copy_(take_out(part))
        return out

    return pad


def packer(pieces: list[Piece], shape: Shape) -> Pack:
    """Copy boxes of a part of ``shape`` to their stretches of one buffer, of whatever shape."""
    total = sum(piece.numel for piece in pieces)
    if lie_in_order(pieces, shape, total):
        return as_it_is
    if len(pieces) == 1:
        cut = cutter(pieces[0].box, shape)
        return lambda part, lender: lender.copy(cut(part))
    dim = _even_dim(pieces, shape)
    if dim is not None:
        # Equal pieces along one dim: a strided view has them one after the other, so one copy packs
        # all. A copy per piece is a call of torch each, dearer than the bytes of small parts.
        turned, strides = _turned(shape, dim, len(pieces))
        return lambda part, lender: lender.copy(part.contiguous().as_strided(turned, strides))
    sizes = [piece.numel for piece in pieces]

    def pack(part: Tensor, lender: Lender) -> Tensor:
        flat = lender.take((total,), part)
        for piece, stretch in zip(pieces, flat.split(sizes), strict=True):
            stretch.view(piece.shape).copy_(part[piece.box])
        return flat

    return pack


def _turned(shape: Shape, dim: int, count: int) -> tuple[Shape, Shape]:
    """Shape and strides that show ``shape`` cut in ``count`` along ``dim``, piece after piece.

    One view instead of a reshape and a permutation.
    """
    strides, length = _strides(shape), shape[dim] // count
    turned = (count, *shape[:dim], length, *shape[dim + 1 :])
    return turned, (length * strides[dim], *strides)


def _strides(shape: Shape) -> Shape:
    """Of a contiguous tensor."""
    return tuple(math.prod(shape[n + 1 :]) for n in range(len(shape)))


def assembler(pieces: list[Piece], shape: Shape, total: int) -> Landing:
    """Put the stretches of a buffer of ``total``, which cover the part once, in place.

    What is received is the result itself where the pieces ``lie_in_order``, else it is copied.
    """
    if lie_in_order(pieces, shape, total):
        return shape, keep
    dim = _joining_dim(pieces, shape)
    if dim is None:
        return (total,), _scatterer(pieces, shape)
    if _even_dim(pieces, shape) == dim and total == numel(whole(shape)):
        # Received as a stack of equal pieces, whose first dim gloo and NCCL divide by rank; `cat`
        # of its slices is one pass, where writing each into its strided place is one per piece.
        count, (first, *rest) = len(pieces), pieces[0].shape
        each = (count, first, *rest)
        return (count * first, *rest), lambda stack: torch.cat(stack.view(each).unbind(), dim)
    ordered = sorted(pieces, key=lambda piece: piece.box[dim].start)
    return (total,), lambda flat: torch.cat([piece.of(flat) for piece in ordered], dim)


def combiner(pieces: list[Piece], shape: Shape, total: int, op: Reduction) -> Landing:
    """Add up (or take the max or min of) the stretches, in list order; half types in float32."""
    box = whole(shape)
    if all(piece.box == box for piece in pieces) and len(pieces) > 1:
        # Terms arrive by rank; the order they are combined in is the list's.
        places = [piece.offset // max(1, numel(box)) for piece in pieces]
        return (len(pieces), *shape), lambda stack: _combine_whole(stack.unbind(), places, op)

    def combine(flat: Tensor) -> Tensor:
        out = flat.new_full(shape, neutral(op, flat.dtype), dtype=_wide(flat.dtype))
        for piece in pieces:
            target = out[piece.box]
            _COMBINE[op](target, piece.of(flat).to(out.dtype), out=target)
        return out.to(flat.dtype)

    return (total,), combine


def adder(cut: LocalFn, places: list[int], op: Reduction) -> Callable[[Tensor, Tensor], Tensor]:
    """As ``combiner``, of the terms that came and, after them, what ``cut`` takes of the part."""
    return lambda stack, part: _combine_whole([*stack.unbind(), cut(part)], places, op)


_COMBINE: dict[Reduction, Callable[..., Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


def _combine_whole(terms: Sequence[Tensor], places: list[int], op: Reduction) -> Tensor:
    combine, dtype = _COMBINE[op], terms[0].dtype
    wide = _wide(dtype)
    if wide != dtype:
        terms = [term.to(wide) for term in terms]
    out = combine(terms[places[0]], terms[places[1]])
    for place in places[2:]:
        combine(out, terms[place], out=out)
    return out if wide == dtype else out.to(dtype)


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
    """The same boxes in a buffer that holds them one after the other."""
    closed: list[Piece] = []
    for piece in pieces:
        closed.append(Piece(sum(before.numel for before in closed), piece.box))
    return closed


def run_of(pieces: list[Piece], shape: Shape) -> slice | None:
    """The stretch of the flattened part that the pieces, in order, make up; None if none does."""
    strides = _strides(shape)
    at: int | None = None
    start = 0
    for piece in pieces:
        first = sum(e.start * stride for e, stride in zip(piece.box, strides, strict=True))
        if not _is_run(piece.box, shape) or (at is not None and first != at):
            return None
        start = first if at is None else start
        at = first + piece.numel
    return None if at is None else slice(start, at)


def run_taker(run: slice) -> Pack:
    """A stretch of the flattened part; no copy if the part is contiguous."""
    start, length = run.start, run.stop - run.start

    def take_run(part: Tensor, lender: Lender) -> Tensor:
        return lender.copy(part).view(-1).narrow(0, start, length)

    return take_run


def lie_in_order(pieces: list[Piece], shape: Shape, total: int) -> bool:
    """Whether the part, flattened, is the buffer: each piece a run of it, in buffer order."""
    if total != numel(whole(shape)):
        return False
    strides = _strides(shape)
    for piece in pieces:
        start = sum(e.start * stride for e, stride in zip(piece.box, strides, strict=True))
        if start != piece.offset or not _is_run(piece.box, shape):
            return False
    return True


def _is_run(box: Box, shape: Shape) -> bool:
    """Whether the box is one unbroken run of the flattened part."""
    sizes = lengths(box)
    first = next((dim for dim, n in enumerate(sizes) if n != 1), len(shape))
    return sizes[first + 1 :] == shape[first + 1 :]


def _joining_dim(pieces: list[Piece], shape: Shape) -> int | None:
    """The only dim along which the pieces differ, if there is just one."""
    dims = [
        dim
        for dim, length in enumerate(shape)
        if any(piece.box[dim] != slice(0, length) for piece in pieces)
    ]
    return dims[0] if len(dims) == 1 else None


def _even_dim(pieces: list[Piece], shape: Shape) -> int | None:
    """The dim that the pieces cut into equal lengths, first to last, if they do."""
    dim = _joining_dim(pieces, shape)
    if dim is None or shape[dim] % len(pieces):
        return None
    length = shape[dim] // len(pieces)
    in_order = all(
        piece.box[dim] == slice(n * length, (n + 1) * length) for n, piece in enumerate(pieces)
    )
    return dim if in_order else None
