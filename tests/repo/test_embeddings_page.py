"""The Python of docs/embeddings.md runs as it is printed, and does what it says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run_block(tmp_path: Path, num_ranks: int) -> list[str]:
    """What each rank prints that runs the one Python block of the page."""
    (block,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "embeddings.md").read_text(), re.DOTALL
    )
    tmp_path.mkdir()
    script = tmp_path / "block.py"
    script.write_text(block)
    # Each rank's output in a file of its own: in one pipe they mix within a line.
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    torchrun += ["--redirects", "1", "--log-dir", str(tmp_path / "log")]
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, *(torchrun if num_ranks > 1 else []), str(script)],
        env={**clean, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    if num_ranks == 1:
        return [done.stdout]
    return [path.read_text() for path in sorted(tmp_path.glob("log/*/*/*/stdout.log"))]


def test_the_block_trains_alike_on_one_rank_and_on_two(tmp_path):
    """Every rank has the same samples, so the mean over the batch does not depend on their number:
    gradients that are too large by the number of ranks would show.
    """
    one, two = ([_parse(output) for output in run_block(tmp_path / str(n), n)] for n in (1, 2))
    assert len(one) == 1
    assert one[0] == sorted(set(one[0]), reverse=True), "every step lowers the loss"
    assert two == [pytest.approx(one[0], abs=0.002)] * 2


def _parse(output: str) -> list[float]:
    lines = output.splitlines()
    assert [line.rpartition(" ")[0] for line in lines] == [f"{n} [2, 24]" for n in range(1, 4)]
    return [float(line.rpartition(" ")[2]) for line in lines]
