"""One training step and one prediction, on the ranks of a world.

The moves that a step consists of are here; their order, and so what overlaps, is a
``StepSchedule``. Nothing is used before the update it depends on, so the numbers are the same in
every order. Batches that were announced form the window: their ids travel during earlier steps.
The loss rides in the dense exchange.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor

from sbpflow.boxing.executor import Boxing
from sbpflow.boxing.plan import Conversion
from sbpflow.config.train_options import LossConfig
from sbpflow.embedding.collection import EmbeddingCollection, EmbeddingsInFlight
from sbpflow.embedding.plan.embedding_plan import EmbeddingPlan
from sbpflow.errors import DataError, SbpError, TrainingError
from sbpflow.runtime.random.streams import stream_key
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Split, balanced_sizes
from sbpflow.tensor import ops
from sbpflow.tensor.global_tensor import GlobalTensor
from sbpflow.tensor.gradient_sync import (
    GradientPlan,
    GradientSync,
    PendingSync,
    Total,
    plan_gradients,
)
from sbpflow.training.batch import Batch
from sbpflow.training.clipping import Clipper
from sbpflow.training.cuda_graph import DenseInputs
from sbpflow.training.dense_part import DensePart
from sbpflow.training.graphed_step import OF_BATCH, OF_STEP, GraphedStep, StepInputs
from sbpflow.training.learning_rate import RateFactor, constant
from sbpflow.training.losses import PLAIN, row_losses
from sbpflow.training.move_times import MoveTimes, MoveWatch
from sbpflow.training.step_schedule import (
    CLIP,
    OF_A_BATCH,
    OF_A_STEP,
    OF_IDS,
    OVERLAPPED,
    BatchInFlight,
    Move,
    StepSchedule,
)


@dataclass(slots=True, eq=False)
class _BatchInFlight(BatchInFlight):
    """A batch's way through a step, and what its moves leave for later ones."""

    batch: Batch
    share: float = 1.0  # of the step's rows
    number: int = 0  # within the step
    embeddings: EmbeddingsInFlight | None = None
    vectors: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    loss: GlobalTensor | None = None
    term: Tensor | None = None  # of a loss whose backward is done, too

    @property
    def begun(self) -> EmbeddingsInFlight:
        """After the move ``start_id_exchange``."""
        if self.embeddings is None:
            raise RuntimeError("a move of a batch that has not begun")
        return self.embeddings


def _check_batch(given: object) -> None:
    missing = [
        name for name in ("labels", "dense", "ids", "batch_size") if not hasattr(given, name)
    ]
    if missing:
        raise SbpError(
            f"step: {type(given).__name__} is not a batch: it has no attribute {missing[0]}; pass "
            "a batch from a loader, or a list of them"
        )


