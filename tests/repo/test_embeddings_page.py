"""The Python of docs/embeddings.md runs as it is printed, and does what it says."""

import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

import sbpflow

ROOT = Path(__file__).resolve().parents[2]


PAGE = (ROOT / "docs" / "embeddings.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def test_the_module_of_the_page_is_the_examples():
    assert len(BLOCKS) == 3
    assert BLOCKS[0].strip() in (ROOT / "examples" / "own_module.py").read_text()


def train_linear(world, dense):
    """Losses of the page's model on global tensors over four steps."""
    names = {"__name__": "page"}
    sys.modules["page"] = types.ModuleType("page")  # dataclasses look their module up
    exec(compile(BLOCKS[1], "embeddings.md block 1", "exec"), names)
    config = sbpflow.Config(
        model=names["LinearModel"](),
        data=sbpflow.DataConfig(batch_size=12),
        parallel=sbpflow.ParallelConfig(scheme="1", device="cpu", dtype="float64", dense=dense),
    )
    fields = sbpflow.Fields.of([], {"C1": 9, "C2": 5})
    job = sbpflow.start_job(config, fields, sbpflow.Boxing(world))
    losses = []
    for step in range(4):
        rng = torch.Generator().manual_seed(step)
        ids = torch.stack([torch.randint(0, n, (12,), generator=rng) for n in (9, 5)], 1).int()
        labels = (ids[:, 0] % 2).float()
        parts = (x.tensor_split(world.size)[world.rank] for x in (labels, torch.empty(12, 0), ids))
        batch = dict(zip(("labels", "dense", "ids"), parts, strict=True), num_rows=12)
        losses.append(float(job.trainer.step(types.SimpleNamespace(**batch))))
    return losses


@pytest.mark.parametrize("dense", [{}, {"weight": "S(1)"}])
def test_the_model_on_global_tensors_trains_alike_with_its_weight_split(ranks, dense):
    (one,) = ranks(1, train_linear, {})
    assert one[-1] < one[0]
    for losses in ranks(3, train_linear, dense):
        assert losses == pytest.approx(one, abs=1e-13)


def run_block(tmp_path: Path, num_ranks: int) -> list[str]:
    """What each rank prints that runs the last Python block of the page."""
    block = BLOCKS[2]
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
