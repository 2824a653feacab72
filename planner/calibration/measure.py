"""Runs plans on the ranks of a world with the engine's own trainer and times every move.

A watch in the trainer times the moves and times transfers where the engine waits for them. Steps
alternate between the plans of a task. In serial steps every move starts on all ranks at once, so a
rank waits only for the transfer and not for other ranks' work. Steps with overlap are timed as a
whole.
"""

import json
import random
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from sbpflow.boxing.agreement import gather_texts
from sbpflow.boxing.executor import Boxing
from sbpflow.embedding.collection import EmbeddingCollection
from sbpflow.embedding.ids.batch_ids import BatchIds
from sbpflow.embedding.storage.choose import KernelChoice
from sbpflow.planner.calibration.process_memory import peak_bytes, reset_peak, resident_bytes
from sbpflow.planner.costs.simulate import PHASES
from sbpflow.planner.task import Choice, DenseWork, Task, dense_work, embedding_plan
from sbpflow.run.model.torch_model import TorchModel
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.sbp import Broadcast
from sbpflow.training.move_times import MoveTimes
from sbpflow.training.step_schedule import LOOKUP, OVERLAPPED, RECEIVE_IDS, SERIAL
from sbpflow.training.trainer import Trainer

T = TypeVar("T")
HIDDEN = (16,)  # widths of the dense part's hidden layers
_FIRST_WAITS = {move.name: move.starts for move in (*SERIAL.each_batch, *SERIAL.each_step)}


@dataclass(slots=True)
class Rows:
    """Contains a rank's rows of a batch, as ``Trainer.step`` accepts them."""

    labels: Tensor
    dense: Tensor
    ids: Tensor | BatchIds
    batch_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Stores ``phases`` [rank][phase] of serial steps and ``step_ms`` of overlapped steps, in ms.

    ``rounds_ms`` contains the overlapped steps of each round. ``peak_bytes`` is the peak memory
    growth of each rank's process while the plan is built and runs its first steps.
    """

    phases: list[list[float]]
    step_ms: float
    rounds_ms: list[float]
    peak_bytes: list[int]


def from_all_ranks(boxing: Boxing, value: object) -> list[Any]:
    """Return the JSON values of all ranks, in rank order; every rank calls this function."""
    return [json.loads(text) for text in gather_texts(boxing, json.dumps(value))]


def from_first_rank(boxing: Boxing, value: object) -> Any:  # noqa: ANN401
    """Return rank 0's JSON value on every rank; every rank calls this function."""
    return from_all_ranks(boxing, value)[0]


class MoveTimer:
    """Times a trainer's moves: the ms of each move without its waits, and its waits by transfer.

    Work on a single host thread is timed by that thread's CPU clock, because other programs on the
    machine do not affect that clock. Waits, work on several threads and work on devices are timed
    by the wall clock.
    """

    def __init__(self, boxing: Boxing) -> None:
        self._boxing = boxing
        on_host = boxing.world.device.type == "cpu" and torch.get_num_threads() == 1
        self._worked = time.thread_time if on_host else self._now
        self._waited = 0.0
        self._worked_in_waits = 0.0
        self.times: dict[str, float] = dict.fromkeys(PHASES, 0.0)

    def __enter__(self) -> "MoveTimer":
        self._boxing.world.on_wait = self._wait
        return self

    def __exit__(self, *error: object) -> None:
        self._boxing.world.on_wait = None

    def _now(self) -> float:
        if self._boxing.world.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def _wait(self, finish: Callable[[], T]) -> T:
        start, worked = self._now(), self._worked()
        result = finish()
        self._waited += self._now() - start
        self._worked_in_waits += self._worked() - worked
        return result

    @contextmanager
    def move(self, name: str) -> Generator[None]:
        """Return a context manager that times the move ``name``."""
        self._boxing.world.barrier()
        self._waited = self._worked_in_waits = 0.0
        start = self._worked()
        yield
        worked, waited = self._worked() - start - self._worked_in_waits, self._waited
        phase = LOOKUP.name if name == RECEIVE_IDS.name else name
        self.times[phase] += 1e3 * worked
        kinds = _FIRST_WAITS[name]
        self.times[kinds[0] if kinds else phase] += 1e3 * waited


