"""Logs the data that a rank sends, with one record per collective, in execution order.

``boxing`` and the embedding exchanges fill the log. ``explain`` predicts the log, and tests
compare the prediction with the log.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class CommRecord:
    """Describes one collective of this rank; ``bytes_sent`` counts bytes to other ranks."""

    step_id: str
    collective: str
    channel: str
    group: tuple[int, ...]
    bytes_sent: int


@dataclass(slots=True)
class CommLog:
    """Records collectives while ``enabled``; if disabled, a call costs only one attribute test."""

    enabled: bool = False
    records: list[CommRecord] = field(default_factory=list)

    def add(self, record: CommRecord) -> None:
        """Append ``record`` if the log is enabled."""
        if self.enabled:
            self.records.append(record)

    def clear(self) -> None:
        """Delete all records; do not change ``enabled``."""
        self.records.clear()
