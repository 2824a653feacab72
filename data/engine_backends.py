"""Run calls in threads, processes, Ray, or Dask; ``engine`` decides which calls to submit, and how
often.

Ray and Dask are imported only if they are used. A cluster started by this module ends with this
process.
"""

import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from importlib import import_module
from multiprocessing.connection import Connection
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any, ClassVar, Protocol

from sbpflow.errors import ConfigError
from sbpflow.runtime.compute.malloc import KEEP_FREED_MEMORY, keep_freed_memory

_CLOSE_S = 30
_CONNECT_S = 60
_THREADS = "POLARS_MAX_THREADS"


class Backend(Protocol):
    """Runs submitted calls; an exception in ``lost`` means that the worker running a call has
    died.
    """

    lost: tuple[type[BaseException], ...] = ()
    shares_memory: ClassVar[bool] = False
    is_cluster: ClassVar[bool] = False
    can_lose: ClassVar[bool] = True
    """True if workers run outside this process, where a call may never return"""

    @abstractmethod
    def __init__(self, address: str | None, workers: int | None) -> None: ...

    @abstractmethod
    def num_workers(self) -> int:
        """Return the number of calls that run concurrently."""

    @abstractmethod
    def submit(self, function: Callable[..., Any], *arguments: object) -> "Future[Any]":
        """Run ``function(*arguments)`` in a worker."""

    def cancel(self, futures: "Sequence[Future[Any]]") -> None:
        """Cancel the calls, if possible."""
        for future in futures:
            future.cancel()

    @abstractmethod
    def state(self) -> str:
        """Return a description of the workers for an error message."""

    @abstractmethod
    def close(self) -> None:
        """Stop the workers that this process started."""


class _Pool(Backend):
    """Runs calls on this machine."""

    def __init__(self, address: str | None, workers: int | None) -> None:
        self._workers = workers or os.cpu_count() or 1

    def num_workers(self) -> int:
        return self._workers

    def state(self) -> str:
        return f"workers on this machine: {self._workers}"


class Threads(_Pool):
    """Runs calls in threads in this process."""

    shares_memory: ClassVar[bool] = True
    can_lose: ClassVar[bool] = False

    def __init__(self, address: str | None, workers: int | None) -> None:
        super().__init__(address, workers)
        self._pool = ThreadPoolExecutor(self._workers)

    def submit(self, function: Callable[..., Any], *arguments: object) -> "Future[Any]":
        return self._pool.submit(function, *arguments)

    def close(self) -> None:
        self._pool.shutdown()


class ProcessLostError(Exception):
    """The process running a call died, or the engine was closed."""


