"""Compute crosses while rows are read, by hashing the ids of other columns.

The hash uses ids rather than raw values, so it needs only the rows. Values with the same id (such
as rare values) also have the same id in the cross. Equal ids have equal hashes on every machine.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sbpflow.data.format.manifest import Manifest
from sbpflow.errors import ConfigError
from sbpflow.run.model.spec import HashedColumn
from sbpflow.serving.cells import hashed_ids


class CrossColumns:
    """Computes cross columns from a matrix of ids."""

    def __init__(self, manifest: Manifest, crosses: Sequence[HashedColumn]) -> None:
        indices: dict[str, int] = {}
        column = 0
        for field in manifest.fixed:
            if field.hot == 1:
                indices[field.name] = column
            column += field.hot
        for cross in crosses:
            if absent := [name for name in cross.columns if name not in indices]:
                raise ConfigError(
                    f"cross {cross.name}: {absent[0]} is not a column with one id per row; "
                    f"{manifest.path} has {', '.join(indices)}"
                )
        self._crosses = [([indices[name] for name in c.columns], c.rows) for c in crosses]
        self.rows = tuple(cross.rows for cross in crosses)

    def __len__(self) -> int:
        return len(self._crosses)

    def fill(self, ids: NDArray[np.int32], out: NDArray[np.int32]) -> None:
        """Compute ``out`` [n, crosses] from ``ids`` [n, columns]."""
        for index, (columns, rows) in enumerate(self._crosses):
            out[:, index] = hashed_ids([ids[:, column] for column in columns], rows)
