"""Runs a training step as a CUDA graph: everything after the id exchange, or only the dense part.

On one rank, all work after sorting the ids uses fixed sizes and stays on the device: reading rows,
forward, backward, clipping, table updates, and the dense optimizer's step if torch can capture it.
If ranks exchange vectors, or a table cannot be captured (``embedding/captured.py``), only the dense
part is captured.
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

# A function of inputs and a random seed that returns this rank's loss term [1] and sets the
# gradients of the leaf tensors.
DensePass = Callable[[DenseInputs, int], Tensor]


@dataclass(slots=True, kw_only=True)
class StepInputs:
    """A batch whose ids have arrived (``EmbeddingCollection.arrive``); ``dense`` has no vectors
    yet. ``step`` is the job's step number, counted from 1.
    """

    dense: DenseInputs
    rows: EmbeddingsInFlight
    step: int

    def tensors(self) -> list[Tensor | None]:
        return [*self.dense.tensors(), *self.rows.lookup_tensors()]

    def new_like(self) -> "StepInputs":
        return StepInputs(dense=self.dense.new_like(), rows=self.rows.new_like(), step=self.step)

    def take_gradients(self, source: "StepInputs") -> None:
        """Do nothing, because the step has already applied the gradients of the vectors to the
        rows.
        """


class GraphedStep:
    """Runs batches as CUDA graphs; ``work`` computes the dense forward, loss and backward.

    ``optimizer`` is the optimizer of the dense part, and ``leaves`` are its parameters.
    """

    def __init__(
        self,
        work: DensePass,
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
        """Return whether the graph includes the step of the dense optimizer."""
        return self._optimizer is not None

    @property
    def takes_rows(self) -> bool:
        """Return whether the graph of the next batch starts by reading rows.

        While a before-update hook is installed, the result is False, because graphs cannot call
        hooks.
        """
        return self._all is not None and not self._embeddings.is_watched

    @property
    def takes_vectors(self) -> bool:
        """Return whether graphs start from the embedding vectors."""
        return self._dense is not None

    @property
    def warm_up_steps(self) -> int:
        """Return the number of batches of the same shape that run op by op before a capture."""
        return self._graphs.warm_up_steps

    @warm_up_steps.setter
    def warm_up_steps(self, count: int) -> None:
        self._graphs.warm_up_steps = count

    def forget(self) -> None:
        """Drop all graphs; call this method after replacing the tensors of parameters or optimizer
        state.
        """
        self._graphs.forget()

    def describe(self) -> str:
        """Return a log line that says which part of a step is replayed."""
        optimizer = "" if self.updates_dense else ", without the dense optimizer"
        if self.why_not_all:
            return (
                f"the dense part is replayed{optimizer}; the tables run op by op: "
                f"{self.why_not_all}"
            )
        return f"the whole step after sorting the ids is replayed{optimizer}"

    def run_dense(self, inputs: DenseInputs, seed: int) -> Tensor:
        """Return the loss term [1], and set the gradients of the vectors and, unless
        ``updates_dense``, of the leaves.
        """
        if self._dense is None:
            raise RuntimeError("run_dense needs graphs that start at the vectors")
        return self._dense.run(inputs, seed)[0]

    def run_all(self, inputs: StepInputs, seed: int) -> tuple[Tensor, Tensor | None]:
        """Run a whole step; return the loss term [1], and the gradient norm if the step clips.

        Raises DataError for out-of-range ids before anything changes.
        """
        if self._all is None:
            raise RuntimeError("run_all needs graphs that start at the rows")
        self._embeddings.check_late()
        results = self._all.run(inputs, seed)
        return results[0], results[1] if self._clipper is not None else None

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
        results = [self._work(replace(inputs.dense, vectors=rows.gather_outputs(batch)), seed)]
        rows.send_grads(batch)
        rows.receive_grads(batch)
        if self._clipper is not None:
            results.append(self._clipper.clip())
        rows.apply(inputs.step)
        if self._optimizer is not None:
            self._optimizer.step()
        return tuple(results)

    def _write_numbers(self, inputs: StepInputs) -> None:
        self._embeddings.write_numbers(inputs.step)


# The moves of a batch and of a step that ``run_all`` includes.
OF_BATCH = frozenset({GATHER_OUTPUTS.name, SEND_GRADS.name, RECEIVE_GRADS.name})
OF_STEP = frozenset({CLIP.name, UPDATE.name})
