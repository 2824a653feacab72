"""Run tasks on the hosts of the ranks: rank 0 assigns tasks, and one rank per host runs them.

Messages go through the ranks' store, so no further port or address is needed. The store does not
authenticate its clients, and messages are pickles: each message is therefore signed with a key that
the ranks exchange over their process group.
"""

import hashlib
import hmac
import logging
import pickle
import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from typing import Any, ClassVar

from sbpflow.data.engine_backends import Threads
from sbpflow.errors import PeerLostError
from sbpflow.runtime.processes.background import in_background
from sbpflow.runtime.processes.store import TimedStore

StoreOf = Callable[[str], TimedStore]
_LOG = logging.getLogger(__name__)
_POLL_S = 0.02
_DIGEST_BYTES = hashlib.sha256().digest_size


class _Messages:
    """Sends or receives objects in order, through numbered keys of a store. One thread may use it.

    Receiving raises PeerLostError if a message is not signed with ``secret``.
    """

    def __init__(self, store: TimedStore, secret: str) -> None:
        self._store, self._secret, self._next = store, secret.encode(), 0

    def send(self, message: object) -> None:
        body = pickle.dumps(message)
        text = b64encode(self._sign(body) + body).decode()
        self._store.set(str(self._next), text)
        self._next += 1

    def receive(self) -> Any:  # noqa: ANN401  (messages have different types)
        """Return the next message, or None if it has not arrived."""
        key = str(self._next)
        if not self._store.check([key]):
            return None
        raw = b64decode(self._store.get(key))
        self._store.forget([key])
        signature, body = raw[:_DIGEST_BYTES], raw[_DIGEST_BYTES:]
        if not hmac.compare_digest(signature, self._sign(body)):
            raise PeerLostError(f"{self._store.where}: a task is not signed by a rank of this run")
        self._next += 1
        return pickle.loads(body)  # noqa: S301  (signed by a rank)

    def _sign(self, body: bytes) -> bytes:
        return hmac.digest(self._secret, str(self._next).encode() + b" " + body, "sha256")


def _messages(store_of: StoreOf, secret: str, kind: str, rank: int) -> _Messages:
    run = hashlib.sha256(secret.encode()).hexdigest()[:16]  # a world may encode several times
    return _Messages(store_of(f"{run} {kind} of rank {rank}"), f"{secret} {kind} {rank}")


class HostTasks:
    """A backend of ``engine`` on rank 0, for ``num_workers`` tasks at a time on each of some ranks.

    The ranks other than 0 must call ``run_tasks`` with an equal ``secret``; ``close`` ends it.
    """

    lost: tuple[type[BaseException], ...] = ()
    shares_memory: ClassVar[bool] = False
    is_cluster: ClassVar[bool] = False
    can_lose: ClassVar[bool] = False  # if a rank is lost, all ranks end

    def __init__(self, store_of: StoreOf, secret: str, num_workers: Mapping[int, int]) -> None:
        self._num_workers = dict(num_workers)
        self._local = Threads(None, self._num_workers[0])
        others = [rank for rank in self._num_workers if rank]
        self._tasks = {r: _messages(store_of, secret, "tasks", r) for r in others}
        self._results = {r: _messages(store_of, secret, "results", r) for r in others}
        self._numbers, self._lock = count(), threading.Lock()
        self._waiting: dict[int, tuple[int, Future[Any]]] = {}
        self._running = dict.fromkeys(self._num_workers, 0)
        self._assigned = dict.fromkeys(self._num_workers, 0)
        self._closed = threading.Event()
        self._listener = in_background(self._listen, "results of tasks")

    def num_workers(self) -> int:
        return sum(self._num_workers.values())

    def submit(self, function: Callable[..., Any], *arguments: object) -> "Future[Any]":
        with self._lock:
            load = {rank: self._running[rank] / self._num_workers[rank] for rank in self._running}
            rank = min(load, key=lambda each: load[each])
            self._running[rank] += 1
            self._assigned[rank] += 1
        if rank == 0:
            future = self._local.submit(function, *arguments)
            future.add_done_callback(lambda _: self._ended(0))
            return future
        future = Future()
        future.set_running_or_notify_cancel()  # another rank cannot be interrupted
        number = next(self._numbers)
        with self._lock:
            self._waiting[number] = rank, future
        if self._listener.done():
            raise PeerLostError("the results of tasks cannot be received")
        self._tasks[rank].send((number, function, arguments))
        return future

    def cancel(self, futures: "Sequence[Future[Any]]") -> None:
        for future in futures:
            future.cancel()

    def state(self) -> str:
        return f"{self.num_workers()} workers on {len(self._num_workers)} hosts"

    def close(self) -> None:
        self._local.close()
        self._closed.set()
        for tasks in self._tasks.values():
            tasks.send((-1, None, ()))
        shares = ", ".join(f"rank {rank}: {number}" for rank, number in self._assigned.items())
        _LOG.info("tasks on %d hosts: %s", len(self._assigned), shares)

    def _ended(self, rank: int) -> None:
        with self._lock:
            self._running[rank] -= 1

    def _listen(self) -> None:
        """Set the results of tasks; an error, such as a lost store, fails every task."""
        try:
            while not self._closed.wait(_POLL_S):
                for messages in self._results.values():
                    while (message := messages.receive()) is not None:
                        self._set(*message)
        except Exception as error:
            with self._lock:
                waiting, self._waiting = self._waiting, {}
            for _, future in waiting.values():
                future.set_exception(error)
            raise

    def _set(self, number: int, result: object, error: BaseException | None) -> None:
        with self._lock:
            rank, future = self._waiting.pop(number)
        self._ended(rank)
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)


def run_tasks(store_of: StoreOf, secret: str, rank: int, num_workers: int) -> None:
    """Run the tasks that ``HostTasks`` of rank 0 assigns to this ``rank``, until it is closed."""
    tasks, results = (_messages(store_of, secret, kind, rank) for kind in ("tasks", "results"))
    running: dict[Future[Any], int] = {}
    is_open = True
    with ThreadPoolExecutor(num_workers) as pool:
        while is_open or running:
            message = tasks.receive() if is_open else None
            if message is not None:
                number, function, arguments = message
                is_open = function is not None
                if is_open:
                    running[pool.submit(function, *arguments)] = number
                    continue
            for future in [future for future in running if future.done()]:
                error = future.exception()
                results.send((running.pop(future), None if error else future.result(), error))
            time.sleep(_POLL_S)
