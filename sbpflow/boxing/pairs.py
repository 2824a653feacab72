"""Messages between pairs of ranks, and an all-to-all made of them, for links between hosts.

gloo's own all-to-all gives its sends before its receives. That a rank is ready to receive travels
in the stream of what it sends, so the later rank of two says so after all of its data, and the two
directions of their link are used one after the other: twice the time of messages whose receives
come first (``docs/decisions/engine.md`` has the figures). On one host there is nothing to gain,
and a collective is fewer calls.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor


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

    What one rank sends another receives in the same order and size.
    """
    moves = [dist.P2POp(dist.irecv, t, rank, group) for rank, t in receives.items() if t.numel()]
    moves += [dist.P2POp(dist.isend, t, rank, group) for rank, t in sends.items() if t.numel()]
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
