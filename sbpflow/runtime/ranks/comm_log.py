"""What a rank really sent: one record per collective, in the order they ran.

Filled by ``boxing`` and by the embedding exchange; ``explain`` predicts it and tests compare both.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class CommRecord:
    """One collective this rank took part in; ``bytes_sent`` counts what it sent to other ranks."""

    step_id: str
    collective: str
    channel: str
    group: tuple[int, ...]
    bytes_sent: int


@dataclass(slots=True)
class CommLog:
    """Records only while ``enabled``, so that a training loop pays one attribute test for it."""

    enabled: bool = False
    records: list[CommRecord] = field(default_factory=list)

    def add(self, record: CommRecord) -> None:
        """Append ``record`` if the log is enabled."""
        if self.enabled:
            self.records.append(record)

    def clear(self) -> None:
        """Forget the records; ``enabled`` stays as it is."""
        self.records.clear()
