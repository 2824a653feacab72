"""What training needs of a model's dense part: leaves, a forward, and a loss per row."""

from collections.abc import Mapping
from typing import Protocol

from sbpflow.tensor.global_tensor import GlobalTensor


class DensePart(Protocol):
    """A model without its tables, on one rank, written on global tensors.

    All tensors over the batch are [batch, width] laid out S(0) on the way in; what comes out may
    have any layout.
    """

    @property
    def parameters(self) -> Mapping[str, GlobalTensor]:
        """Leaves by name, in the layouts the part was built with."""
        ...

    @property
    def buffers(self) -> Mapping[str, GlobalTensor]:
        """State that training changes and no optimizer does, such as the running statistics of a
        batch norm: equal on all ranks, B.
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
        """Logits [batch, 1] from the embeddings' outputs by name and the dense fields.

        ``seed`` is another one for every batch of every step; what is random is drawn from it, a
        name and the part alone.
        """
        ...

    def row_losses(self, logits: GlobalTensor, labels: GlobalTensor) -> GlobalTensor:
        """[batch, 1]: the loss of each row; the trainer takes the mean over the batch."""
        ...
