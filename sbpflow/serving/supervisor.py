"""Runs worker processes that share one listening socket, and replaces those that die.

Workers are forked, not spawned, so that they share the imported libraries and the mapped model with
the supervisor, and so that a replacement starts within milliseconds. The supervisor must not start
threads that hold locks, because a fork would copy held locks.
"""

import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import NoReturn

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# If a worker exits this soon after its start, its replacement would probably exit too.
_SOON_S = 2.0
_PAUSE_S = 0.05


class Supervisor:
    """Keeps ``num_workers`` processes running, each of which calls ``work`` with its number.

    ``restarted`` is called in the supervisor before a worker is replaced, and ``between`` about
    every ``between_s`` seconds. The supervisor closes its copy of ``listener`` when it stops.
    """

    def __init__(
        self,
        work: Callable[[int], None],
        listener: socket.socket,
        num_workers: int,
        restarted: Callable[[], None],
        between: Callable[[], None] = lambda: None,
        between_s: float = 1.0,
    ) -> None:
        self._work, self._listener, self._restarted = work, listener, restarted
        self._between, self._between_s = between, between_s
        self._num_workers = num_workers
        self._workers: dict[int, tuple[int, float]] = {}  # pid -> number, start time
        self._stopping = False

    def run(self, grace_s: float) -> int:
        """Run until SIGTERM or SIGINT; return the exit code of the command.

        At the end, workers receive SIGTERM and finish the requests in flight; a worker that takes
        longer than ``grace_s`` is killed. If a worker exits right after its start, the server stops
        and the exit code is 1.
        """
        # The command's signal watcher would interrupt a shutdown that takes more than two seconds.
        signal.set_wakeup_fd(-1)
        for number in _SIGNALS:
            signal.signal(number, self._on_signal)
        for number in range(self._num_workers):
            self._start(number)
        failed, called = False, time.monotonic()
        while not self._stopping:
            failed = self._replace_dead()
            if time.monotonic() - called > self._between_s:
                self._between()
                called = time.monotonic()
            time.sleep(_PAUSE_S)
        self._stop()
        deadline = time.monotonic() + grace_s
        while self._workers and time.monotonic() < deadline:
            self._replace_dead()
            time.sleep(_PAUSE_S)
        self._signal(signal.SIGKILL)
        return int(failed)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # The call that this signal interrupts, such as the loading of a bundle, can take minutes.
        self._stop()

    def _stop(self) -> None:
        self._stopping = True
        # Otherwise, clients could connect after the workers' end, and would wait for an answer.
        self._listener.close()
        self._signal(signal.SIGTERM)

    def _signal(self, number: int) -> None:
        for pid in self._workers:
            # A worker is reaped just before it is removed here, so its pid cannot belong to another
            # process yet.
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _replace_dead(self) -> bool:
        """Reap workers that have ended and, unless the server is stopping, replace them.

        Returns whether a worker exited right after its start.
        """
        for pid in list(self._workers):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended:
                continue
            number, started = self._workers.pop(pid)
            if self._stopping:
                continue
            code = os.waitstatus_to_exitcode(status)
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            if code >= 0 and time.monotonic() - started < _SOON_S:
                logger.error("worker %d ended with %s right after its start", number, how)
                self._stopping = True
                return True
            logger.warning(
                "worker %d (pid %d) ended with %s and is being replaced", number, pid, how
            )
            self._restarted()
            self._start(number)
        return False

    def _start(self, number: int) -> None:
        # A signal that arrives before the worker installs its handlers must not be lost.
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        if not self._stopping:  # a signal may have interrupted ``restarted``
            pid = os.fork()
            if not pid:
                self._become_worker(number)
            self._workers[pid] = number, time.monotonic()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)

    def _become_worker(self, number: int) -> NoReturn:
        code = 1
        try:
            for name in _SIGNALS:
                signal.signal(name, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            self._work(number)
            code = 0
        except BaseException:
            logger.exception("worker %d failed", number)
        finally:
            # ``os._exit`` neither runs the exit handlers nor flushes the buffers; both belong to
            # the supervisor.
            os._exit(code)
