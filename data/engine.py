"""Run one function on many items: in threads, in processes, or as tasks of a Ray or Dask cluster.

A task may run twice, even at the same time, because workers can die, be slow, or lose and regain
their connection. Tasks must therefore write files under unique names and rename them, write a
record last, and always write the same bytes. Results are in the order of the items.
"""

import argparse
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Generic, TypeVar

from sbpflow import __version__
from sbpflow.data.engine_backends import ENGINES, Backend
from sbpflow.errors import ConfigError, DataError

Item = TypeVar("Item")
Result = TypeVar("Result")
Function = Callable[[Any], Any]
_LOG = logging.getLogger(__name__)
_POLL_S = 1.0
_MAX_ATTEMPTS = 5
_SLOW_S = 10.0
_SLOW_RATIO = 4.0
"""An idle worker of a cluster repeats a task that has run for more than ``_SLOW_S`` seconds and for
more than this multiple of the median task duration
"""
_END_S = 60.0


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The engine to use.

    ``address`` is the address of a running cluster, or None to start workers on this machine.
    """

    name: str = "threads"
    address: str | None = None
    wait_s: float = 1800.0
    """Maximum time without a finished task, in seconds"""

    def check(self) -> None:
        """Raise ConfigError for an unknown engine, or an address that the engine cannot use."""
        if self.name not in ENGINES:
            raise ConfigError(
                f"--engine: {self.name!r} is unknown; use one of {', '.join(ENGINES)}"
            )
        if self.address is not None and not ENGINES[self.name].is_cluster:
            raise ConfigError(
                f"--address: {self.address!r} needs an engine with a cluster; use, for "
                "example, --engine ray"
            )
        if not self.wait_s > 0:
            raise ConfigError(
                f"--wait must be above 0, got {self.wait_s / 60:g}; use, for example, 30"
            )


@dataclass(frozen=True, slots=True)
class Home:
    """Requirements for every worker: equal package versions, and access to the file ``mark`` in a
    folder that all machines share.
    """

    versions: tuple[tuple[str, str], ...]
    mark: Path
    text: str

    @staticmethod
    def of(mark: Path) -> "Home":
        """Return a ``Home`` with this process's versions and the content of the file ``mark``."""
        return Home(_versions(), mark.absolute(), mark.read_text(encoding="utf-8"))


def _versions() -> tuple[tuple[str, str], ...]:
    return ("sbpflow", __version__), *((name, version(name)) for name in ("numpy", "polars"))


@dataclass(slots=True)
class _Task:
    index: int
    item: Any
    started: float
    attempts: int = 1


