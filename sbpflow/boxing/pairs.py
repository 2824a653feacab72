"""Messages between pairs of ranks, and an all-to-all made of them, for links between hosts.

gloo's own all-to-all gives its sends before its receives. That a rank is ready to receive travels
in the stream of what it sends, so the later rank of two says so after all of its data, and the two
directions of their link are used one after the other: twice the time of messages whose receives
come first (``docs/decisions/engine.md`` has the figures). On one host there is nothing to gain,
and a collective is fewer calls.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor

_MAX_TAG = 2**31 - 1
# Transfers so far in each group: the ranks of a group make the same ones in the same order.
_transfers: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Messages:
    """Messages under way; neither what is sent nor what receives may be touched until ``wait``."""

    works: Sequence[dist.Work]

    def wait(self) -> None:
        """Until all have arrived and left. RuntimeError, as c10d raises it, if a peer is gone."""
        for work in self.works:
            work.wait()


def pass_messages(
    sends: Mapping[int, Tensor], receives: Mapping[int, Tensor], group: dist.ProcessGroup
) -> Messages:
    """Send to and receive from ranks of the world, in ``group``; what has no elements is left out.

    Every rank of the group calls it for the same transfers in the same order, and what one sends
    another receives in the same size. gloo tells transfers apart by their tag: one that ranks size
    differently gets no message of the next. RuntimeError from ``wait`` if a message never comes.
    """
    tag = _transfers.get(group, 0)
    _transfers[group] = (tag + 1) & _MAX_TAG  # also where this rank has nothing to move
    moves = [dist.P2POp(dist.irecv, t, r, group, tag) for r, t in receives.items() if t.numel()]
    moves += [dist.P2POp(dist.isend, t, r, group, tag) for r, t in sends.items() if t.numel()]
    return Messages(dist.batch_isend_irecv(moves) if moves else [])


def all_to_all(
    received: Tensor,
    sent: Tensor,
    sizes: tuple[Sequence[int], Sequence[int]],
    ranks: Sequence[int],
    rank: int,
    group: dist.ProcessGroup,
) -> Messages:
    """As ``all_to_all_single`` on the first dim: ``sizes`` received from and sent to each rank.

    ``ranks`` are the group's, ascending, ``rank`` is this one; both tensors are contiguous.
    """
    into = dict(zip(ranks, received.split(list(sizes[0])), strict=True))
    out = dict(zip(ranks, sent.split(list(sizes[1])), strict=True))
    here, mine = into.pop(rank), out.pop(rank)
    messages = pass_messages(out, into, group)
    here.copy_(mine)
    return messages
