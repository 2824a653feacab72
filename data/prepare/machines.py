"""Coordinate several machines that prepare one set.

All machines run the same command, except for ``--part K/N``, with one output on a shared file
system. The machines communicate through files in ``OUTPUT.work``, and a file is valid once its
record exists. Any machine may therefore be killed and restarted at any time.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sbpflow.data.prepare.source import Input
from sbpflow.data.prepare.workspace import MARK
from sbpflow.errors import ConfigError, DataError

_LOG = logging.getLogger(__name__)
_MAX_PARTS = 10_000
_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class MachinePart:
    """Identifies one of ``count`` machines, numbered from 1; machine 1 also completes the set."""

    number: int = 1
    count: int = 1
    wait_s: float = 0.0
    """Maximum wait for the files of another part in seconds"""

    @property
    def is_alone(self) -> bool:
        """Return True if this is the only machine."""
        return self.count == 1

    @property
    def is_first(self) -> bool:
        """Return True if this machine fits constants, writes the manifest and publishes the set."""
        return self.number == 1

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def owners(self, inputs: Sequence[Input]) -> dict[int, int]:
        """Assign a part to each file, by the file's order; a part gets adjacent files, and parts
        have similar sizes."""
        total = max(sum(source.num_bytes for source in inputs), 1)
        before, owners = 0, dict[int, int]()
        for source in inputs:
            middle = before + source.num_bytes // 2
            owners[source.order] = min(self.count * middle // total, self.count - 1) + 1
            before += source.num_bytes
        return owners

    def wait(self, work: Path, plan: str, files: Mapping[Path, int], contents: str) -> None:
        """Wait until all ``files`` exist; ``files`` maps each file to the part that writes it.

        Raise DataError after ``wait_s`` seconds, or if another run has replaced the folder
        ``work``, which belongs to ``plan``. ``contents`` describes the files in error messages.
        """
        deadline = time.monotonic() + self.wait_s
        missing, is_logged = dict(files), False
        while True:
            missing = {path: owner for path, owner in missing.items() if not path.exists()}
            if not missing:
                return
            check_mark(work, plan)
            others = ", ".join(str(owner) for owner in sorted(set(missing.values())))
            if time.monotonic() >= deadline:
                raise DataError(
                    f"--part {self}: {contents} of part {others} are missing after "
                    f"{self.wait_s / 60:g} minutes; start those parts and then rerun this "
                    "command to resume"
                )
            if not is_logged:
                _LOG.info("part %s: waiting for %s of part %s", self, contents, others)
                is_logged = True
            time.sleep(_POLL_S)

    def wait_for_plan(self, work: Path, plan: str) -> None:
        """Raise ConfigError unless the first part creates the work folder within the wait time."""
        deadline = time.monotonic() + self.wait_s
        while read_mark(work) != plan:
            if time.monotonic() >= deadline:
                reason = (
                    "belongs to other inputs or options" if read_mark(work) else "does not exist"
                )
                raise ConfigError(
                    f"--part {self}: {work} {reason}; start part 1 with this command and --part "
                    f"1/{self.count}"
                )
            time.sleep(_POLL_S)


def check_mark(work: Path, plan: str) -> None:
    """Raise DataError if the work folder no longer belongs to ``plan``."""
    if read_mark(work) != plan:
        raise DataError(
            f"{work} was removed or replaced by another run; start all parts with the same command"
        )


def read_mark(work: Path) -> str:
    """Return the plan of a work folder, or an empty string if it has no mark."""
    try:
        return (work / MARK).read_text(encoding="ascii")
    except OSError:
        return ""


def parse_part(text: str, wait_minutes: float) -> MachinePart:
    """Parse ``2/3``."""
    number, slash, count = text.partition("/")
    fits = slash == "/" and number.isdecimal() and count.isdecimal()
    if not fits or not 1 <= int(number) <= int(count) <= _MAX_PARTS:
        raise ConfigError(
            f"--part: {text!r} is not valid; write K/N with K from 1 to N (for example, 1/3)"
        )
    return MachinePart(int(number), int(count), 60.0 * wait_minutes)
