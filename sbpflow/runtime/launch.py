"""The wrapper of entry points: every way a rank can end becomes an exit code and one message.

Imports nothing heavy, so that a broken torch or a Ctrl-C during imports is met in here as well.
An entry point should import torch inside ``main`` for the same reason. ``run_main`` closes the
process groups after success, within a limit, and leaves without that after a failure: ``main`` need
not close them, and should not in a ``finally``, where a dead peer costs all of that limit.
"""

import argparse
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from sbpflow.errors import USER_ERRORS, ConfigError
from sbpflow.runtime.exit_messages import (
    AbsentError,
    Meeting,
    Words,
    first_line,
    is_port_in_use,
    port_in_use,
)
from sbpflow.runtime.shutdown import close_process_groups

logger = logging.getLogger(__name__)

EXIT_CRASH = 1
EXIT_MISTAKE = 2
EXIT_LOST_PEER = 3
EXIT_INTERRUPT = 130

_STUCK_S = 2.0  # a signalled main thread that is inside a collective gets this long to come back

# What torch 2.11 to 2.13 say when the other end of a collective or of the store is gone.
_LOST_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Connection refused",
    "Socket closed",
    "pair closure",
    "Timed out waiting",
    "wait timeout after",
    "clients joined",
    "failed to recv",
    "Failed to recv, got 0 bytes",
    "remote process exited",
    "ncclRemoteError",
    "NCCL communicator was aborted",
    "Watchdog caught collective operation timeout",
)


class Terminated(BaseException):
    """SIGTERM, raised in the main thread; not an Exception, so that no handler swallows it."""


class ArgumentParser(argparse.ArgumentParser):
    """Usage mistakes become a ConfigError, so that N ranks print one message and not N."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; usage: {' '.join(self.format_usage().split()[1:])}")


def run_main(main: Callable[[], int | None]) -> NoReturn:
    """Run ``main`` as this process's whole work, and exit.

    0 or what ``main`` returns; 2 with one readable message (over all ranks) for a user's mistake;
    3 with one message if a peer was lost or never came; 130 for Ctrl-C and SIGTERM; 1 with the
    traceback for anything else. After a failure a rank is gone within seconds, whatever its
    threads are doing.
    """
    exits = _Exits()
    exits.watch_signals()
    try:
        exits.meeting = Meeting.connect()
        code = main() or 0
        close_process_groups()
    except SystemExit as error:
        if error.code in (None, 0):
            raise
        exits.leave(Words("crash"), error.code if isinstance(error.code, int) else EXIT_CRASH)
    except KeyboardInterrupt:
        exits.leave(Words("interrupt"), EXIT_INTERRUPT)
    except Terminated:
        exits.leave(Words("terminated"), EXIT_INTERRUPT)
    except BaseException as error:  # every error of a rank ends here
        words, code = classify(error)
        if words.kind == "crash":
            traceback.print_exc()
        else:
            logger.debug("ending with exit code %d", code, exc_info=True)
        exits.leave(words, code)
    exits.done()
    sys.exit(code)


def classify(error: BaseException) -> tuple[Words, int]:
    """What an error means to the user, and the exit code for it."""
    if is_port_in_use(error):
        port = os.environ.get("MASTER_PORT", "29500")
        return Words("mistake", str(port_in_use(port))), EXIT_MISTAKE
    if isinstance(error, USER_ERRORS):
        return Words("mistake", str(error)), EXIT_MISTAKE
    if isinstance(error, OSError) and error.filename is not None:
        reason = f"{error.filename}: {(error.strerror or 'cannot be used').lower()}"
        return Words("mistake", reason), EXIT_MISTAKE
    if isinstance(error, AbsentError):
        return Words("absent", str(error)), EXIT_LOST_PEER
    if isinstance(error, RuntimeError) and any(sign in str(error) for sign in _LOST_PEER):
        return Words("lost_peer", first_line(error)), EXIT_LOST_PEER
    return Words("crash"), EXIT_CRASH


class _Exits:
    """The two ways out, main thread or watcher; whichever comes first is the only one."""

    def __init__(self) -> None:
        self.meeting: Meeting | None = None
        self._lock = threading.Lock()
        self._main_left = threading.Event()

    def watch_signals(self) -> None:
        """Raise on SIGTERM; and if the main thread is stuck in C++ code, leave without it."""
        signal.signal(signal.SIGTERM, _raise_terminated)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(reader,), daemon=True).start()

    def _watch(self, reader: int) -> None:
        """Python handlers wait for the main thread; the wake-up byte is written at once."""
        while True:
            received = os.read(reader, 1)
            if received[0] not in (signal.SIGTERM, signal.SIGINT):
                continue
            words = Words("interrupt" if received[0] == signal.SIGINT else "terminated")
            if self.meeting is not None and not self._main_left.is_set():
                self.meeting.post(words)
            if not self._main_left.wait(_STUCK_S):
                self._end(words, EXIT_INTERRUPT)

    def done(self) -> None:
        """The work is over: signals from here on find nothing to interrupt."""
        self._main_left.set()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def leave(self, words: Words, code: int) -> NoReturn:
        """End this rank from the main thread. Later signals must not cut the message short."""
        self._main_left.set()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._end(words, code)

    def _end(self, words: Words, code: int) -> NoReturn:
        with self._lock:  # never released: the process ends in here
            if self.meeting is not None:
                self.meeting.leave(words)
            elif words.text:
                sys.stderr.write(f"\nerror: {words.text}\n")
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
            # Not sys.exit: threads of gloo and NCCL would abort or hang the interpreter's exit.
            os._exit(code)


def _raise_terminated(signum: int, frame: FrameType | None) -> None:
    raise Terminated
