"""Defines selections of a store's rows, for saves that do not write all rows."""

from collections.abc import Mapping

from torch import Tensor

from sbpflow.embedding.storage.store import RowStore

# Reading this slice gives the names, shapes, and dtypes of the tensors, and does not trigger a
# sort.
NO_ROWS = slice(0, 0)


class SelectedRows:
    """A read-only selection of ``num_rows`` rows of ``store``, in its own order."""

    is_in_place = False

    def __init__(self, store: RowStore, num_rows: int) -> None:
        self.store, self.num_rows, self.width = store, num_rows, store.width

    def numbers(self, rows: slice) -> slice | Tensor:
        """Return the store's row numbers for these rows of the selection."""
        raise NotImplementedError

    def places(self, numbers: Tensor) -> Tensor:
        """Return the positions, within the selection, of the rows that have these ``numbers`` in
        the store.
        """
        raise NotImplementedError

    def read(self, rows: slice, into: Mapping[str, Tensor] | None = None) -> Mapping[str, Tensor]:
        """Read rows as ``RowStore.read`` does."""
        return self.store.read(self.numbers(rows), into)
