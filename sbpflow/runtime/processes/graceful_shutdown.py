"""The first Ctrl-C or SIGTERM asks a run to save and end between two steps; the second ends it.

Takes the signals over from ``launch.py``, and hands them back: after a second one, or once the time
given is over, whatever the main thread is stuck in.
"""

import os
import select
import signal
import threading
from types import FrameType

# To finish a step and save; leaving with a message takes up to 5 s more. torchrun kills 30 s after
# it has passed a SIGTERM on.
GRACE_S = 20.0


class GracefulShutdown:
    """``asked`` is the signal that came, 0 before; made and ended by the main thread."""

    def __init__(self, grace_s: float = GRACE_S) -> None:
        self.asked = 0
        self._grace_s = grace_s
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        self._pass_on = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        self._handlers = {
            number: signal.signal(number, self._ask) for number in (signal.SIGTERM, signal.SIGINT)
        }
        threading.Thread(target=self._watch, args=(reader,), daemon=True).start()

    @staticmethod
    def where_watched() -> "GracefulShutdown | None":
        """One, if signals of this process are watched (``run_main``): somebody must end it then."""
        return GracefulShutdown() if callable(signal.getsignal(signal.SIGTERM)) else None

    def end(self) -> None:
        """Hand the signals back."""
        signal.set_wakeup_fd(self._pass_on, warn_on_full_buffer=False)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def leave(self) -> None:
        """Do now what the signal does without this: raise."""
        self.end()
        signal.raise_signal(self.asked)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        first, self.asked = not self.asked, self.asked or number
        if not first:
            self.leave()

    def _watch(self, reader: int) -> None:
        """The main thread may be in C++ code, where no handler runs."""
        ours = {int(number) for number in self._handlers}
        received = os.read(reader, 1)
        while received[0] not in ours:
            received = os.read(reader, 1)
        select.select([reader], [], [], self._grace_s)
        if self._pass_on >= 0:
            os.write(self._pass_on, received)