class _Layers(nn.Module):
    """Implements the dense part: hidden layers over the joined outputs, then one output."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(widths):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Linear(widths[-1], 1))

    def forward(self, vectors: Mapping[str, Tensor], dense: Tensor) -> Tensor:
        return self.layers(torch.cat([*vectors.values(), dense], 1))


def dense_work_of(width: int, hidden: Sequence[int] = HIDDEN) -> DenseWork:
    """Return the work of the dense part that ``make_trainer`` builds for outputs of this width."""
    return dense_work([(a, b) for a, b in pairwise((width + 1, *hidden, 1))], biases=True)


def make_trainer(
    boxing: Boxing,
    task: Task,
    plan: Mapping[str, Choice],
    kernels: Mapping[str, KernelChoice] | None = None,
    hidden: Sequence[int] = HIDDEN,
) -> Trainer:
    """Build a trainer for this plan, with a small dense part; every rank calls this function."""
    tables = EmbeddingCollection(
        embedding_plan(task, plan), boxing, seed=1, kernel="auto" if kernels is None else kernels
    )
    width = sum(output.width for output in task.outputs)
    spec = TorchModel(outputs=task.outputs, make=lambda: _Layers((width + 1, *hidden)))
    copied = {name: Layout(task.world, (Broadcast(),)) for name in spec.parameters}
    model = spec.build(copied, boxing, seed=2, dtype=task.dtype)
    parts = [parameter.part for parameter in model.parameters.values()]
    optimizer = torch.optim.SGD(parts, lr=0.01)
    return Trainer(model, tables, optimizer, boxing, dtype=task.dtype, seed=3, schedule=SERIAL)


def time_moves(
    boxing: Boxing, trainer: Trainer, batches: Sequence[Rows], steps: int
) -> list[list[float]]:
    """Return [steps][phase] ms of this rank in serial steps, after one untimed step.

    The caches are not cleared, so they depend on the previous work. Afterwards the trainer uses
    overlap.
    """
    trainer.schedule = SERIAL
    trainer.step(batches[0])
    times: list[list[float]] = []
    for number in range(steps):
        with MoveTimer(boxing) as timer:
            trainer.move_watch = timer
            trainer.step(batches[number % len(batches)])
        times.append([round(timer.times[name], 4) for name in PHASES])
    trainer.move_watch = MoveTimes()
    trainer.schedule = OVERLAPPED
    return times


class _Turn:
    """Stores one plan's trainer on this rank and the times of its steps."""

    def __init__(
        self, boxing: Boxing, task: Task, plan: Mapping[str, Choice], batches: Sequence[Rows]
    ) -> None:
        reset_peak()
        before = resident_bytes()
        self._boxing, self._batches = boxing, batches
        self._trainer = make_trainer(boxing, task, plan)
        self._trainer.schedule = OVERLAPPED
        self._steps(2)
        self.peak_bytes = peak_bytes() - before
        self.serial: list[list[float]] = []  # [step][phase]
        self.overlapped: list[list[float]] = []  # [round][step]

    def run(self, serial: int, overlapped: int) -> None:
        """Run serial steps, timed move by move, then steps that send the next batch's ids ahead."""
        if serial:
            self.serial += time_moves(self._boxing, self._trainer, self._batches, serial)
        self._boxing.world.barrier()
        # The first step has no ids ahead, and the last step sends no ids; neither step is typical.
        self.overlapped.append(self._steps(overlapped + 2)[1:-1])

    def _steps(self, count: int) -> list[float]:
        """Return the ms of each step; all steps but the last send the next batch's ids ahead."""
        times: list[float] = []
        batches = [self._batches[number % len(self._batches)] for number in range(count)]
        losses = self._trainer.train_on(batches)
        for _ in range(count):
            start = time.perf_counter()
            loss = next(losses)
            if loss.device.type == "cuda":
                torch.cuda.synchronize()
            times.append(1e3 * (time.perf_counter() - start))
        return times


def measure_in_turns(
    boxing: Boxing,
    task: Task,
    plans: Sequence[Mapping[str, Choice]],
    batches: Sequence[Rows],
    *,
    rounds: int = 3,
    serial: int = 2,
    overlapped: int = 6,
) -> list[Measured]:
    """Measure plans of one task together: each round runs ``serial`` steps of each plan move by
    move and ``overlapped`` steps as in training.

    Drift over minutes affects all plans of a task equally, so the steps of a round are comparable.
    Each round has its own order, because a plan's caches depend on the previous plan. Every rank
    calls this function and gets the same result.
    """
    turns = [_Turn(boxing, task, plan, batches) for plan in plans]
    for number in range(rounds):
        for turn in random.Random(number).sample(turns, len(turns)):
            turn.run(serial, overlapped)
    mine = [[turn.serial, turn.overlapped, turn.peak_bytes] for turn in turns]
    return [_join(of_plan) for of_plan in zip(*from_all_ranks(boxing, mine), strict=True)]


def _join(ranks: Sequence[tuple[list[list[float]], list[list[float]], int]]) -> Measured:
    """Combine one plan's times: lower quartiles over its steps, each as long as on its slowest
    rank.

    Lower quartiles are used because other programs on the machine only lengthen the times.
    """
    phases = phases_of([serial for serial, _, _ in ranks])
    rounds = [
        [max(times) for times in zip(*of_round, strict=True)]
        for of_round in zip(*(overlapped for _, overlapped, _ in ranks), strict=True)
    ]
    return Measured(
        phases=phases,
        step_ms=lower_quartile([ms for times in rounds for ms in times]),
        rounds_ms=[round(lower_quartile(times), 4) for times in rounds],
        peak_bytes=[peak for _, _, peak in ranks],
    )


def phases_of(ranks: Sequence[list[list[float]]]) -> list[list[float]]:
    """Return [rank][phase] ms from ``time_moves`` of all ranks, as lower quartiles over the steps.

    A transfer lasts from the time when the last rank has finished its part of the move until the
    last rank has received its data: a sender may continue while its bytes are still in flight.
    """
    for step in zip(*ranks, strict=True):
        for move, kinds in _FIRST_WAITS.items():
            if kinds:
                work, wait = PHASES.index(move), PHASES.index(kinds[0])
                through = through_ms([(row[work], row[wait]) for row in step])
                for row in step:
                    row[wait] = through
    return [[lower_quartile(column) for column in zip(*steps, strict=True)] for steps in ranks]


def through_ms(ranks: Sequence[tuple[float, float]]) -> float:
    """Return a transfer's ms from all ranks' (work, waiting) in ms; the ranks start together."""
    whole = max(work + wait for work, wait in ranks)
    return round(whole - max(work for work, _ in ranks), 4)


def lower_quartile(values: Sequence[float]) -> float:
    """Return the lower quartile of measured times, which other programs on the machine can only
    lengthen.
    """
    return sorted(values)[(len(values) - 1) // 4]
