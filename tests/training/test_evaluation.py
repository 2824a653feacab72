"""Tests normalized entropy, calibration, and AUC (by histogram and by slices) against brute force
in float64.

The oracles are loops over rows and pairs, which share no code with sbpflow.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from sbpflow.boxing.executor import Boxing
from sbpflow.errors import ConfigError, MetricError
from sbpflow.runtime.ranks.world import World
from sbpflow.sbp.sbp import balanced_sizes
from sbpflow.training.evaluate import ScoreOptions, _Rows, score_split, slice_columns
from sbpflow.training.grouped_metrics import exponent_sums
from sbpflow.training.histogram_auc import ScoreHistogram, auc_of_counts
from sbpflow.training.metrics import (
    GROUPED,
    Evaluation,
    GroupTerms,
    calibration_groups,
    evaluate,
    gauc,
    group_terms,
    slice_by,
)
from sbpflow.training.report import describe_evaluation, figures_of
from tests.training.test_health import Split
from tests.training.wdl_case import make_batches, make_config, make_job

CPU = torch.device("cpu")


def made_up(rows: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return logits with ties, labels that depend on them, and a column of ids."""
    rng = np.random.default_rng(seed)
    logits = np.round(rng.normal(-1.0, 2.0, rows), 1).astype(np.float32)
    labels = (rng.random(rows) < 1.0 / (1.0 + np.exp(-logits + 0.4))).astype(np.float32)
    return logits, labels, rng.integers(0, 6, rows) ** 2


def pairs_in_order(scores: Any, labels: Any) -> float | None:
    """Compute the AUC from all pairs; return ``None`` for a single class."""
    wins = [
        1.0 if p > n else 0.5 if p == n else 0.0
        for p, y in zip(scores, labels, strict=True)
        if y == 1
        for n, z in zip(scores, labels, strict=True)
        if z == 0
    ]
    return sum(wins) / len(wins) if wins else None


def slow_logloss(logits: Any, labels: Any) -> float:
    chances = [1.0 / (1.0 + math.exp(-float(logit))) for logit in logits]
    terms = [-math.log(p if y == 1 else 1.0 - p) for p, y in zip(chances, labels, strict=True)]
    return sum(terms) / len(terms)


def test_normalised_entropy_and_calibration_by_hand():
    logits, labels, _ = made_up(500)
    evaluation = evaluate(logits, labels)
    positives = int(sum(labels))
    share = positives / 500
    entropy = -(share * math.log(share) + (1 - share) * math.log(1 - share))
    assert evaluation.normalised_entropy == pytest.approx(
        slow_logloss(logits, labels) / entropy, 1e-12
    )
    total = sum(1.0 / (1.0 + math.exp(-float(logit))) for logit in logits)
    assert (evaluation.predicted, evaluation.positives) == (
        pytest.approx(total, rel=1e-12),
        positives,
    )
    assert evaluation.calibration_ratio == pytest.approx(total / positives, rel=1e-12)
    constant = evaluate(np.full(500, math.log(share / (1 - share))), labels)
    assert constant.normalised_entropy == pytest.approx(1.0, rel=1e-12)
    assert constant.calibration_ratio == pytest.approx(1.0, rel=1e-12)


def test_calibration_bins_are_rows_in_order_of_their_chance():
    logits, labels, _ = made_up(503)
    bins = evaluate(logits, labels).calibration
    assert [bucket.num_rows for bucket in bins] == [26] * 3 + [25] * 17
    order = np.argsort(logits, kind="stable")
    chance = 1.0 / (1.0 + np.exp(-logits[order[:26]].astype(np.float64)))
    assert bins[0].predicted == pytest.approx(chance.mean(), rel=1e-12)
    assert bins[0].observed == pytest.approx(labels[order[:26]].mean(), rel=1e-12)
    assert sum(bucket.num_rows * bucket.observed for bucket in bins) == pytest.approx(labels.sum())


