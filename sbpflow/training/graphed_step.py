"""What of a training step is a CUDA graph: all of it behind the ids, or its dense part.

On one rank all that follows the sorted ids is of fixed sizes and stays on the device: rows read,
forward, backward, clipping, and the update of tables and of a dense optimizer that torch can
capture. Where vectors travel, or a table's ids come in lists, it is the dense part alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sbpflow.embedding.collection import EmbeddingCollection
from sbpflow.embedding.in_flight import EmbeddingsInFlight
from sbpflow.runtime.ranks.world import World
from sbpflow.training.clipping import Clipper
from sbpflow.training.cuda_graph import DenseInputs, Graphs
from sbpflow.training.step_schedule import CLIP, GATHER_OUTPUTS, RECEIVE_GRADS, SEND_GRADS, UPDATE

# (inputs, seed of what is random) -> [1], this rank's term of the loss; gradients are on the leaves
Pass = Callable[[DenseInputs, int], Tensor]


@dataclass(slots=True, kw_only=True)
class StepInputs:
    """A batch after ``EmbeddingCollection.arrive``; ``dense`` is without vectors.

    ``step`` is the job's, counted from 1.
    """

    dense: DenseInputs
    rows: EmbeddingsInFlight
    step: int

    def tensors(self) -> list[Tensor | None]:
        return [*self.dense.tensors(), *self.rows.lookup_tensors()]

    def new_like(self) -> "StepInputs":
        return StepInputs(dense=self.dense.new_like(), rows=self.rows.new_like(), step=self.step)

    def take_gradients(self, of: "StepInputs") -> None:
        """They went to the rows."""


class GraphedStep:
    """Runs batches by graphs: ``work`` is the dense forward, loss and backward of a batch.

    ``optimizer`` is that of the dense part; ``leaves`` are its parameters.
    """

    def __init__(
        self,
        work: Pass,
        leaves: Sequence[Tensor],
        world: World,
        *,
        embeddings: EmbeddingCollection,
        optimizer: torch.optim.Optimizer | None,
        clipper: Clipper | None,
    ) -> None:
        self._work, self._embeddings, self._clipper = work, embeddings, clipper
        self._optimizer: torch.optim.Optimizer | None = None
        self.why_not_all = embeddings.why_not_captured()
        if optimizer is not None and world.size == 1:
            capturable = all(group.get("capturable") for group in optimizer.param_groups)
            clipped_later = clipper is not None and bool(self.why_not_all)
            self._optimizer = optimizer if capturable and not clipped_later else None
        self._all: Graphs[StepInputs] | None = None
        self._dense: Graphs[DenseInputs] | None = None
        if self.why_not_all:
            self._dense = Graphs(self._run_dense, leaves, world)
        else:
            embeddings.keep_numbers()
            self._all = Graphs(self._run_all, leaves, world, prepare=self._write_numbers)

    @property
    def updates_dense(self) -> bool:
        """Whether the dense optimizer's step is in the graph."""
        return self._optimizer is not None

    @property
    def takes_rows(self) -> bool:
        """Whether the next batch is run from its rows on: not while rows must be told of."""
        return self._all is not None and not self._embeddings.is_watched

    @property
    def takes_vectors(self) -> bool:
        """Whether batches are run from their vectors on."""
        return self._dense is not None

    @property
    def warm_up_steps(self) -> int:
        """How many batches of a shape run op by op before one is captured."""
        return self._graphs.warm_up_steps

    @warm_up_steps.setter
    def warm_up_steps(self, count: int) -> None:
        self._graphs.warm_up_steps = count

    def forget(self) -> None:
        """Where parameters or the optimizer's state are no longer the tensors that they were."""
        self._graphs.forget()

    def describe(self) -> str:
        """What is replayed, for the start of a run."""
        optimizer = "" if self.updates_dense else ", without the dense optimizer"
        if self.why_not_all:
            return f"the dense part is replayed{optimizer}; tables op by op: {self.why_not_all}"
        return f"all of a step behind the sorted ids is replayed{optimizer}"

    def run_dense(self, inputs: DenseInputs, seed: int) -> Tensor:
        """[1], the loss term; gradients of the vectors are there, of the leaves, too, unless
        ``updates_dense``.
        """
        if self._dense is None:
            raise RuntimeError("a batch of vectors, and graphs that begin at the rows")
        return self._dense.run(inputs, seed)[0]

    def run_all(self, inputs: StepInputs, seed: int) -> tuple[Tensor, Tensor | None]:
        """[1], the loss term, and the norm of the gradients where they are clipped; tables are
        updated. DataError for ids out of range, before anything is changed.
        """
        if self._all is None:
            raise RuntimeError("a batch of rows, and graphs that begin at the vectors")
        self._embeddings.check_late()
        found = self._all.run(inputs, seed)
        return found[0], found[1] if self._clipper is not None else None

    @property
    def _graphs(self) -> Graphs[StepInputs] | Graphs[DenseInputs]:
        graphs = self._all or self._dense
        if graphs is None:
            raise RuntimeError("no graphs")
        return graphs

    def _run_dense(self, inputs: DenseInputs, seed: int) -> tuple[Tensor, ...]:
        term = self._work(inputs, seed)
        if self._optimizer is not None:
            self._optimizer.step()
        return (term,)

    def _run_all(self, inputs: StepInputs, seed: int) -> tuple[Tensor, ...]:
        rows, batch = self._embeddings, inputs.rows
        rows.read(batch)
        found = [self._work(replace(inputs.dense, vectors=rows.gather_outputs(batch)), seed)]
        rows.send_grads(batch)
        rows.receive_grads(batch)
        if self._clipper is not None:
            found.append(self._clipper.clip())
        rows.apply(inputs.step)
        if self._optimizer is not None:
            self._optimizer.step()
        return tuple(found)

    def _write_numbers(self, inputs: StepInputs) -> None:
        self._embeddings.write_numbers(inputs.step)


# What ``run_all`` has made of a batch, and of a step.
OF_BATCH = frozenset({GATHER_OUTPUTS.name, SEND_GRADS.name, RECEIVE_GRADS.name})
OF_STEP = frozenset({CLIP.name, UPDATE.name})
