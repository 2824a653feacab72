"""What a loader delivers, and what training needs of a loader."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from torch import Tensor

from sbpflow.embedding.ids.batch_ids import BatchIds

State = dict[str, int | str]
Ids = Tensor | BatchIds


class Cursor(NamedTuple):
    """A place in a read: ``row`` rows of the order of ``epoch`` lie before it, over all ranks."""

    epoch: int
    row: int


@dataclass(frozen=True, slots=True)
class Batch:
    """This rank's b rows of one global batch."""

    labels: Tensor
    """[b] float32: the first label"""
    dense: Tensor
    """[b, dense] float32"""
    ids: Ids
    """[b, columns] int32, fields in the order of ``Manifest.fixed``; of a set with ragged fields
    this matrix and the lists of ``Manifest.lists``, sample by sample, as the engine takes them"""
    batch_size: int
    """rows of the global batch, over all ranks"""
    step: int
    """number of the step in the epoch"""
    cursor: Cursor
    """where the read goes on **after** this batch, whatever has been read ahead of its training:
    ``state_dict(batch.cursor)`` is the state of a run that has trained on it"""
    weights: Tensor | None = None
    """[b] float32, of mean 1 over train, if the set has sample weights"""
    columns: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    """columns beside the features, those of ``group``, ``time``, ``row_key`` [b] int64 (the bits of
    a uint64 group) and ``labels`` [b, further labels] float32 that the set has"""


class Loader(Protocol):
    """What training needs of a reader."""

    @property
    def num_steps(self) -> int:
        """Steps of a whole epoch, equal on all ranks."""
        ...

    def epoch(self, epoch: int) -> Iterator[Batch]:
        """Deliver the epoch, or what a restored state has left of it."""
        ...

    def state_dict(self, cursor: Cursor | None = None) -> State:
        """Where the read is, or was at ``cursor``, for any world size."""
        ...

    def load_state_dict(self, state: Mapping[str, int | str]) -> None:
        """Go on from ``state`` at the next call of ``epoch``."""
        ...
