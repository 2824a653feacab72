"""A log of what a rank sent: one record per collective, in the order of execution.

It is filled by ``boxing`` and the embedding exchanges. ``explain`` predicts its contents, and tests
compare the two.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class CommRecord:
    """One collective of this rank; ``bytes_sent`` is what this rank sent to other ranks."""

    step_id: str
    collective: str
    channel: str
    group: tuple[int, ...]
    bytes_sent: int


@dataclass(slots=True)
class CommLog:
    """Records only while ``enabled``, so that otherwise it costs one attribute test per call."""

    enabled: bool = False
    records: list[CommRecord] = field(default_factory=list)

    def add(self, record: CommRecord) -> None:
        """Append ``record`` if the log is enabled."""
        if self.enabled:
            self.records.append(record)

    def clear(self) -> None:
        """Delete the records; ``enabled`` is unchanged."""
        self.records.clear()
