"""The input of training and evaluation: batches, and the loaders that yield them."""

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor

from sbpflow.embedding.ids.batch_ids import BatchIds


class Batch(Protocol):
    """This rank's rows of a global batch of ``batch_size`` rows.

    A batch may also have ``weights`` [local batch], with mean 1 over all rows of the data set,
    which multiply the losses of the rows. The loss of a step is sum(weight * loss) / rows. Dividing
    by the sum of the weights instead would need a collective before the backward, and would give
    steps with small weights as much influence as those with large ones.
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
        """[local batch, id columns] int32, or a ``BatchIds`` if fields have lists of ids."""
        ...

    @property
    def batch_size(self) -> int:
        """Rows of the global batch, over all ranks."""
        ...


class Loader(Protocol):
    """Batches of one split, the same number on every rank."""

    @property
    def num_steps(self) -> int:
        """Batches per epoch."""
        ...

    def epoch(self, epoch: int) -> Iterator[Batch]:
        """The batches of one pass over the split."""
        ...
