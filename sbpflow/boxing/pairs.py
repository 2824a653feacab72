"""Sends messages between pairs of ranks, and implements all-to-all and, for ranks that share
memory, all-gather and all-reduce with these messages.

Messages of up to 256 MiB between ranks of a host use shared memory where the host supports it,
except those of large all-gathers; all other messages use gloo.

gloo's own all-to-all posts its sends before its receives. A rank's ready-to-receive notice travels
in the same stream as its data. The slower of two ranks therefore sends its notice only after all
its data, and the link carries data in only one direction at a time. Posting the receives first
halves the time (measurements are in ``docs/decisions/engine.md``). Within a single host that does
not share memory, separate messages are not faster, and a collective needs fewer calls.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from sbpflow.boxing.copies import combined
from sbpflow.boxing.regions import Region
from sbpflow.runtime.ranks.shared_memory import MOST_GATHERED, SharedChannel
from sbpflow.runtime.ranks.shared_messages import Arriving, Copy
from sbpflow.runtime.ranks.world import Link
from sbpflow.sbp.sbp import Reduction

_MAX_TAG = 2**31 - 1
# Two ranks combine at most this many bytes in one round of messages: they send as much as in two,
# but each combines everything.
_MOST_IN_ONE_ROUND = 1 << 19


@dataclass(frozen=True, slots=True)
class Messages:
    """Messages in flight. Do not touch the send or receive buffers before ``wait`` returns.

    The buffers of messages that nobody waits for are kept until the world closes, so that they
    cannot block later messages.
    """

    works: Sequence[dist.Work | Arriving]
    release: Callable[[], object] | None = None

    def wait(self) -> None:
        """Wait for all messages. c10d raises RuntimeError if a peer is gone."""
        for work in self.works:
            work.wait()
        if self.release is not None:
            self.release()


def pass_messages(
    sends: Mapping[int, Tensor], receives: Mapping[int, Tensor], link: Link
) -> Messages:
    """Exchange tensors with other ranks of the link; both mappings are keyed by global rank, and
    empty tensors are not sent.

    Every rank of the link must make the same calls in the same order, and both ends must agree on
    the size of each message. Each call has its own gloo tag. If ranks disagree on a size, the next
    call therefore cannot receive leftover messages of this call, and ``wait`` raises RuntimeError
    for the missing ones.
    """
    group, shared = link.group, link.shared
    # Count this call even if this rank sends and receives nothing, because the other ranks count
    # it.
    tag = next(link.calls) & _MAX_TAG
    arriving: list[Arriving] = []
    operations: list[dist.P2POp] = []
    for rank, target in receives.items():
        if shared is not None and shared.takes(rank, target):
            arriving.append(shared.receive(rank, target))
        elif target.numel():
            operations.append(dist.P2POp(dist.irecv, target, rank, group, tag))
    for rank, message in sends.items():
        if shared is not None and shared.takes(rank, message):
            shared.send(rank, message)
        elif message.numel():
            operations.append(dist.P2POp(dist.isend, message, rank, group, tag))
    if not operations:
        return Messages(arriving)
    works = dist.batch_isend_irecv(operations)
    link.under_way[tag] = works, *receives.values(), *sends.values()
    return Messages([*works, *arriving], partial(link.under_way.pop, tag, None))


def exchange_regions(
    sends: Mapping[int, Region],
    part: Tensor,
    receives: Mapping[int, Region],
    out: Tensor,
    shared: SharedChannel,
) -> Messages:
    """Send regions of ``part`` to other ranks, and receive their regions into ``out``; both
    mappings are keyed by global rank. All of these ranks share memory.
    """

    def copied(
        copy: Callable[[Tensor, Tensor], object], tensor: Tensor, region: Region
    ) -> tuple[int, Copy]:
        count = region.numel * tensor.itemsize

        def run(memory: Tensor, offset: int) -> None:
            copy(tensor, memory[offset : offset + count].view(tensor.dtype).view(region.shape))

        return count, run

    arriving = [
        shared.read(rank, *copied(region.put, out, region)) for rank, region in receives.items()
    ]
    for rank, region in sends.items():
        shared.write(rank, *copied(region.take, part, region))
    return Messages(arriving)


def _share_memory(link: Link) -> bool:
    """Return whether all ranks of the link share memory."""
    return link.shared is not None and link.shared.connects(link.ranks)


def all_gather(gathered: Tensor, sent: Tensor, link: Link) -> Messages | None:
    """Like c10d's ``all_gather_into_tensor``, with flat contiguous tensors.

    Returns None, on all ranks, if the tensors are empty or the ranks do not share memory. Messages
    that are too large for shared memory use gloo, whose own all-gather would need a second buffer
    for all parts.
    """
    if not sent.numel() or not _share_memory(link):
        return None
    if (len(link.ranks) - 1) * sent.numel() * sent.itemsize > MOST_GATHERED:
        link = replace(link, shared=None)
    receives = dict(zip(link.ranks, gathered.split(sent.numel()), strict=True))
    own_target = receives.pop(link.rank)
    messages = pass_messages(dict.fromkeys(receives, sent), receives, link)
    own_target.copy_(sent)  # this copy overlaps the transfer
    return messages


@dataclass(frozen=True, slots=True)
class AllReduce:
    """An all-reduce in progress, in which every rank computes one piece of the result or, with
    ``one_round``, all of it.
    """

    pieces: dict[int, Tensor]  # the result's pieces, keyed by the global rank that computes them
    terms: dict[int, Tensor]  # the other ranks' terms of this rank's piece, keyed by global rank
    messages: Messages
    op: Reduction
    link: Link
    one_round: bool

    def wait(self) -> None:
        """Compute this rank's piece. Unless ``one_round``, send it to the other ranks, and receive
        their pieces.

        This may send messages, so all ranks must make this call at the same place in their order of
        calls on the link.
        """
        self.messages.wait()
        own = self.pieces[self.link.rank]
        terms = [self.terms.get(rank, own) for rank in self.pieces]  # in the order of the ranks
        own.copy_(combined(terms, range(len(terms)), self.op, out=terms[0]))
        if not self.one_round:
            others = {rank: piece for rank, piece in self.pieces.items() if rank != self.link.rank}
            pass_messages(dict.fromkeys(others, own), others, self.link).wait()


def gloo_drops_nan(op: Reduction, dtype: torch.dtype) -> bool:
    """Return True for reductions in which gloo's all-reduce may drop NaN, unlike ``combined``."""
    return op != "sum" and dtype.is_floating_point


