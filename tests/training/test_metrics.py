"""Tests AUC, GAUC and logloss against slow, obvious definitions."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sbpflow.errors import MetricError
from sbpflow.training.metrics import auc, evaluate, gauc, logloss

# Only a few distinct scores, so that ties are common; they include infinities and both zeros.
SCORES = st.sampled_from([-math.inf, -2.5, -1.0, -0.0, 0.0, 1e-30, 1.0, 1.0000001, 7.0, math.inf])
ROWS = st.lists(st.tuples(SCORES, st.booleans()), min_size=2, max_size=40).filter(
    lambda rows: len({label for _, label in rows}) == 2
)


def pair_count(rows):
    """Count every (positive, negative) pair: 1 if ordered, 1/2 if tied."""
    positives = [score for score, label in rows if label]
    negatives = [score for score, label in rows if not label]
    wins = sum(
        Fraction(int(p > n)) + Fraction(int(p == n), 2) for p in positives for n in negatives
    )
    return wins / (len(positives) * len(negatives))


def arrays(rows, dtype=np.float64):
    return np.array([s for s, _ in rows], dtype), np.array([y for _, y in rows], np.float32)


@given(ROWS)
def test_auc_equals_the_count_of_pairs(rows):
    assert auc(*arrays(rows)) == float(pair_count(rows))


@given(ROWS, st.randoms(use_true_random=False))
def test_auc_does_not_depend_on_order_scale_or_direction(rows, random):
    value = auc(*arrays(rows))
    shuffled = random.sample(rows, len(rows))
    assert auc(*arrays(shuffled)) == value
    assert auc(*arrays([(s / 4, y) for s, y in rows])) == value
    flipped = auc(*arrays([(-s, y) for s, y in rows]))
    assert flipped == pytest.approx(1 - value, abs=1e-15)  # each side has one rounding error


def test_auc_of_the_textbook():
    labels = np.array([0, 0, 1, 1])
    assert auc(np.array([0.1, 0.4, 0.35, 0.8]), labels) == 0.75
    assert auc(np.array([1.0, 2.0, 3.0, 4.0]), labels) == 1.0
    assert auc(np.zeros(4), labels) == 0.5


def test_auc_counts_pairs_beyond_float_precision():
    """A float32 sum of 2^27 pairs would lose the half point of the only tie."""
    n = 2**13
    scores = np.concatenate([np.arange(n) + 0.5, np.arange(2 * n) - n])
    labels = np.concatenate([np.ones(n), np.zeros(2 * n)])
    scores[0] = 0.0
    expected = Fraction(2 * sum(n + k + 1 for k in range(n)) - 1, 2 * n * 2 * n)
    assert Fraction(auc(scores, labels)) == expected


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_torch_and_numpy_agree(dtype):
    scores = torch.tensor([0.5, -1.0, 2.0, 0.5]).to(dtype).requires_grad_()
    labels = torch.tensor([1, 0, 0, 1])
    as_numpy = scores.detach().double().numpy(), labels.numpy()
    assert auc(scores, labels) == auc(*as_numpy) == 0.5
    assert logloss(scores, labels) == logloss(*as_numpy)
    assert auc(scores[:, None], labels[:, None].float()) == 0.5


@given(st.lists(st.tuples(st.floats(-30, 30), st.booleans()), min_size=1, max_size=30))
def test_logloss_is_the_mean_of_minus_log_p(rows):
    expected = [math.log1p(math.exp(-s if y else s)) for s, y in rows]
    # one rounding in log1p(exp()) and one in logaddexp
    assert logloss(*arrays(rows)) == pytest.approx(math.fsum(expected) / len(rows), rel=1e-14)


def test_logloss_stays_finite_where_a_probability_would_round_to_one():
    assert logloss(np.array([1e4, -800.0]), np.array([0, 1])) == 5400.0
    assert logloss(np.array([800.0]), np.array([1])) == 0.0


def test_logloss_does_not_depend_on_order():
    random = np.random.default_rng(1)
    logits, labels = random.normal(size=10_001) * 8, random.random(10_001) < 0.3
    value = logloss(logits, labels)
    for seed in range(5):
        order = np.random.default_rng(seed).permutation(len(logits))
        assert logloss(logits[order], labels[order]) == value


def test_nan_predictions_are_an_error_with_their_place():
    with pytest.raises(MetricError, match="2 of 4 predictions are NaN, the first in row 1"):
        auc(np.array([0.0, np.nan, 1.0, np.nan]), np.array([0, 1, 0, 1]))
    with pytest.raises(MetricError, match="NaN"):
        logloss(torch.tensor([math.nan]), torch.tensor([1.0]))


def test_rows_of_one_class_have_no_auc_and_the_reason_is_given():
    with pytest.raises(MetricError, match="all 2 rows are positive"):
        auc(np.zeros(2), np.ones(2))
    evaluation = evaluate(np.zeros(3), np.zeros(3))
    assert evaluation.no_auc.startswith("all 3 rows are negative")
    assert (evaluation.auc, evaluation.normalised_entropy, evaluation.calibration_ratio) == (
        None,
        None,
        None,
    )
    assert evaluation.logloss == math.log(2)
    assert evaluate(np.array([1.0, 2.0]), np.array([0, 1])).auc == 1.0


@pytest.mark.parametrize(
    ("scores", "labels", "message"),
    [
        ([], [], "no predictions"),
        ([1.0], [1, 0], "there are 1 predictions, but 2 labels"),
        ([1.0, 2.0], [1, 2], "labels must be 0 or 1, got 2"),
        ([1.0, 2.0], [1, math.nan], "labels must be 0 or 1, got nan"),
    ],
)
def test_invalid_inputs_are_refused(scores, labels, message):
    with pytest.raises(MetricError, match=message):
        auc(np.array(scores), np.array(labels))


GROUPED = st.lists(st.tuples(SCORES, st.booleans(), st.integers(0, 4)), min_size=1, max_size=40)


def grouped_pair_count(rows):
    """Compute GAUC by counting pairs in each group; return None if no group has both classes."""
    total, weight = Fraction(0), 0
    for group in {group for _, _, group in rows}:
        own = [(score, label) for score, label, other in rows if other == group]
        if len({label for _, label in own}) == 2:
            total, weight = total + len(own) * pair_count(own), weight + len(own)
    return total / weight if weight else None


@given(GROUPED, st.randoms(use_true_random=False))
def test_gauc_equals_the_count_of_pairs_in_groups_of_both_classes(rows, random):
    want = grouped_pair_count(rows)
    rows = random.sample(rows, len(rows))
    groups = np.array([group for _, _, group in rows]) - 2**62  # group ids may be any integers
    given = (*arrays([row[:2] for row in rows]), groups)
    if want is None:
        assert gauc(*given) is None
    else:
        assert gauc(*given) == pytest.approx(float(want), abs=1e-15)  # one rounding per group


def test_gauc_of_one_group_is_the_auc_and_groups_of_one_class_count_nothing():
    rng = np.random.default_rng(0)
    scores, labels = rng.normal(size=500).astype(np.float32), rng.integers(0, 2, 500)
    assert gauc(scores, labels, np.zeros(500, np.int64)) == auc(scores, labels)
    more = np.concatenate([scores, scores]), np.concatenate([labels, np.ones(500)])
    groups = np.repeat([3, 9], 500)
    assert gauc(*more, groups) == auc(scores, labels)
    assert evaluate(*more, groups).gauc == auc(scores, labels)
    assert evaluate(*more).gauc is None
    with pytest.raises(MetricError, match="500 predictions, but 3 group IDs"):
        gauc(scores, labels, groups[:3])
