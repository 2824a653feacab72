"""One training step and one prediction, on the ranks of a world; the schedule of what overlaps.

    rows of the batch looked up, vectors start      <- its ids came during the step before
      beside them: the next batch's ids are checked, sorted and counted; the counts start
    vectors arrive, dense forward
      the counts are here: the next batch's ids start, beside the backward
    dense backward, row gradients start, dense gradients start
      beside those: row gradients arrive, rows are updated
    dense gradients arrive, dense optimizer

Nothing is used before the update it depends on, so the numbers are those of a run without overlap.
The loss rides in the dense exchange.
"""

from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor

from sbpflow import ops
from sbpflow.boxing import Boxing
from sbpflow.embedding.collection import EmbeddingCollection, Passage
from sbpflow.embedding.initial import stream_key
from sbpflow.global_tensor import GlobalTensor, parameter
from sbpflow.gradients import GradientSync
from sbpflow.layout import Layout
from sbpflow.placement import Placement
from sbpflow.sbp import Broadcast, Split, balanced_sizes
from sbpflow.training.schedule import Schedule, constant

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
    """Runs a model and its embeddings; ``optimizer`` holds the parts of the model's parameters.

    With ``overlap`` a batch's ids travel during the step before it; the numbers are the same.
    """

    def __init__(
        self,
        model: Model,
        embeddings: EmbeddingCollection,
        optimizer: torch.optim.Optimizer | None,
        boxing: Boxing,
        *,
        dtype: torch.dtype,
        seed: int,
        schedule: Schedule = constant,
        overlap: bool = True,
    ) -> None:
        self._model = model
        self._embeddings = embeddings
        self._optimizer = optimizer
        self._boxing = boxing
        self._dtype = dtype
        self._seed = seed
        self._schedule = schedule
        self.overlap = overlap
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
        self._base_lrs = [group["lr"] for group in optimizer.param_groups] if optimizer else []
        self._coming: tuple[Batch, Passage] | None = None
        self.num_steps = 0

    def step(self, batches: Batch | list[Batch], ahead: Batch | None = None) -> Tensor:
        """Train on a batch, or on several as if they were one; returns the mean loss over all
        their rows, 0-d, on every rank.

        Several batches are one step of the optimizers, of the mean gradient over all rows.
        ``ahead`` is the first batch of the next step, whose ids may travel during this one. The
        order of a batch's moves is spelled out in ``_pass``.
        """
        self.num_steps += 1
        self._set_learning_rates(self._schedule(self.num_steps))
        passes = batches if isinstance(batches, list) else [batches]
        num_rows = sum(batch.num_rows for batch in passes)
        following = [*passes[1:], ahead]
        passages = [
            self._pass(batch, next_batch, batch.num_rows / num_rows, number)
            for number, (batch, next_batch) in enumerate(zip(passes, following, strict=True))
        ]
        pending = self.gradients.start()
        for passage in passages:  # beside the dense gradients' all-reduce
            self._embeddings.collect(passage)
        self._embeddings.update()
        pending.wait()
        if self._loss.part.grad is None:
            raise RuntimeError("the loss did not come back from its exchange")
        loss = self._loss.part.grad.squeeze(0)
        self._loss.part.grad = None
        if self._optimizer is not None:
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
        return loss

    def _pass(self, batch: Batch, ahead: Batch | None, share: float, number: int) -> Passage:
        """Batch ``number`` of the step forward and backward; ``share`` is its part of the rows."""
        embeddings = self._embeddings
        passage = self._passage_of(batch)
        embeddings.look_up(passage)  # waits for the ids; the vectors start
        if self.overlap and ahead is not None:  # beside them: the next ids sorted, counted
            self._coming = (ahead, self._begin(ahead))
        vectors = embeddings.outputs(passage)  # waits for the vectors
        loss = self._dense_loss(batch, vectors, number)
        if self._coming is not None:  # their counts are here, the ids themselves may start
            embeddings.advance(self._coming[1])
        if share != 1.0:
            loss = ops.scale(loss, share)
        loss.backward()
        terms = loss.detach().to("P", id="loss").part.reshape(LOSS_SHAPE)
        so_far = self._loss.part.grad
        self._loss.part.grad = terms if so_far is None else so_far + terms
        embeddings.push(passage)  # the row gradients start
        return passage

    def _begin(self, batch: Batch) -> Passage:
        return self._embeddings.begin(batch.ids, batch.num_rows, training=True)

    def _passage_of(self, batch: Batch) -> Passage:
        """Begun during the batch before, or now."""
        coming, self._coming = self._coming, None
        if coming is None:
            return self._begin(batch)
        announced, passage = coming
        if announced is not batch:
            raise RuntimeError("step: the batch is not the one that was announced as ahead")
        return passage

    def _dense_loss(self, batch: Batch, vectors: Mapping[str, Tensor], number: int) -> GlobalTensor:
        logits = self._dense_logits(batch, vectors, training=True, seed=self._mask_seed(number))
        labels = self._home(batch.labels.unsqueeze(1), batch.num_rows)
        return ops.bce_with_logits(logits, labels)

    def _set_learning_rates(self, factor: float) -> None:
        self._embeddings.scale_lr(factor)
        if self._optimizer is not None:
            for group, base in zip(self._optimizer.param_groups, self._base_lrs, strict=True):
                group["lr"] = base * factor

    @torch.no_grad()
    def predict(self, batch: Batch) -> Tensor:
        """Logits [local batch] of this rank's rows."""
        vectors = self._embeddings.forward(batch.ids, batch.num_rows, training=False)
        logits = self._dense_logits(batch, vectors, training=False, seed=0)
        return logits.to(self._home_layout(batch.num_rows), id="predict").part.squeeze(1)

    def _dense_logits(
        self, batch: Batch, vectors: Mapping[str, Tensor], *, training: bool, seed: int
    ) -> GlobalTensor:
        num_rows = batch.num_rows
        return self._model.logits(
            {name: self._home(part, num_rows) for name, part in vectors.items()},
            self._home(batch.dense, num_rows),
            training=training,
            seed=seed,
        )

    def _mask_seed(self, number: int) -> int:
        """Of the dropout masks of batch ``number`` of this step; the first is named by the step."""
        within = f"/{number}" if number else ""
        return stream_key(self._seed, f"dropout/{self.num_steps}{within}")

    def _home(self, part: Tensor, num_rows: int) -> GlobalTensor:
        """Rows of the batch as a global tensor, S(0)."""
        layout, shape = self._home_layout(num_rows), (num_rows, *part.shape[1:])
        return GlobalTensor.from_local(part.to(self._dtype), layout, shape, self._boxing)

    def _home_layout(self, num_rows: int) -> Layout:
        """S(0) over all ranks, with explicit sizes if some rank has no row."""
        size = self._boxing.world.size
        sizes = balanced_sizes(num_rows, size) if num_rows < size else None
        return Layout(self._line, (Split(0, sizes),))