def all_reduce(values: Tensor, op: Reduction, link: Link) -> AllReduce | None:
    """Like c10d's ``all_reduce``, with a flat contiguous tensor, whose values are replaced. Terms
    are combined in the order of the ranks.

    Returns None, on all ranks, if the tensor is empty, larger than ``MOST_GATHERED``, or the ranks
    do not share memory. If ``gloo_drops_nan``, all tensors on CPU that are not empty are reduced.
    """
    needed = values.is_cpu and values.numel() and gloo_drops_nan(op, values.dtype)
    fits = 0 < values.numel() * values.itemsize <= MOST_GATHERED and _share_memory(link)
    if not (needed or fits):
        return None
    size = len(link.ranks)
    one_round = size == 2 and values.numel() * values.itemsize <= _MOST_IN_ONE_ROUND
    parts = [values] * size if one_round else values.tensor_split(size)
    pieces = dict(zip(link.ranks, parts, strict=True))
    others = {rank: piece for rank, piece in pieces.items() if rank != link.rank}
    terms = {rank: torch.empty_like(pieces[link.rank]) for rank in others}
    return AllReduce(pieces, terms, pass_messages(others, terms, link), op, link, one_round)


def all_to_all(
    received: Tensor,
    sent: Tensor,
    sizes: tuple[Sequence[int], Sequence[int]],
    link: Link,
) -> Messages:
    """Like c10d's ``all_to_all_single``, along the first dim.

    ``sizes`` contains two lists: the sizes to receive from the link's ranks, and the sizes to
    send to them. ``received`` and ``sent`` must be contiguous. If the size to receive from this
    rank itself is 0, its own piece of ``sent`` is skipped.
    """
    receives = dict(zip(link.ranks, received.split_with_sizes(sizes[0]), strict=True))
    sends = dict(zip(link.ranks, sent.split_with_sizes(sizes[1]), strict=True))
    own_target, own_source = receives.pop(link.rank), sends.pop(link.rank)
    messages = pass_messages(sends, receives, link)
    if own_target.numel():
        own_target.copy_(own_source)  # this copy overlaps the transfer
    return messages