def test_a_histogram_is_within_its_error_bound_and_has_the_exact_sums(monkeypatch):
    logits, labels, _ = made_up(700)
    want = evaluate(logits, labels)
    for bins in (10, 200, 10_000):
        monkeypatch.setattr("sbpflow.training.histogram_auc.NUM_BINS", bins)
        histogram = ScoreHistogram(CPU)
        for part in range(0, 700, 300):
            rows = slice(part, part + 300)
            histogram.add(torch.from_numpy(logits[rows]), torch.from_numpy(labels[rows]))
        evaluation = histogram.evaluation()
        exact = pairs_in_order(logits, labels)
        assert abs(evaluation.auc - exact) <= evaluation.auc_error
        assert evaluation.logloss == pytest.approx(want.logloss, rel=1e-12)
        assert evaluation.predicted == pytest.approx(want.predicted, rel=1e-12)
        assert (evaluation.positives, evaluation.num_rows) == (want.positives, 700)
        assert evaluation.normalised_entropy == pytest.approx(want.normalised_entropy, rel=1e-12)
        assert sum(one.num_rows for one in evaluation.calibration) == 700
        assert len(evaluation.calibration) <= 20
    assert evaluation.auc_error < 0.01  # only ties within a bin cause errors


def test_the_error_bound_is_tight():
    # With 3 positives and 2 negatives in a single bin, the AUC is given as 0.5, but it is 0 or 1 if
    # all pairs have the same order.
    assert auc_of_counts([3], [2]) == (0.5, 0.5)
    assert auc_of_counts([0, 4], [5, 0]) == (1.0, 0.0)
    area, bound = auc_of_counts([1, 2], [3, 1])
    assert area == (3 * 2 + 0.5 * 1 * 3 + 0.5 * 2 * 1) / 12
    assert bound == (3 + 2) / 24


def test_histogram_refusals():
    histogram = ScoreHistogram(CPU)
    with pytest.raises(MetricError, match="no predictions"):
        histogram.evaluation()
    histogram.add(torch.tensor([0.0, math.nan]), torch.tensor([0.0, 1.0]))
    with pytest.raises(MetricError, match="1 predictions are NaN"):
        histogram.evaluation()
    other = ScoreHistogram(CPU)
    other.add(torch.tensor([0.0, 1.0]), torch.tensor([0.0, 2.0]))
    with pytest.raises(MetricError, match="1 labels are neither 0 nor 1"):
        other.evaluation()
    alone = ScoreHistogram(CPU)
    alone.add(torch.tensor([0.0, math.inf, -math.inf]), torch.tensor([1.0, 1.0, 1.0]))
    assert alone.evaluation().no_auc.startswith("all 3 rows are positive")


def test_groups_of_bins_take_all_rows():
    rows, chances, positives = [5, 0, 1, 94], [1.0, 0.0, 0.5, 60.0], [1, 0, 1, 50]
    groups = calibration_groups(rows, chances, positives)
    assert [(group.num_rows, group.observed) for group in groups] == [(5, 0.2), (95, 51 / 95)]


def test_slices_are_evaluations_of_their_rows():
    logits, labels, values = made_up(400)
    labels[values == 25] = 0  # a slice with only negatives
    whole, *slices = slice_by(logits, labels, values, "C1", most=4)
    counts = {int(v): int((values == v).sum()) for v in set(values)}
    frequent = sorted(counts, key=lambda v: (-counts[v], v))[:4]
    assert [slice_.value for slice_ in slices] == frequent
    for slice_ in slices:
        rows = values == slice_.value
        assert slice_.num_rows == rows.sum()
        want = pairs_in_order(logits[rows], labels[rows])
        assert slice_.auc == (None if want is None else pytest.approx(want, rel=1e-12))
        assert slice_.logloss == pytest.approx(slow_logloss(logits[rows], labels[rows]), rel=1e-6)
    both = {v: n for v, n in counts.items() if v != 25}
    areas = {v: pairs_in_order(logits[values == v], labels[values == v]) for v in both}
    mean = sum(n * areas[v] for v, n in both.items()) / sum(both.values())
    assert (whole.column, whole.value, whole.num_rows) == ("C1", None, sum(both.values()))
    assert whole.auc == pytest.approx(mean, rel=1e-12)


def scores(world: World, options: list[ScoreOptions]) -> list[Evaluation | None]:
    job = make_job(world, make_config("2", "sgd"))
    loader = Split(world, make_batches(6, 31, seed=8))
    return [score_split(job.trainer, loader, job.boxing, option) for option in options]


