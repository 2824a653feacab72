"""Tests the statistics of a table's ids against sampled ids."""

import numpy as np
import pytest

from sbpflow.errors import ConfigError
from sbpflow.planner.costs.features import (
    BIN_SAMPLES,
    NUM_BINS,
    from_bins,
    from_histogram,
    from_ratios,
    from_sample,
    zipf_mandelbrot,
)

ROWS, S, Q = 20_000, 1.1, 3.0


@pytest.fixture(scope="module")
def drawn():
    share = (np.arange(1, ROWS + 1) + Q) ** -S
    random = np.random.default_rng(1)
    return random.choice(ROWS, BIN_SAMPLES, p=share / share.sum())


def unique(ids, count):
    return len(np.unique(ids[:count]))


@pytest.mark.parametrize("count", [100, 3000, 65_536])
def test_a_distribution_touches_as_many_rows_as_samples_from_it(drawn, count):
    law = zipf_mandelbrot(ROWS, S, Q, 1.0)
    assert law.touched(count) == pytest.approx(unique(drawn, count), rel=0.08)
    assert law.distinct == ROWS
    assert law.touched(1e12) <= ROWS


def test_the_bins_of_a_distribution_are_those_of_a_sampled_batch(drawn):
    law = zipf_mandelbrot(ROWS, S, Q, 1.0)
    _, times = np.unique(drawn, return_counts=True)
    place = np.ceil(np.log2(times)).astype(int)  # 1 -> 0, 2 -> 1, 3-4 -> 2, 5-8 -> 3
    rows = np.bincount(place, minlength=NUM_BINS) / len(times)
    lookups = np.bincount(place, weights=times, minlength=NUM_BINS) / BIN_SAMPLES
    np.testing.assert_allclose(law.bin_rows, rows, atol=0.02)
    np.testing.assert_allclose(law.bin_lookups, lookups, atol=0.03)


@pytest.mark.parametrize("count", [500, 10_000])
def test_bins_samples_and_ratios_agree(drawn, count):
    _, times = np.unique(drawn, return_counts=True)
    place = np.ceil(np.log2(times)).astype(int)
    rows = np.bincount(place, minlength=NUM_BINS)
    lookups = np.bincount(place, weights=times, minlength=NUM_BINS)
    truth = unique(drawn, count)
    assert from_sample(drawn, 1.0).touched(count) == pytest.approx(truth, rel=0.05)
    assert from_bins(rows, lookups, 1.0).touched(count) == pytest.approx(truth, rel=0.15)
    ratios = {n: unique(drawn, n) / n for n in (1024, 4096, 16384, 65536)}
    measured = from_ratios(ratios, 1.0, distinct=ROWS, bin_rows=rows, bin_lookups=lookups)
    assert measured.touched(count) == pytest.approx(truth, rel=0.1)


def test_lookups_of_rows_whose_share_is_rounded_to_0_count():
    lookups = [0.2, *[0.0] * 15, 0.8]
    rounded = from_bins([1.0, *[0.0] * 16], lookups, 1.0)
    exact = from_bins([1.0, *[0.0] * 15, 1e-6], lookups, 1.0)
    assert rounded.touched(10_000) == exact.touched(10_000)
    assert rounded.touched(10_000) < 0.25 * 10_000


def test_even_ids_touch_the_expected_number_of_rows():
    even = from_histogram([1000.0], [1.0], 1.0)
    assert even.touched(1000) == pytest.approx(1000 * (1 - np.exp(-1)), rel=0.02)
    assert even.touched(0) == 0.0
    assert even.touched(1) == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize("seed", range(5))
def test_more_lookups_never_touch_fewer_rows(seed):
    random = np.random.default_rng(seed)
    law = zipf_mandelbrot(int(random.integers(2, 5000)), random.random() * 1.5, 2.0, 1.0)
    touched = [law.touched(x) for x in np.geomspace(0.5, 1e9, 200)]
    assert (np.diff(touched) >= -1e-9).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: from_sample([1], 1.0), "a sample must have 2 or more ids, got 1"),
        (lambda: from_bins([1.0], [1.0], 1.0), "must have 17 values"),
        (lambda: from_histogram([5.0], [0.0], 1.0), "use, for example, rows"),
    ],
)
def test_impossible_statistics_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
