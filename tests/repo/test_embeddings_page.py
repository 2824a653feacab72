"""Tests that the Python code in docs/embeddings.md runs as printed, with the stated results."""

import os
import re
import runpy
import sys
import types
from pathlib import Path

import pytest
import torch

import sbpflow
from sbpflow.embedding.rules.registry import sparse_optimizer
from sbpflow.embedding.storage.choose import KernelChoice, make_kernel
from sbpflow.embedding.storage.lookup import Lookup
from tests.deadlines import run
from tests.quick import quick

ROOT = Path(__file__).resolve().parents[2]


PAGE = (ROOT / "docs" / "embeddings.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def test_the_first_block_is_part_of_the_example():
    assert len(BLOCKS) == 5
    assert BLOCKS[0].strip() in (ROOT / "examples" / "own_module.py").read_text()


def train_linear(world, dense):
    """Return the losses of the page's model on global tensors, over four steps."""
    names = {"__name__": "page"}
    sys.modules["page"] = types.ModuleType("page")  # a dataclass's module must be in sys.modules
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
        batch = dict(zip(("labels", "dense", "ids"), parts, strict=True), batch_size=12)
        losses.append(float(job.trainer.step(types.SimpleNamespace(**batch))))
    return losses


@pytest.mark.parametrize("dense", quick([{}, {"weight": "S(1)"}], lambda n: n == 1))
def test_the_model_on_global_tensors_has_the_same_losses_with_a_split_weight(ranks, dense):
    (alone,) = ranks(1, train_linear, {})
    assert alone[-1] < alone[0]
    for losses in ranks(3, train_linear, dense):
        assert losses == pytest.approx(alone, abs=1e-13)


def run_on_two_ranks(script: Path) -> list[str]:
    """Return the output of each rank."""
    log = script.parent / "log"
    # Each rank writes its output to a separate file, because lines would mix in a shared pipe.
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = run(
        [sys.executable, *torchrun, "--redirects", "1", "--log-dir", str(log), str(script)],
        60,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=script.parent,
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    return [path.read_text() for path in sorted(log.glob("*/*/*/stdout.log"))]


@pytest.mark.slow
def test_the_block_trains_equally_on_one_rank_and_on_two(tmp_path, capfd):
    """All ranks use the same samples, so losses do not depend on the number of ranks, unless
    gradients are wrongly multiplied by it.
    """
    script = tmp_path / "block.py"
    script.write_text(BLOCKS[2])
    runpy.run_path(str(script), run_name="__main__")
    shown = capfd.readouterr()
    assert "Warning" not in shown.err
    alone = _parse(shown.out)
    assert alone == sorted(set(alone), reverse=True), "every step lowers the loss"
    two = [_parse(output) for output in run_on_two_ranks(script)]
    assert two == [pytest.approx(alone, abs=0.002)] * 2


def _parse(output: str) -> list[float]:
    lines = output.splitlines()
    assert [line.rpartition(" ")[0] for line in lines] == [f"{n} [2, 24]" for n in range(1, 4)]
    return [float(line.rpartition(" ")[2]) for line in lines]


@pytest.fixture
def page_modules(monkeypatch):
    """Return the page's optimizer and its loops as modules with the names from the page."""
    pytest.importorskip("numba")
    for name, block in (("my_rules", BLOCKS[3]), ("my_loops", BLOCKS[4])):
        module = types.ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)
        exec(compile(block.replace("cache=True, ", ""), name, "exec"), vars(module))
    return sys.modules["my_rules"]


def test_the_optimizer_of_the_page_is_the_same_in_both_kernels(page_modules):
    rule = sparse_optimizer("my_rules:Momentum", lr=0.1, momentum=0.5, weight_decay=0.2)
    assert type(rule) is page_modules.Momentum
    torch.manual_seed(0)
    start = torch.randn(9, 4, dtype=torch.float64)
    weights, velocity = start.clone(), torch.zeros(9, 4, dtype=torch.float64)
    storages = [
        make_kernel(
            KernelChoice(kernel, "for the test"),
            9,
            4,
            dim=4,
            optimizer=rule,
            dtype=torch.float64,
            device=torch.device("cpu"),
        )
        for kernel in ("torch", "numba")
    ]
    for storage in storages:
        storage.weights.copy_(start)
    for step in (1, 2, 3):
        rows, grads = torch.tensor([1, 5, 8]), torch.randn(3, 4, dtype=torch.float64)
        velocity[rows] = 0.5 * velocity[rows] + grads
        weights[rows] = weights[rows] * (1 - 0.1 * 0.2) - 0.1 * velocity[rows]
        for storage in storages:
            storage.update(Lookup(rows), grads, 0.1, step)
            torch.testing.assert_close(storage.weights, weights, rtol=1e-14, atol=1e-14)
            torch.testing.assert_close(storage.state["velocity"], velocity, rtol=1e-14, atol=1e-14)
