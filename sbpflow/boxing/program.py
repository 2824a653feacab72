"""Compiles the work of one rank in a step: packing, the sizes to exchange, and unpacking.

A program touches only local tensors; ``executor`` runs the collective between ``pack`` and
``unpack``.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sbpflow.boxing.columns import gatherer, scatterer
from sbpflow.boxing.copies import (
    Landing,
    LocalFn,
    Pack,
    Piece,
    Shape,
    Unpack,
    as_it_is,
    assembler,
    closed_up,
    combined,
    combiner,
    cutter,
    keep,
    lengths,
    lie_in_order,
    neutral,
    nothing,
    packer,
    pad_to,
    run_of,
    run_taker,
    whole,
)
from sbpflow.boxing.moves import Box, BoxTransfer, numel, shift
from sbpflow.boxing.regions import Direct, direct_exchange
from sbpflow.boxing.step import WIRE_DTYPES, BoxingStep, Collective, padded_part
from sbpflow.errors import unknown_value
from sbpflow.sbp.sbp import Partial, Reduction

# Pieces bypass the buffers (``Direct``, ``Stays``) if they have at least this size. For smaller
# pieces, the extra calls cost more than the copies they save (benchmarks.boxing, gloo, 2 ranks).
APART_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class Program:
    """``pack`` builds the send buffer from the part; ``unpack`` builds the result from received
    data.

    * If nothing is exchanged, ``unpack`` receives the part itself instead of a buffer of
      ``receive_shape``.
    * ``keeps_received`` means that the receive buffer becomes the result, so it must be a new
      tensor instead of a borrowed buffer.
    * ``sizes`` are the numbers of elements that an all-to-all receives from and sends to each rank
      of the group, or None if the collective does not need them.
    * ``comm_dtype`` is the dtype in which buffers are sent, or None to keep their dtype.
    * ``stays`` or ``add_own`` is set if the exchange leaves out the piece that this rank would send
      to itself. ``stays`` copies that piece. ``add_own`` is used if the piece is one of several
      terms; it replaces ``unpack``, and its arguments are the part and the received data.
    * ``direct`` describes the transfer without buffers, for ranks that share memory.
    * ``to_layout`` and ``from_layout`` reorder the columns of the part and of the result, if the
      step has ``src_columns`` or ``dst_columns``; ``direct`` reorders them itself.
    * ``in_pairs`` means that all-to-alls are sent as messages between pairs of ranks.
    """

    step: BoxingStep
    bytes_sent: int
    part_shape: Shape | None
    reduction: Reduction
    unpack: Unpack
    changes_device: bool
    comm_dtype: torch.dtype | None
    pack: Pack = as_it_is
    receive_shape: Shape = ()
    keeps_received: bool = True
    sizes: tuple[list[int], list[int]] | None = None
    stays: "Stays | None" = None
    add_own: Callable[[Tensor, Tensor], Tensor] | None = None
    in_pairs: bool = False
    direct: Direct | None = None
    to_layout: LocalFn | None = None
    from_layout: LocalFn | None = None


@dataclass(frozen=True, slots=True)
class Stays:
    """A piece that stays on its rank and is copied directly into the result.

    ``cut`` returns a view of the piece in the part, and ``put`` a view of its destination in the
    result. One direct copy replaces three: into the send buffer, through the backend, and out of
    the receive buffer. The data of other ranks is received directly into the range ``run`` of the
    flat result or, if ``run`` is None, copied there from the receive buffer according to
    ``pieces``.
    """

    shape: Shape
    cut: LocalFn
    put: LocalFn
    run: slice | None
    pieces: tuple[tuple[LocalFn, Piece], ...]

    def place(self, out: Tensor, received: Tensor) -> Tensor:
        """Copy the received pieces into ``out`` and return ``out``."""
        if self.run is None:
            for put, piece in self.pieces:
                put(out).copy_(piece.of(received))
        return out


def compile_step(
    step: BoxingStep, rank: int, *, in_pairs: bool = False, device: torch.device | None = None
) -> Program:
    """Return the program of ``rank`` in ``step``.

    With ``in_pairs``, all-to-alls are sent as messages between pairs of ranks. ``device`` is that
    of the parts; the default is the CPU.
    """
    group = step.group_of(rank)
    base = Program(
        step=step,
        bytes_sent=step.bytes_sent(rank),
        part_shape=step.src.part_shape(step.shape, rank),
        reduction=reduction_of(step),
        unpack=keep,
        changes_device=step.src.placement.device_type != step.dst.placement.device_type,
        comm_dtype=_comm_dtype(step.dtype),
        in_pairs=in_pairs,
        direct=direct_exchange(step, rank, group, APART_BYTES) if in_pairs and group else None,
        to_layout=None if step.src_columns is None else gatherer(step.src_columns, device),
        from_layout=None if step.dst_columns is None else scatterer(step.dst_columns, device),
    )
    if group is None:
        return replace(base, unpack=_local(step, rank))
    if step.collective == "all_gather":
        return _all_gather(base, rank, group)
    if step.collective == "all_reduce":
        return base
    if step.collective in ("all_to_all", "reduce_scatter"):
        return _exchange(base, rank, group)
    if step.collective == "none":
        raise RuntimeError(f"{step.id}: the step has groups but no collective")
    raise unknown_value("collective", step.collective, Collective)


def _comm_dtype(dtype: torch.dtype) -> torch.dtype | None:
    """Return a dtype of the same size that the backends support, or None if they support ``dtype``.

    The substitute works only for transfers that copy bits, not for transfers that add values.
    """
    if dtype in WIRE_DTYPES or dtype == torch.bool:
        return None
    return {1: torch.uint8, 2: torch.bfloat16, 4: torch.int32, 8: torch.int64}.get(dtype.itemsize)


def _landed(base: Program, landing: Landing) -> Program:
    shape, unpack = landing
    return replace(base, receive_shape=shape, unpack=unpack, keeps_received=unpack is keep)


def reduction_of(step: BoxingStep) -> Reduction:
    """Return the reduction of this step ("sum" if the step does not reduce)."""
    ops: list[Reduction] = [
        s.op for s in (*step.src.nd_sbp, *step.dst.nd_sbp) if isinstance(s, Partial)
    ]
    return ops[0] if ops else "sum"


def _local(step: BoxingStep, rank: int) -> Unpack:
    """Return the function for a rank that does not communicate: the function slices the part, or
    embeds the part in neutral elements.
    """
    dst_box = step.dst.part_slices(step.shape, rank)
    if dst_box is None:
        return nothing
    shape, fill = lengths(dst_box), neutral(reduction_of(step), step.dtype)
    move = next((m for m in step.moves if m.src == m.dst == rank), None)
    if move is None:
        return lambda part: part.new_full(shape, fill)
    src_box = step.src.part_slices(step.shape, rank) or ()
    cut = cutter(shift(move.box, src_box), lengths(src_box))
    put = cutter(shift(move.box, dst_box), shape)
    if put is keep:  # the box covers the result
        return keep if cut is keep else lambda part: cut(part).contiguous()

    def pad(part: Tensor) -> Tensor:
        out = part.new_full(shape, fill)
        put(out).copy_(cut(part))
        return out

    return pad


def _all_gather(base: Program, rank: int, group: tuple[int, ...]) -> Program:
    """Send every rank's part, padded to the size of the largest one, to every rank of the group."""
    step = base.step
    stride = padded_part(step.src, step.shape, group)
    mine = numel(step.src.part_slices(step.shape, rank) or ())
    dst_box = step.dst.part_slices(step.shape, rank) or ()
    boxes = [(n * stride, step.src.part_slices(step.shape, r) or ()) for n, r in enumerate(group)]
    pieces = [Piece(offset, shift(box, dst_box)) for offset, box in boxes if numel(box)]
    packed = replace(base, pack=pad_to(stride) if mine < stride else as_it_is)
    return _landed(packed, assembler(pieces, lengths(dst_box), stride * len(group)))


