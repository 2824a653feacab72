"""Measures the times of a step's moves on this rank, and traces some steps with the bytes that they
send. Times are measured on the host; on CUDA, a move may return before the device has finished its
work. The trace also contains events measured on the device.
"""

import json
import logging
import time
from collections import defaultdict, deque
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from sbpflow.runtime.files.json_file import JsonError, object_of, read_json
from sbpflow.runtime.files.run_folder import TRACE_FILE
from sbpflow.runtime.ranks.world import World
from sbpflow.training.step_schedule import MoveWatch

LOG = logging.getLogger(__name__)


class MoveTimes:
    """Adds up the seconds of each move."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)

    def move(self, name: str) -> "_TimedMove":
        """Return a context manager for the move ``name``."""
        return _TimedMove(self._seconds, name)

    def take(self) -> dict[str, float]:
        """Return the seconds of each move since the last call."""
        seconds = dict(self._seconds)
        self._seconds.clear()
        return seconds


class _TimedMove:
    """Adds the seconds of a block to ``seconds[name]``; a generator would take longer itself."""

    __slots__ = ("_name", "_seconds", "_start")

    def __init__(self, seconds: dict[str, float], name: str) -> None:
        self._seconds, self._name = seconds, name

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._seconds[self._name] += time.perf_counter() - self._start


class StepProfiler:
    """Traces steps ``first`` to ``last`` into ``folder``, one file per rank in Chrome's format.

    Each move becomes an event of category ``user_annotation``, above the events of torch's
    profiler. The event's arguments are the step, the transfers that the move started, and the bytes
    that this rank sent in them. Traces can be viewed in chrome://tracing or ui.perfetto.dev.
    """

    def __init__(self, first: int, last: int, folder: Path, world: World) -> None:
        self.first, self.last = first, last
        self.path = folder / TRACE_FILE.format(rank=world.rank)
        self._world = world
        self._traffic: list[tuple[str, dict[str, Any]]] = []  # each move and its arguments
        self._profile: profile | None = None
        self._log_was_enabled = False

    def starts_at(self, step: int) -> bool:
        """Return whether ``step``, which comes next, is the first traced step of this process."""
        return self._profile is None and self.first <= step <= self.last

    @contextmanager
    def step(self, step: int, watch: MoveWatch) -> Generator[MoveWatch]:
        """Trace training step ``step`` if it is in range; yield the watch for the step's moves."""
        if not self.first <= step <= self.last:
            yield watch
            return
        with record_function(f"step {step}"):
            yield partial(self._traced, step, watch)

    def close(self) -> None:
        """Write the trace, even if the run ended before step ``last``."""
        running, self._profile = self._profile, None
        if running is None:
            return
        running.stop()
        self._world.log.enabled = self._log_was_enabled
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.unlink(missing_ok=True)  # of an earlier start of this run
        running.export_chrome_trace(str(self.path))
        if not self.path.exists():  # torch only logs the error, without its reason
            self.path.with_name(f"{self.path.name}.tmp").unlink(missing_ok=True)
            LOG.warning("train.profile: torch could not write %s; is its disk full?", self.path)
            return
        try:
            trace = object_of(read_json(self.path), str(self.path))
        except JsonError as error:  # the file exceeds the size limit or has an unexpected format
            LOG.warning("%s; the trace does not show the transfers of its moves", error)
            return
        _add_traffic(trace["traceEvents"], self._traffic)
        trace["rank"], trace["world_size"] = self._world.rank, self._world.size
        self.path.write_text(json.dumps(trace), encoding="utf-8")

    def start(self) -> None:
        """Start the trace."""
        self._log_was_enabled, self._world.log.enabled = self._world.log.enabled, True
        kinds = [ProfilerActivity.CPU]
        if self._world.device.type == "cuda":
            kinds.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=kinds)
        self._profile.start()

    @contextmanager
    def _traced(self, step: int, watch: MoveWatch, name: str) -> Generator[None]:
        """Record the move ``name`` of ``step``, with the transfers that it starts."""
        records = self._world.log.records
        before = len(records)
        with watch(name), record_function(name):
            yield
        transfers = [
            {
                "id": record.step_id,
                "collective": record.collective,
                "channel": record.channel,
                "bytes_sent": record.bytes_sent,
            }
            for record in records[before:]
        ]
        sent = sum(record.bytes_sent for record in records[before:])
        self._traffic.append((name, {"step": step, "bytes_sent": sent, "transfers": transfers}))


def _add_traffic(events: list[dict[str, Any]], traffic: list[tuple[str, dict[str, Any]]]) -> None:
    """Add the arguments of each move to its event.

    Events have no ids, so the n-th event with a name is matched with the n-th move of that name.
    """
    by_name: dict[str, deque[dict[str, Any]]] = defaultdict(deque)
    for event in sorted(events, key=lambda event: event.get("ts", 0)):
        if event.get("cat") == "user_annotation":
            by_name[event["name"]].append(event)
    for name, arguments in traffic:
        by_name[name].popleft().setdefault("args", {}).update(arguments)


def peak_memory_of(device: torch.device) -> int:
    """Return this process's peak memory in bytes: device memory on CUDA, else host memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource
    import sys

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
