"""Wraps entry points so that a rank always ends with an exit code and at most one message.

This module imports only small modules, so that it can report a broken torch installation, or a
Ctrl-C during imports. For the same reason, an entry point should import torch inside ``main``.
``run_main`` closes the process groups, with a time limit, but only after success. Therefore
``main`` need not close them. ``main`` must not close them in a ``finally`` block, where a dead peer
would block the process for the whole time limit.
"""

import argparse
import contextlib
import errno
import gc
import logging
import os
import re
import resource
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import FrameType
from typing import NoReturn

from sbpflow.errors import MESSAGE_ERRORS, AbsentError, ConfigError, PeerLostError, PeerStoppedError
from sbpflow.runtime.processes.exit_messages import Meeting, Reason
from sbpflow.runtime.processes.shutdown import close_process_groups
from sbpflow.runtime.processes.store import first_line

logger = logging.getLogger(__name__)

EXIT_CRASH = 1
EXIT_MISTAKE = 2
EXIT_LOST_PEER = 3
EXIT_INTERRUPT = 130
EXIT_PIPE = 141  # exit code of a program killed by SIGPIPE

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
_MAKE_ROOM = (
    "free some space where this run writes (run.dir, checkpoint.dir, --output), or use a writable "
    "folder on another disk; earlier checkpoints are unchanged"
)
_CPU_ALLOCATOR = "DefaultCPUAllocator: can't allocate memory"
_NEED_LESS = (
    "`sbpflow explain` prints the memory that each rank needs; use more ranks, layouts that split "
    "tables, half-precision rows (parallel.table_dtype: bfloat16), or a smaller data.batch_size"
)
_STUCK_S = 2.0  # Time for the main thread to return from a collective after a signal.
_PEER_EXIT_S = 5.0  # Time for the main thread to fail after another rank has exited.


class Terminated(BaseException):
    """Raised on SIGTERM; a BaseException, because programs must not catch it by accident."""


class ArgumentParser(argparse.ArgumentParser):
    """Raises usage errors as ConfigError, so that N ranks print one message instead of N."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; usage: {' '.join(self.format_usage().split()[1:])}")


def parse_seed(text: str) -> int:
    """Return the value of ``--seed``; raise ArgumentTypeError unless every generator accepts it."""
    if not text.isascii() or not text.isdecimal() or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a whole number from 0 to 2**63 - 1; use, for example, 7"
        )
    return int(text)


def dispatch(
    prog: str,
    commands: Mapping[str, Callable[[Sequence[str]], int]],
    argv: Sequence[str],
    lines: Mapping[str, str] | None = None,
) -> int:
    """Run the command that the first argument names; without arguments, list the commands, each
    with its help line from ``lines``.
    """
    name = argv[0] if argv else "--help"
    if name in ("-h", "--help"):
        text = [f"usage: {prog} COMMAND ...; {prog} COMMAND --help shows the options\n\n"]
        text += [f"  {each:<18}{(lines or {}).get(each, '')}".rstrip() + "\n" for each in commands]
        sys.stdout.write("".join(text))
        return 0
    if name not in commands:
        near = [f"; did you mean {match}?" for match in get_close_matches(name, commands, 1)]
        raise ConfigError(
            f"unknown command {name!r}{''.join(near)}; use one of {', '.join(commands)}"
        )
    return commands[name](argv[1:])


def until_nobody_reads(command: Callable[[], int]) -> int:
    """Run a command that prints; exit quietly if the reader closes stdout, as ``head`` does."""
    try:
        code = command()
        sys.stdout.flush()
    except BrokenPipeError:
        if not _stdout_is_closed():
            raise
        # Redirect stdout, because flushing its buffer at interpreter exit would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE
    return code


def _stdout_is_closed() -> bool:
    """Return whether standard output is a pipe that its reader has closed."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return bool(poll.poll(0))


