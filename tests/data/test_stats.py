"""Tests table statistics against lookups counted by hand."""

import numpy as np
import pytest

from sbpflow.data.format.manifest import SPLITS, load_manifest, write_manifest
from sbpflow.data.format.shards import write_shard
from sbpflow.data.stats import batch_counts, compute_stats, num_distinct


def set_of_ids(folder, ids):
    """Return a set with one field that has these ids in train."""
    folder.mkdir()
    shards = {}
    for split in SPLITS:
        own_ids = ids if split == "train" else ids[:1]
        words = np.zeros((len(own_ids), 2), dtype=np.int32)
        words[:, 1] = own_ids
        shards[split] = [write_shard(folder, f"{split}-0.npy", words)]
    fields = [{"name": "C1", "rows": 100}]
    write_manifest(folder, {"source": "test", "dense": [], "fields": fields, "splits": shards})
    return load_manifest(folder)


def test_bins_count_the_rows_of_a_batch_by_their_lookups(tmp_path):
    ids = np.array([5] * 9 + [6] * 8 + [7] * 2 + [8, 9])
    (stats,) = compute_stats(set_of_ids(tmp_path / "set", ids))
    assert stats.bins_samples == 21
    assert stats.bins_rows == [2, 1, 0, 1, 1] + [0] * 12  # bins of 1, 2, 3-4, 5-8, 9-16 lookups
    assert stats.bins_lookups == [2, 2, 0, 8, 9] + [0] * 12
    assert stats.distinct == 5


def test_bins_describe_65536_samples_and_the_last_bin_is_open(tmp_path):
    ids = np.full(70_000, 3)
    ids[:30_000] = np.arange(30_000) % 90 + 5
    manifest = set_of_ids(tmp_path / "set", ids)
    samples, counts = batch_counts(manifest)
    assert samples == 65_536
    assert counts["C1"].sum() == 65_536
    (stats,) = compute_stats(manifest)
    assert stats.bins_rows[16] == 1
    assert stats.bins_lookups[16] == counts["C1"][-1] > 2**15


@pytest.mark.parametrize("ids", [[], [7], [3, 3], [5, 1, 5, 2, 1]])
def test_distinct_ids_are_counted(ids):
    assert num_distinct(np.array(ids, dtype=np.int32).reshape(-1, 1)) == len(set(ids))
