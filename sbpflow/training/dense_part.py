"""Defines the interface of a model's dense part: parameters, forward, and a loss per row."""

from collections.abc import Mapping
from typing import Protocol

from sbpflow.tensor.global_tensor import GlobalTensor


class DensePart(Protocol):
    """Computes logits from embedding outputs and dense fields, all of which are global tensors.
    Inputs are [batch, width] with layout S(0). Results may have any layout; on other ranks or a
    grid, they are converted to the layout of the labels.
    """

    @property
    def parameters(self) -> Mapping[str, GlobalTensor]:
        """Return the trainable leaf tensors by name, in the layouts that the dense part was built
        with.
        """
        ...

    @property
    def buffers(self) -> Mapping[str, GlobalTensor]:
        """Return the tensors with layout B that ``forward`` updates, such as batch norm
        statistics.
        """
        ...

    def forward(
        self,
        vectors: Mapping[str, GlobalTensor],
        dense: GlobalTensor,
        *,
        training: bool,
        seed: int,
    ) -> GlobalTensor:
        """Return logits [batch, 1] from the embedding outputs by name and the dense fields.

        In training, ``seed`` differs for every batch of every step. Random numbers must depend only
        on the seed, a name, and the position in the tensor.
        """
        ...

    def row_losses(self, logits: GlobalTensor, labels: GlobalTensor) -> GlobalTensor:
        """Return the loss of each row, [batch, 1]; the trainer averages these losses over the
        batch.
        """
        ...


def has_batch_norm(part: DensePart) -> bool:
    """Return whether the dense part contains batch norm, which rejects batches of one row."""
    return any(name.endswith("running_mean") for name in getattr(part, "buffers", ()))