def _exchange(base: Program, rank: int, group: tuple[int, ...]) -> Program:
    """Send each rank of the group the box that it needs; combine received terms in the order of
    ``step.moves``.
    """
    step = base.step
    leaving = {move.dst: move for move in step.moves if move.src == rank}
    coming = {move.src: move for move in step.moves if move.dst == rank}
    dst_box = step.dst.part_slices(step.shape, rank)
    sent, send_sizes = _pieces(leaving, group, step.src.part_slices(step.shape, rank))
    received, receive_sizes = _pieces(coming, group, dst_box)
    exchanged = replace(
        base,
        pack=packer(list(sent.values()), (0,) if base.part_shape is None else base.part_shape),
        sizes=None if _all_equal(step, group) else (receive_sizes, send_sizes),
    )
    if dst_box is None:
        return _landed(exchanged, ((sum(receive_sizes),), nothing))
    shape, total = lengths(dst_box), sum(receive_sizes)
    if step.collective == "reduce_scatter":
        return replace(exchanged, receive_shape=shape)
    own = received.get(rank)
    apart = None
    if own is not None and own.numel * step.dtype.itemsize >= APART_BYTES:
        apart = _leave_out_own(exchanged, rank, group, sent)
    if any(isinstance(sbp, Partial) for sbp in (*step.src.nd_sbp, *step.dst.nd_sbp)):
        terms = {source: received[source] for source in coming}
        alike = len(terms) > 1 and all(term.box == whole(shape) for term in terms.values())
        if apart is not None and alike:
            return _adding_apart(apart, rank, sent[rank], terms, shape)
        return _landed(exchanged, combiner(list(terms.values()), shape, total, base.reduction))
    if apart is not None:
        apart = _staying_apart(apart, rank, sent[rank], received, shape)
    return apart or _landed(exchanged, assembler(list(received.values()), shape, total))


