"""What training and evaluation take: batches, and loaders that give them."""

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor

from sbpflow.embedding.ids.batch_ids import BatchIds


class Batch(Protocol):
    """This rank's rows of a global batch of ``batch_size``.

    A batch may also have ``weights`` [local batch], of mean 1 over all rows of the set: factors of
    the rows' losses. The loss of a step is sum(weight x loss) / rows: not over the sum of the
    weights, which would need a collective before the backward, and would make steps of light rows
    as strong as those of heavy ones.
    """

    @property
    def labels(self) -> Tensor:
        """[local batch] float32."""
        ...

    @property
    def dense(self) -> Tensor:
        """[local batch, dense fields] float32."""
        ...

    @property
    def ids(self) -> Tensor | BatchIds:
        """[local batch, id columns] int32, or these with lists."""
        ...

    @property
    def batch_size(self) -> int:
        """Rows over all ranks."""
        ...


class Loader(Protocol):
    """Batches of one split, the same number on every rank."""

    @property
    def num_steps(self) -> int:
        """Batches of an epoch."""
        ...

    def epoch(self, epoch: int) -> Iterator[Batch]:
        """The batches of one pass over the split."""
        ...
