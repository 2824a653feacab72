"""Tests how the benchmarks compare plans: equal plans are measured once, some rounds select a plan,
and the other rounds are reported.
"""

import json
import math
import statistics
from pathlib import Path

import numpy as np
import pytest

from benchmarks import planner_steps
from benchmarks.planner_plans import make_sample, scheme_auto
from benchmarks.planner_steps import (
    Case,
    compared,
    gap_closed,
    measured_cases,
    spearman,
    summary,
)
from benchmarks.planner_worker import difference, settled
from sbpflow.planner.task import Choice, Shape

PLANS = {
    "auto": ({"a": Choice(Shape("B", "columns"), (0,))}, 2.0),
    "auto 2": ({"a": Choice(Shape("B", "columns"), (1,))}, 2.1),
    "size": ({"a": Choice(Shape("B", "columns"), (0,))}, 2.0),
    "dim": ({"a": Choice(Shape("B", "local"), (0, 1))}, 3.0),
}
CASE = Case(number=3, tables=1, batch=64, plans=PLANS)


def test_equal_plans_are_measured_once():
    assert list(CASE.distinct().values()) == [["auto", "size"], ["auto 2"], ["dim"]]


def test_rounds_that_choose_a_plan_are_not_reported():
    """Of ten rounds, the even ones select a plan: auto 2 is faster in the even rounds and slower in
    the odd ones.
    """
    ours = [2.0] * 10
    other = [1.0, 4.0] * 5
    row = compared(CASE, {"auto": ours, "auto 2": other, "dim": [3.0] * 10})
    best = row["plans"]["auto, best of 4"]
    assert (best["ms"], best["slower_than_auto"]) == (4.0, pytest.approx(1.0))
    assert row["plans"]["size"]["slower_than_auto"] == 0.0  # the two plans are the same
    assert row["plans"]["greedies, best of 4"]["ms"] == 2.0
    assert row["plans"]["all plans, fastest"]["slower_than_auto"] == pytest.approx(1.0)
    assert row["fastest"] == "auto"
    assert row["plans"]["auto 2"]["ms"] == pytest.approx(2.0)  # from all ten rounds
    assert row["spearman_predicted"] == pytest.approx(1.0)


def test_one_start_of_the_ranks_selects_plans_and_another_is_reported(monkeypatch):
    """In the second start, auto 2 is slow in all rounds, and dim drops out after one round."""
    starts = [[[2.0, 2.0], [1.0, 1.0], [3.0, 3.0]], [[2.0, 2.0], [4.0, 4.0], [3.0]]]
    waiting, seeds = iter(starts), []

    def start(_module, _size, words, *, link):
        assert (link, words[words.index("--seconds") + 1]) == ("1gbit", "5.0")
        seeds.append(words[words.index("--seed") + 1])
        Path(words[words.index("--output") + 1]).write_text(json.dumps([next(waiting)]))

    monkeypatch.setattr(planner_steps, "start_ranks", start)
    (times,) = measured_cases([CASE], 2, "1gbit", 10.0)
    assert times == {"auto": [2.0] * 4, "auto 2": [1.0, 4.0] * 2, "dim": [3.0, 3.0]}
    assert compared(CASE, times)["plans"]["auto, best of 4"]["ms"] == 4.0
    assert seeds == ["0", "1"], "the starts have the plans in other orders"


def test_a_plan_is_measured_until_its_difference_is_significant():
    ours = [1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 1.0, 2.0]
    noisy = [1.2, 2.0, 1.0, 2.4, 1.1, 1.9, 1.2, 2.0]
    assert settled([ms * 1.5 for ms in ours], ours)  # 50 % slower in every round
    assert settled([ms * 2.0 for ms in noisy], ours)
    assert settled([ms * 1.001 for ms in ours], ours)  # as fast as our plan, with a narrow interval
    assert not settled([1.0, 2.0 * 1.01, 1.0, 2.0], ours)  # four rounds may agree by chance
    assert not settled(noisy, ours)
    # The difference is computed over the rounds in which the plan ran, and then applied to our
    # plan's median over all rounds.
    drifted = [1.0] * 4 + [3.0] * 6
    row = compared(CASE, {"auto": drifted, "auto 2": [1.5] * 4, "dim": [2.0] * 10})
    assert row["plans"]["auto 2"]["slower_than_auto"] == pytest.approx(0.5)
    assert row["plans"]["auto 2"]["ms"] == pytest.approx(4.5)


def test_the_closed_gap_is_computed_over_all_tasks():
    def row(auto, size, other):
        return {"plans": {"auto": {"ms": auto}, "size": {"ms": size}, "all B": {"ms": other}}}

    halfway = row(np.sqrt(2.0), 2.0, 1.0)
    assert gap_closed([halfway], "auto") == pytest.approx(0.5)
    assert gap_closed([halfway, row(1.0, 2.0, 3.0)], "auto") == pytest.approx(0.75)
    assert gap_closed([row(1.0, 1.0, 2.0)], "auto") is None


def test_differences_are_paired_and_have_intervals():
    ours = np.array([1.0, 2.0, 4.0])
    mean, half = difference((ours * 1.1).tolist(), ours.tolist())
    assert (mean, half) == (pytest.approx(0.1), pytest.approx(0.0, abs=1e-12))
    # The mean of -1 and 1 has a standard error of 1, and its 95 % interval is +- 12.7.
    assert difference([math.exp(-1), math.e], [1.0, 1.0])[1] == pytest.approx(12.706)
    few = [0.9, 1.0, 1.1, 1.0]
    spread = statistics.stdev(math.log(ms) for ms in few)
    assert difference(few, [1.0] * 4)[1] == pytest.approx(3.182 * spread / 2)
    many = few * 10
    spread = statistics.stdev(math.log(ms) for ms in many)
    assert difference(many, [1.0] * 40)[1] == pytest.approx(1.96 * spread / math.sqrt(40))
    rows = [
        compared(CASE, {"auto": [ms] * 5, "auto 2": [ms] * 5, "dim": [ms * times] * 5})
        for ms, times in ((1.0, 1.2), (3.0, 1.1))
    ]
    dim = summary(rows)["planners"]["dim"]
    assert dim["slower_than_auto"] == pytest.approx(np.sqrt(1.32) - 1, abs=1e-4)
    low, high = dim["interval"]
    assert low < dim["slower_than_auto"] < high
    assert spearman([1, 2, 3], [3, 2, 1]) == -1.0


def test_the_engine_runs_the_plan_of_scheme_auto():
    task = make_sample(1, 2, num_tables=4, batch_size=128).task
    task.check(scheme_auto(task))
