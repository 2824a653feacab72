"""Run calls in threads, processes, Ray, or Dask; ``engine`` decides which calls to submit, and how
often.

Ray and Dask are imported only if they are used. A cluster started by this module ends with this
process.
"""

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any, ClassVar, Protocol

from sbpflow.errors import ConfigError

_CLOSE_S = 30
_CONNECT_S = 60
_THREADS = "POLARS_MAX_THREADS"


class Backend(Protocol):
    """Runs submitted calls; an exception in ``lost`` means that the worker of a call has died."""

    lost: tuple[type[BaseException], ...]
    shares_memory: ClassVar[bool]
    is_cluster: ClassVar[bool]
    can_lose: ClassVar[bool]
    """True if workers run on a cluster, where a call may never return"""

    def __init__(self, address: str | None, workers: int | None) -> None: ...

    def num_workers(self) -> int:
        """Return the number of calls that run concurrently."""
        ...

    def submit(self, function: Callable[..., Any], *arguments: object) -> "Future[Any]":
        """Run ``function(*arguments)`` in a worker."""
        ...

    def cancel(self, futures: "Sequence[Future[Any]]") -> None:
        """Cancel the calls, if possible."""
        ...

    def state(self) -> str:
        """Return a description of the workers for an error message."""
        ...

    def close(self) -> None:
        """Stop the workers that this process started."""
        ...


class _Pool:
    """Runs calls on this machine."""

    lost: tuple[type[BaseException], ...] = ()
    is_cluster: ClassVar[bool] = False

    def __init__(self, address: str | None, workers: int | None) -> None:
        self._workers = workers or os.cpu_count() or 1

    def num_workers(self) -> int:
        return self._workers

    def cancel(self, futures: "Sequence[Future[Any]]") -> None:
        for future in futures:
            future.cancel()

    def state(self) -> str:
        return f"{self._workers} workers on this machine"


class Threads(_Pool):
    """Runs calls in threads of this process."""

    shares_memory: ClassVar[bool] = True
    can_lose: ClassVar[bool] = False

    def __init__(self, address: str | None, workers: int | None) -> None:
        super().__init__(address, workers)
        self._pool = ThreadPoolExecutor(self._workers)

    def submit(self, function: Callable[..., Any], *arguments: object) -> "Future[Any]":
        return self._pool.submit(function, *arguments)

    def close(self) -> None:
        self._pool.shutdown()


class Processes(_Pool):
    """Runs calls in processes, which are replaced if one of them dies."""

    shares_memory: ClassVar[bool] = False
    can_lose: ClassVar[bool] = True
    lost = (BrokenProcessPool,)

    def __init__(self, address: str | None, workers: int | None) -> None:
        super().__init__(address, workers)
        self._pool = self._start()

    def _start(self) -> ProcessPoolExecutor:
        context = multiprocessing.get_context("spawn")
        threads = max(1, (os.cpu_count() or 1) // self._workers)
        return ProcessPoolExecutor(self._workers, context, _start_worker, (threads,))

    def submit(self, function: Callable[..., Any], *arguments: object) -> "Future[Any]":
        try:
            return self._pool.submit(function, *arguments)
        except BrokenProcessPool:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = self._start()
            return self._pool.submit(function, *arguments)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in list((self._pool._processes or {}).values()):
            process.terminate()  # tasks that are still running belong to a failed run


def _start_worker(threads: int) -> None:
    """Limit the threads of Polars and torch, which are not loaded yet, and make this process exit
    with its parent.
    """
    os.environ |= {_THREADS: str(threads), "OMP_NUM_THREADS": str(threads)}
    parent = multiprocessing.parent_process()

    def follow() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


class Ray:
    """Runs calls as Ray tasks with one CPU each."""

    shares_memory: ClassVar[bool] = False
    is_cluster: ClassVar[bool] = True
    can_lose: ClassVar[bool] = True

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
            threads = max(1, (os.cpu_count() or 1) // here)
        else:
            threads = 1
            settings |= {"address": address, "runtime_env": {"env_vars": {_THREADS: "1"}}}
        with _environment({_THREADS: str(threads), "RAY_raylet_start_wait_time_s": "120"}):
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
        return f"Ray has {len(nodes)} nodes and runs {self.num_workers()} tasks at a time"

    def close(self) -> None:
        self._ray.shutdown()


class Dask:
    """Runs calls as Dask tasks."""

    shares_memory: ClassVar[bool] = False
    is_cluster: ClassVar[bool] = True
    can_lose: ClassVar[bool] = True

    def __init__(self, address: str | None, workers: int | None) -> None:
        distributed: Any = _required("distributed", "dask")
        self.lost = (distributed.scheduler.KilledWorker, distributed.client.FutureCancelledError)
        self._workers, self._cluster = workers, None
        try:
            if address is None:
                here = workers or os.cpu_count() or 1
                threads = max(1, (os.cpu_count() or 1) // here)
                self._cluster: Any = distributed.LocalCluster(
                    n_workers=here, threads_per_worker=1, dashboard_address=None,
                    memory_limit=0, silence_logs="ERROR", env={_THREADS: str(threads)},
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

    def cancel(self, futures: "Sequence[Future[Any]]") -> None:
        for future in futures:
            future.cancel()

    def state(self) -> str:
        return f"Dask has {len(self._client.nthreads())} workers"

    def close(self) -> None:
        self._client.close(timeout=_CLOSE_S)
        if self._cluster is not None:
            self._cluster.close(timeout=_CLOSE_S)


ENGINES: Mapping[str, type[Backend]] = {
    "threads": Threads,
    "processes": Processes,
    "ray": Ray,
    "dask": Dask,
}


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
