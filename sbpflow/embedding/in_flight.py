"""Defines the state of a batch between the moves of a collection."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from sbpflow.embedding.exchange.base import GroupInFlight
from sbpflow.embedding.exchange.counts import CountsUnderWay
from sbpflow.embedding.exchange.id_transfer import IdsUnderWay
from sbpflow.embedding.ids.reader import IdCheck
from sbpflow.embedding.storage.live_rows import Changes
from sbpflow.runtime.compute.async_scalar_read import AsyncScalarRead


@dataclass(slots=True, eq=False)
class EmbeddingsInFlight:
    """The result of ``EmbeddingCollection.start_id_exchange``, passed to all other moves."""

    ids: IdsUnderWay
    groups: list[GroupInFlight]
    counts: CountsUnderWay
    check: IdCheck | None
    changes: Sequence[Changes]  # the row changes of this batch in growing fields
    ids_exchanged: bool = False
    received: bool = False
    most_requested: AsyncScalarRead | None = None  # result of ``PaddedGroups.ask``
    outputs: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    def lookup_tensors(self) -> list[Tensor | None]:
        """Return the addresses, bags, and segments of all lookups.

        Call this method after ``EmbeddingCollection.arrive``.
        """
        lookups = [lookup for part in self.groups for lookup in part.lookups]
        return [tensor for lookup in lookups for tensor in lookup.tensors()]

    def new_like(self) -> "EmbeddingsInFlight":
        """Return a batch whose lookups have the same sizes but uninitialized values."""
        groups = [
            replace(part, lookups=[lookup.new_like() for lookup in part.lookups])
            for part in self.groups
        ]
        facts = self.ids, groups, self.counts, self.check, self.changes
        return EmbeddingsInFlight(*facts, ids_exchanged=True, received=True)
