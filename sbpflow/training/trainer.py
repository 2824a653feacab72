"""One training step and one prediction, on the ranks of a world.

The moves that a step consists of are here; their order, and so what overlaps, is a
``StepSchedule``. Nothing is used before the update it depends on, so the numbers are the same in
every order. The loss rides in the dense exchange.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from sbpflow.boxing.executor import Boxing
from sbpflow.embedding.collection import EmbeddingCollection, Passage
from sbpflow.embedding.storage.initial import stream_key
from sbpflow.errors import DataError, SbpError, TrainingError
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Broadcast, Split, balanced_sizes
from sbpflow.tensor import ops
from sbpflow.tensor.global_tensor import GlobalTensor, parameter
from sbpflow.tensor.gradient_sync import GradientSync, PendingSync
from sbpflow.training.learning_rate import RateFactor, constant
from sbpflow.training.step_schedule import OVERLAPPED, Pass, StepSchedule

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


@dataclass(slots=True)
class _Pass(Pass):
    """A batch's way through a step, and what its moves leave for later ones."""

    batch: Batch
    share: float = 1.0  # of the step's rows
    number: int = 0  # within the step
    passage: Passage | None = None
    vectors: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    loss: GlobalTensor | None = None

    @property
    def begun(self) -> Passage:
        """After the move ``begin``."""
        if self.passage is None:
            raise RuntimeError("a move of a batch that has not begun")
        return self.passage


def _check_batch(given: object) -> None:
    missing = [name for name in ("labels", "dense", "ids", "num_rows") if not hasattr(given, name)]
    if missing:
        raise SbpError(
            f"step: a {type(given).__name__} is no batch, for it has no {missing[0]}; pass one, "
            "such as a loader gives, or a list of them; ahead is one"
        )


class Trainer:
    """Runs a model and its embeddings; ``optimizer`` holds the parts of the model's parameters.

    ``schedule`` is the order of a step's moves, and may be exchanged between steps; ``rate_factor``
    gives the factor of all learning rates at a step.
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
        rate_factor: RateFactor = constant,
        schedule: StepSchedule = OVERLAPPED,
    ) -> None:
        self._model = model
        self._embeddings = embeddings
        self._optimizer = optimizer
        self._boxing = boxing
        self._dtype = dtype
        self._seed = seed
        self._rate_factor = rate_factor
        self.schedule = schedule
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
        self._gradients_under_way: PendingSync | None = None
        self._base_lrs = [group["lr"] for group in optimizer.param_groups] if optimizer else []
        self._coming: _Pass | None = None
        self._failure = ""
        self.num_steps = 0

    def step(self, batches: Batch | list[Batch], ahead: Batch | None = None) -> Tensor:
        """Train on a batch, or on several as if they were one; returns the mean loss over all
        their rows, 0-d, on every rank.

        Several batches are one step of the optimizers, of the mean gradient over all rows.
        ``ahead`` is the first batch of the next step, whose ids may travel during this one.
        Batches without rows are left out. SbpError, and nothing has happened, if all are, for what
        is no batch, and for another batch than was announced. After a step that failed otherwise
        there is none: TrainingError.
        """
        given = batches if isinstance(batches, list) else [batches]
        for batch in (*given, *(() if ahead is None else (ahead,))):
            _check_batch(batch)
        if self._failure:
            raise TrainingError(
                f"step: an earlier step failed ({self._failure}), and what it left half done would "
                "be mixed in; build the trainer and its tables anew"
            )
        passes = self._passes_of([batch for batch in given if batch.num_rows])
        try:
            self._coming = _Pass(ahead) if ahead is not None and ahead.num_rows else None
            self.num_steps += 1
            self._set_learning_rates(self._rate_factor(self.num_steps))
            self._run(passes)
        except BaseException as error:
            self._failure = f"{type(error).__name__}: {error}"
            raise
        if self._loss.part.grad is None:
            raise RuntimeError("the loss did not come back from its exchange")
        loss = self._loss.part.grad.squeeze(0)
        self._loss.part.grad = None
        return loss

    def _run(self, passes: list[_Pass]) -> None:
        self.schedule.run(
            {
                "begin": self._begin,
                "advance": lambda one: self._embeddings.advance(one.begun),
                "look_up": lambda one: self._embeddings.look_up(one.begun),
                "outputs": self._outputs,
                "forward": self._forward,
                "backward": self._backward,
                "push": lambda one: self._embeddings.push(one.begun),
                "collect": lambda one: self._embeddings.collect(one.begun),
            },
            {
                "send_dense": self._send_dense,
                "receive_dense": self._receive_dense,
                "update": self._embeddings.update,
                "update_dense": self._update_dense,
            },
            passes,
            self._coming,
            self._boxing.world,
        )

    def _passes_of(self, batches: list[Batch]) -> list[_Pass]:
        """The first may have begun during the step before."""
        if not batches:
            raise SbpError("step: no batch with rows; pass one, or a list with one at least")
        coming = self._coming
        if coming is not None and coming.batch is not batches[0]:
            raise SbpError(
                "step: the batch is not the one that the step before was told of as ahead, whose "
                "ids are on their way; pass that one"
            )
        passes = [_Pass(batch) for batch in batches]
        if coming is not None:
            passes[0] = coming
        num_rows = sum(batch.num_rows for batch in batches)
        for number, one in enumerate(passes):
            one.number, one.share = number, one.batch.num_rows / num_rows
        return passes

    def _begin(self, one: _Pass) -> None:
        try:
            one.passage = self._embeddings.begin(one.batch.ids, one.batch.num_rows, training=True)
        except DataError as error:
            if one is self._coming:
                raise DataError(f"the first batch of step {self.num_steps + 1}: {error}") from error
            raise

    def _outputs(self, one: _Pass) -> None:
        one.vectors = self._embeddings.outputs(one.begun)

    def _forward(self, one: _Pass) -> None:
        batch, seed = one.batch, self._mask_seed(one.number)
        logits = self._dense_logits(batch, one.vectors, training=True, seed=seed)
        labels = self._home(batch.labels.unsqueeze(1), batch.num_rows)
        loss = ops.bce_with_logits(logits, labels)
        one.loss = loss if one.share == 1.0 else ops.scale(loss, one.share)

    def _backward(self, one: _Pass) -> None:
        if one.loss is None:
            raise RuntimeError("backward before forward")
        one.loss.backward()
        terms = one.loss.detach().to("P", id="loss").part.reshape(LOSS_SHAPE)
        so_far = self._loss.part.grad
        self._loss.part.grad = terms if so_far is None else so_far + terms
        one.loss, one.vectors = None, {}

    def _send_dense(self) -> None:
        self._gradients_under_way = self.gradients.start()

    def _receive_dense(self) -> None:
        under_way, self._gradients_under_way = self._gradients_under_way, None
        if under_way is None:
            raise RuntimeError("receive_dense before send_dense")
        under_way.wait()

    def _update_dense(self) -> None:
        if self._optimizer is not None:
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)

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
