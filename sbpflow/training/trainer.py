"""Runs one training step, or one prediction, on the ranks of a world.

This module implements the moves of a step; a ``StepSchedule`` defines their order, which determines
which transfers overlap computation. The order does not affect results, because every move reads
fully updated values. Batches can be announced before the step that trains on them; their ids are
then exchanged during earlier steps. The loss is reduced together with the dense gradients.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice

import torch
from torch import Tensor

from sbpflow.boxing.executor import Boxing
from sbpflow.boxing.plan import Conversion
from sbpflow.config.train_options import LossConfig
from sbpflow.embedding.collection import EmbeddingCollection, EmbeddingsInFlight
from sbpflow.errors import DataError, SbpError, TrainingError
from sbpflow.runtime.random.streams import stream_key
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Split, balanced_sizes
from sbpflow.tensor import ops
from sbpflow.tensor.global_tensor import GlobalTensor
from sbpflow.tensor.gradient_sync import GradientPlan, GradientSync, Total, plan_gradients
from sbpflow.training.batch import Batch, check_batch, event_time
from sbpflow.training.clipping import Clipper
from sbpflow.training.cuda_graph import StepInputs
from sbpflow.training.dense_part import DensePart
from sbpflow.training.graphed_step import OF_BATCH, OF_STEP, GraphedStep
from sbpflow.training.learning_rate import RateFactor, constant
from sbpflow.training.losses import PLAIN, backward, row_losses
from sbpflow.training.step_schedule import (
    OF_IDS,
    OVERLAPPED,
    BatchInFlight,
    Move,
    MoveWatch,
    StepSchedule,
)


@dataclass(slots=True, eq=False)
class _BatchInFlight(BatchInFlight):
    """A batch and the results of its moves, which later moves use."""

    batch: Batch
    share: float = 1.0  # This batch's fraction of the step's rows.
    number: int = 0  # Number of the batch within the step.
    begins_step: bool = True  # False if the previously announced batch belongs to the same step.
    embeddings: EmbeddingsInFlight | None = None
    vectors: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    loss: GlobalTensor | None = None
    term: Tensor | None = None  # this rank's loss term, if a CUDA graph also ran the backward pass

    @property
    def started(self) -> EmbeddingsInFlight:
        """Return the embeddings; raise RuntimeError before ``start_id_exchange`` has run."""
        if self.embeddings is None:
            raise RuntimeError("the id exchange of this batch has not started")
        return self.embeddings


class Trainer:
    """Trains a dense part and its embeddings; ``optimizer`` updates this rank's parameters.

    * ``schedule``: the order of a step's moves. It may change between steps, as may ``lookahead``.
    * ``rate_factor``, ``table_rate_factor`` (default: ``rate_factor``): map a step to the factors
      of the dense and table learning rates. The attribute ``rate_scale``, which may be set between
      steps, multiplies both.
    * ``clipper``: makes the clip move, if the schedule has one. ``loss``: modifies the row losses.
    * ``gradients``: the planned exchange of dense gradients and loss (``plan_gradients`` with a
      ``total``).
    * ``planned``: a batch size, and the only conversions that a forward pass of this size may make.
    * ``cuda_graph``: run batches of the planned size with a ``GraphedStep``.
    * ``lookahead``: the number of announced batches whose ids are exchanged early.
    """

    def __init__(
        self,
        model: DensePart,
        embeddings: EmbeddingCollection,
        optimizer: torch.optim.Optimizer | None,
        boxing: Boxing,
        *,
        dtype: torch.dtype,
        seed: int,
        rate_factor: RateFactor = constant,
        table_rate_factor: RateFactor | None = None,
        clipper: Clipper | None = None,
        loss: LossConfig = PLAIN,
        schedule: StepSchedule = OVERLAPPED,
        gradients: GradientPlan | None = None,
        planned: tuple[int, Sequence[Conversion]] | None = None,
        cuda_graph: bool = False,
        lookahead: int = 1,
    ) -> None:
        self._model = model
        self.embeddings = embeddings
        self.optimizer = optimizer
        self._boxing = boxing
        self._dtype = dtype
        self._seed = seed
        self._rate_factor = rate_factor
        self._table_rate_factor = table_rate_factor or rate_factor
        self.rate_scale = 1.0
        self._clipper = clipper
        self._loss_config = loss
        self.gradient_norm: Tensor | None = None  # 0-d float64, before clipping
        self.schedule = schedule
        self.move_watch: MoveWatch | None = None
        self._line = Placement.line(boxing.world.device.type, boxing.world.size)
        leaves = list(model.parameters.values())
        # The loss has layout P, like the gradients, so it is reduced as part of a gradient bucket,
        # which saves a collective.
        plan = gradients or plan_gradients(leaves, total=Total.over(self._line, dtype))
        self.gradients = GradientSync(leaves, plan=plan, boxing=boxing)
        self._loss_terms: Tensor | None = None  # This rank's part of the step's loss [1].
        self._loss: Tensor | None = None  # The step's loss [1], summed over all ranks.
        self._planned_size, self._conversions = planned or (None, ())
        groups = optimizer.param_groups if optimizer else []
        self._base_lrs = [float(group["lr"]) for group in groups]
        self.graphs: GraphedStep | None = None
        if cuda_graph:
            self.graphs = GraphedStep(
                lambda inputs, seed: backward(self._loss_of(inputs, seed), inputs.vectors),
                [parameter.part for parameter in leaves],
                boxing.world,
                embeddings=embeddings,
                optimizer=optimizer,
                clipper=clipper,
            )
        # whether this step's CUDA graph did the dense update, and which other moves it did
        self._updated = False
        self._done: frozenset[str] = frozenset()
        self.lookahead = lookahead
        self._window: deque[_BatchInFlight] = deque()  # announced batches, oldest first
        self._failure = ""
        self.num_steps = 0

    def announce(self, batch: Batch, *, begins_step: bool = True) -> None:
        """Announce a batch for a later step; every rank must announce the same batches.

        Each step exchanges the ids of the next ``lookahead`` announced batches. This call sends
        nothing. A batch without rows is ignored. With growing tables, pass ``begins_step=False``
        for all but the first batch of a step. Raises SbpError if ``batch`` is not a batch, and
        TrainingError after a failed step.
        """
        check_batch(batch)
        self._check_usable("announce")
        if batch.batch_size:
            self._window.append(_BatchInFlight(batch, begins_step=begins_step))

    def step(self, batches: Batch | list[Batch]) -> Tensor:
        """Make one optimizer step on one batch, or on several batches as if they were one.

        Returns the mean loss over the rows of all batches (0-d) on every rank. The gradient is also
        the mean over these rows. Announced batches must be passed in announcement order, before any
        other batches. Batches without rows are skipped. Raises SbpError, without any effect, if no
        batch has rows, an argument is not a batch, or a batch differs from the announced batch.
        Raises DataError for an out-of-range id. After a DataError, or any other error except the
        SbpErrors above, further steps raise TrainingError.
        """
        given = batches if isinstance(batches, list) else [batches]
        for batch in given:
            check_batch(batch)
        self._check_usable("step")
        in_flight = self._take([batch for batch in given if batch.batch_size])
        try:
            self.num_steps += 1
            self._updated, self._done = False, frozenset()
            self._set_learning_rates()
            self.schedule.run(
                self._make_of_batch,
                self._make_of_step,
                in_flight,
                list(self._window),
                self.lookahead,
                self._boxing.world,
                self.move_watch,
            )
        except BaseException as error:
            self._failure = f"{type(error).__name__}: {error}"
            raise
        loss, self._loss = self._loss, None
        if loss is None:
            raise RuntimeError("the schedule ended without computing the loss")
        return loss.squeeze(0)

    def train_on(self, batches: Iterable[Batch]) -> Iterator[Tensor]:
        """Train on each batch and yield its loss; announce the next ``lookahead`` batches early."""
        source = iter(batches)
        queue: deque[Batch] = deque()
        while True:
            for batch in islice(source, self.lookahead + 1 - len(queue)):
                queue.append(batch)
                self.announce(batch)
            if not queue:
                return
            yield self.step(queue.popleft())

    def drain(self) -> None:
        """Cancel all announced batches; every rank must call this method. Unless a step has failed,
        id exchanges in flight are completed first, so that all ranks make the same transfers.
        """
        window, self._window = self._window, deque()
        if self._failure:
            return
        self.settle()
        for flight in window:
            if flight.embeddings is not None:
                for move in OF_IDS:
                    if move.name not in flight.done:
                        self._make_of_batch(move, flight)
                self.embeddings.cancel(flight.embeddings)

    def settle(self) -> None:
        """Apply the late gradients of the last step, unless it failed. Every rank must call this
        method before reading rows; ``step``, ``predict``, and ``drain`` call it themselves.
        """
        if not self._failure:
            self.embeddings.settle()

    @property
    def num_announced(self) -> int:
        """Return the number of announced batches that no step has used yet."""
        return len(self._window)

    def _check_usable(self, call: str) -> None:
        if self._failure:
            raise TrainingError(
                f"{call}: an earlier step failed ({self._failure}) and was only partly applied; "
                "build a new trainer and new tables"
            )

    def _make_of_batch(self, move: Move, flight: _BatchInFlight) -> None:
        """Make a move of a batch with the method of this class or of the tables."""
        own: Callable[[_BatchInFlight], None] | None = getattr(self, f"_{move.name}", None)
        if own is not None:
            own(flight)
        else:
            getattr(self.embeddings, move.name)(flight.started)

    def _make_of_step(self, move: Move) -> None:
        """Make a move of a step unless this step's CUDA graph has already made it."""
        if move.name not in self._done:
            getattr(self, f"_{move.name}")()

    def _take(self, batches: list[Batch]) -> list[_BatchInFlight]:
        """Return the batches in flight: announced batches from the window, or else new ones."""
        if not batches:
            raise SbpError("step: none of the batches has rows; pass at least one batch with rows")
        for group in self.embeddings.plan.groups:
            group.check_step(len(batches))
        for place, (flight, batch) in enumerate(zip(self._window, batches, strict=False)):
            if flight.batch is not batch:
                raise SbpError(
                    f"step: batch {place} of {len(batches)} is not the batch that was announced "
                    "at this position, whose ids may be in flight; pass the announced batches in "
                    "order, or call drain() first"
                )
        announced = list(islice(self._window, len(batches)))  # a refused step keeps the window
        in_flight = announced + [
            _BatchInFlight(batch, begins_step=batch is batches[0])
            for batch in batches[len(announced) :]
        ]
        if self.embeddings.plan.vocabularies and any(
            flight.begins_step != (flight is in_flight[0]) for flight in in_flight
        ):
            raise SbpError(
                f"step: the {len(batches)} batches were announced for different steps, and "
                "growing tables depend on the steps; announce all but the first batch of a step "
                "with begins_step=False"
            )
        self._window = deque(islice(self._window, len(announced), None))
        step_size = sum(batch.batch_size for batch in batches)
        for number, flight in enumerate(in_flight):
            flight.number, flight.share = number, flight.batch.batch_size / step_size
        return in_flight

    def _start_id_exchange(self, flight: _BatchInFlight) -> None:
        try:
            flight.embeddings = self.embeddings.start_id_exchange(
                flight.batch.ids,
                flight.batch.batch_size,
                training=True,
                begins_step=flight.begins_step,
                event_time=event_time(flight.batch),
            )
        except DataError as error:
            if flight not in self._window:
                raise
            place = self._window.index(flight) + 1
            raise DataError(
                f"batch {place} announced after step {self.num_steps}: {error}"
            ) from error

    def _is_planned(self, flight: _BatchInFlight) -> bool:
        """Return whether the batch is the only one of its step and has the planned batch size."""
        return flight.batch.batch_size == self._planned_size and flight.share == 1.0

    def _lookup(self, flight: _BatchInFlight) -> None:
        graphs = self.graphs
        if graphs is not None and graphs.takes_rows and self._is_planned(flight):
            self.embeddings.arrive(flight.started)
            flight.done |= OF_BATCH
            self._done = OF_STEP
        else:
            self.embeddings.lookup(flight.started)

    def _gather_outputs(self, flight: _BatchInFlight) -> None:
        flight.vectors = self.embeddings.gather_outputs(flight.started)

    def _forward(self, flight: _BatchInFlight) -> None:
        batch, seed, graphs = flight.batch, self._mask_seed(flight.number), self.graphs
        inputs = StepInputs(
            batch_size=batch.batch_size,
            labels=batch.labels,
            dense=batch.dense,
            weights=getattr(batch, "weights", None),
            vectors=flight.vectors,
            rows=flight.started if self._done else None,
            step=self.num_steps,
        )
        takes_vectors = graphs is not None and graphs.takes_vectors and self._is_planned(flight)
        if graphs is not None and (self._done or takes_vectors):
            flight.term, self.gradient_norm = graphs.run(inputs, seed)
            self._updated = graphs.updates_dense
        else:
            loss = self._loss_of(inputs, seed)
            flight.loss = loss if flight.share == 1.0 else ops.scale(loss, flight.share)

    def _loss_of(self, inputs: StepInputs, seed: int) -> GlobalTensor:
        batch_size = inputs.batch_size
        labels = self._home(inputs.labels.unsqueeze(1), batch_size)
        as_planned = batch_size == self._planned_size
        with self._boxing.expecting(self._conversions if as_planned else None):
            logits = self._dense_logits(
                inputs.dense, inputs.vectors, batch_size, training=True, seed=seed
            )
            losses = row_losses(self._model, logits, labels, self._loss_config)
        if inputs.weights is not None:
            losses = ops.mul(losses, self._home(inputs.weights.unsqueeze(1), batch_size))
        return ops.reduce_mean(losses, id="loss")

    def _backward(self, flight: _BatchInFlight) -> None:
        term, flight.term = flight.term, None
        if term is None:
            if flight.loss is None:
                raise RuntimeError("backward before forward")
            term = backward(flight.loss, flight.vectors)
        self._loss_terms = term if self._loss_terms is None else self._loss_terms + term
        flight.loss, flight.vectors = None, {}

    def _send_dense(self) -> None:
        terms, self._loss_terms = self._loss_terms, None
        if self._updated:
            self._loss = terms
            return
        self.gradients.start(terms)

    def _receive_dense(self) -> None:
        if self._updated:
            return
        self._loss = self.gradients.wait()

    def _update(self) -> None:
        self.embeddings.update(self.num_steps)

    def _update_dense(self) -> None:
        if self.optimizer is not None and not self._updated:
            self.optimizer.step()
        self.gradients.clear()

    def _clip(self) -> None:
        if self._clipper is None:
            raise RuntimeError("the schedule clips gradients, but the trainer has no Clipper")
        self.gradient_norm = self._clipper.clip()

    def _set_learning_rates(self) -> None:
        self.embeddings.scale_lr(self._table_rate_factor(self.num_steps) * self.rate_scale)
        factor = self._rate_factor(self.num_steps) * self.rate_scale
        if self.optimizer is not None:
            for group, base in zip(self.optimizer.param_groups, self._base_lrs, strict=True):
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(base * factor)
                else:
                    group["lr"] = base * factor

    def predict(self, batch: Batch) -> Tensor:
        """Return the logits of this rank's rows ([local batch])."""
        [(_, logits)] = self.predict_all([batch])
        return logits

    @torch.no_grad()
    def predict_all(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, Tensor]]:
        """Yield each batch with its logits. The rows of the next batch are read ahead.

        Every rank must iterate over all batches, without training steps during the iteration.
        """
        self.settle()
        ready: tuple[Batch, EmbeddingsInFlight] | None = None
        for batch in batches:
            started = self.embeddings.start_id_exchange(batch.ids, batch.batch_size, training=False)
            self.embeddings.read_ahead(started)
            if ready is not None:
                yield ready[0], self._logits_of(*ready)
            ready = batch, started
        if ready is not None:
            yield ready[0], self._logits_of(*ready)

    def _logits_of(self, batch: Batch, embeddings: EmbeddingsInFlight) -> Tensor:
        self.embeddings.lookup(embeddings)
        batch_size, vectors = batch.batch_size, self.embeddings.gather_outputs(embeddings)
        logits = self._dense_logits(batch.dense, vectors, batch_size, training=False, seed=0)
        return logits.to(home_layout(self._line, batch_size), id="predict").part.squeeze(1)

    def _dense_logits(
        self,
        dense: Tensor,
        vectors: Mapping[str, Tensor],
        batch_size: int,
        *,
        training: bool,
        seed: int,
    ) -> GlobalTensor:
        return self._model.forward(
            {name: self._home(part, batch_size) for name, part in vectors.items()},
            self._home(dense, batch_size),
            training=training,
            seed=seed,
        )

    def _mask_seed(self, number: int) -> int:
        """Return the seed of the dropout masks of batch ``number`` within this step."""
        within = f"/{number}" if number else ""
        return stream_key(self._seed, f"dropout/{self.num_steps}{within}")

    def _home(self, part: Tensor, batch_size: int) -> GlobalTensor:
        """Return the global tensor with layout S(0) whose part on this rank is ``part``."""
        layout, shape = home_layout(self._line, batch_size), (batch_size, *part.shape[1:])
        return GlobalTensor.from_local(part.to(self._dtype), layout, shape, self._boxing)


@lru_cache(maxsize=1024)
def home_layout(line: Placement, batch_size: int) -> Layout:
    """Return layout S(0) over all ranks, with explicit sizes if some rank has no rows."""
    size = len(line.ranks)
    sizes = balanced_sizes(batch_size, size) if batch_size < size else None
    return Layout(line, (Split(0, sizes),))