class Engine:
    """Runs tasks on a backend, and repeats lost and slow tasks. ``open_engine`` makes an engine."""

    def __init__(self, options: EngineOptions, backend: Backend) -> None:
        self._options, self._backend = options, backend
        self.home: Home | None = None
        """The requirements that each worker checks before its first task, or None for no check"""

    @property
    def shares_memory(self) -> bool:
        """Return whether tasks share this process's memory, in which case items and results are not
        copied.
        """
        return self._backend.shares_memory

    def run(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        """Yield ``function(item)`` for every item, in the order of the items.

        Functions and items must be picklable unless ``shares_memory`` is true. Raises the first
        error of a task, or DataError if workers die repeatedly or no task finishes within
        ``EngineOptions.wait_s``.
        """
        return _Run(self._backend, self._options, self.home, function).results(items)


class _Run:
    """The tasks of one call to ``Engine.run``."""

    def __init__(
        self, backend: Backend, options: EngineOptions, home: Home | None, function: Function
    ) -> None:
        self._backend, self._options = backend, options
        self._home, self._function = home, function
        self._waiting: dict[Future[Any], _Task] = {}
        self._results: dict[int, Any] = {}
        self._durations: list[float] = []
        self._copied: set[int] = set()
        self._workers = backend.num_workers()

    def results(self, items: Iterable[Any]) -> Iterator[Any]:
        source, first = enumerate(items), 0
        is_finished, last = False, time.monotonic()
        try:
            while True:
                while not is_finished and len(self._waiting) < 2 * self._workers:
                    index, item = next(source, (-1, None))
                    is_finished = index < 0
                    if not is_finished:
                        self._submit(_Task(index, item, time.monotonic()))
                if not self._waiting:
                    return
                done, _ = wait(self._waiting, _POLL_S, FIRST_COMPLETED)
                if done:
                    last = time.monotonic()
                elif self._backend.can_lose and time.monotonic() - last > self._options.wait_s:
                    raise self._stuck()
                for future in done:
                    self._finish(future)
                if is_finished:
                    self._repeat_slow()
                while first in self._results:
                    yield self._results.pop(first)
                    first += 1
        finally:
            self._backend.cancel(list(self._waiting))
            wait(self._waiting, _END_S if self._backend.can_lose else None)

    def _submit(self, task: _Task) -> None:
        self._waiting[self._backend.submit(_call, self._home, self._function, task.item)] = task

    def _finish(self, future: "Future[Any]") -> None:
        task = self._waiting.pop(future, None)
        if task is None:
            return  # a copy of this task has already finished
        try:
            result, error = future.result()
        except self._backend.lost as reason:
            self._again(task, reason)
            return
        if error is not None:
            raise error
        self._results[task.index] = result
        self._durations.append(time.monotonic() - task.started)
        copies = [f for f, other in self._waiting.items() if other.index == task.index]
        self._backend.cancel(copies)
        for copy in copies:
            del self._waiting[copy]

    def _again(self, task: _Task, reason: BaseException) -> None:
        if any(other.index == task.index for other in self._waiting.values()):
            return  # a copy is still running
        if task.attempts == _MAX_ATTEMPTS:
            raise DataError(
                f"--engine {self._options.name}: workers died in all {_MAX_ATTEMPTS} attempts at "
                f"one task ({type(reason).__name__}); check their memory, use fewer "
                "--workers, and rerun this command to resume"
            ) from reason
        _LOG.warning("a worker died (%s); repeating its task", type(reason).__name__)
        self._submit(_Task(task.index, task.item, time.monotonic(), task.attempts + 1))

    def _repeat_slow(self) -> None:
        """If a worker of a cluster is idle, run a copy of the longest-running task, provided that
        finished tasks were much faster.
        """
        if not self._backend.is_cluster or len(self._waiting) >= self._workers:
            return
        if not self._durations:
            return
        from statistics import median  # slow to import

        limit = max(_SLOW_S, _SLOW_RATIO * median(self._durations))
        tasks = [task for task in self._waiting.values() if task.index not in self._copied]
        slowest = min(tasks, key=lambda task: task.started, default=None)
        if slowest is not None and time.monotonic() - slowest.started > limit:
            self._copied.add(slowest.index)
            self._submit(_Task(slowest.index, slowest.item, time.monotonic(), slowest.attempts))

    def _stuck(self) -> DataError:
        minutes = self._options.wait_s / 60
        return DataError(
            f"--engine {self._options.name}: no task has finished within {minutes:g} min "
            f"(waiting tasks: {len(self._waiting)}; {self._backend.state()}); check the workers, "
            "and rerun this command to resume. --wait MINUTES sets this limit"
        )


def _call(home: Home | None, function: Function, item: object) -> tuple[object, Exception | None]:
    """Run a task in a worker; return its result, or an error that the user can correct."""
    try:
        if home is not None:
            _check_home(home)
        return function(item), None
    except (ConfigError, DataError, OSError) as error:
        return None, error


@lru_cache(maxsize=4)
def _check_home(home: Home) -> None:
    """Raise ConfigError if this worker has different package versions or does not see the shared
    file.
    """
    here = os.uname().nodename
    for (name, wanted), (_, present) in zip(home.versions, _versions(), strict=True):
        if wanted != present:
            raise ConfigError(
                f"--engine: a worker on {here} has {name} {present}, but this "
                f"process has {wanted}; install equal versions on all machines"
            )
    try:
        text = home.mark.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--output: a worker on {here} cannot read {home.mark} ({error.strerror}); use a "
            "folder that all machines share under one path"
        ) from error
    if text != home.text:
        raise ConfigError(
            f"--output: a worker on {here} sees different content in {home.mark}; use a folder "
            "that all machines share under one path"
        )


@contextmanager
def open_engine(options: EngineOptions, workers: int | None) -> Iterator[Engine]:
    """Start an engine, or connect to its cluster. Raises ConfigError on failure.

    At most ``workers`` tasks run at a time; by default, one per CPU on this machine or in the
    cluster.
    """
    options.check()
    backend = ENGINES[options.name](options.address, workers)
    try:
        yield Engine(options, backend)
    finally:
        backend.close()


def add_engine(parser: argparse.ArgumentParser, default: str = "threads") -> None:
    """Add the options that select an engine to a command; ``default`` names the engine that is used
    by default, which starts no processes.
    """
    add = parser.add_argument
    add("--workers", type=int, metavar="N", help="number of concurrent tasks (default: all CPUs)")
    text = (
        f"where tasks run: in {default}, in processes on this machine, or on a Ray or Dask cluster"
    )
    names = (default, "processes", "ray", "dask")
    add("--engine", default=default, choices=names, help=f"{text} (default {default})")
    add("--address", metavar="A", help="running Ray or Dask cluster, such as auto or "
        "tcp://head:8786 (default: start workers on this machine)")  # fmt: skip
    add("--wait", type=float, default=30, metavar="MINUTES", help="maximum time without a finished "
        "task with --engine processes, ray or dask (default %(default)s)")  # fmt: skip


def engine_options(args: argparse.Namespace) -> EngineOptions:
    """Return the engine options that a command's arguments select."""
    return EngineOptions(args.engine, args.address, 60.0 * args.wait)


class Cached(Generic[Item, Result]):
    """Caches the last value of an expensive function for all threads of a worker process."""

    def __init__(self, function: Callable[[Item], Result]) -> None:
        self._function, self._lock = function, threading.Lock()
        self._last: tuple[Item, Result] | None = None

    def __call__(self, key: Item) -> Result:
        """Return the value for ``key``; the value is computed only if ``key`` differs from the last
        key.
        """
        with self._lock:
            if self._last is None or self._last[0] != key:
                self._last = None  # free the old value first
                self._last = key, self._function(key)
            return self._last[1]

    def clear(self) -> None:
        """Drop the cached value."""
        with self._lock:
            self._last = None
