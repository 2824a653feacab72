"""Define the batches that loaders yield, and the interface of loaders."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from torch import Tensor

from sbpflow.embedding.ids.batch_ids import BatchIds

State = dict[str, int | str]
Ids = Tensor | BatchIds


class Cursor(NamedTuple):
    """A read position: an epoch, and the number of rows before the position in the epoch's global
    order.
    """

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
    """[b, columns] int32, or int64 for a set with keys, with the fields in the order of
    ``Manifest.fixed``. For a set with ragged fields, a ``BatchIds`` with this matrix and the lists
    of the fields in ``Manifest.lists``, sample by sample
    """
    batch_size: int
    """Number of rows in the global batch, over all ranks"""
    step: int
    """Number of the batch's step within the epoch"""
    cursor: Cursor
    """The position **after** this batch, regardless of read-ahead:

    ``state_dict(batch.cursor)`` is the state of a run that has trained on the batch
    """
    weights: Tensor | None = None
    """[b] float32 with mean 1 over train, or None for a set without sample weights"""
    columns: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    """The non-feature columns of the set: ``group``, ``time``, and integer ``row_key`` (int64 [b];
    a uint64 group is stored as its bits), and ``labels`` (float32 [b, additional labels])
    """


class Loader(Protocol):
    """The interface that training expects of a loader."""

    @property
    def num_steps(self) -> int:
        """Return the number of steps in a whole epoch, which is the same on all ranks."""
        ...

    def epoch(self, epoch: int) -> Iterator[Batch]:
        """Yield the batches of the epoch or, after a state was restored, the remaining batches."""
        ...

    def state_dict(self, cursor: Cursor | None = None) -> State:
        """Return the state at ``cursor`` or, by default, at the current position. A state is valid
        for any world size.
        """
        ...

    def load_state_dict(self, state: Mapping[str, int | str]) -> None:
        """Restore ``state``, from which the next call to ``epoch`` continues."""
        ...
