"""How long the moves of a step take on this rank, and a trace of some steps with what they sent.

Times are the host's: on CUDA a move may return before the device has done its work; the trace has
the device's own events beside them.
"""

import json
import logging
import time
from collections import defaultdict
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from sbpflow.runtime.files.json_file import JsonError, object_of, read_json
from sbpflow.runtime.files.run_folder import TRACE_FILE
from sbpflow.runtime.ranks.world import World

LOG = logging.getLogger(__name__)


class MoveWatch(Protocol):
    """Told of every move of a step while it is made."""

    def move(self, name: str) -> AbstractContextManager[None]:
        """Around the move ``name``."""
        ...


class MoveTimes:
    """Adds up the seconds of each move."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def move(self, name: str) -> Generator[None]:
        """Around the move ``name``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] += time.perf_counter() - start

    def take(self) -> dict[str, float]:
        """Seconds by move since the last call."""
        taken, self._seconds = dict(self._seconds), defaultdict(float)
        return taken


@dataclass(slots=True)
class _Sent:
    """What a move of a traced step sent: (step of the plan, collective, channel, bytes)."""

    move: str
    step: int
    transfers: list[dict[str, Any]]


class StepProfiler:
    """Traces steps ``first`` to ``last`` of a run into ``folder``, in Chrome's format, per rank.

    The moves are events "MOVE" of category user_annotation, over the events of torch's profiler;
    their arguments are the step and, of every transfer that began in them, the bytes that this rank
    sent by the log of communication. Load the file in chrome://tracing or ui.perfetto.dev.
    """

    def __init__(self, first: int, last: int, folder: Path, world: World) -> None:
        self.first, self.last = first, last
        self.path = folder / TRACE_FILE.format(rank=world.rank)
        self._world = world
        self._step = 0
        self._sent: list[_Sent] = []
        self._profile: profile | None = None
        self._logged = False

    @staticmethod
    def of(steps: tuple[int, int] | None, folder: Path, world: World) -> "StepProfiler | None":
        """As ``train.profile`` says."""
        return None if steps is None else StepProfiler(*steps, folder, world)

    @contextmanager
    def step(self, step: int, times: MoveWatch) -> Generator[MoveWatch]:
        """Around training step ``step``; gives what to tell of its moves in place of ``times``."""
        if not self.first <= step <= self.last:
            yield times
            return
        if self._profile is None:
            self._start()
        self._step = step
        with record_function(f"step {step}"):
            yield _Traced(self, times)
        if step == self.last:
            self.close()

    def close(self) -> None:
        """Write what was traced, also of a run that ended before ``last``."""
        running, self._profile = self._profile, None
        if running is None:
            return
        running.stop()
        self._world.log.enabled = self._logged
        self.path.parent.mkdir(parents=True, exist_ok=True)
        running.export_chrome_trace(str(self.path))
        try:
            trace = object_of(read_json(self.path), str(self.path))
        except JsonError as error:  # of a size or form that torch never wrote before
            LOG.warning("%s; the trace stays without what its moves sent", error)
            return
        _add_sent(trace["traceEvents"], self._sent)
        trace["rank"], trace["world_size"] = self._world.rank, self._world.size
        self.path.write_text(json.dumps(trace), encoding="utf-8")

    def _start(self) -> None:
        self._logged, self._world.log.enabled = self._world.log.enabled, True
        kinds = [ProfilerActivity.CPU]
        if self._world.device.type == "cuda":
            kinds.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=kinds)
        self._profile.start()

    @contextmanager
    def traced(self, name: str) -> Generator[None]:
        """Around the move ``name`` of the step under way."""
        records = self._world.log.records
        before = len(records)
        with record_function(name):
            yield
        sent = [
            {
                "id": one.step_id,
                "collective": one.collective,
                "channel": one.channel,
                "bytes_sent": one.bytes_sent,
            }
            for one in records[before:]
        ]
        self._sent.append(_Sent(name, self._step, sent))


class _Traced:
    """Tells a profiler and a clock of the same moves."""

    def __init__(self, profiler: StepProfiler, times: MoveWatch) -> None:
        self._profiler, self._times = profiler, times

    @contextmanager
    def move(self, name: str) -> Generator[None]:
        with self._times.move(name), self._profiler.traced(name):
            yield


def _add_sent(events: list[dict[str, Any]], sent: list[_Sent]) -> None:
    """Write each move's step and transfers into its event: both are in the order of time."""
    by_name: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "user_annotation":
            by_name[event["name"]].append(event)
    for found in by_name.values():
        found.sort(key=lambda event: event["ts"])
    taken: Mapping[str, Any] = {name: iter(found) for name, found in by_name.items()}
    for one in sent:
        event = next(taken[one.move])
        total = sum(transfer["bytes_sent"] for transfer in one.transfers)
        event.setdefault("args", {}).update(
            {"step": one.step, "bytes_sent": total, "transfers": one.transfers}
        )


def peak_memory_of(device: torch.device) -> int:
    """Most memory that this process has held so far: of the device, or of the host for a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource
    import sys

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
