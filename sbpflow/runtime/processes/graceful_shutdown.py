"""Saves and exits between two steps after the first Ctrl-C or SIGTERM; exits immediately on the
second.

In a process that calls ``run_main``, ``GracefulShutdown`` takes over signal handling from
``launch.py`` until a second signal or the end of a grace period. ``GracefulShutdown`` ends the
process even if the main thread is stuck. In other processes, such as a notebook's kernel,
``GracefulInterrupt`` delays the KeyboardInterrupt.
"""

import os
import select
import signal
import threading
import time
from types import FrameType

# A shutdown has this many seconds to finish a step and save. The exit message can take another 5 s,
# and torchrun kills a rank 30 s after forwarding SIGTERM.
GRACE_S = 20.0
# Slurm sends SIGTERM to every process of a job step, and torchrun forwards the signal that it gets.
# Therefore, a second SIGTERM this soon after the first counts as the same request. After Ctrl-C,
# SIGTERM can come from torch's launcher, which sends it to the ranks on a second Ctrl-C.
REPEAT_S = 5.0


class GracefulShutdown:
    """Records the first signal in ``signum``, which is 0 until then.

    Use this class only in the main thread.
    """

    def __init__(self) -> None:
        self.signum = 0
        self._first_s = 0.0
        reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._pass_on = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._handlers = {
            number: signal.signal(number, self._ask) for number in (signal.SIGTERM, signal.SIGINT)
        }
        threading.Thread(target=self._watch, args=(reader,), daemon=True).start()

    def end(self) -> None:
        """Restore the previous signal handlers; after a signal, the grace period goes on."""
        signal.set_wakeup_fd(self._pass_on, warn_on_full_buffer=False)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if not self.signum and self._writer >= 0:
            os.close(self._writer)  # ends the thread
            self._writer = -1

    def leave(self, saved: str = "") -> None:
        """Raise the received signal again for the previous handler, with the message ``saved``."""
        self.end()
        # If there is a message, do not wake the thread that reads the pipe, which could post a
        # reason without the message.
        pass_on = signal.set_wakeup_fd(-1) if saved else -1
        try:
            signal.raise_signal(self.signum)
        except BaseException as stopped:
            stopped.args = (saved,) if saved else ()
            raise
        finally:
            if saved:
                signal.set_wakeup_fd(pass_on, warn_on_full_buffer=False)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if not self.signum:
            self.signum, self._first_s = number, time.monotonic()
        elif not _repeats(number, self.signum, self._first_s):
            self.leave()

    def _watch(self, reader: int) -> None:
        """Pass the signal to the previous wake-up pipe after a second signal or the grace period.

        Python handlers do not run while the main thread is in C++ code. Therefore a thread watches
        the wake-up pipe, to which the C handler writes immediately.
        """
        ours = {int(number) for number in self._handlers}
        received = os.read(reader, 1)
        while received and received[0] not in ours:
            received = os.read(reader, 1)
        if not received:
            os.close(reader)
            return
        first, first_s = received[0], time.monotonic()
        while (left_s := first_s + GRACE_S - time.monotonic()) > 0:
            if not select.select([reader], [], [], left_s)[0]:
                break
            received = os.read(reader, 1)
            if received[0] in ours and not _repeats(received[0], first, first_s):
                break
        if self._pass_on >= 0:
            os.write(self._pass_on, received)


def _repeats(number: int, first: int, first_s: float) -> bool:
    """Return whether a signal repeats the signal ``first``, received at time ``first_s``."""
    return number == first == signal.SIGTERM and time.monotonic() - first_s < REPEAT_S


class GracefulInterrupt:
    """Delays the KeyboardInterrupt of the first Ctrl-C until ``leave``; a second Ctrl-C interrupts
    immediately."""

    def __init__(self) -> None:
        self.signum = 0
        signal.signal(signal.SIGINT, self._ask)

    def end(self) -> None:
        """Restore Python's default handler."""
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def leave(self, saved: str = "") -> None:
        """Raise the delayed KeyboardInterrupt with the message ``saved``."""
        self.end()
        raise KeyboardInterrupt(*([saved] if saved else []))

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.signum:
            self.leave()
        self.signum = number


def watch_signals() -> GracefulShutdown | GracefulInterrupt | None:
    """Start watching for signals; return None if a Ctrl-C does not reach this thread, or if the
    program handles it.
    """
    if threading.current_thread() is not threading.main_thread():
        return None
    if callable(signal.getsignal(signal.SIGTERM)):  # set by ``run_main``
        return GracefulShutdown()
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return GracefulInterrupt() if is_default else None