def test_score_options_do_not_depend_on_the_number_of_ranks(ranks):
    rows = sum(batch.batch_size for batch in make_batches(6, 31, seed=8))
    options = [
        ScoreOptions(slices={"C1": 0, "C2": 1}),
        ScoreOptions(exact_rows=40),  # the first batch still fits
        ScoreOptions(exact_rows=0),
        ScoreOptions(max_rows=40),
    ]
    ((exact, some, none, first),) = ranks(1, scores, options)
    assert (exact.num_rows, some.num_rows, first.num_rows) == (rows, rows, 62)
    assert exact.auc_error is None
    assert abs(some.auc - exact.auc) <= some.auc_error < 1e-3
    assert some.logloss == pytest.approx(exact.logloss, rel=1e-12)
    assert replace(some, logloss=0, predicted=0) == replace(none, logloss=0, predicted=0)
    assert [slice_.column for slice_ in exact.slices if slice_.value is None] == ["C1", "C2"]
    ids = torch.cat([batch.ids[:, 1] for batch in make_batches(6, 31, seed=8)])
    values, counts = ids.unique(return_counts=True)
    found = {slice_.value: slice_.num_rows for slice_ in exact.slices if slice_.column == "C2"}
    want = dict(zip(values.tolist(), counts.tolist(), strict=True))
    assert all(want[value] == n for value, n in found.items() if value is not None)
    for several in ranks(3, scores, options)[:1]:
        for one, other in zip(several, (exact, some, none, first), strict=True):
            assert one.num_rows == other.num_rows
            assert one.auc == pytest.approx(other.auc, abs=1e-9)
            assert one.auc_error == pytest.approx(other.auc_error, abs=1e-9)
            assert one.logloss == pytest.approx(other.logloss, abs=1e-12)
            assert [s.num_rows for s in one.slices] == [s.num_rows for s in other.slices]


def groups_of(world: World, seed: int, terms: GroupTerms = group_terms) -> Evaluation | None:
    """Evaluate more rows than ``exact_rows`` allows, with slices by two id columns and with groups,
    whose ``terms`` give the metric ``gauc``.
    """
    with patch.dict(GROUPED, gauc=terms):
        return _groups_of(world, seed)


def _groups_of(world: World, seed: int) -> Evaluation | None:
    rows = _Rows(Boxing(world), ScoreOptions(exact_rows=0, slices={"C1": 0, "C2": 1}))
    for batch, logits in made_up_batches(seed, world.size, world.rank):
        rows.add(logits, batch)
    return rows.evaluation()


