"""Simulates all ranks of a world in one process: runs every rank's compiled programs and emulates
collectives.

Use it for worlds larger than the machine and for missing backends; the real executor has its own
tests.
"""

import torch

from sbpflow.boxing.plan import plan_boxing
from sbpflow.boxing.program import compile_step
from tests import oracle
from tests.sbp.conversions import whole_numbers

REDUCE = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}


def check(src, dst, shape, dtype, backend):
    """Convert on simulated ranks and compare with the oracle; print the plan first."""
    for step in plan_boxing(src, dst, shape, getattr(torch, dtype), id="x", backend=backend):
        print(step)  # noqa: T201 -- called by hand, to look at a failing case
    simulate(src, dst, shape, dtype, backend)


def simulate(src, dst, shape, dtype, backend, parts=None):
    """Assert that the parts after the conversion match ``dst`` and the bytes match the plan."""
    dtype = getattr(torch, dtype)
    full = whole_numbers(shape, dtype)
    parts = oracle.shares(full, src, seed=1) if parts is None else parts
    for step in plan_boxing(src, dst, shape, dtype, id="x", backend=backend):
        parts = run_step(step, parts)
    assert sorted(parts) == sorted(dst.placement.ranks)
    for rank, part in parts.items():
        extent = oracle.extent(dst, shape, rank)
        assert list(part.shape) == [stop - start for start, stop in extent], f"rank {rank}"
        assert part.dtype == dtype
    assert torch.equal(oracle.joined(parts, dst, shape, dtype), full), f"{src} -> {dst}"


def run_step(step, parts):
    """Run one step on all ranks: pack, exchange within each group, and unpack."""
    ranks = sorted({*step.src.placement.ranks, *step.dst.placement.ranks})
    programs = {rank: compile_step(step, rank) for rank in ranks}
    nothing = torch.empty(0, dtype=step.dtype)
    sent = {rank: programs[rank].pack(parts.get(rank, nothing), Lender()) for rank in ranks}
    received = {rank: parts.get(rank, nothing) for rank in ranks if step.group_of(rank) is None}
    for group in step.groups:
        received |= EXCHANGE[step.collective](step, group, programs, sent)
    out = {rank: programs[rank].unpack(received[rank]) for rank in ranks}
    return {rank: part for rank, part in out.items() if part is not None}


class Lender:
    """Lends buffers filled with garbage, as reused buffers may be."""

    def take(self, shape, like):
        return like.new_full(shape, 77)

    def copy(self, view):
        return self.take(view.shape, view).copy_(view)


def _sizes(program, group, sent):
    """Return how many elements an all-to-all receives and sends, by rank of the group."""
    if program.sizes is None:
        return [[sent.numel() // len(group)] * len(group)] * 2
    return program.sizes


def _all_to_all(step, group, programs, sent):
    sizes = {rank: _sizes(programs[rank], group, sent[rank]) for rank in group}
    pieces = {rank: sent[rank].view(-1).split(sizes[rank][1]) for rank in group}
    for rank in group:
        away = sum(p.numel() for to, p in zip(group, pieces[rank], strict=True) if to != rank)
        assert step.bytes_sent(rank) == away * step.dtype.itemsize
    received = {}
    for number, rank in enumerate(group):
        assert [pieces[peer][number].numel() for peer in group] == sizes[rank][0]
        flat = torch.cat([pieces[peer][number] for peer in group])
        received[rank] = flat.view(programs[rank].receive_shape)
    return received


def _all_gather(step, group, programs, sent):
    assert len({sent[rank].numel() for rank in group}) == 1
    flat = torch.cat([sent[peer].view(-1) for peer in group])
    return {rank: flat.view(programs[rank].receive_shape) for rank in group}


def _all_reduce(step, group, programs, sent):
    reduce = REDUCE[programs[group[0]].reduction]
    total = reduce(torch.stack([sent[rank] for rank in group]), 0).to(step.dtype)
    return {rank: total.clone() for rank in group}


def _reduce_scatter(step, group, programs, sent):
    total = _all_reduce(step, group, programs, sent)[group[0]]
    pieces = total.view(-1).split(total.numel() // len(group))
    return {r: p.view(programs[r].receive_shape) for r, p in zip(group, pieces, strict=True)}


EXCHANGE = {
    "all_to_all": _all_to_all,
    "all_gather": _all_gather,
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
}
