"""Several machines that prepare one set: which files each reads, and how one waits for the others.

All run the same command, each with a ``--part K/N`` of its own, into one output on a file system
that all of them see. What goes between them are files in ``OUTPUT.work``, each of which counts once
its record is there; so any of them may be killed and started again at any time.
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
_MOST = 10_000
_LOOK_S = 0.2
"""Between two looks for what others write."""


@dataclass(frozen=True, slots=True)
class Part:
    """One of ``count`` machines; ``number`` counts from 1, and the first also completes the set."""

    number: int = 1
    count: int = 1
    wait_s: float = 0.0
    """How long it waits for what another part has to write."""

    @property
    def is_alone(self) -> bool:
        """Whether one machine does it all."""
        return self.count == 1

    @property
    def is_first(self) -> bool:
        """Whether this one fits constants, writes the manifest and puts the set in place."""
        return self.number == 1

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def owners(self, inputs: Sequence[Input]) -> dict[int, int]:
        """The part that reads each file, by the file's order: neighbours, about as many bytes."""
        total = max(sum(source.num_bytes for source in inputs), 1)
        before, owners = 0, dict[int, int]()
        for source in inputs:
            middle = before + source.num_bytes // 2
            owners[source.order] = min(self.count * middle // total, self.count - 1) + 1
            before += source.num_bytes
        return owners

    def wait(self, work: Path, plan: str, files: Mapping[Path, int], what: str) -> None:
        """Until all ``files`` (by the part that writes each) are there; DataError if they are not.

        Also if another run has replaced the folder ``work``, whose mark was ``plan``.
        """
        deadline = time.monotonic() + self.wait_s
        missing, is_told = dict(files), False
        while True:
            missing = {path: owner for path, owner in missing.items() if not path.exists()}
            if not missing:
                return
            check_mark(work, plan)
            others = ", ".join(str(owner) for owner in sorted(set(missing.values())))
            if time.monotonic() >= deadline:
                raise DataError(
                    f"--part {self}: {what} of part {others} are not there yet (waited "
                    f"{self.wait_s / 60:g} minutes); start those parts, and then this command "
                    "again, which goes on from here"
                )
            if not is_told:
                _LOG.info("part %s: waiting for %s of part %s", self, what, others)
                is_told = True
            time.sleep(_LOOK_S)

    def wait_for_plan(self, work: Path, plan: str) -> None:
        """Until the first part has made the folder; ConfigError if that is of another plan."""
        deadline = time.monotonic() + self.wait_s
        while _mark(work) != plan:
            if time.monotonic() >= deadline:
                found = "was started with other inputs or options" if _mark(work) else "is not made"
                raise ConfigError(
                    f"--part {self}: {work} {found}; start part 1 with this command and --part "
                    f"1/{self.count}"
                )
            time.sleep(_LOOK_S)


def check_mark(work: Path, plan: str) -> None:
    """DataError unless the folder still is of ``plan``."""
    if _mark(work) != plan:
        raise DataError(
            f"{work}: was removed or made anew by another run; start all parts with one command"
        )


def _mark(work: Path) -> str:
    try:
        return (work / MARK).read_text(encoding="ascii")
    except OSError:
        return ""


def parse_part(text: str, wait_minutes: float) -> Part:
    """Read ``2/3``."""
    number, slash, count = text.partition("/")
    fits = slash == "/" and number.isdecimal() and count.isdecimal()
    if not fits or not 1 <= int(number) <= int(count) <= _MOST:
        raise ConfigError(
            f"--part: {text!r} is no part of a whole; write K/N with K from 1 to N, for example 1/3"
        )
    return Part(int(number), int(count), 60.0 * wait_minutes)