def _all_equal(step: BoxingStep, group: tuple[int, ...]) -> bool:
    """Return True if all ranks of the group send each other equal amounts, each less than
    ``APART_BYTES``.

    The collective then needs no sizes. All ranks must make the same decision, so this function
    looks at the transfers of the whole group.
    """
    inside = [move.numel for move in step.moves if move.src in group]
    return (
        len(inside) == len(group) ** 2
        and len(set(inside)) == 1
        and inside[0] * step.dtype.itemsize < APART_BYTES
    )


def _leave_out_own(
    base: Program, rank: int, group: tuple[int, ...], sent: dict[int, Piece]
) -> Program | None:
    """Return ``base`` without the piece that this rank sends to itself.

    Return None if this rank sends itself no piece or nothing else, or if leaving the piece out
    would cost an extra copy. No extra copy is needed if the other pieces still form one range of
    the part, if they must be packed anyway, or if they are sent as separate messages.
    """
    if rank not in sent or base.sizes is None or len(sent) < 2:
        return None
    part_shape = base.part_shape or ()
    leaving = [piece for peer, piece in sent.items() if peer != rank]
    run = run_of(leaving, part_shape)
    is_between = run is None and _in_order(sent, part_shape)  # the own piece divides the others
    if is_between and not base.in_pairs:
        return None
    at = group.index(rank)
    coming_sizes, leaving_sizes = (
        [0 if n == at else size for n, size in enumerate(sizes)] for sizes in base.sizes
    )
    pack = packer(leaving, part_shape) if run is None else run_taker(run)
    if is_between:  # the send buffer is the part itself, of which messages skip the own piece
        pack, leaving_sizes = base.pack, base.sizes[1]
    return replace(
        base,
        pack=pack,
        receive_shape=(sum(coming_sizes),),
        keeps_received=False,
        sizes=(coming_sizes, leaving_sizes),
    )


def _staying_apart(
    base: Program, rank: int, own: Piece, received: dict[int, Piece], shape: Shape
) -> Program | None:
    """Return ``base`` with this rank's own piece copied during the exchange.

    Return None if this rank receives no other pieces, or if they would then need an extra copy.
    The other pieces need no extra copy if they are received into one range of the result, or if
    they must be copied anyway.
    """
    coming = [piece for peer, piece in received.items() if peer != rank]
    run = run_of(coming, shape)
    if not coming or (run is None and _in_order(received, shape)):
        return None
    stays = Stays(
        shape,
        cutter(own.box, base.part_shape or ()),
        cutter(received[rank].box, shape),
        run,
        tuple((cutter(piece.box, shape), piece) for piece in closed_up(coming)),
    )
    return replace(base, stays=stays)


def _adding_apart(
    base: Program, rank: int, own: Piece, terms: dict[int, Piece], shape: Shape
) -> Program:
    """Return ``base``, changed to receive only the terms of other ranks.

    After the exchange, all terms are combined in the order of ``terms``; this rank's own term is
    taken from its part.
    """
    others = sorted(terms.keys() - {rank})
    places = [len(others) if source == rank else others.index(source) for source in terms]
    cut = cutter(own.box, base.part_shape or ())

    def add_own(part: Tensor, stack: Tensor) -> Tensor:
        return combined([*stack.unbind(), cut(part)], places, base.reduction)

    return replace(base, receive_shape=(len(others), *shape), add_own=add_own)


def _in_order(pieces: dict[int, Piece], shape: Shape) -> bool:
    return lie_in_order(list(pieces.values()), shape, numel(whole(shape)))


def _pieces(
    moves: dict[int, BoxTransfer], group: tuple[int, ...], origin: Box | None
) -> tuple[dict[int, Piece], list[int]]:
    """Return the pieces of a buffer with one range per rank of the group, and the ranges' sizes."""
    pieces: dict[int, Piece] = {}
    sizes: list[int] = []
    for rank in group:
        move = moves.get(rank)
        if move is not None and origin is not None:
            pieces[rank] = Piece(sum(sizes), shift(move.box, origin))
        sizes.append(0 if move is None else move.numel)
    return pieces, sizes
