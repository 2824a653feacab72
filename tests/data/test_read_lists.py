"""Tests reading a set with every kind of column: weighted lists, weights, group, time, keys,
labels.
"""

from itertools import chain

import numpy as np
import pytest
import torch

from sbpflow.data import open_loader
from sbpflow.data.read.order import SHUFFLES
from tests.data.backends import BACKENDS, INSTALLED
from tests.data.full_set import NUM_ROWS, make_full_set


@pytest.fixture(scope="module")
def full_set(tmp_path_factory):
    """Return the manifest and the train rows of the set."""
    return make_full_set(tmp_path_factory.mktemp("full") / "set")


def rows_of(batch):
    return batch.dense[:, 0].to(torch.int64).tolist()


def check(batch, rows):
    """Check every column of a batch against the expected rows; return the row numbers."""
    numbers = rows_of(batch)
    own = [rows[number] for number in numbers]
    lists = batch.ids.lists
    assert batch.labels.tolist() == [row.label for row in own]
    assert batch.ids.matrix.tolist() == [row.ids for row in own]
    assert lists.lengths.dtype == lists.values.dtype == torch.int32
    assert lists.lengths.tolist() == [[len(ids) for ids in row.lists] for row in own]
    assert lists.values.tolist() == [i for row in own for ids in row.lists for i in ids]
    weights = [w for row in own for ws in row.list_weights for w in ws]
    assert torch.equal(lists.weights, torch.tensor(weights, dtype=torch.float32))
    assert torch.equal(batch.weights, torch.tensor([r.weight for r in own], dtype=torch.float32))
    group = np.array([row.group for row in own], dtype=np.uint64).view(np.int64)
    assert batch.columns["group"].tolist() == group.tolist()
    assert batch.columns["time"].tolist() == [row.time for row in own]
    assert batch.columns["row_key"].tolist() == [row.key for row in own]
    assert batch.columns["labels"][:, 0].tolist() == [row.labels[0] for row in own]
    assert batch.columns["labels"].shape == (len(own), 2)
    assert bool(batch.columns["labels"][:, 1].isnan().all())
    return numbers


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_every_column_of_every_row(full_set, backend, shuffle):
    manifest, rows = full_set
    seen = []
    for rank in range(2):
        loader = open_loader(
            manifest, batch_size=900, backend=backend, shuffle=shuffle, rank=rank, world_size=2
        )
        for batch in loader.epoch(1):
            seen += check(batch, rows)
    assert sorted(seen) == list(range(NUM_ROWS))


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_order_does_not_depend_on_world_or_backend(full_set, shuffle):
    manifest, rows = full_set

    def order(world_size, backend):
        loaders = [
            open_loader(
                manifest, batch_size=900, backend=backend, shuffle=shuffle, rank=rank,
                world_size=world_size,
            )
            for rank in range(world_size)
        ]  # fmt: skip
        steps = zip(*(loader.epoch(2) for loader in loaders), strict=True)
        return [number for step in steps for batch in step for number in check(batch, rows)]

    assert order(1, "memmap") == order(3, INSTALLED[-1]) == order(4, "memmap")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_without_rows_has_empty_columns(full_set, backend):
    manifest, rows = full_set
    loader = open_loader(
        manifest, split="test", batch_size=7, backend=backend, rank=6, world_size=7, shuffle="none"
    )
    (batch,) = loader.epoch(0)
    assert check(batch, rows) == []
    assert batch.batch_size == 5


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_cursor_of_a_batch_is_the_state_after_it(full_set, backend):
    """When a trainer saves, it has already read the next batch; a resumed read must deliver that
    batch again.
    """
    manifest, rows = full_set
    loader = open_loader(manifest, batch_size=900, backend=backend)
    batches = loader.epoch(3)
    trained, held = next(batches), next(batches)
    state = loader.state_dict(trained.cursor)
    assert state["cursor"] == 900
    assert loader.state_dict()["cursor"] == 1800
    again = open_loader(manifest, batch_size=900, backend=backend, rank=0, world_size=1)
    again.load_state_dict(state)
    assert check(next(again.epoch(3)), rows) == rows_of(held)


def test_reading_further_does_not_change_earlier_batches(full_set):
    """Buffers of unequal sizes are reused only when all tensors that refer to them are gone."""
    manifest, rows = full_set
    batches = list(open_loader(manifest, batch_size=100, backend="memmap").epoch(0))
    values = [batch.ids.lists.values for batch in batches]
    numbers = [check(batch, rows) for batch in batches]
    copies = [value.clone() for value in values]
    del batches
    for _ in open_loader(manifest, batch_size=100, backend="memmap").epoch(1):
        pass
    assert all(torch.equal(a, b) for a, b in zip(values, copies, strict=True))
    assert sorted(chain.from_iterable(numbers)) == list(range(NUM_ROWS))
