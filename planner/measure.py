"""One plan on the ranks of a world, with the engine's own trainer: what each move takes.

Moves are timed by a watch of the trainer's moves, transfers where the engine waits for them.
In serial steps every move begins on all ranks at once, so that a rank's waits are transfers and not
the work of others; steps with overlap are timed as a whole.
"""

import json
import resource
import statistics
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor, nn

from planner.ranks import gather_texts
from planner.simulate import MOVES, PHASES, TRANSFERS
from planner.task import Choice, Task, embedding_plan
from sbpflow.boxing.executor import Boxing
from sbpflow.embedding.collection import EmbeddingCollection
from sbpflow.embedding.ids.batch_ids import BatchIds
from sbpflow.embedding.storage.choose import KernelChoice
from sbpflow.run.torch_model import TorchModel
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.sbp import Broadcast
from sbpflow.training.move_times import MoveTimes
from sbpflow.training.step_schedule import OVERLAPPED, SERIAL
from sbpflow.training.trainer import Trainer

T = TypeVar("T")
HIDDEN_WIDTH = 16  # of the dense part that stands behind the tables
_FIRST_WAITS = {move.name: move.starts for move in (*SERIAL.each_batch, *SERIAL.each_step)}


@dataclass(slots=True)
class Rows:
    """This rank's rows of a batch, as ``Trainer.step`` takes them."""

    labels: Tensor
    dense: Tensor
    ids: Tensor | BatchIds
    num_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """``phases`` [rank][phase] in ms, of serial steps; ``step_ms`` with overlap, over all ranks.

    ``noise`` is the relative spread of the steps (median absolute deviation). ``peak_bytes`` is
    what each rank's process grew by, at its highest, while the plan was built and ran.
    """

    phases: list[list[float]]
    step_ms: float
    serial_ms: float
    noise: float
    peak_bytes: list[int] = field(default_factory=list[int])


class MoveTimer:
    """Watches a trainer's moves: ms of each without its waits, and of the waits, by transfer.

    What one thread of the host computes is told by the clock of that thread, which other programs
    on the machine do not move; waits, several threads and devices by the clock on the wall.
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
        found = finish()
        self._waited += self._now() - start
        self._worked_in_waits += self._worked() - worked
        return found

    @contextmanager
    def move(self, name: str) -> Generator[None]:
        """Around the move ``name``."""
        self._boxing.world.barrier()
        self._waited = self._worked_in_waits = 0.0
        start = self._worked()
        yield
        worked, waited = self._worked() - start - self._worked_in_waits, self._waited
        self.times[name] += 1e3 * worked
        kinds = _FIRST_WAITS[name]
        if kinds:
            self.times[kinds[0]] += 1e3 * waited
        else:
            self.times[name] += 1e3 * waited


class _Layers(nn.Module):
    """The dense part: two layers over the joined outputs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(width, HIDDEN_WIDTH), nn.ReLU(), nn.Linear(HIDDEN_WIDTH, 1)
        )

    def forward(self, vectors: Mapping[str, Tensor], dense: Tensor) -> Tensor:
        return self.layers(torch.cat([*vectors.values(), dense], 1))


def dense_work_of(width: int) -> tuple[float, int]:
    """(multiply-adds per sample, parameters) of the dense part that ``make_trainer`` builds."""
    macs = (width + 1) * HIDDEN_WIDTH + HIDDEN_WIDTH
    return float(macs), macs + HIDDEN_WIDTH + 1


def make_trainer(
    boxing: Boxing,
    task: Task,
    plan: Mapping[str, Choice],
    kernels: Mapping[str, KernelChoice] | None = None,
) -> Trainer:
    """The engine on this plan, with a small dense part; every rank calls it."""
    tables = EmbeddingCollection(
        embedding_plan(task, plan), boxing, seed=1, kernel="auto" if kernels is None else kernels
    )
    width = sum(output.width for output in task.outputs)
    spec = TorchModel(outputs=task.outputs, make=lambda: _Layers(width + 1))
    copied = {name: Layout(task.world, (Broadcast(),)) for name in spec.parameters}
    model = spec.build(copied, boxing, seed=2, dtype=task.dtype)
    parts = [parameter.part for parameter in model.parameters.values()]
    optimizer = torch.optim.SGD(parts, lr=0.01)
    return Trainer(model, tables, optimizer, boxing, dtype=task.dtype, seed=3, schedule=SERIAL)


