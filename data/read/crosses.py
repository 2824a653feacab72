"""Compute crosses while rows are read, by hashing the ids of other columns.

The hash uses ids or keys instead of raw values, so only the rows of the set are needed. Values with
the same id (such as rare values) also share an id in the cross. Equal ids have equal hashes on
every machine.
"""

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from sbpflow.data.format.manifest import Manifest
from sbpflow.errors import ConfigError
from sbpflow.run.model.spec import HashedColumn
from sbpflow.serving.cells import MISSING_ID, MISSING_KEY, hashed_ids


class CrossColumns:
    """Computes cross columns from a matrix of ids."""

    def __init__(self, manifest: Manifest, crosses: Sequence[HashedColumn]) -> None:
        indices: dict[str, int] = {}
        missing = {f.name: MISSING_KEY if f.keyed else MISSING_ID for f in manifest.fixed}
        column = 0
        for field in manifest.fixed:
            if field.hot == 1:
                indices[field.name] = column
            column += field.hot
        for cross in crosses:
            if absent := [name for name in cross.columns if name not in indices]:
                raise ConfigError(
                    f"cross {cross.name}: {absent[0]} is not a column with one id per row; "
                    f"{manifest.path} contains {', '.join(indices)}"
                )
        self._crosses = [
            ([indices[name] for name in c.columns], c.rows, [missing[name] for name in c.columns])
            for c in crosses
        ]
        self.rows = tuple(cross.rows for cross in crosses)

    def __len__(self) -> int:
        return len(self._crosses)

    def fill(self, ids: "NDArray[Any]", out: "NDArray[Any]") -> None:
        """Write the ids of crosses to ``out`` [n, crosses], given ``ids`` [n, columns]."""
        for index, (columns, rows, missing) in enumerate(self._crosses):
            out[:, index] = hashed_ids([ids[:, column] for column in columns], rows, missing)
