"""``sbpflow doctor``: what of this environment works."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sbpflow.runtime.compute.doctor import Finding


def doctor(argv: Sequence[str]) -> int:
    """What of this environment works, on the ranks that it runs on."""
    from sbpflow.runtime.compute import doctor

    def moving(folder: Path) -> "Sequence[Finding]":
        from sbpflow.run.execution.machine_checks import checks  # torch, which may be broken

        return checks(folder)

    return doctor.main(argv, moving)
