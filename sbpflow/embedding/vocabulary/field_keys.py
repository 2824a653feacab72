"""This rank's view of a growing field: the buckets it owns, and the keys of the rows it stores."""

from collections.abc import Sequence

from sbpflow.embedding.plan.growth import first_row_of
from sbpflow.embedding.plan.tables import Shard
from sbpflow.embedding.plan.vocabularies import VocabularyPlan
from sbpflow.embedding.storage.live_rows import LiveRows
from sbpflow.embedding.vocabulary.vocabulary import Vocabulary


class FieldKeys:
    """The vocabulary that this rank owns, if any, and the rows of the field on this rank."""

    def __init__(self, plan: VocabularyPlan, rank: int, shards: Sequence[Shard]) -> None:
        self.plan = plan
        own = [owner for owner in plan.owners if owner[0] == rank]
        self.part: Vocabulary | None = None
        if own:
            _, first, last = own[0]
            self.part = Vocabulary(plan.growth, plan.num_rows, first, last)
        # The tables of a field that split their rows do so in the same way, and of any other table,
        # this rank stores all rows or none. The rows on this rank therefore form one range.
        starts = [shard.row_start for shard in shards]
        self.live: LiveRows | None = None
        if shards:
            self.live = LiveRows(min(starts), max(shard.row_stop for shard in shards))

    def first_rows(self) -> list[tuple[int, int, int]]:
        """Return (first bucket, last bucket + 1, first row with a key) of every owner's part."""
        rows = self.plan.num_rows
        return [
            (first, last, max(1, first_row_of(first, rows)))  # row 0 is shared
            for _, first, last in self.plan.owners
        ]
