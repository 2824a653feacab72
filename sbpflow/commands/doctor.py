"""``sbpflow doctor``: check which parts of this environment work."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sbpflow.runtime.compute.doctor import Finding


def doctor(argv: Sequence[str]) -> int:
    """Check which parts of this environment work, on all ranks that run the command."""
    from sbpflow.run.execution.kernel_checks import kernel_checks
    from sbpflow.runtime.compute import doctor

    def data_checks(folder: Path) -> "Sequence[Finding]":
        # Imported late, because ``machine_checks`` imports torch, whose installation may be broken.
        from sbpflow.run.execution.machine_checks import checks

        return checks(folder)

    return doctor.main(argv, data_checks, kernel_checks())
