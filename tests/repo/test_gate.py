"""Tests the speed gate's verdicts, and that it measures each commit with that commit's code."""

import math
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gate

ROOT = Path(__file__).resolve().parents[2]
BASE = [10.0, 11.0, 9.0, 10.5]  # four rounds on a machine with varying speed


def times(factors):
    return [value * factor for value, factor in zip(BASE, factors, strict=True)]


@pytest.mark.parametrize(
    ("factors", "cost", "rate"),
    [
        ((1.0, 1.01, 0.99, 1.0), gate.SAME, gate.SAME),
        ((1.1, 1.11, 1.09, 1.1), gate.SLOWER, gate.FASTER),
        ((0.9, 0.91, 0.89, 0.9), gate.FASTER, gate.SLOWER),
        ((1.01, 1.011, 1.009, 1.01), gate.SAME, gate.SAME),  # significant, but below the margin
        ((1.1, 1.5, 0.9, 1.1), gate.SAME, gate.SAME),  # above the margin, but not significant
    ],
)
def test_slower_means_significant_and_above_the_margin(factors, cost, rate):
    assert gate.judge("demo", "wall_s", BASE, times(factors)).verdict == cost
    assert gate.judge("loader", "rows_per_s", BASE, times(factors)).verdict == rate


def test_the_interval_is_students_on_logarithms_of_pairs():
    verdict = gate.judge("demo", "wall_s", [1.0, 10.0], [1.1, 10.0 * 1.3])
    logs = math.log(1.1), math.log(1.3)
    half = 12.706 * (logs[1] - logs[0]) / 2  # t for one degree of freedom, times stdev / sqrt(2)
    assert math.log(verdict.low) == pytest.approx(sum(logs) / 2 - half)
    assert math.log(verdict.high) == pytest.approx(sum(logs) / 2 + half)
    assert (verdict.cost_ratio, verdict.base, verdict.head) == pytest.approx((1.2, 5.5, 7.05))


def test_a_figure_that_was_slower_once_is_not_slower():
    slow, same = (gate.judge("demo", "wall_s", BASE, times([f] * 4)) for f in (1.2, 1.0))
    other = same._replace(name="explain")
    assert gate.confirmed([slow, other], [slow]) == [slow, other]
    assert gate.confirmed([slow, other], [same]) == [same, other]
    assert gate.confirmed([same, other], [slow])[0].verdict == gate.SAME


@pytest.mark.parametrize(
    ("head", "text"),
    [
        ({"loss of step 1": 0.50001, "loss of step 2": 0.4}, ""),
        ({"loss of step 2": 0.4}, ""),  # no step in common
        (
            {"loss of step 1": 0.5, "loss of step 2": 0.4001},
            "loss of step 2 is 0.4 in base and 0.4001 in head",
        ),
        ({"loss of step 1": math.nan}, "loss of step 1 is 0.5 in base and nan in head"),
        (
            {"loss of step 3": 0.5},
            "base and head have no key in common: base has loss of step 1, "
            "loss of step 2, and head has ",
        ),
    ],
)
def test_different_work_is_reported(head, text):
    difference = gate.different_work({"loss of step 1": 0.5, "loss of step 2": 0.4}, head)
    assert difference.startswith(text) if text else difference == ""


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Make a repository with two packages, one of which differs between the last commit and the
    working tree.
    """
    folder = tmp_path / "repository"
    for package in ("sbpflow", "benchmarks"):
        (folder / package).mkdir(parents=True)
        (folder / package / "__init__.py").write_text("SIDE = 'base'\n")
    monkeypatch.setattr(gate, "REPOSITORY", folder)
    gate.git("init", "--quiet")
    gate.git("add", "--all")
    gate.git("-c", "user.name=a", "-c", "user.email=a@localhost", "commit", "--quiet", "-m", "one")
    (folder / "sbpflow" / "__init__.py").write_text("from sbpflow.new import SIDE\n")
    (folder / "sbpflow" / "new.py").write_text("SIDE = 'head'\n")
    return folder


def test_each_checkout_imports_its_own_packages_and_is_removed(repository, tmp_path):
    """The measured process must import the checkout's sbpflow, not the installed one."""
    for name, side in (("HEAD", "base"), (gate.WORKING_TREE, "head")):
        before = gate.git("status", "--short")
        with gate.checkout(gate.resolve(name, tmp_path), tmp_path / side) as root:
            code = "import sbpflow, benchmarks.gate_worker; print(sbpflow.SIDE)"
            done = subprocess.run(
                [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
            )
            assert done.stdout.strip() == side
        assert gate.git("status", "--short") == before
    assert len(gate.git("worktree", "list").splitlines()) == 1
    assert not (tmp_path / "base").exists()


def test_a_package_from_another_place_is_refused(repository, tmp_path, monkeypatch):
    """If Python ignored the current folder, another checkout would be measured."""
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    monkeypatch.setenv("PYTHONPATH", str(repository))
    with (
        pytest.raises(SystemExit, match="not its own packages"),
        gate.checkout(gate.resolve("HEAD", tmp_path), tmp_path / "base"),
    ):
        pass
    assert len(gate.git("worktree", "list").splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["vs_torchrec", "vs_torchrec_whole", "demo", "loader", "prepare", "explain", "start"]
)
def test_every_row_can_be_measured(tmp_path, name):
    """Run the gate on this tree with tiny sizes; simulating the link needs root."""
    measured = gate.Bench(tmp_path, ROOT, quick=True).measure(name, ROOT)
    assert len(measured.figures) >= 2
    assert all(value > 0 for value in measured.figures.values())
    assert bool(measured.work) == (name not in ("prepare", "explain", "start"))
