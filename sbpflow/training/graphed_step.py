"""Runs a training step as a CUDA graph: everything after the id exchange, or only the dense part.

On one rank, all work after sorting the ids uses fixed sizes and stays on the device: reading rows,
forward, backward, clipping, table updates, and the dense optimizer's step if torch can capture it.
If ranks exchange vectors, or a table cannot be captured (``embedding/captured.py``), only the dense
part is captured.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sbpflow.embedding.collection import EmbeddingCollection
from sbpflow.runtime.ranks.world import World
from sbpflow.training.clipping import Clipper
from sbpflow.training.cuda_graph import Graphs, StepInputs
from sbpflow.training.step_schedule import CLIP, GATHER_OUTPUTS, RECEIVE_GRADS, SEND_GRADS, UPDATE

# A function of inputs and a random seed that returns this rank's loss term [1] and sets the
# gradients of the leaf tensors.
DensePass = Callable[[StepInputs, int], Tensor]


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
        if not self.why_not_all:
            embeddings.keep_numbers()
        self._graphs = Graphs(self._run, leaves, world, prepare=self._write_numbers)

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
        return not self.why_not_all and not self._embeddings.is_watched

    @property
    def takes_vectors(self) -> bool:
        """Return whether graphs start from the embedding vectors."""
        return bool(self.why_not_all)

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

    def run(self, inputs: StepInputs, seed: int) -> tuple[Tensor, Tensor | None]:
        """Run the graph that starts at the rows or, without ``inputs.rows``, at the vectors.

        Returns the loss term [1] and, if the graph clips, the gradient norm. A graph that starts at
        the vectors sets their gradients and, unless ``updates_dense``, those of the leaves. Raises
        DataError for out-of-range ids before anything changes.
        """
        if inputs.rows is not None:
            self._embeddings.check_late()
        term, *norm = self._graphs.run(inputs, seed)
        return term, norm[0] if norm else None

    def _run(self, inputs: StepInputs, seed: int) -> tuple[Tensor, ...]:
        tables, rows = self._embeddings, inputs.rows
        if rows is None:
            results = [self._work(inputs, seed)]
        else:
            tables.read(rows)
            results = [self._work(replace(inputs, vectors=tables.gather_outputs(rows)), seed)]
            tables.send_grads(rows)
            tables.receive_grads(rows)
            if self._clipper is not None:
                results.append(self._clipper.clip())
            tables.apply(inputs.step)
        if self._optimizer is not None:
            self._optimizer.step()
        return tuple(results)

    def _write_numbers(self, inputs: StepInputs) -> None:
        if inputs.rows is not None:
            self._embeddings.write_numbers(inputs.step)


# The moves of a batch and of a step that the graph of a whole step includes.
OF_BATCH = frozenset({GATHER_OUTPUTS.name, SEND_GRADS.name, RECEIVE_GRADS.name})
OF_STEP = frozenset({CLIP.name, UPDATE.name})
