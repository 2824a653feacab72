"""Tests that an epoch's order contains every row once and is not stored, and that training in this
order works as well as in random order.
"""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbpflow.data.read.order import RUN_ROWS, SHUFFLES, RowOrder
from sbpflow.data.read.permutation import Permutation
from sbpflow.training.metrics import auc


def rows_of(order, start, stop):
    runs = order.runs(start, stop)
    pieces = [np.arange(a, a + n) for a, n in zip(runs.firsts, runs.lengths, strict=True)]
    return np.concatenate([np.empty(0, np.int64), *pieces])


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 5000), st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1))
def test_a_permutation_contains_every_value_once(size, seed, epoch):
    image = Permutation(size, seed, epoch)(np.arange(size))
    assert np.array_equal(np.sort(image), np.arange(size))


def test_a_permutation_depends_on_every_part_of_its_key():
    images = [Permutation(10_000, *key)(np.arange(10_000)) for key in ((1, 2), (1, 3), (2, 2))]
    for n, image in enumerate(images):
        for other in images[:n]:
            assert (image == other).sum() < 10  # for random permutations, the expected value is 1


@pytest.mark.slow
@pytest.mark.parametrize("size", [3, 7, 24, 300])
def test_every_index_has_every_image_equally_often(size):
    """Apply a chi-squared test to the permutations of many keys, for the sizes with the fewest bits
    to mix.
    """
    times = 20 * size
    counts = np.zeros((size, size))
    for key in range(times):
        counts[np.arange(size), Permutation(size, key, 1)(np.arange(size))] += 1
    freedom = (size - 1) ** 2
    chi = float(((counts - times / size) ** 2 / (times / size)).sum())
    assert abs(chi - freedom) < 4 * (2 * freedom) ** 0.5


def test_neighbors_and_order_are_not_preserved():
    image = Permutation(1_000_000, 7, 0)(np.arange(1_000_000))
    assert abs(np.corrcoef(image[:-1], image[1:])[0, 1]) < 0.004  # 4 standard errors
    assert abs(np.corrcoef(image, np.arange(len(image)))[0, 1]) < 0.004
    assert 2 < (np.abs(np.diff(image)) < 10).sum() < 50  # 18 are expected


@settings(max_examples=200, deadline=None)
@given(st.data(), st.sampled_from(SHUFFLES), st.integers(1, 20_000), st.integers(0, 99))
def test_an_order_has_every_row_once_and_ranges_of_it_are_consistent(
    data, shuffle, num_rows, epoch
):
    order = RowOrder(num_rows, shuffle, 7, epoch)
    whole = rows_of(order, 0, num_rows)
    assert np.array_equal(np.sort(whole), np.arange(num_rows))
    start = data.draw(st.integers(0, num_rows))
    stop = data.draw(st.integers(start, num_rows))
    assert np.array_equal(rows_of(order, start, stop), whole[start:stop])


def test_runs_are_contiguous_and_the_short_one_moves():
    places = set()
    for epoch in range(20):
        order = RowOrder(16 * 50 + 5, "runs", 7, epoch)
        runs = order.runs(0, order.num_rows)
        assert sorted(runs.lengths.tolist()) == [5] + [16] * 50
        places.add(int(runs.lengths.argmin()))
    assert len(places) > 10


@pytest.mark.parametrize("shuffle", ["runs", "rows"])
def test_the_order_of_four_billion_rows_needs_no_memory(shuffle):
    """Test an order as large as Criteo's 1 TB data: 4,195,197,692 training rows."""
    num_rows, batch = 4_195_197_692, 16384
    tracemalloc.start()
    order = RowOrder(num_rows, shuffle, 7, 3)
    starts = [0, 2**31 - 5, 2**32 - 200_000_000, num_rows - batch]
    rows = np.concatenate([rows_of(order, start, start + batch) for start in starts])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(np.unique(rows)) == len(starts) * batch
    assert rows.min() >= 0
    assert rows.max() < num_rows
    assert peak < 8e6
    # A batch is a sample of the whole split: its mean is within 4 standard errors of the mean of
    # all rows.
    per_batch = rows.reshape(len(starts), batch).mean(1) / num_rows
    error = (1 / 12 / (batch / RUN_ROWS[shuffle])) ** 0.5
    assert np.abs(per_batch - 0.5).max() < 4 * error


FIELDS, ROWS_PER_TABLE = 8, 500


def _clicks(num_rows):
    """Return ids ([rows, fields]) into stacked tables, with low ids more frequent, and matching
    clicks.
    """
    rng = np.random.default_rng(0)
    ids = (ROWS_PER_TABLE * rng.random((num_rows, FIELDS)) ** 3).astype(np.int64)
    ids += np.arange(FIELDS) * ROWS_PER_TABLE
    weights = rng.normal(size=FIELDS * ROWS_PER_TABLE)
    return ids, rng.random(num_rows) < 1 / (1 + np.exp(1.2 - weights[ids].sum(1) / 2))


def _train_on_sorted_labels(clicks, shuffle, seed):
    """Return the test AUC of a wide model after one epoch of SGD over rows sorted by label."""
    ids, labels = clicks
    half, batch = len(labels) // 2, 256
    by_label = np.argsort(labels[:half], kind="stable")
    ids_train, labels_train = ids[:half][by_label], labels[:half][by_label]
    order, weights, bias = RowOrder(half, shuffle, seed, 0), np.zeros(FIELDS * ROWS_PER_TABLE), 0.0
    for start in range(0, half, batch):
        rows = rows_of(order, start, min(start + batch, half))
        chosen = ids_train[rows]
        error = 1 / (1 + np.exp(-weights[chosen].sum(1) - bias)) - labels_train[rows]
        step = np.repeat(error, FIELDS)
        # The rate falls to 0, so that the last rows do not dominate the model.
        rate = 1 - start / half
        weights -= 0.02 * rate * np.bincount(chosen.reshape(-1), step, len(weights))
        bias -= 0.2 * rate * error.mean()
    return auc(weights[ids[half:]].sum(1), labels[half:].astype(np.float32))


@pytest.mark.slow
def test_rows_sorted_by_label_train_as_well_as_randomly_ordered_ones():
    """In the worst case, all clicks are at the end of the file, so training in file order favors
    ids of the last rows.
    """
    clicks = _clicks(400_000)
    for seed in (1, 2, 3):
        random, runs = (_train_on_sorted_labels(clicks, s, seed) for s in ("rows", "runs"))
        assert abs(random - runs) < 0.001
    assert random - _train_on_sorted_labels(clicks, "none", 1) > 0.01
