"""Define the batches that loaders yield."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

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