class Processes(_Pool):
    """Runs calls in processes; a process that dies is replaced, and only its call is lost.

    Each process has its own pipe, and no other process holds the far end. If a process dies,
    reading from its pipe therefore ends at once, even in the middle of a result. The processes of a
    ``ProcessPoolExecutor`` share a pipe; if one of them died while sending a result, the reader
    would wait forever for the rest.
    """

    lost: tuple[type[BaseException], ...] = (ProcessLostError,)

    def __init__(self, address: str | None, workers: int | None) -> None:
        super().__init__(address, workers)
        self._pool = ThreadPoolExecutor(self._workers)  # each thread waits for one process
        self._lock, self._is_closed = threading.Lock(), False
        self._processes: set[_Process] = set()
        self._idle: list[_Process] = []

    def submit(self, function: Callable[..., Any], *arguments: object) -> "Future[Any]":
        return self._pool.submit(self._run, function, arguments)

    def _run(self, function: Callable[..., Any], arguments: tuple[object, ...]) -> object:
        process = self._take()
        try:
            result, error = process.call(function, arguments)
        finally:
            with self._lock:
                if process.is_dead:
                    self._processes.discard(process)
                else:
                    self._idle.append(process)
        if error is not None:
            raise error
        return result

    def _take(self) -> "_Process":
        with self._lock:
            if self._is_closed:
                raise ProcessLostError
            if self._idle:
                return self._idle.pop()
            process = _Process(max(1, (os.cpu_count() or 1) // self._workers))
            self._processes.add(process)
            return process

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            processes = list(self._processes)
        for process in processes:
            process.kill()  # any task that is still running belongs to a failed run
        self._pool.shutdown(cancel_futures=True)


class _Process:
    """A process that runs one call at a time."""

    def __init__(self, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, remote = context.Pipe()
        self._process = context.Process(target=_work, args=(remote, threads), daemon=True)
        self._process.start()
        remote.close()
        self.is_dead = False

    def call(
        self, function: Callable[..., Any], arguments: tuple[object, ...]
    ) -> tuple[object, Exception | None]:
        """Return the result or the error of a call. Raises ProcessLostError if the process dies."""
        try:
            self._pipe.send((function, arguments))
            return self._pipe.recv()
        except (EOFError, OSError) as error:
            self.kill()
            raise ProcessLostError from error

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self.is_dead = True


def _work(pipe: "Connection[Any, Any]", threads: int) -> None:
    """Run calls until the parent ends or kills this process."""
    keep_freed_memory()
    # These variables limit the threads of Polars and torch, which are not loaded yet.
    os.environ |= {_THREADS: str(threads), "OMP_NUM_THREADS": str(threads)}
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends this process without a traceback
    threading.Thread(target=_follow_parent, daemon=True).start()
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:  # the parent has ended
            return
        answer: tuple[object, Exception | None]
        try:
            answer = function(*arguments), None
        except Exception as error:  # noqa: BLE001  (the parent raises whatever a task raises)
            error.add_note(f"in a worker process:\n{traceback.format_exc()}")
            answer = None, error
        try:
            pipe.send(answer)  # nothing is sent before the whole answer has been pickled
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            pipe.send((None, RuntimeError(f"a result cannot be returned: {error!r}")))


def _follow_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


class Ray(Backend):
    """Runs calls as Ray tasks with one CPU each."""

    is_cluster: ClassVar[bool] = True

    def __init__(self, address: str | None, workers: int | None) -> None:
        self._ray: Any = _required("ray")
        from ray import exceptions

        self.lost = (
            *(exceptions.WorkerCrashedError, exceptions.NodeDiedError, exceptions.ObjectLostError),
            *(exceptions.OutOfMemoryError, exceptions.LocalRayletDiedError),
        )
        self._workers, self._refs = workers, dict[Future[Any], Any]()
        settings: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        if address is None:
            here = workers or os.cpu_count() or 1
            settings |= {"address": "local", "num_cpus": here, "include_dashboard": False}
            # Workers inherit the environment. By default, Ray would start them with a niceness of
            # 15.
            started = {**_worker_environment(here), "RAY_worker_niceness": "0"}
            started["RAY_raylet_start_wait_time_s"] = "120"
        else:
            started = {}
            wanted = {_THREADS: "1", **KEEP_FREED_MEMORY}
            settings |= {"address": address, "runtime_env": {"env_vars": wanted}}
        with _environment(started):
            try:
                self._ray.init(**settings)
            except Exception as error:
                raise _cannot_start("ray", address, error) from error
        self._call: Any = self._ray.remote(_apply).options(max_retries=0)

    def num_workers(self) -> int:
        cpus = int(self._ray.cluster_resources().get("CPU", 1))
        return max(1, min(cpus, self._workers or cpus))

    def submit(self, function: Callable[..., Any], *arguments: object) -> "Future[Any]":
        ref = self._call.remote(function, arguments)
        future: Future[Any] = ref.future()
        self._refs[future] = ref
        future.add_done_callback(lambda done: self._refs.pop(done, None))
        return future

    def cancel(self, futures: "Sequence[Future[Any]]") -> None:
        for future in futures:
            if (ref := self._refs.get(future)) is not None:
                self._ray.cancel(ref, force=True)

    def state(self) -> str:
        nodes = [node for node in self._ray.nodes() if node["Alive"]]
        return f"Ray nodes: {len(nodes)}, tasks at a time: {self.num_workers()}"

    def close(self) -> None:
        self._ray.shutdown()


class Dask(Backend):
    """Runs calls as Dask tasks."""

    is_cluster: ClassVar[bool] = True

    def __init__(self, address: str | None, workers: int | None) -> None:
        distributed: Any = _required("distributed", "dask")
        config: Any = _required("dask.config", "dask")
        self.lost = (distributed.scheduler.KilledWorker, distributed.client.FutureCancelledError)
        self._workers, self._cluster = workers, None
        self._opened = ExitStack()
        try:
            if address is None:
                here = workers or os.cpu_count() or 1
                # By default, Dask's workers profile themselves every 10 ms, return freed memory to
                # the system, and leave a folder in TMPDIR.
                parent: str | None = config.get("temporary-directory", None)
                if parent is not None:
                    os.makedirs(parent, exist_ok=True)  # as Dask does
                folder = TemporaryDirectory(
                    dir=parent, prefix="sbpflow-", ignore_cleanup_errors=True
                )
                settings = {
                    "temporary-directory": self._opened.enter_context(folder),
                    "distributed.worker.profile.enabled": False,
                    "distributed.nanny.pre-spawn-environ": _worker_environment(here),
                }
                with config.set(settings):
                    self._cluster: Any = distributed.LocalCluster(
                        n_workers=here, threads_per_worker=1, dashboard_address=None,
                        memory_limit=0, silence_logs="ERROR",
                    )  # fmt: skip
            target = address if self._cluster is None else self._cluster.scheduler_address
            self._client: Any = distributed.Client(target, timeout=_CONNECT_S)
        except Exception as error:
            raise _cannot_start("dask", address, error) from error
        self._pool: Any = self._client.get_executor(pure=False)

    def num_workers(self) -> int:
        threads = sum(self._client.nthreads().values())
        return max(1, min(threads, self._workers or threads))

    def submit(self, function: Callable[..., Any], *arguments: object) -> "Future[Any]":
        return self._pool.submit(_apply, function, arguments)

    def state(self) -> str:
        return f"Dask workers: {len(self._client.nthreads())}"

    def close(self) -> None:
        self._client.close(timeout=_CLOSE_S)
        if self._cluster is not None:
            self._cluster.close(timeout=_CLOSE_S)
        self._opened.close()


ENGINES: Mapping[str, type[Backend]] = {
    "threads": Threads,
    "processes": Processes,
    "ray": Ray,
    "dask": Dask,
}


def _worker_environment(workers: int) -> dict[str, str]:
    """Return the environment variables for each process if ``workers`` processes share this
    machine.
    """
    threads = str(max(1, (os.cpu_count() or 1) // workers))
    return {_THREADS: threads, "OMP_NUM_THREADS": threads, **KEEP_FREED_MEMORY}


def _apply(function: Callable[..., Any], arguments: tuple[object, ...]) -> object:
    return function(*arguments)


def _required(module: str, extra: str = "") -> ModuleType:
    try:
        return import_module(module)
    except ImportError as error:
        name = extra or module
        raise ConfigError(
            f"--engine {name} needs {module} ({error}); run `pip install 'sbpflow[{name}]'`"
        ) from error


def _cannot_start(name: str, address: str | None, error: Exception) -> ConfigError:
    text = str(error).strip().splitlines() or [type(error).__name__]
    if address is None:
        return ConfigError(
            f"--engine {name}: a cluster on this machine did not start ({text[0]}); rerun this "
            "command, or use --engine processes"
        )
    return ConfigError(
        f"--address {address}: no connection to a {name} cluster ({text[0]}); give the address of "
        "a running cluster, or omit --address to start one on this machine"
    )


@contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for processes that are started inside the context."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