def measure(
    boxing: Boxing,
    task: Task,
    plan: Mapping[str, Choice],
    batches: Sequence[Rows],
    *,
    repeats: int = 5,
    overlapped: int = 8,
) -> Measured:
    """Serial steps move by move, then steps with overlap; every rank calls it, all get the same."""
    reset_peak()
    before = resident_bytes()
    trainer = make_trainer(boxing, task, plan)
    _steps(trainer, batches, 2)
    serial: list[dict[str, float]] = []
    totals: list[float] = []
    for repeat in range(repeats):
        with MoveTimer(boxing) as timer:
            trainer.move_watch = timer
            start = time.perf_counter()
            trainer.step(batches[repeat % len(batches)])
            totals.append(1e3 * (time.perf_counter() - start))
        serial.append(timer.times)
    trainer.move_watch = MoveTimes()
    trainer.schedule = OVERLAPPED
    times = _timed_steps(boxing, trainer, batches, overlapped)
    peak = peak_bytes() - before
    mine = [[round(one[name], 4) for name in PHASES] for one in serial]
    texts = gather_texts(boxing, json.dumps([mine, totals, times, peak]))
    return _join([json.loads(text) for text in texts])


def _join(ranks: Sequence[tuple[list[list[float]], list[float], list[float], int]]) -> Measured:
    """Lower quartiles over the steps, for what else runs on a machine only adds to them.

    Of a transfer it is what the rank waited that came to it last.
    """
    steps_of = [mine for mine, _, _, _ in ranks]
    for step in zip(*steps_of, strict=True):
        for place in (PHASES.index(name) for name in TRANSFERS):
            least = min(row[place] for row in step)
            for row in step:
                row[place] = least
    phases = [[_lower_quartile(column) for column in zip(*mine, strict=True)] for mine in steps_of]
    steps = [max(one) for one in zip(*(times for _, _, times, _ in ranks), strict=True)]
    median = statistics.median(steps)
    spread = statistics.median(abs(ms - median) for ms in steps) / max(median, 1e-9)
    return Measured(
        phases=phases,
        step_ms=_lower_quartile(steps),
        serial_ms=max(_lower_quartile(totals) for _, totals, _, _ in ranks),
        noise=spread,
        peak_bytes=[peak for _, _, _, peak in ranks],
    )


def _lower_quartile(values: Sequence[float]) -> float:
    return sorted(values)[(len(values) - 1) // 4]


def _steps(trainer: Trainer, batches: Sequence[Rows], count: int) -> None:
    for number in range(count):
        coming = batches[(number + 1) % len(batches)]
        trainer.step(batches[number % len(batches)], coming if number + 1 < count else None)


def _timed_steps(
    boxing: Boxing, trainer: Trainer, batches: Sequence[Rows], count: int
) -> list[float]:
    """ms of each of ``count`` steps with the next batch's ids ahead, after two that warm up."""
    if not count:
        return [0.0]
    times: list[float] = []
    total = count + 2
    for number in range(total):
        coming = batches[(number + 1) % len(batches)]
        if number == 2:
            boxing.world.barrier()
        start = time.perf_counter()
        loss = trainer.step(batches[number % len(batches)], coming if number + 1 < total else None)
        if loss.device.type == "cuda":
            torch.cuda.synchronize()
        if number >= 2:
            times.append(1e3 * (time.perf_counter() - start))
    return times


def resident_bytes() -> int:
    """Of this process now; on systems without /proc, its highest so far."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def reset_peak() -> None:
    """Let the highest resident size start from now, where the system can."""
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")
    except OSError:
        return


def peak_bytes() -> int:
    """Highest resident size since ``reset_peak``, or of the process where it cannot be reset."""
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            found = [line.split()[1] for line in file if line.startswith("VmHWM:")]
        return int(found[0]) * 1024
    except (OSError, IndexError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


__all__ = ["MOVES", "Measured", "MoveTimer", "Rows", "dense_work_of", "make_trainer", "measure"]