class Trainer:
    """Runs a dense part and its embeddings; ``optimizer`` holds the parts of its parameters.

    ``schedule`` is the order of a step's moves, and may be exchanged between steps; ``rate_factor``
    gives the factor of the learning rates at a step, ``table_rate_factor`` that of the tables where
    it is another; ``rate_scale``, which may be set between steps, multiplies both. ``clipper``
    makes the move of a schedule that clips, ``loss`` changes the loss of rows. ``gradients`` is how
    dense gradients and the loss travel (``plan_gradients`` with a ``total``), as the plan of a run
    has it. ``planned`` are the rows of a batch and the conversions that its forward then makes,
    these and no others. With ``cuda_graph`` batches of so many rows are run by a ``GraphedStep``.
    ``lookahead``, which may be set between steps, is how many announced batches exchange their ids
    before their turn; no value of it changes a result.
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
        self._embeddings = embeddings
        self.optimizer = optimizer
        self._boxing = boxing
        self._dtype = dtype
        self._seed = seed
        self._rate_factor = rate_factor
        self._table_rate_factor = table_rate_factor or rate_factor
        self.rate_scale = 1.0
        self._clipper = clipper
        self._loss_config = loss
        self.gradient_norm: Tensor | None = None  # 0-d float64, before it was clipped
        self.schedule = schedule
        self.move_watch: MoveWatch = MoveTimes()
        self._line = Placement.line(boxing.world.device.type, boxing.world.size)
        leaves = list(model.parameters.values())
        # The loss is P like the gradients: as one more number among them it costs no collective.
        plan = gradients or plan_gradients(
            leaves, total=Total.over(self._line, dtype), backend=boxing.world.backend
        )
        self.gradients = GradientSync(leaves, plan=plan, boxing=boxing)
        self._loss_terms: Tensor | None = None  # [1], this rank's, of the batches of the step
        self._loss: Tensor | None = None  # [1], of all ranks
        self._gradients_under_way: PendingSync | None = None
        self._planned_rows, self._conversions = planned or (None, ())
        groups = optimizer.param_groups if optimizer else []
        self._base_lrs = [float(group["lr"]) for group in groups]
        self.graphs: GraphedStep | None = None
        if cuda_graph:
            self.graphs = GraphedStep(
                lambda inputs, seed: _terms_after_backward(self._loss_of(inputs, seed)),
                [parameter.part for parameter in leaves],
                boxing.world,
                embeddings=embeddings,
                optimizer=optimizer,
                clipper=clipper,
            )
        self._updated = False  # the dense part, beside its backward
        self._made: frozenset[str] = frozenset()  # moves of the step, likewise
        self.lookahead = lookahead
        self._window: deque[_BatchInFlight] = deque()  # announced, oldest first
        self._failure = ""
        self.num_steps = 0

    @property
    def embedding_plan(self) -> EmbeddingPlan:
        """The plan of the tables, which says where a batch has the ids of a field."""
        return self._embeddings.plan

    def announce(self, batch: Batch) -> None:
        """Say which batch comes after those announced so far. Every rank announces the same.

        The first ``lookahead`` of them exchange their ids during the steps before their own.
        Nothing is sent here. A batch without rows is ignored. Raises SbpError for what is not a
        batch, and TrainingError after a step that failed.
        """
        _check_batch(batch)
        self._check_usable("announce")
        if batch.batch_size:
            self._window.append(_BatchInFlight(batch))

    def step(self, batches: Batch | list[Batch]) -> Tensor:
        """Train on a batch, or on several as if they were one; returns the mean loss over all
        their rows, 0-d, on every rank.

        Several batches are one step of the optimizers, of the mean gradient over all rows. They are
        the oldest ones announced; where fewer were announced, the others come after them. Batches
        without rows are left out. Raises SbpError, and nothing has happened, if all are, for what
        is not a batch, and for another batch than was announced; DataError for an id out of range
        in these batches. After a step that failed otherwise there is none: TrainingError.
        """
        given = batches if isinstance(batches, list) else [batches]
        for batch in given:
            _check_batch(batch)
        self._check_usable("step")
        in_flight = self._take([batch for batch in given if batch.batch_size])
        try:
            self.num_steps += 1
            self._updated, self._made = False, frozenset()
            self._set_learning_rates()
            self._run(in_flight)
        except BaseException as error:
            self._failure = f"{type(error).__name__}: {error}"
            raise
        loss, self._loss = self._loss, None
        if loss is None:
            raise RuntimeError("the loss did not come back from its exchange")
        return loss.squeeze(0)

    def train_on(self, batches: Iterable[Batch]) -> Iterator[Tensor]:
        """A step on each batch; yields the losses. Announces ``lookahead`` batches ahead."""
        source = iter(batches)
        held: deque[Batch] = deque()
        while True:
            for batch in islice(source, self.lookahead + 1 - len(held)):
                held.append(batch)
                self.announce(batch)
            if not held:
                return
            yield self.step(held.popleft())

    def drain(self) -> None:
        """Forget the batches that were announced and not trained; every rank calls it.

        Ids that are in flight arrive first, so that all ranks have made the same transfers. After a
        step that failed there is nothing that could still arrive.
        """
        window, self._window = self._window, deque()
        if self._failure:
            return
        for one in window:
            if one.embeddings is not None:
                for move in OF_IDS:
                    if move.name not in one.made:
                        self._of_batch(move)(one)
                self._embeddings.cancel(one.embeddings)

    @property
    def num_announced(self) -> int:
        """Batches announced and not yet trained."""
        return len(self._window)

    def _check_usable(self, call: str) -> None:
        if self._failure:
            raise TrainingError(
                f"{call}: an earlier step failed ({self._failure}), and what it left half done "
                "would be mixed in; build the trainer and its tables anew"
            )

    def _run(self, batches: list[_BatchInFlight]) -> None:
        self.schedule.run(
            {move.name: self._of_batch(move) for move in OF_A_BATCH},
            {move.name: self._of_step(move) for move in (*OF_A_STEP, CLIP)},
            batches,
            list(self._window),
            self.lookahead,
            self._boxing.world,
            self.move_watch.move,
        )

    def _of_batch(self, move: Move) -> Callable[[_BatchInFlight], None]:
        """What makes a move: the method here of its name, else the collection's."""
        own: Callable[[_BatchInFlight], None] | None = getattr(self, f"_{move.name}", None)
        if own is not None:
            return own
        theirs: Callable[[EmbeddingsInFlight], None] = getattr(self._embeddings, move.name)
        return lambda one: theirs(one.begun)

    def _of_step(self, move: Move) -> Callable[[], None]:
        """What makes a move of the step, unless a graph has."""
        make: Callable[[], None] = getattr(self, f"_{move.name}")

        def unless_made() -> None:
            if move.name not in self._made:
                make()

        return unless_made

    def _take(self, batches: list[Batch]) -> list[_BatchInFlight]:
        """Out of the window, as far as they are in it."""
        if not batches:
            raise SbpError("step: no batch with rows; pass one, or a list with at least one")
        for place, (one, batch) in enumerate(zip(self._window, batches, strict=False)):
            if one.batch is not batch:
                raise SbpError(
                    f"step: batch {place} of {len(batches)} is not the one announced in its "
                    "place, whose ids may be in flight; pass the announced batches in their "
                    "order, or call drain() first"
                )
        in_flight = [
            self._window.popleft() if self._window else _BatchInFlight(batch) for batch in batches
        ]
        batch_size = sum(batch.batch_size for batch in batches)
        for number, one in enumerate(in_flight):
            one.number, one.share = number, one.batch.batch_size / batch_size
        return in_flight

    def _start_id_exchange(self, one: _BatchInFlight) -> None:
        try:
            one.embeddings = self._embeddings.start_id_exchange(
                one.batch.ids, one.batch.batch_size, training=True
            )
        except DataError as error:
            if one not in self._window:
                raise
            place = self._window.index(one) + 1
            raise DataError(
                f"announced batch {place} after step {self.num_steps}: {error}"
            ) from error

    def _lookup(self, one: _BatchInFlight) -> None:
        as_planned = one.batch.batch_size == self._planned_rows and one.share == 1.0
        if as_planned and self.graphs is not None and self.graphs.takes_rows:
            self._embeddings.arrive(one.begun)
            one.made |= OF_BATCH
            self._made = OF_STEP
        else:
            self._embeddings.lookup(one.begun)

    def _gather_outputs(self, one: _BatchInFlight) -> None:
        one.vectors = self._embeddings.gather_outputs(one.begun)

    def _forward(self, one: _BatchInFlight) -> None:
        batch, seed, graphs = one.batch, self._mask_seed(one.number), self.graphs
        inputs = DenseInputs(
            batch_size=batch.batch_size,
            labels=batch.labels,
            dense=batch.dense,
            weights=getattr(batch, "weights", None),
            vectors=one.vectors,
        )
        as_planned = batch.batch_size == self._planned_rows and one.share == 1.0
        if graphs is not None and self._made:
            whole = StepInputs(dense=inputs, rows=one.begun, step=self.num_steps)
            one.term, self.gradient_norm = graphs.run_all(whole, seed)
            self._updated = graphs.updates_dense
        elif graphs is not None and as_planned and graphs.takes_vectors:
            one.term = graphs.run_dense(inputs, seed)
            self._updated = graphs.updates_dense
        else:
            loss = self._loss_of(inputs, seed)
            one.loss = loss if one.share == 1.0 else ops.scale(loss, one.share)

    def _loss_of(self, inputs: DenseInputs, seed: int) -> GlobalTensor:
        batch_size = inputs.batch_size
        labels = self._home(inputs.labels.unsqueeze(1), batch_size)
        as_planned = batch_size == self._planned_rows
        with self._boxing.expecting(self._conversions if as_planned else None):
            logits = self._dense_logits(
                inputs.dense, inputs.vectors, batch_size, training=True, seed=seed
            )
            losses = row_losses(self._model, logits, labels, self._loss_config)
        if inputs.weights is not None:
            losses = ops.mul(losses, self._home(inputs.weights.unsqueeze(1), batch_size))
        return ops.reduce_mean(losses, id="loss")

    def _backward(self, one: _BatchInFlight) -> None:
        terms, one.term = one.term, None
        if terms is None:
            if one.loss is None:
                raise RuntimeError("backward before forward")
            terms = _terms_after_backward(one.loss)
        self._loss_terms = terms if self._loss_terms is None else self._loss_terms + terms
        one.loss, one.vectors = None, {}

    def _send_dense(self) -> None:
        terms, self._loss_terms = self._loss_terms, None
        if self._updated:
            self._loss = terms
            return
        self._gradients_under_way = self.gradients.start(terms)

    def _receive_dense(self) -> None:
        if self._updated:
            return
        under_way, self._gradients_under_way = self._gradients_under_way, None
        if under_way is None:
            raise RuntimeError("receive_dense before send_dense")
        self._loss = under_way.wait()

    def _update(self) -> None:
        self._embeddings.update(self.num_steps)

    def _update_dense(self) -> None:
        if self.optimizer is not None:
            if not self._updated:
                self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)

    def _clip(self) -> None:
        if self._clipper is None:
            raise RuntimeError("the schedule clips, and there is no Clipper")
        self.gradient_norm = self._clipper.clip()

    def _set_learning_rates(self) -> None:
        self._embeddings.scale_lr(self._table_rate_factor(self.num_steps) * self.rate_scale)
        factor = self._rate_factor(self.num_steps) * self.rate_scale
        if self.optimizer is not None:
            for group, base in zip(self.optimizer.param_groups, self._base_lrs, strict=True):
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(base * factor)
                else:
                    group["lr"] = base * factor

    @torch.no_grad()
    def predict(self, batch: Batch) -> Tensor:
        """Logits [local batch] of this rank's rows."""
        vectors = self._embeddings.forward(batch.ids, batch.batch_size, training=False)
        batch_size = batch.batch_size
        logits = self._dense_logits(batch.dense, vectors, batch_size, training=False, seed=0)
        return logits.to(self._home_layout(batch.batch_size), id="predict").part.squeeze(1)

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
        """Of the dropout masks of batch ``number`` of this step; the first is named by the step."""
        within = f"/{number}" if number else ""
        return stream_key(self._seed, f"dropout/{self.num_steps}{within}")

    def _home(self, part: Tensor, batch_size: int) -> GlobalTensor:
        """Rows of the batch as a global tensor, S(0)."""
        layout, shape = self._home_layout(batch_size), (batch_size, *part.shape[1:])
        return GlobalTensor.from_local(part.to(self._dtype), layout, shape, self._boxing)

    def _home_layout(self, batch_size: int) -> Layout:
        """S(0) over all ranks, with explicit sizes if some rank has no row."""
        size = self._boxing.world.size
        sizes = balanced_sizes(batch_size, size) if batch_size < size else None
        return Layout(self._line, (Split(0, sizes),))


def _terms_after_backward(loss: GlobalTensor) -> Tensor:
    """[1], this rank's term of the loss."""
    loss.backward()
    return loss.detach().to("P", id="loss").part.reshape(1)
