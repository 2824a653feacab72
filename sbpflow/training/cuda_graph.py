"""Stretches of a training step as one CUDA graph per shape of a batch, replayed.

The first steps of a shape run as ever, on the stream that captures later: what is made once (an
optimizer's state, workspaces of libraries, compiled code) is made there. The next one is captured,
which computes nothing, and replayed, as all after it are. A graph reads and writes the same memory
each time: a batch is copied into it, gradients and the loss are read from it.
``graphed_step`` says which stretches there are.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor

from sbpflow.errors import ConfigError
from sbpflow.runtime.random.draws import KeptDraws
from sbpflow.runtime.ranks.world import World

WARM_UP_STEPS = 3  # a torch module's buffers are looked at in as many


class Inputs(Protocol):
    """What a stretch takes of a batch."""

    def tensors(self) -> list[Tensor | None]:
        """All that is in memory of the device, in one order."""
        ...

    def new_like(self) -> Self:
        """Memory for another batch of these sizes."""
        ...

    def take_gradients(self, of: Self) -> None:
        """Have the gradients that the stretch left with ``of``."""
        ...


InputsT = TypeVar("InputsT", bound=Inputs)


@dataclass(slots=True, kw_only=True)
class DenseInputs:
    """What the dense part takes of a batch of ``batch_size`` rows, of which these are this rank's.

    ``vectors`` are the embeddings' outputs by name, leaves that require a gradient.
    """

    batch_size: int
    labels: Tensor
    dense: Tensor
    weights: Tensor | None
    vectors: Mapping[str, Tensor]

    def tensors(self) -> list[Tensor | None]:
        return [self.labels, self.dense, self.weights, *self.vectors.values()]

    def new_like(self) -> "DenseInputs":
        return DenseInputs(
            batch_size=self.batch_size,
            labels=torch.empty_like(self.labels),
            dense=torch.empty_like(self.dense),
            weights=None if self.weights is None else torch.empty_like(self.weights),
            vectors={
                name: torch.empty_like(vectors).requires_grad_()
                for name, vectors in self.vectors.items()
            },
        )

    def take_gradients(self, of: "DenseInputs") -> None:
        for name, vectors in self.vectors.items():
            vectors.grad = of.vectors[name].grad


@dataclass(frozen=True, slots=True)
class _Captured(Generic[InputsT]):
    graph: torch.cuda.CUDAGraph
    inputs: InputsT
    gradients: list[Tensor | None]  # of the leaves
    found: tuple[Tensor, ...]


class Graphs(Generic[InputsT]):
    """Runs ``work``, (inputs, seed of what is random) -> what it finds.

    ``leaves`` are what has a gradient afterwards, beside the inputs. ``prepare`` puts where the
    device finds them the numbers of the host that ``work`` takes, before each replay.
    """

    def __init__(
        self,
        work: Callable[[InputsT, int], tuple[Tensor, ...]],
        leaves: Sequence[Tensor],
        world: World,
        *,
        prepare: Callable[[InputsT], object] | None = None,
    ) -> None:
        self._work, self._prepare, self._leaves = work, prepare, leaves
        self.warm_up_steps = WARM_UP_STEPS
        self._world = world
        self._stream = torch.cuda.Stream(world.device)
        self._draws = KeptDraws()
        self._captured: dict[object, _Captured[InputsT]] = {}
        self._runs: dict[object, int] = {}

    def run(self, inputs: InputsT, seed: int) -> tuple[Tensor, ...]:
        """What ``work`` finds; gradients of leaves and inputs are there, as after ``work``.

        Gradients are good until the next run. ConfigError if the region cannot be captured.
        """
        shapes = _shapes(inputs)
        runs = self._runs[shapes] = self._runs.get(shapes, 0) + 1
        if runs <= self.warm_up_steps:
            return self._beside(inputs, seed)
        if shapes not in self._captured:
            static = inputs.new_like()
            _copy(static, inputs)  # so that no address is out of range
            self._captured[shapes] = self._capture(static, seed)
        return self._replay(self._captured[shapes], inputs, seed)

    def forget(self) -> None:
        """Where parameters or the optimizer's state are no longer the tensors that they were."""
        self._captured, self._runs = {}, {}

    def _beside(self, inputs: InputsT, seed: int) -> tuple[Tensor, ...]:
        """Op by op, on the capturing stream; the current one waits for it."""
        current = torch.cuda.current_stream(self._world.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream), self._drawing():
            found = self._work(inputs, seed)
        current.wait_stream(self._stream)
        return found

    def _capture(self, inputs: InputsT, seed: int) -> _Captured[InputsT]:
        graph = torch.cuda.CUDAGraph()
        for leaf in self._leaves:
            leaf.grad = None
        try:
            with (
                self._drawing(capturing=True),
                # thread_local: NCCL's own threads ask for their events meanwhile.
                torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"),
            ):
                found = self._work(inputs, seed)
        except RuntimeError as error:
            raise ConfigError(
                "parallel.cuda_graph: true, but the dense part cannot be captured: "
                f"{_first_line(error)}; a captured model neither waits for the device "
                "(item(), a mask as an index, print) nor brings tensors from the host; change "
                "that, or use parallel.cuda_graph=false"
            ) from error
        return _Captured(graph, inputs, [leaf.grad for leaf in self._leaves], found)

    def _replay(
        self, captured: _Captured[InputsT], inputs: InputsT, seed: int
    ) -> tuple[Tensor, ...]:
        _copy(captured.inputs, inputs)
        if self._prepare is not None:
            self._prepare(inputs)
        with self._draws.replaying(self._world.device, seed):
            captured.graph.replay()
        for leaf, gradient in zip(self._leaves, captured.gradients, strict=True):
            leaf.grad = gradient
        inputs.take_gradients(captured.inputs)
        return tuple(one.clone() for one in captured.found)  # the next replay has others

    @contextmanager
    def _drawing(self, *, capturing: bool = False) -> Generator[None]:
        """Random numbers of the region come from keys that stay where they are."""
        world, before = self._world, self._world.draws
        world.draws, self._draws.capturing = self._draws, capturing
        try:
            yield
        finally:
            world.draws, self._draws.capturing = before, False


def _copy(target: Inputs, source: Inputs) -> None:
    """All in one call: torch has it under this name alone."""
    into = [one for one in target.tensors() if one is not None]
    given = [one for one in source.tensors() if one is not None]
    with torch.no_grad():
        torch._foreach_copy_(into, given)  # pyright: ignore[reportPrivateUsage]


def _shapes(inputs: Inputs) -> tuple[object, ...]:
    """What a graph is captured for."""
    return tuple(one if one is None else (one.shape, one.dtype) for one in inputs.tensors())


def _first_line(error: BaseException) -> str:
    """Of what went wrong at first: the end of a broken capture raises, too, and says less."""
    while isinstance(error.__context__, RuntimeError):
        error = error.__context__
    return str(error).splitlines()[0]