def run_main(main: Callable[[], int | None]) -> NoReturn:
    """Run ``main`` as the program of this process, and exit.

    The exit code is 0 or the result of ``main``. After a user error the code is 2, and the ranks
    print one joint message. After the loss or absence of a peer the code is 3, also with one
    message. After Ctrl-C or SIGTERM the code is 130. ``sys.exit`` keeps its code. Any other failure
    exits with 1 and one rank's traceback. After a failure, all ranks exit within seconds, even if
    their threads are blocked.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the shell closed it, as `>&-` does
            setattr(sys, name, Path(os.devnull).open("w"))
    exits = _Exits()
    exits.watch_signals()
    try:
        exits.meet(Meeting.connect())
        code = until_nobody_reads(lambda: _code_of(main))
        close_process_groups()
    except SystemExit as error:
        exits.leave(*_exit_of_program(error))
    except KeyboardInterrupt as error:
        exits.leave(Reason("interrupt", str(error)), EXIT_INTERRUPT)
    except Terminated as error:
        exits.leave(Reason("terminated", str(error)), EXIT_INTERRUPT)
    except BaseException as error:  # any error ends the rank
        reason, code = classify(error)
        logger.debug("ending with exit code %d", code, exc_info=True)
        exits.leave(reason, code)
    exits.done()
    if "triton" not in sys.modules:  # it would report all objects that still exist as leaks
        gc.freeze()  # otherwise, Python would scan all objects at exit
    sys.exit(code)


def _code_of(main: Callable[[], int | None]) -> int:
    """Return the exit code of ``main``, which may also end with ``sys.exit(0)`` after success."""
    try:
        return main() or 0
    except SystemExit as error:
        if error.code in (None, 0):
            return 0
        raise


def classify(error: BaseException) -> tuple[Reason, int]:
    """Return the reason to report for an error, and its exit code.

    Errors are classified by type where possible, because messages may contain any text. torch's
    own error types occur in calls that bypass ``boxing``.
    """
    if isinstance(error, MESSAGE_ERRORS):
        return Reason("mistake", str(error)), EXIT_MISTAKE
    if isinstance(error, OSError | RuntimeError) and os.strerror(errno.EMFILE) in str(error):
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        reason = f"too many open files: a process may open {limit}; raise this limit (ulimit -n)"
        return Reason("mistake", reason), EXIT_MISTAKE
    if isinstance(error, OSError) and error.filename is not None:
        reason = f"{error.filename}: {(error.strerror or 'cannot be used').lower()}"
        return Reason("mistake", reason), EXIT_MISTAKE
    if isinstance(error, OSError) and (number := errno_of(error)) in _FULL:
        return Reason("mistake", f"{os.strerror(number).lower()}: {_MAKE_ROOM}"), EXIT_MISTAKE
    if detail := _out_of_memory(error):
        text = f"out of memory: {detail}{_memory_limits()}; {_NEED_LESS}"
        return Reason("mistake", text), EXIT_MISTAKE
    if isinstance(error, AbsentError):
        return Reason("absent", str(error)), EXIT_LOST_PEER
    if isinstance(error, PeerStoppedError):
        return Reason("peer_stopped", str(error)), EXIT_LOST_PEER
    if isinstance(error, (PeerLostError, *_torch_peer_errors())):
        return Reason("lost_peer", first_line(error)), EXIT_LOST_PEER
    return Reason("crash", "".join(traceback.format_exception(error))), EXIT_CRASH


def raise_file_limit() -> None:
    """Allow this process to open as many files as the system permits, because each connection of a
    server is one.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def errno_of(error: Exception) -> int:
    """Return the OS error number, or 0 if it is unknown. Polars reports the number only in the
    message, and not always in an OSError.
    """
    match = re.search(r"\(os error (\d+)\)", str(error))
    known = error.errno if isinstance(error, OSError) else None
    return known or (int(match[1]) if match else 0)


def unwritable(error: Exception) -> str:
    """Return why an output cannot be written, and what helps."""
    number = errno_of(error)
    reason = os.strerror(number).lower() if number else str(error)
    return f"cannot be written ({reason}); use a writable folder with enough space"


