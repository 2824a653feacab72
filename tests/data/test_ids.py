"""Tests that each value has its own id, that both halves of a table get equal loads, and that hash
tables find their keys.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbpflow.data.format.ids import IdTable, assign_ids
from sbpflow.serving.cells import RARE_ID, hash_salt, hashed_key_ids


def loads(counts, reserved, ids):
    load = np.zeros(len(counts) + 2, dtype=np.int64)
    load[:2] = reserved
    load[ids] = counts
    return load


def zipf_counts(size, exponent=1.1, total=10**6):
    mass = np.arange(1, size + 1.0) ** -exponent
    return (total * mass / mass.sum()).astype(np.int64) + 1


@pytest.mark.parametrize("reserved", [(0, 0), (300_000, 50_000), (0, 480_000)])
@pytest.mark.parametrize("parts", [2, 4])
def test_contiguous_parts_have_equal_load(reserved, parts):
    counts = zipf_counts(20_000)
    load = loads(counts, reserved, assign_ids(counts, reserved, 7, "C3"))
    assert load.sum() == counts.sum() + sum(reserved)
    shares = [part.sum() / load.sum() for part in np.array_split(load, 2)]
    assert max(shares) < 0.53
    # The part that has the most frequent row has at least that row's load; apart from this, the
    # loads must be balanced.
    hottest = max(load) / load.sum()
    shares = [part.sum() / load.sum() for part in np.array_split(load, parts)]
    assert max(shares) < max(1 / parts + 0.05, hottest + 0.02)


def test_an_id_with_most_lookups_shares_its_half_with_the_coldest():
    counts = zipf_counts(20_000)
    reserved = (3 * int(counts.sum()), 0)
    load = loads(counts, reserved, assign_ids(counts, reserved, 7, "C22"))
    first, second = load[:10_001], load[10_001:]
    assert first[1:].sum() < 0.05 * second.sum()


def test_ids_do_not_follow_frequency():
    counts = zipf_counts(5000)
    ids = assign_ids(counts, (0, 0), 7, "C1")
    assert sorted(ids) == list(range(2, 5002))
    assert abs(np.corrcoef(np.arange(5000), ids)[0, 1]) < 0.1
    assert not np.array_equal(ids, assign_ids(counts, (0, 0), 8, "C1"))
    assert not np.array_equal(ids, assign_ids(counts, (0, 0), 7, "C2"))


@given(
    st.sets(st.integers(0, 2**32 - 1), max_size=200),
    st.lists(st.integers(0, 2**32 - 1), max_size=50),
    st.sampled_from([np.uint32, np.uint64]),
)
def test_tables_find_their_keys_and_no_others(known, others, dtype):
    keys = np.array(sorted(known), dtype=dtype)
    ids = np.arange(len(keys), dtype=np.int32)[::-1] + np.int32(2)
    counts = np.array([2 + 7 * key % 40 for key in keys.tolist()], dtype=np.int64)
    table = IdTable(keys, ids, counts)
    expected = {int(key): int(value) for key, value in zip(keys, ids, strict=True)}
    asked = np.array([*known, *others, 0], dtype=dtype)
    assert table.lookup(asked).tolist() == [expected.get(int(key), RARE_ID) for key in asked]


def test_keys_of_64_bits_are_compared_in_full():
    keys = (np.arange(1000, dtype=np.uint64) << np.uint64(32)) | np.uint64(5)
    table = IdTable(keys, np.arange(2, 1002, dtype=np.int32), np.full(1000, 2))
    assert table.lookup(keys).tolist() == list(range(2, 1002))
    assert set(table.lookup(keys + np.uint64(1)).tolist()) == {RARE_ID}


def test_hashed_ids_fill_the_table_evenly_without_the_reserved_ids():
    ids = hashed_key_ids(np.arange(100_000, dtype=np.uint32), 1002, hash_salt(7, "C3"))
    counts = np.bincount(ids, minlength=1002)
    assert counts[:2].sum() == 0
    assert counts[2:].min() > 50
    assert counts[2:].max() < 160
