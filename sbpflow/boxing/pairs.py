"""Sends messages between pairs of ranks, and implements all-to-all with these messages.

Messages between ranks of a host go through shared memory if the host shares memory, and other
messages through gloo.

gloo's own all-to-all posts its sends before its receives. A rank signals readiness to receive in
the same stream as its data, so the slower of two ranks signals after sending all its data. The two
directions of their link are then used one after the other. Posting the receives first takes half as
long (measurements are in ``docs/decisions/engine.md``). Within one host, messages are not faster,
and a collective needs fewer calls.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor

from sbpflow.runtime.ranks.shared_messages import Arriving
from sbpflow.runtime.ranks.world import Link

_MAX_TAG = 2**31 - 1
# Count the transfers of each group; a group's ranks make the same transfers in the same order.
_transfers: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Messages:
    """Represents messages in flight; do not use the send or receive buffers before ``wait``."""

    works: Sequence[dist.Work | Arriving]

    def wait(self) -> None:
        """Wait for all messages. c10d raises RuntimeError if a peer is gone."""
        for work in self.works:
            work.wait()


def pass_messages(
    sends: Mapping[int, Tensor], receives: Mapping[int, Tensor], link: Link
) -> Messages:
    """Send to and receive from ranks of the link, given by global rank; gloo skips empty tensors.

    Every rank of the link makes the same calls in the same order, and both ends of a message use
    the same size. Each call uses a separate tag in gloo. Therefore, if ranks disagree on a size,
    the next call cannot receive messages of this call, and ``wait`` raises RuntimeError for the
    missing messages.
    """
    group, shared = link.group, link.shared
    tag = _transfers.get(group, 0)
    # count this call even if the rank sends and receives nothing
    _transfers[group] = (tag + 1) & _MAX_TAG
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
    works = dist.batch_isend_irecv(operations) if operations else []
    return Messages([*works, *arriving])


def all_to_all(
    received: Tensor,
    sent: Tensor,
    sizes: tuple[Sequence[int], Sequence[int]],
    ranks: Sequence[int],
    rank: int,
    link: Link,
) -> Messages:
    """Do the same as ``all_to_all_single`` on the first dim.

    ``sizes`` are the sizes received from and sent to each of the link's ``ranks``, in ascending
    order. ``rank`` is this rank. ``received`` and ``sent`` must be contiguous.
    """
    receives = dict(zip(ranks, received.split(list(sizes[0])), strict=True))
    sends = dict(zip(ranks, sent.split(list(sizes[1])), strict=True))
    own_target, own_source = receives.pop(rank), sends.pop(rank)
    messages = pass_messages(sends, receives, link)
    own_target.copy_(own_source)  # this copy overlaps the transfer
    return messages
