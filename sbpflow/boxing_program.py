"""One rank's share of one step, compiled once: how to pack, sizes to exchange, how to unpack.

Touches local tensors only; ``boxing`` issues the collective between ``pack`` and ``unpack``. Pieces
that already lie one after the other in memory are not copied.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sbpflow.boxing_moves import Box, Move, numel, shift
from sbpflow.boxing_step import BoxingStep, padded_part
from sbpflow.sbp import Partial, Reduction

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """``pack`` makes the send buffer from the part; ``unpack`` makes the result from what came.

    ``group`` is None when nothing is exchanged; then ``unpack`` takes the part itself.
    """

    step: BoxingStep
    group: tuple[int, ...] | None
    bytes_sent: int
    pack: Callable[[Tensor], Tensor]
    unpack: Callable[[Tensor], Tensor | None]
    part_shape: Shape | None
    send_sizes: list[int]
    receive_sizes: list[int]
    reduction: Reduction


@dataclass(frozen=True, slots=True)
class _Piece:
    """A stretch of a flat buffer and the box of a part it belongs to (in the part's indices)."""

    offset: int
    box: Box

    @property
    def numel(self) -> int:
        return numel(self.box)

    @property
    def shape(self) -> Shape:
        return _lengths(self.box)


def compile_step(step: BoxingStep, rank: int) -> Program:
    """What ``rank`` does in ``step``."""
    group = step.group_of(rank)
    if group is None:
        pack, unpack, sizes = _keep, _local(step, rank), ([], [])
    elif step.collective == "all_gather":
        pack, unpack, sizes = _all_gather(step, rank, group)
    elif step.collective == "all_reduce":
        pack, unpack, sizes = _keep, _keep, ([], [])
    else:
        pack, unpack, sizes = _exchange(step, rank, group)
    return Program(
        step=step,
        group=group,
        bytes_sent=step.bytes_sent(rank),
        pack=pack,
        unpack=unpack,
        part_shape=step.src.part_shape(step.shape, rank),
        send_sizes=sizes[0],
        receive_sizes=sizes[1],
        reduction=reduction_of(step),
    )


def reduction_of(step: BoxingStep) -> Reduction:
    """How terms combine in this step; sum where there are none."""
    ops = [s.op for s in (*step.src.nd_sbp, *step.dst.nd_sbp) if isinstance(s, Partial)]
    return ops[0] if ops else "sum"


def neutral(op: Reduction, dtype: torch.dtype) -> float | int:
    """What a rank without a term contributes: 0 to a sum, the lowest value to a max."""
    if op == "sum":
        return 0
    if dtype.is_floating_point:
        return float("-inf") if op == "max" else float("inf")
    info = torch.iinfo(dtype)
    return info.min if op == "max" else info.max


def _keep(part: Tensor) -> Tensor:
    return part


def _lengths(box: Box) -> Shape:
    return tuple(extent.stop - extent.start for extent in box)


def _whole(shape: Shape) -> Box:
    return tuple(slice(0, length) for length in shape)


def _local(step: BoxingStep, rank: int) -> Callable[[Tensor], Tensor | None]:
    """Slice the part, or set it into a part of neutral elements; no rank hears of it."""
    dst_box = step.dst.part_slices(step.shape, rank)
    if dst_box is None:
        return lambda part: None
    shape, fill = _lengths(dst_box), neutral(reduction_of(step), step.dtype)
    move = next((m for m in step.moves if m.src == m.dst == rank), None)
    if move is None:
        return lambda part: part.new_full(shape, fill)
    src_box = step.src.part_slices(step.shape, rank) or ()
    inside, at = shift(move.box, src_box), shift(move.box, dst_box)
    if inside == _whole(_lengths(src_box)) == _whole(shape):
        return _keep
    if at == _whole(shape):
        return lambda part: part[inside].contiguous()

    def set_into(part: Tensor) -> Tensor:
        out = part.new_full(shape, fill)
        out[at] = part[inside]
        return out

    return set_into


_Compiled = tuple[
    Callable[[Tensor], Tensor], Callable[[Tensor], "Tensor | None"], tuple[list[int], list[int]]
]


def _all_gather(step: BoxingStep, rank: int, group: tuple[int, ...]) -> _Compiled:
    """Every part, padded to the largest, to every rank of the group."""
    stride = padded_part(step.src, step.shape, group)
    dst_box = step.dst.part_slices(step.shape, rank) or ()
    mine = numel(step.src.part_slices(step.shape, rank) or ())

    def pack(part: Tensor) -> Tensor:
        flat = part.reshape(-1)
        if mine == stride:
            return flat
        padded = flat.new_empty(stride)
        padded[:mine] = flat
        return padded

    parts = [(n * stride, step.src.part_slices(step.shape, r) or ()) for n, r in enumerate(group)]
    pieces = [_Piece(offset, shift(box, dst_box)) for offset, box in parts if numel(box)]
    return pack, _assemble(pieces, _lengths(dst_box), stride * len(group)), ([], [])


def _exchange(step: BoxingStep, rank: int, group: tuple[int, ...]) -> _Compiled:
    """Each rank of the group gets the box it needs; terms are added up in rank order."""
    leaving = {move.dst: move for move in step.moves if move.src == rank}
    coming = {move.src: move for move in step.moves if move.dst == rank}
    sent, send_sizes = _pieces(leaving, group, step.src.part_slices(step.shape, rank))
    received, receive_sizes = _pieces(coming, group, step.dst.part_slices(step.shape, rank))
    pack = _disassemble(list(sent.values()), step.src.part_shape(step.shape, rank) or (0,))
    dst_box = step.dst.part_slices(step.shape, rank)
    sizes = (send_sizes, receive_sizes)
    if dst_box is None:
        return pack, lambda received: None, sizes
    shape = _lengths(dst_box)
    has_terms = any(isinstance(sbp, Partial) for sbp in step.src.nd_sbp)
    if step.collective == "reduce_scatter":
        return pack, lambda received: received.view(shape), sizes
    if has_terms or any(isinstance(sbp, Partial) for sbp in step.dst.nd_sbp):
        ordered = [received[source] for source in coming]
        return pack, _combine(ordered, shape, reduction_of(step)), sizes
    return pack, _assemble(list(received.values()), shape, sum(receive_sizes)), sizes


def _pieces(
    moves: dict[int, Move], group: tuple[int, ...], origin: Box | None
) -> tuple[dict[int, _Piece], list[int]]:
    """A buffer with one stretch per rank of the group, empty where nothing moves."""
    pieces: dict[int, _Piece] = {}
    sizes: list[int] = []
    for rank in group:
        move = moves.get(rank)
        if move is not None and origin is not None:
            pieces[rank] = _Piece(sum(sizes), shift(move.box, origin))
        sizes.append(0 if move is None else move.numel)
    return pieces, sizes


def _disassemble(pieces: list[_Piece], shape: Shape) -> Callable[[Tensor], Tensor]:
    """Copy each box of a part to its stretch of a flat buffer; no copy if they lie so already."""
    total = sum(piece.numel for piece in pieces)
    if _lie_in_order(pieces, shape, total):
        return lambda part: part.reshape(-1)

    def pack(part: Tensor) -> Tensor:
        flat = part.new_empty(total)
        for piece in pieces:
            _stretch(flat, piece).copy_(part[piece.box])
        return flat

    return pack


def _assemble(pieces: list[_Piece], shape: Shape, total: int) -> Callable[[Tensor], Tensor]:
    """Put the stretches of a flat buffer, which cover the part once, where they belong."""
    if _lie_in_order(pieces, shape, total):
        return lambda flat: flat.view(shape)
    dim = _joining_dim(pieces, shape)
    if dim is not None:
        ordered = sorted(pieces, key=lambda piece: piece.box[dim].start)
        return lambda flat: torch.cat([_stretch(flat, piece) for piece in ordered], dim)

    def unpack(flat: Tensor) -> Tensor:
        out = flat.new_empty(shape)
        for piece in pieces:
            out[piece.box] = _stretch(flat, piece)
        return out

    return unpack


def _combine(pieces: list[_Piece], shape: Shape, op: Reduction) -> Callable[[Tensor], Tensor]:
    """Add up (or take the max or min of) the stretches, first to last; half types in float32."""
    whole = _whole(shape)
    if pieces and all(piece.box == whole for piece in pieces):
        return lambda flat: _reduce([_stretch(flat, piece) for piece in pieces], op)

    def unpack(flat: Tensor) -> Tensor:
        wide = torch.float32 if flat.dtype in (torch.float16, torch.bfloat16) else flat.dtype
        out = flat.new_full(shape, neutral(op, flat.dtype), dtype=wide)
        for piece in pieces:
            target = out[piece.box]
            _combine_into(target, _stretch(flat, piece), op)
        return out.to(flat.dtype)

    return unpack


def _reduce(terms: list[Tensor], op: Reduction) -> Tensor:
    first, *rest = terms
    if not rest:
        return first
    wide = torch.float32 if first.dtype in (torch.float16, torch.bfloat16) else first.dtype
    out = first.to(wide, copy=wide != first.dtype)
    for term in rest:
        _combine_into(out, term, op)
    return out.to(first.dtype)


def _combine_into(out: Tensor, term: Tensor, op: Reduction) -> None:
    if op == "sum":
        out.add_(term)
    elif op == "max":
        torch.maximum(out, term.to(out.dtype), out=out)
    else:
        torch.minimum(out, term.to(out.dtype), out=out)


def _stretch(flat: Tensor, piece: _Piece) -> Tensor:
    return flat[piece.offset : piece.offset + piece.numel].view(piece.shape)


def _lie_in_order(pieces: list[_Piece], shape: Shape, total: int) -> bool:
    """Whether the part, flattened, is the buffer: each piece a run of it, in buffer order."""
    if total != numel(_whole(shape)):
        return False
    strides = [numel(_whole(shape[dim + 1 :])) for dim in range(len(shape))]
    for piece in pieces:
        start = sum(
            extent.start * stride for extent, stride in zip(piece.box, strides, strict=True)
        )
        if start != piece.offset or not _is_run(piece.box, shape):
            return False
    return True


def _is_run(box: Box, shape: Shape) -> bool:
    """Whether the box is one unbroken run of the flattened part."""
    lengths = _lengths(box)
    first = next((dim for dim, n in enumerate(lengths) if n != 1), len(shape))
    return lengths[first + 1 :] == shape[first + 1 :]


def _joining_dim(pieces: list[_Piece], shape: Shape) -> int | None:
    """The only dim along which the pieces differ, if there is just one."""
    dims = [
        dim
        for dim, length in enumerate(shape)
        if any(piece.box[dim] != slice(0, length) for piece in pieces)
    ]
    return dims[0] if len(dims) == 1 else None
