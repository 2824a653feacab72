"""Runs plans on the ranks of a world, with the engine's own trainer, and times their steps."""

import math
import random
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn

from sbpflow.boxing.agreement import gather_values
from sbpflow.boxing.executor import Boxing
from sbpflow.embedding.collection import EmbeddingCollection
from sbpflow.planner.calibration.design import Rows, Sample, draw_batches
from sbpflow.planner.task import Choice, Task, embedding_plan
from sbpflow.run.model.torch_model import TorchModel
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.sbp import Broadcast
from sbpflow.training.step_schedule import OVERLAPPED
from sbpflow.training.trainer import Trainer

# In a turn, a plan with slow steps measures fewer steps: at most this many ms, or one step.
TURN_MS = 500.0


class _Layers(nn.Module):
    """The dense part: hidden layers over the concatenated outputs, followed by one output."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(widths):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Linear(widths[-1], 1))

    def forward(self, vectors: Mapping[str, Tensor], dense: Tensor) -> Tensor:
        return self.layers(torch.cat([*vectors.values(), dense], 1))


def make_trainer(
    boxing: Boxing,
    task: Task,
    plan: Mapping[str, Choice],
    hidden: Sequence[int] = (),
) -> Trainer:
    """Build a trainer for this plan and a dense part with ``hidden`` layers, on every rank."""
    tables = EmbeddingCollection(embedding_plan(task, plan), boxing, seed=1)
    width = sum(output.width for output in task.outputs)
    spec = TorchModel(outputs=task.outputs, make=lambda: _Layers((width + 1, *hidden)))
    copied = {name: Layout(task.world, (Broadcast(),)) for name in spec.parameters}
    model = spec.build(copied, boxing, seed=2, dtype=task.dtype)
    parts = [parameter.part for parameter in model.parameters.values()]
    optimizer = torch.optim.SGD(parts, lr=0.01)
    return Trainer(model, tables, optimizer, boxing, dtype=task.dtype, seed=3, schedule=OVERLAPPED)


class _Turn:
    """One plan's trainer on this rank."""

    def __init__(
        self, boxing: Boxing, sample: Sample, plan: Mapping[str, Choice], batches: Sequence[Rows]
    ) -> None:
        self._boxing, self._batches = boxing, batches
        self._trainer = make_trainer(boxing, sample.task, plan, sample.hidden)
        self.usual_ms = min(self.run(2))

    def run(self, steps: int) -> list[float]:
        """Run ``steps + 2`` steps; return the ms of each except the first and the last. Steps send
        the ids of the next batch in advance; the first step receives none in advance, and the last
        sends none.
        """
        self._boxing.world.barrier()
        times: list[float] = []
        batches = [self._batches[number % len(self._batches)] for number in range(steps + 2)]
        losses = self._trainer.train_on(batches)
        for _ in batches:
            start = time.perf_counter()
            loss = next(losses)
            if loss.device.type == "cuda":
                torch.cuda.synchronize()
            times.append(1e3 * (time.perf_counter() - start))
        return times[1:-1]


def measure_in_turns(
    boxing: Boxing,
    sample: Sample,
    plans: Sequence[Mapping[str, Choice]],
    *,
    rounds: int = 3,
    steps: int = 6,
    seconds: float = math.inf,
) -> list[list[float]]:
    """Return the step time of each plan in each round, in ms, as [plans][rounds]. A turn
    measures at most ``steps`` steps. No round starts after ``seconds``, except the first.

    The plans of a task alternate, so drift over minutes affects all of them equally. Each round
    uses a different order, because the state of the caches depends on the previous plan. A step's
    time is that of the slowest rank, and a round's time is the lower quartile of its steps. Every
    rank must call this function; all ranks return the same result.
    """
    start = time.monotonic()
    batches = draw_batches(sample, boxing.world.rank, 2, boxing.world.device)
    turns = [_Turn(boxing, sample, plan, batches) for plan in plans]
    usual_ms = np.max(gather_values(boxing, [turn.usual_ms for turn in turns]), axis=0)
    num_steps = np.clip(TURN_MS / usual_ms, 1, steps).astype(int).tolist()
    times: list[list[list[float]]] = [[] for _ in turns]  # [plan][round][step]
    for number in range(rounds):
        if number and gather_values(boxing, time.monotonic() - start > seconds)[0]:
            break
        for place in random.Random(number).sample(range(len(turns)), len(turns)):
            times[place].append(turns[place].run(num_steps[place]))
    slowest = [np.max(ranks, axis=0) for ranks in zip(*gather_values(boxing, times), strict=True)]
    return [np.quantile(ms, 0.25, axis=-1, method="lower").round(4).tolist() for ms in slowest]
