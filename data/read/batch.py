"""The batches that a loader delivers, and the interface that training needs of a loader."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from torch import Tensor

from sbpflow.embedding.ids.batch_ids import BatchIds

State = dict[str, int | str]
Ids = Tensor | BatchIds


class Cursor(NamedTuple):
    """A position in a read: epoch, and number of rows before it in the epoch's global order."""

    epoch: int
    row: int


@dataclass(frozen=True, slots=True)
class Batch:
    """This rank's b rows of a global batch."""

    labels: Tensor
    """[b] float32: the first label"""
    dense: Tensor
    """[b, dense] float32"""
    ids: Ids
    """[b, columns] int32, fields in the order of ``Manifest.fixed``; for a set with ragged fields
    this matrix and the lists of ``Manifest.lists``, sample by sample, as the engine takes them"""
    batch_size: int
    """Rows of the global batch, over all ranks"""
    step: int
    """Number of the step in the epoch"""
    cursor: Cursor
    """Where the read continues **after** this batch, regardless of read-ahead:
    ``state_dict(batch.cursor)`` is the state of a run that has trained on it"""
    weights: Tensor | None = None
    """[b] float32 with mean 1 over train, if the set has sample weights"""
    columns: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Columns that are not features, if the set has them: ``group``, ``time``, ``row_key`` [b]
    int64 (a uint64 group as its bits) and ``labels`` [b, additional labels] float32"""


class Loader(Protocol):
    """The interface that training needs of a loader."""

    @property
    def num_steps(self) -> int:
        """Steps of a whole epoch, the same on all ranks."""
        ...

    def epoch(self, epoch: int) -> Iterator[Batch]:
        """Deliver the epoch, or the rest of it after a restored state."""
        ...

    def state_dict(self, cursor: Cursor | None = None) -> State:
        """Return the position of the read, or that of ``cursor``; valid for any world size."""
        ...

    def load_state_dict(self, state: Mapping[str, int | str]) -> None:
        """Continue from ``state`` at the next call of ``epoch``."""
        ...