def made_up_batches(seed: int, size: int, rank: int) -> Iterator[tuple[Any, torch.Tensor]]:
    rng = np.random.default_rng(seed)
    for number in range(4):
        rows = 1 if number == 3 else 97  # the last batch leaves some ranks without rows
        logits = torch.from_numpy(rng.normal(size=rows).round(1).astype(np.float32))
        labels = torch.from_numpy((rng.random(rows) < 0.4).astype(np.float32))
        groups = torch.from_numpy(rng.integers(-(2**62), 2**62, 20)[rng.integers(0, 20, rows)])
        ids = torch.from_numpy(rng.integers(0, 30, (rows, 2)) ** 2 // 60)
        own = balanced_sizes(rows, size)
        part = slice(sum(own[:rank]), sum(own[: rank + 1]))
        batch = SimpleNamespace(
            batch_size=rows, labels=labels[part], ids=ids[part], columns={"group": groups[part]}
        )
        yield batch, logits[part]


def test_gauc_and_slices_beyond_the_limit_equal_gathered_rows_bit_for_bit(ranks):
    whole = list(made_up_batches(5, 1, 0))
    logits = torch.cat([logits for _, logits in whole])
    labels = torch.cat([batch.labels for batch, _ in whole])
    groups = torch.cat([batch.columns["group"] for batch, _ in whole])
    ids = torch.cat([batch.ids for batch, _ in whole])
    want = (*slice_by(logits, labels, ids[:, 0], "C1"), *slice_by(logits, labels, ids[:, 1], "C2"))
    for size in (1, 2, 3):
        first, *others = ranks(size, groups_of, 5)
        assert first.gauc == gauc(logits, labels, groups)
        assert first.slices == want
        assert first.auc_error is not None
        assert others == [None] * (size - 1)


def share_of_groups(logits: Any, labels: Any, groups: Any) -> tuple[np.ndarray, int]:
    """Return, for each group, the share of its rows in which the sign of the logit is wrong."""
    wrong = (np.asarray(logits) > 0) != (np.asarray(labels) == 1)
    _, group = np.unique(np.asarray(groups), return_inverse=True)
    counts = np.bincount(group)
    return -np.bincount(group, wrong, len(counts)) / np.maximum(counts, 1), len(counts)


def test_a_metric_of_groups_needs_only_a_function_in_grouped(ranks):
    batches = list(made_up_batches(5, 1, 0))
    rows = torch.cat([torch.stack([logits, batch.labels], 1) for batch, logits in batches])
    groups = torch.cat([batch.columns["group"] for batch, _ in batches])
    with patch.dict(GROUPED, gauc=share_of_groups):
        want = evaluate(rows[:, 0], rows[:, 1], groups).gauc
    wrong = (rows[:, 0] > 0) != (rows[:, 1] == 1)
    shares = [-wrong[groups == group].double().mean().item() for group in groups.unique()]
    assert want == pytest.approx(sum(shares) / len(shares), rel=1e-12)
    for size in (1, 3):
        first, *_ = ranks(size, groups_of, 5, share_of_groups)
        assert first.gauc == want
        assert first.slices == ranks(size, groups_of, 5)[0].slices


def test_rows_beyond_the_limit_are_moved_to_host_memory_once(monkeypatch):
    moved: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "cpu", lambda part: moved.append(part) or part)
    boxing: Any = SimpleNamespace(world=SimpleNamespace(size=1, device=CPU))
    rows = _Rows(boxing, ScoreOptions(exact_rows=97, slices={"C1": 0}))
    for batch, logits in made_up_batches(5, 1, 0):
        rows.add(logits, batch)
    assert [len(part) for part in rows.keys] == [len(part) for part in rows.kept]
    assert {id(part) for part in (*rows.keys, *rows.kept)} == {id(part) for part in moved}
    assert len(moved) == 8


def test_exact_sums_equal_fsum():
    rng = np.random.default_rng(1)
    terms = rng.random(1000) * 2.0 ** rng.integers(-60, 40, 1000)
    high, low = (part.astype(object) for part in exponent_sums(terms))
    powers = [Fraction(2) ** (place - 80 - 53) for place in range(len(low))]
    total = sum((h * 2**26 + n) * p for h, n, p in zip(high, low, powers, strict=True))
    assert float(total) == math.fsum(terms.tolist())


def test_unknown_slices_are_refused_with_the_valid_ones(ranks):
    plan = ranks(1, plan_of)[0]
    assert slice_columns(["C3", "C1"], plan) == {"C3": 2, "C1": 0}
    with pytest.raises(ConfigError, match=r"^train\.slices: C9 .* C1, C2, C3, C4, C1xC2"):
        slice_columns(["C1", "C9"], plan)
    with pytest.raises(ConfigError, match=r"^train\.slices: C1 is listed twice"):
        slice_columns(["C1", "C1"], plan)


def plan_of(world: World) -> Any:
    return make_job(world, make_config("dp", "sgd")).trainer.embeddings.plan


def test_evaluations_print_all_metrics():
    evaluation = Evaluation(
        1200,
        0.4,
        0.75,
        gauc=0.7,
        normalised_entropy=0.9,
        predicted=310.25,
        positives=300,
        auc_error=5.5e-5,
    )
    line = describe_evaluation(evaluation)
    for part in (
        "AUC 0.75 (from a histogram, error at most 5.5e-05)",
        "GAUC by rows 0.7",
        "normalized entropy 0.9",
        "calibration 1.03417 (predicted 310.2 of 300 positives)",
        "1200 rows",
    ):
        assert part in line
    assert figures_of(evaluation)["calibration"] == 310.25 / 300
    assert figures_of(Evaluation(3, 0.5, 0.5)) == {"auc": 0.5, "logloss": 0.5}
