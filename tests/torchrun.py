"""A script of a test, run by torchrun as a user runs one."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run_script(folder: Path, source: str, *, timeout: float) -> subprocess.CompletedProcess[str]:
    """``source`` on 2 ranks; the project is importable, ``timeout`` in seconds."""
    script = folder / "job.py"
    script.write_text(textwrap.dedent(source))
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         str(script)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )  # fmt: skip
