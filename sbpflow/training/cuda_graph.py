"""The dense part of a training step as one CUDA graph per shape of a batch, replayed.

The first steps of a shape run as ever, on the stream that captures later: what is made once (an
optimizer's state, workspaces of libraries, compiled code) is made there. The next one is captured,
which computes nothing, and replayed, as all after it are. A graph reads and writes the same memory
each time: a batch is copied into it, gradients and the loss are read from it.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from sbpflow.errors import ConfigError
from sbpflow.runtime.draws import KeptDraws
from sbpflow.runtime.world import World

WARM_UP_STEPS = 3  # a torch module's buffers are looked at in as many


@dataclass(slots=True, kw_only=True)
class DenseInputs:
    """What the dense part takes of a batch of ``num_rows`` rows, of which these are this rank's.

    ``vectors`` are the embeddings' outputs by name, leaves that require a gradient.
    """

    num_rows: int
    labels: Tensor
    dense: Tensor
    weights: Tensor | None
    vectors: Mapping[str, Tensor]

    def tensors(self) -> list[Tensor]:
        """All of them, in one order."""
        rest = [] if self.weights is None else [self.weights]
        return [self.labels, self.dense, *rest, *self.vectors.values()]

    def new_like(self) -> "DenseInputs":
        """Memory for such a batch."""
        return DenseInputs(
            num_rows=self.num_rows,
            labels=torch.empty_like(self.labels),
            dense=torch.empty_like(self.dense),
            weights=None if self.weights is None else torch.empty_like(self.weights),
            vectors={
                name: torch.empty_like(vectors).requires_grad_()
                for name, vectors in self.vectors.items()
            },
        )

    def shapes(self) -> tuple[object, ...]:
        """What a graph is captured for."""
        return tuple((one.shape, one.dtype) for one in self.tensors()), self.weights is None


# (inputs, seed of what is random) -> [1], this rank's term of the loss; gradients are on the leaves
Pass = Callable[[DenseInputs, int], Tensor]


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    inputs: DenseInputs
    gradients: list[Tensor | None]  # of the leaves
    term: Tensor


class DenseGraphs:
    """Runs ``work``, forward and backward of the dense part, and then ``update`` if given.

    ``leaves`` are what has a gradient afterwards, beside the vectors.
    """

    def __init__(
        self,
        work: Pass,
        leaves: Sequence[Tensor],
        world: World,
        *,
        update: Callable[[], object] | None = None,
    ) -> None:
        self._work, self._update, self._leaves = work, update, leaves
        self.updates = update is not None
        self.warm_up_steps = WARM_UP_STEPS
        self._world = world
        self._stream = torch.cuda.Stream(world.device)
        self._draws = KeptDraws()
        self._captured: dict[object, _Captured] = {}
        self._runs: dict[object, int] = {}

    def run(self, inputs: DenseInputs, seed: int) -> Tensor:
        """The loss term [1]; gradients of leaves and vectors are there, as after ``work``.

        Gradients are good until the next run. ConfigError if the region cannot be captured.
        """
        shapes = inputs.shapes()
        runs = self._runs[shapes] = self._runs.get(shapes, 0) + 1
        if runs <= self.warm_up_steps:
            return self._beside(inputs, seed)
        if shapes not in self._captured:
            self._captured[shapes] = self._capture(inputs.new_like(), seed)
        return self._replay(self._captured[shapes], inputs, seed)

    def forget(self) -> None:
        """Where parameters or the optimizer's state are no longer the tensors that they were."""
        self._captured, self._runs = {}, {}

    def _all(self, inputs: DenseInputs, seed: int) -> Tensor:
        term = self._work(inputs, seed)
        if self._update is not None:
            self._update()
        return term

    def _beside(self, inputs: DenseInputs, seed: int) -> Tensor:
        """Op by op, on the capturing stream; the current one waits for it."""
        current = torch.cuda.current_stream(self._world.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream), self._drawing():
            term = self._all(inputs, seed)
        current.wait_stream(self._stream)
        return term

    def _capture(self, inputs: DenseInputs, seed: int) -> _Captured:
        graph = torch.cuda.CUDAGraph()
        for leaf in self._leaves:
            leaf.grad = None
        try:
            with (
                self._drawing(capturing=True),
                # thread_local: NCCL's own threads ask for their events meanwhile.
                torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"),
            ):
                term = self._all(inputs, seed)
        except RuntimeError as error:
            raise ConfigError(
                "parallel.cuda_graph: true, but the dense part cannot be captured: "
                f"{_first_line(error)}; a captured model neither waits for the device "
                "(item(), a mask as an index, print) nor brings tensors from the host; change "
                "that, or use parallel.cuda_graph=false"
            ) from error
        return _Captured(graph, inputs, [leaf.grad for leaf in self._leaves], term)

    def _replay(self, captured: _Captured, inputs: DenseInputs, seed: int) -> Tensor:
        static = captured.inputs
        with torch.no_grad():
            for target, source in zip(static.tensors(), inputs.tensors(), strict=True):
                target.copy_(source)
        with self._draws.replaying(self._world.device, seed):
            captured.graph.replay()
        for leaf, gradient in zip(self._leaves, captured.gradients, strict=True):
            leaf.grad = gradient
        for name, vectors in inputs.vectors.items():
            vectors.grad = static.vectors[name].grad
        return captured.term.clone()  # the next replay has another

    @contextmanager
    def _drawing(self, *, capturing: bool = False) -> Generator[None]:
        """Random numbers of the region come from keys that stay where they are."""
        world, before = self._world, self._world.draws
        world.draws, self._draws.capturing = self._draws, capturing
        try:
            yield
        finally:
            world.draws, self._draws.capturing = before, False


def _first_line(error: BaseException) -> str:
    """Of what went wrong at first: the end of a broken capture raises, too, and says less."""
    while isinstance(error.__context__, RuntimeError):
        error = error.__context__
    return str(error).splitlines()[0]
