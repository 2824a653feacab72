"""The wrapper of entry points: every way a rank can end becomes an exit code and one message.

Imports nothing heavy, so that a broken torch or a Ctrl-C during imports is met in here as well.
An entry point should import torch inside ``main`` for the same reason. ``run_main`` closes the
process groups after success, within a limit, and leaves without that after a failure: ``main`` need
not close them, and should not in a ``finally``, where a dead peer costs all of that limit.
"""

import argparse
import contextlib
import errno
import logging
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import NoReturn

from sbpflow.errors import (
    MESSAGE_ERRORS,
    AbsentError,
    ConfigError,
    PeerLostError,
    PeerStoppedError,
)
from sbpflow.runtime.processes.exit_messages import Meeting, Reason
from sbpflow.runtime.processes.shutdown import close_process_groups
from sbpflow.runtime.processes.store import first_line

logger = logging.getLogger(__name__)

EXIT_CRASH = 1
EXIT_MISTAKE = 2
EXIT_LOST_PEER = 3
EXIT_INTERRUPT = 130
EXIT_PIPE = 141  # as of a program that ends by SIGPIPE

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
_MAKE_ROOM = (
    "make room where this run writes (run.dir, checkpoint.dir, --output); the checkpoints before "
    "are as they were"
)
_CPU_ALLOCATOR = "DefaultCPUAllocator: can't allocate memory"
_NEED_LESS = (
    "`sbpflow explain` prints what each rank needs: use more ranks, layouts that split "
    "tables, half-precision rows (parallel.table_dtype: bfloat16), or a smaller data.batch_size"
)
_STUCK_S = 2.0  # a signalled main thread that is inside a collective gets this long to come back
_TOLD_S = 5.0  # and one whose peers have left


class Terminated(BaseException):
    """SIGTERM, raised in the main thread; not an Exception, so that no handler swallows it."""


class ArgumentParser(argparse.ArgumentParser):
    """Usage mistakes become a ConfigError, so that N ranks print one message and not N."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; usage: {' '.join(self.format_usage().split()[1:])}")


def dispatch(
    prog: str, commands: Mapping[str, Callable[[Sequence[str]], int]], argv: Sequence[str]
) -> int:
    """Run the command that the first word names with the others; without a word, say which."""
    name = argv[0] if argv else "--help"
    if name in ("-h", "--help"):
        sys.stdout.write(f"usage: {prog} {{{','.join(commands)}}} [-h] ...\n")
        return 0
    if name not in commands:
        raise ConfigError(f"command {name!r} is not known; use {' or '.join(commands)}")
    return until_nobody_reads(lambda: commands[name](argv[1:]))


def until_nobody_reads(command: Callable[[], int]) -> int:
    """Run a command that prints; where the reader leaves early, as ``head`` does, end quietly."""
    try:
        code = command()
        sys.stdout.flush()
    except BrokenPipeError:
        if not _nobody_reads():
            raise
        # What is still in the buffer must not fail once more when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE
    return code


def _nobody_reads() -> bool:
    """Whether the other end of standard output, a pipe, is closed."""
    end = select.poll()
    end.register(sys.stdout.fileno(), 0)
    return bool(end.poll(0))


def run_main(main: Callable[[], int | None]) -> NoReturn:
    """Run ``main`` as this process's whole work, and exit.

    0 or what ``main`` returns; 2 with one readable message (over all ranks) for a user's mistake;
    3 with one message if a peer was lost or never came; 130 for Ctrl-C and SIGTERM; 1 with the
    traceback of one rank for anything else. After a failure a rank is gone within seconds, whatever
    its threads are doing, and so is each other rank.
    """
    exits = _Exits()
    exits.watch_signals()
    try:
        exits.meet(Meeting.connect())
        code = main() or 0
        close_process_groups()
    except SystemExit as error:
        if error.code in (None, 0):
            raise
        exits.leave(*_exit_of_program(error))
    except KeyboardInterrupt:
        exits.leave(Reason("interrupt"), EXIT_INTERRUPT)
    except Terminated:
        exits.leave(Reason("terminated"), EXIT_INTERRUPT)
    except BaseException as error:  # every error of a rank ends here
        reason, code = classify(error)
        logger.debug("ending with exit code %d", code, exc_info=True)
        exits.leave(reason, code)
    exits.done()
    sys.exit(code)


def classify(error: BaseException) -> tuple[Reason, int]:
    """What an error means to the user, and the exit code for it.

    Judged by type, for any text may occur in an error of the user's program. torch's own types are
    for calls that did not go through ``boxing``.
    """
    if isinstance(error, MESSAGE_ERRORS):
        return Reason("mistake", str(error)), EXIT_MISTAKE
    if isinstance(error, OSError) and error.filename is not None:
        reason = f"{error.filename}: {(error.strerror or 'cannot be used').lower()}"
        return Reason("mistake", reason), EXIT_MISTAKE
    if isinstance(error, OSError) and error.errno in _FULL:
        return Reason("mistake", f"{(error.strerror or '').lower()}: {_MAKE_ROOM}"), EXIT_MISTAKE
    if said := _out_of_memory(error):
        return Reason("mistake", f"out of memory: {said}; {_NEED_LESS}"), EXIT_MISTAKE
    if isinstance(error, AbsentError):
        return Reason("absent", str(error)), EXIT_LOST_PEER
    if isinstance(error, PeerStoppedError):
        return Reason("peer_stopped", str(error)), EXIT_LOST_PEER
    if isinstance(error, (PeerLostError, *_torch_peer_errors())):
        return Reason("lost_peer", first_line(error)), EXIT_LOST_PEER
    return Reason("crash", "".join(traceback.format_exception(error))), EXIT_CRASH


def _exit_of_program(error: SystemExit) -> tuple[Reason, int]:
    """The exit code that the program asked for, and where it did; one line."""
    # The system keeps 8 bits, of which 0 would pass for success.
    code = error.code & 0xFF or EXIT_CRASH if isinstance(error.code, int) else EXIT_CRASH
    frames = traceback.extract_tb(error.__traceback__)
    # exit() and quit() raise in a frozen module: the line that called them is wanted.
    own = [frame for frame in frames if not frame.filename.startswith("<frozen ")] or frames
    where = f"{own[-1].filename}:{own[-1].lineno}"
    said = f"sys.exit({error.code!r}) at {where}, in {own[-1].name}"
    return Reason("crash", f"the program ended itself with exit code {code}: {said}"), code


def _out_of_memory(error: BaseException) -> str:
    """What could not be had; "" for other errors. torch's CPU allocator has no type of its own."""
    kinds = (MemoryError, vars(sys.modules.get("torch", argparse)).get("OutOfMemoryError"))
    text = str(error).strip().split("\n", 1)[0]
    if isinstance(error, tuple(kind for kind in kinds if kind is not None)):
        return text or "the system has no more"
    if isinstance(error, RuntimeError) and _CPU_ALLOCATOR in text:
        return text.partition(_CPU_ALLOCATOR)[2].strip(" :.")
    return ""