def _exit_of_program(error: SystemExit) -> tuple[Reason, int]:
    """Return the requested exit code, and a reason that names the source line that requested it."""
    # The system keeps only 8 bits of the code; a multiple of 256 would look like success.
    code = error.code & 0xFF or EXIT_CRASH if isinstance(error.code, int) else EXIT_CRASH
    frames = traceback.extract_tb(error.__traceback__)
    # ``exit()`` and ``quit()`` raise inside a frozen module; report the line that called them.
    own = [frame for frame in frames if not frame.filename.startswith("<frozen ")] or frames
    where = f"{own[-1].filename}:{own[-1].lineno}"
    call = f"sys.exit({error.code!r}) at {where}, in {own[-1].name}"
    return Reason("crash", f"the program exited with code {code}: {call}"), code


def _out_of_memory(error: BaseException) -> str:
    """Describe the failed allocation; return "" if the error is not about memory."""
    kinds = (MemoryError, vars(sys.modules.get("torch", argparse)).get("OutOfMemoryError"))
    text = str(error).strip().split("\n", 1)[0]
    if isinstance(error, tuple(kind for kind in kinds if kind is not None)):
        return text or "the system has no more memory"
    # torch's CPU allocator raises a plain RuntimeError.
    if isinstance(error, RuntimeError) and _CPU_ALLOCATOR in text:
        return text.partition(_CPU_ALLOCATOR)[2].strip(" :.")
    return ""


def _memory_limits() -> str:
    """Return the limits on the memory of this process, or "" without limits."""
    names = {"RLIMIT_DATA": resource.RLIMIT_DATA, "RLIMIT_AS": resource.RLIMIT_AS}
    limits = {name: resource.getrlimit(limit)[0] for name, limit in names.items()}
    return "".join(
        f"; {name} limits this process to {size / 1e9:.2f} GB"
        for name, size in limits.items()
        if size != resource.RLIM_INFINITY
    )


def _torch_peer_errors() -> tuple[type[BaseException], ...]:
    """Return torch's exception classes for the loss of the network, the store, or an NCCL peer; ()
    if torch is not loaded.
    """
    names = vars(sys.modules.get("torch.distributed", argparse))
    kinds = (names.get(name) for name in ("DistNetworkError", "DistStoreError", "DistBackendError"))
    return tuple(kind for kind in kinds if kind is not None)


class _Exits:
    """Ends the process from the main thread or from a watcher thread, but only once."""

    def __init__(self) -> None:
        self.meeting: Meeting | None = None
        self._lock = threading.Lock()
        self._main_left = threading.Event()

    def meet(self, meeting: Meeting) -> None:
        """Connect to the other ranks; from now on, exit soon after another rank exits early."""
        self.meeting = meeting
        meeting.listen(self._on_peer_exit)

    def _on_peer_exit(self) -> None:
        """Exit after a short time, within which the main thread usually fails by itself."""
        if not self._main_left.wait(_PEER_EXIT_S):
            self._end(Reason("lost_peer", "another rank exited"), EXIT_LOST_PEER)

    def watch_signals(self) -> None:
        """Raise on SIGTERM; exit from another thread if the main thread is stuck in C++ code."""
        signal.signal(signal.SIGTERM, _raise_terminated)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(reader,), daemon=True).start()

    def _watch(self, reader: int) -> None:
        """Read signals from the wake-up pipe, which works even while the main thread is blocked,
        unlike Python's signal handlers.
        """
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
        """End the listener after success, and ignore SIGTERM from now on."""
        self._main_left.set()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if self.meeting is not None:
            self.meeting.over()

    def leave(self, reason: Reason, code: int) -> NoReturn:
        """Exit from the main thread; later signals are ignored so that the message is complete."""
        self._main_left.set()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._end(reason, code)

    def _end(self, reason: Reason, code: int) -> NoReturn:
        with self._lock:  # never released, because the process exits while it holds the lock
            if self.meeting is not None:
                self.meeting.leave(reason)
            elif reason.text:
                mark = "" if reason.kind == "crash" else "error: "
                with contextlib.suppress(OSError):
                    sys.stderr.write(f"\n{mark}{reason.text}\n")
            logging.shutdown()
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError):  # the reader may have closed the pipe
                    stream.flush()
            # ``sys.exit`` is not used: gloo's and NCCL's threads could abort or hang Python's exit.
            os._exit(code)


def _raise_terminated(signum: int, frame: FrameType | None) -> None:
    raise Terminated
