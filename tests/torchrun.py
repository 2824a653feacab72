"""Runs a test's script with torchrun, as a user would."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

from tests.deadlines import run

ROOT = Path(__file__).resolve().parents[1]


def torchrun(folder: Path) -> list[str]:
    """Return the command that starts a program on 2 ranks, with its logs in ``folder``; by default,
    torchrun would leave a folder in TMPDIR.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*command, "--nproc-per-node", "2", "--log-dir", str(folder / "torchrun")]


def run_script(folder: Path, source: str, *, seconds: float) -> subprocess.CompletedProcess[str]:
    """Run ``source`` on 2 ranks, with the project importable."""
    script = folder / "job.py"
    script.write_text(textwrap.dedent(source))
    return run(
        [*torchrun(folder), str(script)],
        seconds,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