def _torch_peer_errors() -> tuple[type[BaseException], ...]:
    """What torch raises for a lost network, store or NCCL peer; nothing if it is not loaded."""
    names = vars(sys.modules.get("torch.distributed", argparse))
    found = (names.get(name) for name in ("DistNetworkError", "DistStoreError", "DistBackendError"))
    return tuple(kind for kind in found if kind is not None)


class _Exits:
    """The two ways out, main thread or watcher; whichever comes first is the only one."""

    def __init__(self) -> None:
        self.meeting: Meeting | None = None
        self._lock = threading.Lock()
        self._main_left = threading.Event()

    def meet(self, meeting: Meeting) -> None:
        """Know the other ranks, and leave soon after the first of them that leaves early."""
        self.meeting = meeting
        meeting.listen(self._told)

    def _told(self) -> None:
        """A rank left. The work of this one fails by itself, unless it waits for another one."""
        if not self._main_left.wait(_TOLD_S):
            self._end(Reason("lost_peer", "another rank left"), EXIT_LOST_PEER)

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
            reason = Reason("interrupt" if received[0] == signal.SIGINT else "terminated")
            if self.meeting is not None and not self._main_left.is_set():
                with contextlib.suppress(PeerLostError):
                    self.meeting.post(reason)
            if not self._main_left.wait(_STUCK_S):
                self._end(reason, EXIT_INTERRUPT)

    def done(self) -> None:
        """The work is over: signals from here on find nothing to interrupt."""
        self._main_left.set()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if self.meeting is not None:
            self.meeting.over()

    def leave(self, reason: Reason, code: int) -> NoReturn:
        """End this rank from the main thread. Later signals must not cut the message short."""
        self._main_left.set()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._end(reason, code)

    def _end(self, reason: Reason, code: int) -> NoReturn:
        with self._lock:  # never released: the process ends in here
            if self.meeting is not None:
                self.meeting.leave(reason)
            elif reason.text:
                mark = "" if reason.kind == "crash" else "error: "
                with contextlib.suppress(OSError):
                    sys.stderr.write(f"\n{mark}{reason.text}\n")
            logging.shutdown()
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError):  # whoever read it may be gone
                    stream.flush()
            # Not sys.exit: threads of gloo and NCCL would abort or hang the interpreter's exit.
            os._exit(code)


def _raise_terminated(signum: int, frame: FrameType | None) -> None:
    raise Terminated
