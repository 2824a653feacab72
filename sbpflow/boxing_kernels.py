"""Local copies around a collective: boxes of a part to stretches of a flat buffer, and back.

Each factory looks at the pieces once and returns the cheapest function for them: nothing where they
already lie in order, one strided copy where they are equal, a loop otherwise.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sbpflow.boxing_moves import Box, numel
from sbpflow.sbp import Reduction

Shape = tuple[int, ...]
LocalFn = Callable[[Tensor], Tensor]
Take = Callable[[int, Tensor], Tensor]  # (numel, like) -> a flat buffer that is lent
Pack = Callable[[Tensor, Take], Tensor]


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


def flatten(part: Tensor, take: Take) -> Tensor:
    """One contiguous run; a copy only if it was not (an expanded gradient flattens to stride 0)."""
    del take
    return part.reshape(-1).contiguous()


def pad_to(total: int) -> Pack:
    """The part, flattened, at the start of a buffer of ``total`` elements; the rest is not set."""

    def pad(part: Tensor, take: Take) -> Tensor:
        padded = take(total, part)
        padded[: part.numel()] = part.reshape(-1)
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
    if dtype.is_floating_point:
        return float("-inf") if op == "max" else float("inf")
    info = torch.iinfo(dtype)
    return info.min if op == "max" else info.max


def slicer(inside: Box, shape: Shape) -> LocalFn:
    """Cut a box out of a part of ``shape``."""
    if inside == whole(shape):
        return keep
    return lambda part: part[inside].contiguous()


def padder(inside: Box, at: Box, shape: Shape, fill: float | int) -> LocalFn:
    """Set a box of the part into a part of ``shape`` that is ``fill`` elsewhere."""

    def pad(part: Tensor) -> Tensor:
        out = part.new_full(shape, fill)
        out[at] = part[inside]
        return out

    return pad


def packer(pieces: list[Piece], shape: Shape) -> Pack:
    """Copy boxes of a part of ``shape`` to their stretches of one flat buffer."""
    total = sum(piece.numel for piece in pieces)
    if lie_in_order(pieces, shape, total):
        return flatten
    dim = _even_dim(pieces, shape)
    if dim is not None:
        outer, inner = shape[:dim], shape[dim + 1 :]
        count, length = len(pieces), shape[dim] // len(pieces)
        split, joined = (*outer, count, length, *inner), (count, *outer, length, *inner)
        order = (dim, *range(dim), *range(dim + 1, len(split)))

        def pack_even(part: Tensor, take: Take) -> Tensor:
            flat = take(total, part)
            flat.view(joined).copy_(part.reshape(split).permute(order))
            return flat

        return pack_even
    sizes = [piece.numel for piece in pieces]

    def pack(part: Tensor, take: Take) -> Tensor:
        flat = take(total, part)
        for piece, stretch in zip(pieces, flat.split(sizes), strict=True):
            stretch.view(piece.shape).copy_(part[piece.box])
        return flat

    return pack


def assembler(pieces: list[Piece], shape: Shape, total: int) -> LocalFn:
    """Put the stretches of a flat buffer of ``total``, which cover the part once, in place.

    The result is the buffer itself where the pieces ``lie_in_order``, else a copy.
    """
    if lie_in_order(pieces, shape, total):
        return lambda flat: flat.view(shape)
    dim = _joining_dim(pieces, shape)
    if dim is None:
        return _scatterer(pieces, shape)
    if _even_dim(pieces, shape) == dim and total == numel(whole(shape)):
        stacked = (len(pieces), *pieces[0].shape)
        return lambda flat: torch.cat(flat.view(stacked).unbind(), dim)
    ordered = sorted(pieces, key=lambda piece: piece.box[dim].start)
    return lambda flat: torch.cat([piece.of(flat) for piece in ordered], dim)


def combiner(pieces: list[Piece], shape: Shape, op: Reduction) -> LocalFn:
    """Add up (or take the max or min of) the stretches, in list order; half types in float32."""
    box = whole(shape)
    if all(piece.box == box for piece in pieces) and len(pieces) > 1:
        # Terms arrive by rank; the order they are combined in is the list's.
        places = [piece.offset // max(1, numel(box)) for piece in pieces]
        stacked = (len(pieces), *shape)
        return lambda flat: _combine_whole(flat.view(stacked).unbind(), places, op)

    def combine(flat: Tensor) -> Tensor:
        out = flat.new_full(shape, neutral(op, flat.dtype), dtype=_wide(flat.dtype))
        for piece in pieces:
            target = out[piece.box]
            _COMBINE[op](target, piece.of(flat).to(out.dtype), out=target)
        return out.to(flat.dtype)

    return combine


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
    strides = [numel(whole(shape[dim + 1 :])) for dim in range(len(shape))]
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

    def take_run(part: Tensor, take: Take) -> Tensor:
        return flatten(part, take)[run]

    return take_run


def lie_in_order(pieces: list[Piece], shape: Shape, total: int) -> bool:
    """Whether the part, flattened, is the buffer: each piece a run of it, in buffer order."""
    if total != numel(whole(shape)):
        return False
    strides = [numel(whole(shape[dim + 1 :])) for dim in range(len(shape))]
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
