"""One rank's share of one step, compiled once: how to pack, sizes to exchange, how to unpack.

Touches local tensors only; ``boxing`` issues the collective between ``pack`` and ``unpack``.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from sbpflow.boxing_kernels import (
    LocalFn,
    Pack,
    Piece,
    Shape,
    assembler,
    closed_up,
    combiner,
    flatten,
    keep,
    lengths,
    lie_in_order,
    neutral,
    packer,
    pad_to,
    padder,
    run_of,
    run_taker,
    slicer,
    whole,
)
from sbpflow.boxing_moves import Box, Move, numel, shift
from sbpflow.boxing_step import BoxingStep, padded_part
from sbpflow.sbp import Partial, Reduction

# A piece that stays on its rank skips the buffers from this size on; below it, the copies saved
# take less time than the calls that save them.
APART_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Program:
    """``pack`` makes the send buffer from the part; ``unpack`` makes the result from what came.

    ``group`` is None when nothing is exchanged; then ``unpack`` takes the part itself. If
    ``keeps_received``, the result is a view of the receive buffer, which then must not be lent.
    """

    step: BoxingStep
    group: tuple[int, ...] | None
    bytes_sent: int
    part_shape: Shape | None
    reduction: Reduction
    unpack: Callable[[Tensor], Tensor | None]
    pack: Pack = flatten
    send_sizes: tuple[int, ...] = ()
    receive_sizes: tuple[int, ...] = ()
    keeps_received: bool = True
    stays: "Stays | None" = None


@dataclass(frozen=True, slots=True)
class Stays:
    """The box of the part that stays on its rank: copied straight into the result.

    It skips the send buffer, the backend's copy to itself and the receive buffer. What others send
    is received into ``run`` of the flat result, or is copied from the buffer as ``pieces`` say.
    """

    shape: Shape
    src: Box
    dst: Box
    run: slice | None
    pieces: tuple[Piece, ...]

    def place(self, received: Tensor, out: Tensor) -> Tensor:
        """``out`` with what came, once it is there."""
        if self.run is None:
            for piece in self.pieces:
                out[piece.box] = piece.of(received)
        return out


def compile_step(step: BoxingStep, rank: int) -> Program:
    """What ``rank`` does in ``step``."""
    group = step.group_of(rank)
    base = Program(
        step=step,
        group=group,
        bytes_sent=step.bytes_sent(rank),
        part_shape=step.src.part_shape(step.shape, rank),
        reduction=reduction_of(step),
        unpack=keep,
    )
    if group is None:
        return replace(base, unpack=_local(step, rank))
    if step.collective == "all_gather":
        return _all_gather(base, rank, group)
    if step.collective == "all_reduce":
        return replace(base, unpack=_as_shape(base.part_shape or ()))
    return _exchange(base, rank, group)


def reduction_of(step: BoxingStep) -> Reduction:
    """How terms combine in this step; sum where there are none."""
    ops: list[Reduction] = [
        s.op for s in (*step.src.nd_sbp, *step.dst.nd_sbp) if isinstance(s, Partial)
    ]
    return ops[0] if ops else "sum"


def _nothing(part: Tensor) -> None:
    """What a rank outside the destination has."""
    del part


def _as_shape(shape: Shape) -> LocalFn:
    return lambda flat: flat.view(shape)


def _local(step: BoxingStep, rank: int) -> Callable[[Tensor], Tensor | None]:
    """Slice the part, or set it into a part of neutral elements; no rank hears of it."""
    dst_box = step.dst.part_slices(step.shape, rank)
    if dst_box is None:
        return _nothing
    shape, fill = lengths(dst_box), neutral(reduction_of(step), step.dtype)
    move = next((m for m in step.moves if m.src == m.dst == rank), None)
    if move is None:
        return lambda part: part.new_full(shape, fill)
    src_box = step.src.part_slices(step.shape, rank) or ()
    inside, at = shift(move.box, src_box), shift(move.box, dst_box)
    if at == whole(shape):
        return slicer(inside, lengths(src_box))
    return padder(inside, at, shape, fill)


def _all_gather(base: Program, rank: int, group: tuple[int, ...]) -> Program:
    """Every part, padded to the largest, to every rank of the group."""
    step = base.step
    stride = padded_part(step.src, step.shape, group)
    mine = numel(step.src.part_slices(step.shape, rank) or ())
    dst_box = step.dst.part_slices(step.shape, rank) or ()

    boxes = [(n * stride, step.src.part_slices(step.shape, r) or ()) for n, r in enumerate(group)]
    pieces = [Piece(offset, shift(box, dst_box)) for offset, box in boxes if numel(box)]
    return replace(
        base,
        pack=pad_to(stride) if mine < stride else flatten,
        unpack=assembler(pieces, lengths(dst_box), stride * len(group)),
        receive_sizes=(stride,) * len(group),
        keeps_received=lie_in_order(pieces, lengths(dst_box), stride * len(group)),
    )


def _exchange(base: Program, rank: int, group: tuple[int, ...]) -> Program:
    """Each rank of the group gets the box it needs; terms are combined in rank order."""
    step = base.step
    leaving = {move.dst: move for move in step.moves if move.src == rank}
    coming = {move.src: move for move in step.moves if move.dst == rank}
    dst_box = step.dst.part_slices(step.shape, rank)
    sent, send_sizes = _pieces(leaving, group, step.src.part_slices(step.shape, rank))
    received, receive_sizes = _pieces(coming, group, dst_box)
    exchanged = replace(
        base,
        pack=packer(list(sent.values()), (0,) if base.part_shape is None else base.part_shape),
        send_sizes=send_sizes,
        receive_sizes=receive_sizes,
    )
    if dst_box is None:
        return replace(exchanged, unpack=_nothing, keeps_received=False)
    shape, total = lengths(dst_box), sum(receive_sizes)
    if step.collective == "reduce_scatter":
        return replace(exchanged, unpack=_as_shape(shape))
    if any(isinstance(sbp, Partial) for sbp in (*step.src.nd_sbp, *step.dst.nd_sbp)):
        terms = [received[source] for source in coming]
        combine = combiner(terms, shape, base.reduction)
        return replace(exchanged, unpack=combine, keeps_received=False)
    apart = _staying_apart(exchanged, rank, group, sent, received, shape)
    if apart is not None:
        return apart
    pieces = list(received.values())
    in_order = lie_in_order(pieces, shape, total)
    return replace(exchanged, unpack=assembler(pieces, shape, total), keeps_received=in_order)


def _staying_apart(
    base: Program,
    rank: int,
    group: tuple[int, ...],
    sent: dict[int, Piece],
    received: dict[int, Piece],
    shape: Shape,
) -> Program | None:
    """The exchange without this rank's own piece, where that saves copies and costs none.

    Without it the other pieces must still be sent from one run of the part, or be packed anyway;
    and be received into one run of the result, or be copied anyway.
    """
    if rank not in sent or rank not in received or len(sent) < 2 or len(received) < 2:
        return None
    own_sent, own_received = sent[rank], received[rank]
    if own_sent.numel * base.step.dtype.itemsize < APART_BYTES:
        return None
    leaving = [piece for peer, piece in sent.items() if peer != rank]
    coming = [piece for peer, piece in received.items() if peer != rank]
    part_shape = base.part_shape or ()
    send_run = run_of(leaving, part_shape)
    if send_run is None and lie_in_order(list(sent.values()), part_shape, numel(whole(part_shape))):
        return None
    receive_run = run_of(coming, shape)
    if receive_run is None and lie_in_order(list(received.values()), shape, numel(whole(shape))):
        return None
    at = group.index(rank)
    sizes = [
        tuple(0 if n == at else size for n, size in enumerate(sizes))
        for sizes in (base.send_sizes, base.receive_sizes)
    ]
    return replace(
        base,
        pack=packer(leaving, part_shape) if send_run is None else run_taker(send_run),
        send_sizes=sizes[0],
        receive_sizes=sizes[1],
        stays=Stays(shape, own_sent.box, own_received.box, receive_run, tuple(closed_up(coming))),
    )


def _pieces(
    moves: dict[int, Move], group: tuple[int, ...], origin: Box | None
) -> tuple[dict[int, Piece], tuple[int, ...]]:
    """A buffer with one stretch per rank of the group, empty where nothing moves."""
    pieces: dict[int, Piece] = {}
    sizes: list[int] = []
    for rank in group:
        move = moves.get(rank)
        if move is not None and origin is not None:
            pieces[rank] = Piece(sum(sizes), shift(move.box, origin))
        sizes.append(0 if move is None else move.numel)
    return pieces, tuple(sizes)
