"""Tests the bound of the transfer that announces the rows of idle keys."""

import numpy as np
import pytest

pytest.importorskip("numba", reason="growing tables need numba")

from sbpflow.embedding.plan.growth import MIN_ROWS, NUM_BUCKETS, Eviction, Growth, most_freed
from sbpflow.embedding.vocabulary.vocabulary import Vocabulary
from tests.embedding.cases import Spec
from tests.embedding.growing_case import BATCH, GrowingCase


def test_freed_rows_are_part_of_the_bound_of_their_transfer():
    """A batch can free more rows than it has keys."""
    keeping, idle = (
        Growth(evict=Eviction(max_rows=MIN_ROWS, idle_samples=limit)) for limit in (None, 1)
    )
    vocabulary, none = Vocabulary(idle, MIN_ROWS, 0, NUM_BUCKETS), np.empty(0, np.int64)
    vocabulary.announce(np.arange(2 * MIN_ROWS), none, 2 * MIN_ROWS)
    batches = (vocabulary.announce(np.array([-1]), none, 1)[1] for _ in range(NUM_BUCKETS // 16))
    most = most_freed(idle, MIN_ROWS)
    assert 1 < max(changes.freed.size for changes in batches) <= most
    cases = (GrowingCase(deep=Spec("S(1)", "columns"), growth=each) for each in (keeping, idle))
    steps = [{step.id: step for step in case.plan(3).key_steps(BATCH)} for case in cases]
    before, after = (each["keys/new"].per_rank for each in steps)
    assert after - before == 2 * (2 * most) * 2, "two fields, pairs of numbers, and two other ranks"
