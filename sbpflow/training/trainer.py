"""One training step and one prediction, on the ranks of a world.

The order of a step: look up, forward, dense backward, start the dense gradients' exchange, update
the embedding rows beside it, then step the dense optimizer. The loss rides in the dense exchange.
"""

from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor

from sbpflow import ops
from sbpflow.boxing import Boxing
from sbpflow.embedding.collection import EmbeddingCollection
from sbpflow.embedding.initial import stream_key
from sbpflow.global_tensor import GlobalTensor, parameter
from sbpflow.gradients import GradientSync
from sbpflow.layout import Layout
from sbpflow.placement import Placement
from sbpflow.sbp import Broadcast, Split, balanced_sizes

LOSS_SHAPE = (1,)


class Batch(Protocol):
    """This rank's rows of a global batch of ``num_rows``."""

    @property
    def labels(self) -> Tensor:
        """[local batch] float32."""
        ...

    @property
    def dense(self) -> Tensor:
        """[local batch, dense fields] float32."""
        ...

    @property
    def ids(self) -> Tensor:
        """[local batch, id columns] int32."""
        ...

    @property
    def num_rows(self) -> int:
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


class Model(Protocol):
    """The dense part of a model, written on global tensors."""

    @property
    def parameters(self) -> Mapping[str, GlobalTensor]:
        """Leaves by name."""
        ...

    def logits(
        self,
        vectors: Mapping[str, GlobalTensor],
        dense: GlobalTensor,
        *,
        training: bool,
        seed: int,
    ) -> GlobalTensor:
        """[batch, 1] from the embeddings' outputs and the dense fields."""
        ...


class Trainer:
    """Runs a model and its embeddings; ``optimizer`` holds the parts of the model's parameters."""

    def __init__(
        self,
        model: Model,
        embeddings: EmbeddingCollection,
        optimizer: torch.optim.Optimizer | None,
        boxing: Boxing,
        *,
        dtype: torch.dtype,
        seed: int,
    ) -> None:
        self._model = model
        self._embeddings = embeddings
        self._optimizer = optimizer
        self._boxing = boxing
        self._dtype = dtype
        self._seed = seed
        self._line = Placement.line(boxing.world.device.type, boxing.world.size)
        # The loss is P like the gradients: as the "gradient" of one more number it costs no
        # collective of its own.
        self._loss = parameter(
            torch.zeros(1, dtype=dtype, device=boxing.world.device),
            Layout(self._line, (Broadcast(),)),
            LOSS_SHAPE,
            boxing,
        )
        self.gradients = GradientSync([*model.parameters.values(), self._loss])
        self.num_steps = 0

    def step(self, batch: Batch) -> Tensor:
        """Train on one batch; returns the mean loss over the global batch, 0-d, on every rank."""
        self.num_steps += 1
        logits = self._logits(batch, training=True)
        labels = self._home(batch.labels.unsqueeze(1), batch.num_rows)
        loss = ops.bce_with_logits(logits, labels)
        loss.backward()
        terms = loss.detach().to("P", id="loss")
        self._loss.part.grad = terms.part.reshape(LOSS_SHAPE)
        pending = self.gradients.start()
        self._embeddings.apply_gradients()
        pending.wait()
        if self._optimizer is not None:
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
        return self._loss.part.grad.squeeze(0)

    @torch.no_grad()
    def predict(self, batch: Batch) -> Tensor:
        """Logits [local batch] of this rank's rows."""
        logits = self._logits(batch, training=False)
        return logits.to(self._home_layout(batch.num_rows), id="predict").part.squeeze(1)

    def _logits(self, batch: Batch, *, training: bool) -> GlobalTensor:
        num_rows = batch.num_rows
        vectors = self._embeddings.forward(batch.ids, num_rows, training=training)
        return self._model.logits(
            {name: self._home(part, num_rows) for name, part in vectors.items()},
            self._home(batch.dense, num_rows),
            training=training,
            seed=stream_key(self._seed, f"dropout/{self.num_steps}"),
        )

    def _home(self, part: Tensor, num_rows: int) -> GlobalTensor:
        """Rows of the batch as a global tensor, S(0)."""
        layout, shape = self._home_layout(num_rows), (num_rows, *part.shape[1:])
        return GlobalTensor.from_local(part.to(self._dtype), layout, shape, self._boxing)

    def _home_layout(self, num_rows: int) -> Layout:
        """S(0) over all ranks, with explicit sizes if some rank has no row."""
        size = self._boxing.world.size
        sizes = balanced_sizes(num_rows, size) if num_rows < size else None
        return Layout(self._line, (Split(0, sizes),))
