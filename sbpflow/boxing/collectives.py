"""Starts the collectives of compiled steps."""

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from sbpflow.boxing import pairs
from sbpflow.boxing.buffers import Loan
from sbpflow.boxing.copies import LocalFn, Unpack, keep, nothing
from sbpflow.boxing.program import Program, Stays
from sbpflow.boxing.regions import Direct
from sbpflow.runtime.ranks.shared_memory import SharedChannel
from sbpflow.runtime.ranks.world import Link, all_gather_single, reduce_scatter_single

Work = dist.Work | pairs.Messages | pairs.AllReduce | None
Issued = tuple[Tensor, Work]

_REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def start(
    program: Program, part: Tensor, link: Link, loan: Loan, *, donate: bool
) -> tuple[Tensor, Work, Unpack]:
    """Start the program's collective. Return the receive buffer, the work to wait for, and the
    function that unpacks the buffer.
    """
    direct, shared = program.direct, link.shared
    if direct is not None and shared is not None and shared.connects(link.ranks):
        return _exchange_directly(program, direct, part, shared)
    if program.to_layout is not None:
        part = program.to_layout(part)
    if program.stays is not None:
        issued, unpack = _exchange_apart(program, program.stays, part, link, loan)
    elif program.step.collective == "all_reduce":
        issued, unpack = _run_all_reduce(program, part, link, donate), program.unpack
    else:
        issued = _COLLECTIVES[program.step.collective](program, part, link, loan)
        unpack = program.unpack
        if program.add_own is not None:
            unpack = partial(program.add_own, part)
    return *issued, _reordered(unpack, program.from_layout)


def run_alone(program: Program, part: Tensor) -> Tensor | None:
    """Return the result of a rank that does not communicate in this step."""
    if program.to_layout is not None:
        part = program.to_layout(part)
    return _reordered(program.unpack, program.from_layout)(part)


def _reordered(unpack: Unpack, reorder: LocalFn | None) -> Unpack:
    if reorder is None:
        return unpack

    def unpack_and_reorder(received: Tensor) -> Tensor | None:
        part = unpack(received)
        return None if part is None else reorder(part)

    return unpack_and_reorder


def _exchange_directly(
    program: Program, direct: Direct, part: Tensor, shared: SharedChannel
) -> tuple[Tensor, Work, Unpack]:
    """Start an all-to-all or all-gather between ranks that share memory; during the transfer, copy
    the box that stays on this rank.
    """
    if program.to_layout is not None:
        part = part.contiguous()  # parts with reordered columns must be contiguous
    if direct.shape is None:
        out = part.new_empty(0)
        return out, pairs.exchange_regions(direct.sends, part, {}, out, shared), nothing
    out = part.new_empty(direct.shape)
    messages = pairs.exchange_regions(direct.sends, part, direct.receives, out, shared)
    if direct.own is not None:
        direct.own(part, out)
    return out, messages, keep


def _as_sent(program: Program, buffer: Tensor) -> Tensor:
    return buffer if program.comm_dtype is None else buffer.resolve_conj().view(program.comm_dtype)


def _exchange_apart(
    program: Program, stays: Stays, part: Tensor, link: Link, loan: Loan
) -> tuple[Issued, Unpack]:
    """Start an all-to-all; during the transfer, copy the piece that stays on this rank."""
    packed = program.pack(part, loan)
    out = part.new_empty(stays.shape)
    if stays.run is None:
        received = _receive_buffer(program, part, loan)
    else:
        received = out.view(-1)[stays.run]
    work = _all_to_all(program, received, packed, link)
    stays.put(out).copy_(stays.cut(part))
    return (received, work), partial(stays.place, out)


def _run_all_reduce(program: Program, part: Tensor, link: Link, donate: bool) -> Issued:
    if donate:
        whole = part.resolve_neg().contiguous()
    else:
        whole = part.clone(memory_format=torch.contiguous_format)
    op = program.reduction
    work = pairs.all_reduce(_flat(whole), op, link)
    return whole, work or dist.all_reduce(whole, _REDUCE_OPS[op], link.group, async_op=True)


def _receive_buffer(program: Program, like: Tensor, loan: Loan) -> Tensor:
    shape = program.receive_shape
    return like.new_empty(shape) if program.keeps_received else loan.take(shape, like)


def _run_all_gather(program: Program, part: Tensor, link: Link, loan: Loan) -> Issued:
    packed = program.pack(part, loan)
    gathered = _receive_buffer(program, part, loan)
    # Flat buffers, because gloo gathers only along the first dim, and the shapes of empty parts,
    # such as [6, 0] and [7, 0], may differ.
    sent, into = _flat(_as_sent(program, packed)), _flat(_as_sent(program, gathered))
    messages = pairs.all_gather(into, sent, link)
    return gathered, messages or all_gather_single(into, sent, group=link.group, async_op=True)


def _run_reduce_scatter(program: Program, part: Tensor, link: Link, loan: Loan) -> Issued:
    packed = program.pack(part, loan)
    reduced = part.new_empty(program.receive_shape)
    op = _REDUCE_OPS[program.reduction]
    return reduced, reduce_scatter_single(reduced, packed, op=op, group=link.group, async_op=True)


def _run_all_to_all(program: Program, part: Tensor, link: Link, loan: Loan) -> Issued:
    packed = program.pack(part, loan)
    received = _receive_buffer(program, part, loan)
    return received, _all_to_all(program, received, packed, link)


def _all_to_all(program: Program, received: Tensor, packed: Tensor, link: Link) -> Work:
    received, packed = _as_sent(program, received), _as_sent(program, packed)
    if program.in_pairs:
        even = [packed.numel() // len(link.ranks)] * len(link.ranks)
        return pairs.all_to_all(_flat(received), _flat(packed), program.sizes or (even, even), link)
    group = link.group
    if program.sizes is None:
        received, packed = _by_rank(received, group), _by_rank(packed, group)
        return dist.all_to_all_single(received, packed, group=group, async_op=True)
    return dist.all_to_all_single(
        _flat(received), _flat(packed), *program.sizes, group=group, async_op=True
    )


def _flat(buffer: Tensor) -> Tensor:
    return buffer if buffer.ndim == 1 else buffer.view(-1)


def _by_rank(buffer: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return a view whose first dim is divisible by the number of ranks, as c10d requires."""
    if buffer.ndim and buffer.shape[0] % group.size() == 0:
        return buffer
    return buffer.view(-1)


_COLLECTIVES = {
    "all_gather": _run_all_gather,
    "reduce_scatter": _run_reduce_scatter,
    "all_to_all": _run_all_to_all,
}
