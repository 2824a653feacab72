"""One batch on its way through the groups of a collection."""

from dataclasses import replace

from torch import Tensor

from sbpflow.embedding.exchange.base import GroupInFlight
from sbpflow.embedding.exchange.counts import CountsUnderWay
from sbpflow.embedding.exchange.id_transfer import IdsUnderWay
from sbpflow.embedding.ids.reader import IdCheck
from sbpflow.runtime.compute.async_scalar_read import AsyncScalarRead


class EmbeddingsInFlight:
    """A batch on its way through a collection, from ``EmbeddingCollection.start_id_exchange``."""

    def __init__(
        self,
        ids: IdsUnderWay,
        groups: list[GroupInFlight],
        counts: CountsUnderWay,
        check: IdCheck | None,
    ) -> None:
        self.ids = ids
        self.groups = groups
        self.counts = counts
        self.check = check
        self.ids_exchanged = self.received = False
        self.most_named: AsyncScalarRead | None = None  # of groups whose buffers may be too small
        self.outputs: dict[str, Tensor] = {}

    def lookup_tensors(self) -> list[Tensor | None]:
        """What is looked up, after the collection's ``arrive``: addresses, bags, runs."""
        return [tensor for part in self.groups for one in part.lookups for tensor in one.tensors()]

    def new_like(self) -> "EmbeddingsInFlight":
        """Memory for the lookups of another batch of its sizes."""
        groups = [
            replace(part, lookups=[one.new_like() for one in part.lookups]) for part in self.groups
        ]
        made = EmbeddingsInFlight(self.ids, groups, self.counts, self.check)
        made.ids_exchanged = made.received = True
        return made
