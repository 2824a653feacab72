"""Logs the data that a rank sends, as one record per collective in execution order, and measures
how long the rank waits for transfers.

``boxing`` and the embedding exchanges fill the log. ``explain`` predicts the log, and tests
compare the prediction with the log.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class CommRecord:
    """One collective of this rank; ``bytes_sent`` counts the bytes sent to other ranks."""

    step_id: str
    collective: str
    channel: str
    group: tuple[int, ...]
    bytes_sent: int


@dataclass(slots=True)
class CommLog:
    """The collectives of this rank, which are recorded only while ``enabled``."""

    enabled: bool = False
    records: list[CommRecord] = field(default_factory=list)


@dataclass(slots=True)
class WaitTime:
    """Adds up the seconds that this rank's host threads wait for transfers.

    On CUDA, waiting for NCCL happens on the device and is not included.
    """

    seconds: float = 0.0

    def during(self, wait: Callable[[], object]) -> None:
        """Call ``wait``, and add the time that it takes."""
        begin = time.perf_counter()
        try:
            wait()
        finally:
            self.seconds += time.perf_counter() - begin
