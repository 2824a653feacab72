"""Tests the policies that ``benchmarks.cache`` compares, against fetches counted by hand and
against one another.
"""

import numpy as np
import pytest

from benchmarks.cache_policies import Fetches, bagpipe, belady, lfu, lru, planned

TRACE = [np.array(rows) for rows in ([0, 1], [2], [0], [3], [0, 1], [2])]


def per_step(fetched, read):
    return Fetches(pytest.approx(fetched / len(TRACE)), pytest.approx(read / len(TRACE)))


def test_fetches_counted_by_hand():
    # Fetches per batch with three slots; "3 for 2" means that row 3 replaces row 2.
    # MIN: 0 1 | 2 | - | 3 for 2, whose next use is the latest | - | 2
    assert belady(TRACE, 4, 3) == per_step(5, 1)
    # LRU: 0 1 | 2 | - | 3 for 1 | 1 for 2 | 2
    assert lru(TRACE, 4, 3) == per_step(6, 2)
    # LFU: 0 1 | 2 | - | 3 for 1, the older of two used once | 1 for 2 | 2
    assert lfu(TRACE, 4, 3) == per_step(6, 2)


def test_bagpipe_keeps_the_rows_within_its_lookahead():
    # The uses of row 0 are 2 batches apart, and those of rows 1 and 2 are 4 apart. If rows
    # were kept for 4 batches, the cache would hold rows 0, 1, and 2 in batches 1 and 2, and also
    # row 3 in batch 3.
    assert bagpipe(TRACE, 4, 4) == (per_step(4, 0), len(TRACE))
    assert bagpipe(TRACE, 4, 3) == (per_step(6, 2), 4)
    assert bagpipe(TRACE, 4, 2) == (per_step(6, 2), 4)


@pytest.mark.parametrize("seed", range(5))
def test_no_policy_fetches_less_than_min(seed):
    rng = np.random.default_rng(seed)
    trace = [np.unique((rng.random(60) ** 3 * 400).astype(int)) for _ in range(50)]
    least = belady(trace, 400, 90)
    assert planned(trace, 400, 90, known=len(trace), ahead=0) == (least, 0)
    others = (lru(trace, 400, 90), lfu(trace, 400, 90), bagpipe(trace, 400, 90)[0])
    others += tuple(planned(trace, 400, 90, known=known, ahead=1)[0] for known in (1, 8))
    for other in others:
        assert other.fetched > least.fetched
        assert other.fetched - other.read == pytest.approx(least.fetched - least.read)
