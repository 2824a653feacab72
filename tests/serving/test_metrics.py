"""Tests that the workers' counts are added up, and that Prometheus can read them."""

import os
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbpflow.serving import scores as serving_scores
from sbpflow.serving.metrics import LATENCIES, SCORES, Metrics, ModelCounts

COLUMNS = {"a": ["I1", "C1"], "b": ["C1"]}


def values(text: str) -> dict[str, float]:
    """Parse Prometheus' text format as a scraper does; return the numbers by name and labels."""
    found: dict[str, float] = {}
    kinds: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            assert name not in kinds, f"{name} has two blocks"
            kinds[name] = kind
        elif not line.startswith("# HELP "):
            name, _, number = line.rpartition(" ")
            assert name not in found, line
            found[name] = float(number)
            base = name.partition("{")[0]
            for suffix in ("_bucket", "_sum", "_count"):
                base = base.removesuffix(suffix) if kinds.get(base) is None else base
            assert base in kinds, line
    return found


def work(counts: dict[str, ModelCounts], number: int) -> None:
    counts["a"].answer(200, 0.0006)
    counts["a"].answer(400, 2.0)
    counts["a"].count("rows", 3)
    counts["a"].observe("score", np.array([0.05, 0.4, 0.95], dtype=np.float32))
    counts["a"].values(("I1", "C1"), np.array([[2, 0], [0, 1]]))
    counts[""].answer(404, 0.001)
    counts["a"].serve(f"run-{number}", 1000.0 + number)


def test_the_counts_of_all_processes_are_added_up():
    metrics = Metrics(COLUMNS, 2)
    for number in (0, 1, 1):
        pid = os.fork()
        if not pid:  # in a child: a worker or its replacement
            code = 1
            try:
                work(metrics.worker(number), number)
                code = 0
            finally:
                os._exit(code)  # without running pytest's code
        assert os.waitpid(pid, 0)[1] == 0
    metrics.restarted()
    found = values(metrics.text(now=1500.0))
    assert found['sbpflow_requests_total{model="a",status="200"}'] == 3
    assert found['sbpflow_requests_total{model="a",status="400"}'] == 3
    assert found['sbpflow_requests_total{model="",status="404"}'] == 3
    assert found['sbpflow_rows_total{model="a"}'] == 9
    assert found['sbpflow_rows_total{model="b"}'] == 0
    assert found['sbpflow_missing_values_total{model="a",column="I1"}'] == 6
    assert found['sbpflow_unknown_values_total{model="a",column="C1"}'] == 3
    assert found['sbpflow_score_bucket{model="a",le="0.1"}'] == 3
    assert found['sbpflow_score_bucket{model="a",le="0.5"}'] == 6
    assert found['sbpflow_score_count{model="a"}'] == 9
    assert found['sbpflow_score_sum{model="a"}'] == pytest.approx(4.2, abs=1e-6)  # float32 scores
    assert found['sbpflow_request_seconds_bucket{model="a",le="0.0005"}'] == 0
    assert found['sbpflow_request_seconds_bucket{model="a",le="0.001"}'] == 3
    assert found['sbpflow_request_seconds_bucket{model="a",le="+Inf"}'] == 6
    assert found['sbpflow_request_seconds_sum{model="a"}'] == pytest.approx(6.0018)
    assert found['sbpflow_staleness_seconds{model="a"}'] == 500
    assert 'sbpflow_staleness_seconds{model="b"}' not in found
    assert found['sbpflow_model_workers{model="a",version="run-0"}'] == 1
    assert found['sbpflow_model_workers{model="a",version="run-1"}'] == 1
    assert found["sbpflow_worker_restarts_total"] == 1


def test_values_of_a_bundle_with_other_columns_are_counted_by_name():
    counts = Metrics({"a": ["I1", "C1"]}, 1).worker(0)["a"]
    counts.values(("C1", "C5", "I1"), np.array([[1, 2, 3], [4, 5, 6]]))
    counts.values(("C1", "C2"), np.array([[10, 20], [30, 40]]))
    assert counts.missing.tolist() == [3, 11]
    assert counts.unknown.tolist() == [6, 34]


@pytest.mark.parametrize("size", [1, 5])
def test_a_value_on_a_bound_is_in_the_bucket_of_the_bound(size):
    counts = Metrics({"a": []}, 1).worker(0)["a"]
    counts.observe("score", np.full(size, 0.5, dtype=np.float32))
    counts.answer(200, LATENCIES[2])
    assert counts.histograms["score"][7] == size  # 0.5 is the upper bound of bucket 7
    assert counts.histograms["request_seconds"][2] == 1


VALUES = st.floats(-1, 2, width=32) | st.sampled_from([*SCORES, np.inf, np.nan]).map(np.float32)


@pytest.mark.parametrize("compiled", [True, False])
@given(st.lists(VALUES, min_size=1))
def test_values_are_counted_in_their_buckets(compiled, given_values):
    counts = Metrics({"a": []}, 1).worker(0)["a"]
    scores = np.array(given_values, dtype=np.float32)
    with pytest.MonkeyPatch.context() as patch:
        if not compiled:
            patch.setattr(serving_scores, "_loops", lambda: None)
        counts.observe("score", scores)
    cells, exact = counts.histograms["score"], scores.astype(np.float64)
    for place, (low, high) in enumerate(pairwise([-np.inf, *SCORES])):
        assert cells[place] == ((exact > low) & (exact <= high)).sum()
    assert cells[:-1].sum() == len(scores)
    np.testing.assert_allclose(cells[-1], exact.sum(), rtol=0, atol=1e-9)
