"""Presents the growing tables of a checkpoint as tables of fitted fields, for bundles.

In a bundle, a growing field has the ids of a fitted field: 0 is a missing value, 1 is a key without
a row, and 2 + n is the n-th saved key. Accordingly, row 0 of its tables is for missing values, row
1 is the shared row, and the rows of the keys follow in checkpoint order. Spare rows contain zeros.
"""

from collections.abc import Collection
from dataclasses import replace

import torch
from torch import Tensor

from sbpflow.checkpoint.read import Checkpoint
from sbpflow.embedding.plan.embedding_plan import EmbeddingPlan
from sbpflow.run.export.plain_model import Addresses
from sbpflow.runtime.random.streams import mix
from sbpflow.serving.cells import MISSING_KEY, NUM_RESERVED_IDS

_LEAST_SPARE = 1024


class GrowingTables:
    """The tables of a checkpoint, with the rows of growing tables arranged as in a bundle. ``plan``
    is the run's plan with growing tables replaced by fitted ones, and ``keyed`` lists the fields
    that have keys in the data. If ``has_spare_rows``, deltas can add keys.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        plan: EmbeddingPlan,
        keyed: Collection[str],
        *,
        has_spare_rows: bool,
    ) -> None:
        self._checkpoint, self.keyed = checkpoint, frozenset(keyed)
        self.vocabularies = {each.name: each.features for each in plan.vocabularies}
        self._missing: dict[str, int] = {}  # the saved row for missing values, by tensor
        self._spare: dict[str, int] = {}
        for each in plan.vocabularies:
            place = (self.keys(each.name) == MISSING_KEY).nonzero()
            row = 1 + int(place) if len(place) else 0
            self._missing |= {f"tables/{table}": row for table in each.tables}
            if has_spare_rows:
                count = self.num_keys(each.name)
                spare = min(count // 4 + _LEAST_SPARE, each.num_rows - count)
                self._spare |= {f"tables/{table}": spare for table in each.tables}
        outputs = tuple(
            replace(
                output,
                tables=tuple(
                    table
                    if table.growth is None
                    else replace(table, num_rows=self._rows(f"tables/{table.name}"), growth=None)
                    for table in output.tables
                ),
            )
            for output in plan.outputs
        )
        self.plan = replace(plan, outputs=outputs)

    def num_keys(self, vocabulary: str) -> int:
        """Return the number of keys that have rows."""
        return self._checkpoint.saved(f"vocabularies/{vocabulary}/keys").shape[0]

    def keys(self, vocabulary: str) -> Tensor:
        """Return the keys of a growing field (int64 [n]) in the order of their rows."""
        return self._checkpoint.tensor(f"vocabularies/{vocabulary}/keys")

    def addresses(self) -> Addresses:
        """Return the addresses (``mix``) of the keys of each growing field, in ascending order."""
        by_features = {
            features: mix(self.keys(name)) for name, features in self.vocabularies.items()
        }
        used = {name for features in by_features for name in features}
        none = torch.empty(0, dtype=torch.int64)
        return by_features | {(name,): none for name in self.keyed - used}

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """Return a logical tensor, or some of its rows, like ``Checkpoint.tensor``."""
        if name not in self._missing:
            return self._checkpoint.tensor(name, rows)
        start, stop, _ = (rows or slice(None)).indices(self._rows(name))
        parts: list[Tensor] = []
        if start == 0:
            missing = self._missing[name]
            parts.append(self._checkpoint.tensor(name, slice(missing, missing + 1)))
        if stop > max(start, 1):
            parts.append(self._checkpoint.tensor(name, slice(max(start, 1) - 1, stop - 1)))
        saved = torch.cat(parts)
        return torch.cat([saved, saved.new_zeros(stop - start - len(saved), saved.shape[1])])

    def _rows(self, name: str) -> int:
        saved = self._checkpoint.saved(name).shape[0]
        return NUM_RESERVED_IDS - 1 + saved + self._spare.get(name, 0)
