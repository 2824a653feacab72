"""One batch on its way through the groups of a collection."""

from dataclasses import replace

from torch import Tensor

from sbpflow.embedding.exchange.base import GroupInFlight
from sbpflow.embedding.exchange.counts import CountsUnderWay
from sbpflow.embedding.exchange.id_transfer import IdsUnderWay
from sbpflow.runtime.late_read import LateRead


class EmbeddingsInFlight:
    """One batch on its way through a collection; made by ``EmbeddingCollection.begin``."""

    def __init__(
        self, ids: IdsUnderWay, groups: list[GroupInFlight], counts: CountsUnderWay
    ) -> None:
        self.ids = ids
        self.groups = groups
        self.counts = counts
        self.advanced = False
        self.received = False
        self.most_named: LateRead | None = None  # of groups whose buffers may be too small
        self.outputs: dict[str, Tensor] = {}

    def access_tensors(self) -> list[Tensor | None]:
        """What is looked up, after the collection's ``arrive``: addresses, bags, runs."""
        return [tensor for part in self.groups for one in part.accesses for tensor in one.tensors()]

    def new_like(self) -> "EmbeddingsInFlight":
        """Memory for the accesses of another batch of its sizes."""
        groups = [
            replace(part, accesses=[one.new_like() for one in part.accesses])
            for part in self.groups
        ]
        made = EmbeddingsInFlight(self.ids, groups, self.counts)
        made.advanced = True
        return made
