"""Defines the batches that training and evaluation use, and the loaders that yield them."""

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor

from sbpflow.embedding.ids.batch_ids import BatchIds
from sbpflow.errors import SbpError


class Batch(Protocol):
    """This rank's rows of a global batch of ``batch_size`` rows. A batch may also have row
    ``weights`` [local batch], whose mean over the data set is 1. The loss of a step is sum(weight *
    row loss) / rows. Dividing by the sum of the weights instead would need a collective before the
    backward pass, and steps with small weights would have as much influence as steps with large
    weights. ``evict.idle_time`` requires ``columns["time"]`` (int64 [local batch]).
    """

    @property
    def labels(self) -> Tensor:
        """Return float32 labels [local batch]."""
        ...

    @property
    def dense(self) -> Tensor:
        """Return float32 values [local batch, dense fields]."""
        ...

    @property
    def ids(self) -> Tensor | BatchIds:
        """Return ids [local batch, id columns], or a ``BatchIds`` if fields have id lists.

        The ids are int32, or int64 if a field has keys. They are on the device of the tables, or
        in host memory if tables grow.
        """
        ...

    @property
    def batch_size(self) -> int:
        """Return the number of rows in the global batch."""
        ...


def event_time(batch: Batch) -> int | None:
    """Return the latest event time among this rank's rows, or None without times or rows."""
    times = getattr(batch, "columns", {}).get("time")
    return None if times is None or not times.numel() else int(times.max())


class Loader(Protocol):
    """The interface of a loader for one split; every rank gets the same number of batches."""

    @property
    def num_steps(self) -> int:
        """Return the number of batches per epoch."""
        ...

    def epoch(self, epoch: int) -> Iterator[Batch]:
        """Yield the batches of one pass over the split."""
        ...


def check_batch(batch: object) -> None:
    """Raise SbpError if ``batch``, passed to ``Trainer.step``, is not a ``Batch``.

    Weights of shape [rows, 1] would be averaged over the batch.
    """
    for name in ("labels", "dense", "ids", "batch_size"):
        if not hasattr(batch, name):
            raise SbpError(
                f"step: a {type(batch).__name__} is not a batch, because it has no attribute "
                f"{name}; pass a batch from a loader, or a list of them"
            )
    for name, dims in (("labels", 1), ("weights", 1), ("dense", 2)):
        value: Tensor | None = getattr(batch, name, None)
        if value is not None and value.ndim != dims:
            form = "[rows]" if dims == 1 else "[rows, dense fields]"
            raise SbpError(f"step: {name} must have shape {form}, got {list(value.shape)}")
