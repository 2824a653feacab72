"""Captures a region of a training step as one CUDA graph per batch shape, and replays it.

The first steps with a batch shape run op by op on the capture stream, so that optimizer state,
library workspaces and compiled code are created there. The next step is captured, which does not
execute it, and then replayed. All later steps are only replayed. Every replay uses the same memory:
each batch is copied into this memory, and gradients and the loss are read from it. ``graphed_step``
defines the regions.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sbpflow.embedding.in_flight import EmbeddingsInFlight
from sbpflow.errors import ConfigError
from sbpflow.runtime.random.draws import KeptDraws
from sbpflow.runtime.ranks.world import World

WARM_UP_STEPS = 3  # must cover the batches whose buffer values a TorchModel compares


@dataclass(slots=True, kw_only=True)
class StepInputs:
    """This rank's inputs to a region, for a global batch of ``batch_size`` rows.

    ``vectors`` maps names to embedding outputs, which are leaf tensors that require gradients. A
    region that starts by reading rows has none, but has ``rows``: a batch whose ids have arrived
    (``EmbeddingCollection.arrive``). ``step`` is the job's step number, counted from 1.
    """

    batch_size: int
    labels: Tensor
    dense: Tensor
    weights: Tensor | None
    vectors: Mapping[str, Tensor]
    rows: EmbeddingsInFlight | None
    step: int

    def tensors(self) -> list[Tensor | None]:
        """Return all tensors in device memory, always in the same order."""
        of_rows = [] if self.rows is None else self.rows.lookup_tensors()
        return [self.labels, self.dense, self.weights, *self.vectors.values(), *of_rows]

    def new_like(self) -> "StepInputs":
        """Return uninitialized inputs with the same shapes."""
        return replace(
            self,
            labels=torch.empty_like(self.labels),
            dense=torch.empty_like(self.dense),
            weights=None if self.weights is None else torch.empty_like(self.weights),
            vectors={
                name: torch.empty_like(vectors).requires_grad_()
                for name, vectors in self.vectors.items()
            },
            rows=None if self.rows is None else self.rows.new_like(),
        )


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    inputs: StepInputs
    gradients: list[Tensor | None]  # gradients of the leaves
    results: tuple[Tensor, ...]


class Graphs:
    """Runs the function ``work(inputs, seed)``, which returns a tuple of results, as CUDA graphs.

    ``leaves`` are the tensors, other than the inputs, that receive gradients. Before each replay,
    ``prepare`` copies the host numbers that ``work`` uses to the device.
    """

    def __init__(
        self,
        work: Callable[[StepInputs, int], tuple[Tensor, ...]],
        leaves: Sequence[Tensor],
        world: World,
        *,
        prepare: Callable[[StepInputs], object],
    ) -> None:
        self._work, self._prepare, self._leaves = work, prepare, leaves
        self.warm_up_steps = WARM_UP_STEPS
        self._world = world
        self._stream = torch.cuda.Stream(world.device)
        self._draws = KeptDraws()
        self._captured: dict[object, _Captured] = {}
        self._runs: dict[object, int] = {}

    def run(self, inputs: StepInputs, seed: int) -> tuple[Tensor, ...]:
        """Return the results of ``work``; set the gradients that ``work`` computes for leaves and
        inputs.

        The gradients are valid until the next run. Raises ConfigError if capturing the region
        fails.
        """
        shapes = tuple(t if t is None else (t.shape, t.dtype) for t in inputs.tensors())
        runs = self._runs[shapes] = self._runs.get(shapes, 0) + 1
        if runs <= self.warm_up_steps:
            return self._run_uncaptured(inputs, seed)
        if shapes not in self._captured:
            static = inputs.new_like()
            # uninitialized memory could contain row addresses that are out of range
            _copy(static, inputs)
            self._captured[shapes] = self._capture(static, seed)
        return self._replay(self._captured[shapes], inputs, seed)

    def forget(self) -> None:
        """Drop all graphs.

        Call this method after replacing the tensors of parameters or optimizer state.
        """
        self._captured, self._runs = {}, {}

    def _run_uncaptured(self, inputs: StepInputs, seed: int) -> tuple[Tensor, ...]:
        """Run ``work`` op by op on the capture stream; the current stream waits for the capture
        stream.
        """
        current = torch.cuda.current_stream(self._world.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream), self._drawing():
            results = self._work(inputs, seed)
        current.wait_stream(self._stream)
        return results

    def _capture(self, inputs: StepInputs, seed: int) -> _Captured:
        graph = torch.cuda.CUDAGraph()
        for leaf in self._leaves:
            leaf.grad = None
        try:
            with (
                self._drawing(capturing=True),
                # The error mode is ``thread_local``, because NCCL's own threads query events during
                # the capture.
                torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"),
            ):
                results = self._work(inputs, seed)
        except RuntimeError as error:
            raise ConfigError(
                "parallel.cuda_graph: true is not possible, because the step cannot be "
                f"captured ({_first_line(error)}); a captured model must not synchronize with the "
                "device (item(), a mask as an index, print) or copy tensors from the host; "
                "change the model, or use parallel.cuda_graph=false"
            ) from error
        return _Captured(graph, inputs, [leaf.grad for leaf in self._leaves], results)

    def _replay(self, captured: _Captured, inputs: StepInputs, seed: int) -> tuple[Tensor, ...]:
        _copy(captured.inputs, inputs)
        self._prepare(inputs)
        with self._draws.replaying(self._world.device, seed):
            captured.graph.replay()
        for leaf, gradient in zip(self._leaves, captured.gradients, strict=True):
            leaf.grad = gradient
        for name, vectors in inputs.vectors.items():
            vectors.grad = captured.inputs.vectors[name].grad
        # Copy the results, because the next replay overwrites them.
        return tuple(result.clone() for result in captured.results)

    @contextmanager
    def _drawing(self, *, capturing: bool = False) -> Generator[None]:
        """Store random keys at a fixed device address, so that every replay reads new keys."""
        world, before = self._world, self._world.draws
        world.draws, self._draws.capturing = self._draws, capturing
        try:
            yield
        finally:
            world.draws, self._draws.capturing = before, False


def _copy(target: StepInputs, source: StepInputs) -> None:
    """Copy all tensors in one call to a private torch function; torch has no public one."""
    targets = [tensor for tensor in target.tensors() if tensor is not None]
    sources = [tensor for tensor in source.tensors() if tensor is not None]
    with torch.no_grad():
        torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateUsage]


def _first_line(error: BaseException) -> str:
    """Return the first line of the original error, because the error from ending a broken capture
    is less specific.
    """
    while isinstance(error.__context__, RuntimeError):
        error = error.__context__
    return str(error).splitlines()[0]
