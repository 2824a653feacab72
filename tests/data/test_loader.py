"""Tests the loader: the rows of each rank, equality of backends, and exact resumption of a read."""

import gc
import subprocess
import sys
from itertools import chain

import numpy as np
import pytest
import torch

from sbpflow.data import open_loader
from sbpflow.data.read.loader import RowLoader
from sbpflow.errors import ConfigError, DataError
from tests.data.backends import BACKENDS, INSTALLED, needs_dali

SHUFFLES = ["none", "blocks", "runs", "rows"]


def rows_of(batch):
    return batch.dense[:, 0].to(torch.int64).tolist()


def global_steps(manifest, world_size, *, state=None, epoch=0, **options):
    """Return the rows of all ranks at each step, in rank order; also check batch_size."""
    loaders = [
        open_loader(manifest, rank=rank, world_size=world_size, backend="memmap", **options)
        for rank in range(world_size)
    ]
    if state is not None:
        for loader in loaders:
            loader.load_state_dict(state)
    steps = []
    for batches in zip(*(loader.epoch(epoch) for loader in loaders), strict=True):
        rows = [row for batch in batches for row in rows_of(batch)]
        assert all(batch.batch_size == len(rows) for batch in batches)
        assert max(map(len, map(rows_of, batches))) - min(map(len, map(rows_of, batches))) <= 1
        steps.append(rows)
    return steps


@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize("num_rows", [1, 4096, 9000])
def test_an_epoch_has_every_row_once_for_any_world_size(row_set, shuffle, num_rows):
    on_one, on_three = (
        global_steps(row_set(num_rows), world, batch_size=700, shuffle=shuffle) for world in (1, 3)
    )
    assert on_one == on_three
    assert sorted(chain.from_iterable(on_one)) == list(range(num_rows))


@needs_dali
@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_backends_yield_identical_batches(row_set, shuffle):
    both = [
        list(
            open_loader(
                row_set(9000),
                batch_size=700,
                rank=1,
                world_size=2,
                backend=backend,
                shuffle=shuffle,
            ).epoch(3)
        )
        for backend in ("memmap", "dali")
    ]
    assert len(both[0]) == len(both[1]) == 13
    for left, right in zip(*both, strict=True):
        assert (left.batch_size, left.step, left.cursor) == (
            right.batch_size,
            right.step,
            right.cursor,
        )
        for name in ("labels", "dense", "ids"):
            assert torch.equal(getattr(left, name), getattr(right, name))


@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("world", [1, 2])
def test_batches_do_not_depend_on_how_many_are_read_at_once(
    row_set, monkeypatch, world, backend, shuffle
):
    """Read batches one by one, several at once, and a whole epoch at once. Some batches span two
    shards, and the last batch is short.
    """
    options = {"batch_size": 300, "rank": world - 1, "world_size": world, "shuffle": shuffle}
    reads = []
    for size in (0, 30_000, 1 << 30):
        monkeypatch.setattr("sbpflow.data.read.blocks.BLOCK_BYTES", size)
        reads.append(list(open_loader(row_set(9100), backend=backend, **options).epoch(1)))
    single = reads[0]
    assert [batch.cursor.row for batch in single] == [*range(300, 9001, 300), 9100]
    for other in reads[1:]:
        for left, right in zip(single, other, strict=True):
            assert left.cursor == right.cursor
            for name in ("labels", "dense", "ids"):
                assert torch.equal(getattr(left, name), getattr(right, name))
    if shuffle != "none":  # without shuffling, batches need not share memory
        assert _num_memories(reads[1]) < _num_memories(single) / 2
        assert _num_memories(reads[2]) == 1


def test_the_steps_of_an_epoch_are_not_listed_ahead(row_set, monkeypatch):
    made, make = [], RowLoader._step
    monkeypatch.setattr(RowLoader, "_step", lambda *args: made.append(args) or make(*args))
    monkeypatch.setattr("sbpflow.data.read.blocks.BLOCK_BYTES", 1000)
    next(open_loader(row_set(9000), batch_size=1, backend="memmap").epoch(0))
    assert 0 < len(made) < 900


def _num_memories(batches):
    return len({batch.dense.untyped_storage().data_ptr() for batch in batches})


@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 3), (4, 1)])
def test_a_restored_read_delivers_the_rows_not_yet_seen(row_set, shuffle, before, after):
    manifest = row_set(9000)
    whole = global_steps(manifest, 1, batch_size=700, shuffle=shuffle, epoch=2)
    for stop in (1, 6, 13):
        loader = open_loader(
            manifest, batch_size=700, shuffle=shuffle, rank=before - 1, world_size=before
        )
        for _, _batch in zip(range(stop), loader.epoch(2), strict=False):
            state = loader.state_dict()
        rest = global_steps(manifest, after, state=state, batch_size=700, shuffle=shuffle, epoch=2)
        assert rest == whole[stop:]


def test_a_read_continues_with_another_batch_size(row_set):
    loader = open_loader(row_set(9000), batch_size=700, backend="memmap")
    next(iter(loader.epoch(0)))
    rest = global_steps(row_set(9000), 2, state=loader.state_dict(), batch_size=512)
    first = global_steps(row_set(9000), 1, batch_size=700)[0]
    assert sorted([*chain.from_iterable(rest), *first]) == list(range(9000))


def test_rows_of_a_dropped_tail_are_counted(row_set):
    loader = open_loader(row_set(9000), batch_size=700, tail="drop", backend="memmap")
    assert loader.num_steps == 12
    assert loader.num_dropped_rows == 600
    assert len(list(loader.epoch(0))) == 12


def test_epochs_differ_but_are_reproducible(row_set):
    orders = [global_steps(row_set(9000), 1, batch_size=700, epoch=e) for e in (0, 1, 0)]
    assert orders[0] == orders[2] != orders[1]


def test_a_state_of_another_set_or_order_is_refused(row_set):
    state = open_loader(row_set(9000), batch_size=700).state_dict()
    for loader in (
        open_loader(row_set(4096), batch_size=700),
        open_loader(row_set(9000), batch_size=700, seed=8),
        open_loader(row_set(9000), batch_size=700, shuffle="rows"),
        open_loader(row_set(9000), batch_size=700, split="val"),
    ):
        with pytest.raises(DataError, match="use the same rows and order"):
            loader.load_state_dict(state)


def test_a_batch_smaller_than_the_ranks_is_refused(row_set):
    with pytest.raises(ConfigError, match="at least 4, the number of ranks, got 3"):
        open_loader(row_set(4096), batch_size=3, world_size=4)


def test_ids_and_floats_are_in_the_manifests_order(row_set):
    batch = next(iter(open_loader(row_set(4096), batch_size=10, shuffle="none").epoch(0)))
    assert batch.labels.tolist() == [0, 1] * 5
    assert batch.dense[:, 1].tolist() == [-float(n) for n in range(10)]
    assert np.array_equal(batch.ids[:, 2], np.arange(10) * 10 + 2)
    assert batch.ids.dtype == torch.int32


def test_importing_data_imports_neither_dali_nor_polars_nor_torch():
    names = ("polars", "nvidia.dali", "torch")
    code = f"import sys, data; print([name for name in {names} if name in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_abandoned_epochs_may_be_garbage_collected_in_any_thread(row_set):
    """An abandoned generator may be garbage-collected in one of its reader threads; its cleanup
    must not wait for these threads.
    """
    for backend in INSTALLED:
        for _ in range(20):
            loader = open_loader(row_set(9000), batch_size=100, backend=backend)
            ring = [loader.epoch(0)]
            ring.append(ring)
            next(ring[0])
    gc.collect()


def test_reading_further_does_not_change_earlier_batches(row_set):
    """Buffers are reused only when all tensors that refer to them are gone."""
    loader = open_loader(row_set(9000), batch_size=100, shuffle="none")
    first_ids = []
    for batch in loader.epoch(0):
        first_ids.append(batch.ids[:, :1])
        del batch
    actual = torch.cat(first_ids)[:, 0]
    assert torch.equal(actual, torch.arange(9000, dtype=torch.int32) * 10)


def test_a_state_of_another_epoch_is_refused(row_set):
    loader = open_loader(row_set(9000), batch_size=700, backend="memmap")
    next(loader.epoch(3))
    state = loader.state_dict()
    again = open_loader(row_set(9000), batch_size=700, backend="memmap")
    again.load_state_dict(state)
    with pytest.raises(DataError, match="finish that epoch first"):
        next(again.epoch(4))


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_writing_to_a_batch_does_not_change_other_batches(row_set, shuffle):
    loader = open_loader(row_set(9000), batch_size=700, shuffle=shuffle, backend="memmap")
    first = [batch.ids.clone() for batch in loader.epoch(0)]
    for batch in loader.epoch(0):
        batch.ids.zero_()
        batch.dense.fill_(float("nan"))
    again = [batch.ids for batch in loader.epoch(0)]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": 2, "world_size": 2}, "rank must be a whole number from 0 to 1, got 2"),
        ({"rank": -1}, "rank must .* got -1"),
        ({"world_size": 0}, "world_size must .* got 0"),
        ({"seed": -1}, "seed must .* got -1"),
        ({"seed": 0.5}, "seed must .* got 0.5"),
        ({"batch_size": 0}, "data.batch_size must .* got 0"),
        ({"batch_size": "16"}, "data.batch_size must .* got '16'"),
        ({"batch_size": True}, "data.batch_size must .* got True"),
        ({"backend": "csv"}, "data.loader must .* got 'csv'"),
        ({"shuffle": "all"}, "data.shuffle must .* got 'all'"),
        ({"tail": "mask"}, "tail must .* got 'mask'"),
        (
            {"device": "cpu"},
            r"device must .* got 'cpu' \(str\); .*torch.device\(\"cpu\"\)",
        ),
        ({"device": 0}, r"device must be a torch\.device, got 0 \(int\)"),
    ],
)
def test_an_argument_out_of_range_is_named(row_set, arguments, message):
    with pytest.raises(ConfigError, match=message):
        open_loader(row_set(4096), **{"batch_size": 16, **arguments})


@pytest.mark.parametrize("epoch", [-1, 1.0, None])
def test_the_epoch_must_be_a_whole_number(row_set, epoch):
    with pytest.raises(ConfigError, match="epoch must be a whole number"):
        open_loader(row_set(4096), batch_size=16).epoch(epoch)


@pytest.mark.parametrize(
    "change",
    [{"cursor": -1}, {"cursor": 9001}, {"cursor": 1.5}, {"cursor": None}, {"cursor": True},
     {"epoch": -1}, {"epoch": "0"}],
)  # fmt: skip
def test_a_state_out_of_range_is_refused(row_set, change):
    loader = open_loader(row_set(9000), batch_size=700)
    (key,) = change
    with pytest.raises(
        DataError, match=f"{key} of the saved state must be a whole number from 0 to"
    ):
        loader.load_state_dict({**loader.state_dict(), **change})
    assert len(next(loader.epoch(0)).labels) == 700


def ids_of(loader, epoch):
    return [batch.ids for batch in loader.epoch(epoch)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_second_read_ends_the_first(row_set, backend):
    loader = open_loader(row_set(9000), batch_size=700, backend=backend)
    first = loader.epoch(0)
    next(first)
    second = loader.epoch(1)
    with pytest.raises(DataError, match=r"ended by a later epoch\(\)"):
        next(first)
    assert len(list(second)) == 13
    state = loader.state_dict()
    third = loader.epoch(2)
    loader.load_state_dict(state)
    with pytest.raises(DataError, match="ended by"):
        next(third)


def test_a_closed_loader_is_refused(row_set):
    loader = open_loader(row_set(9000), batch_size=700, backend="memmap")
    batches = loader.epoch(0)
    next(batches)
    loader.close()
    with pytest.raises(DataError, match="ended by"):
        next(batches)
    with pytest.raises(DataError, match="is closed"):
        loader.epoch(1)


def test_a_dropped_tail_is_counted_from_the_restored_cursor(row_set):
    """After 2,000 of 9,000 rows, there are two more steps of 3,000 rows, and 1,000 rows are
    dropped."""

    def fresh(batch_size):
        return open_loader(
            row_set(9000), batch_size=batch_size, tail="drop", backend="memmap", shuffle="none"
        )

    loader = fresh(2000)
    next(loader.epoch(0))
    state = loader.state_dict()
    loader = fresh(3000)
    loader.load_state_dict(state)
    assert loader.num_dropped_rows == 1000
    assert len(list(loader.epoch(0))) == 2
    assert loader.num_dropped_rows == 1000
    state = loader.state_dict()
    assert state["cursor"] == 8000
    again = fresh(3000)
    again.load_state_dict(state)
    assert rows_of(next(again.epoch(1)))[0] == 0
    assert again.num_dropped_rows == 0
    smaller = fresh(1000)  # with this batch size, the epoch has one more step
    smaller.load_state_dict(state)
    with pytest.raises(DataError, match="finish that epoch first"):
        smaller.epoch(1)


@pytest.mark.parametrize("shuffle", ["none", "rows"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_window_of_batches_across_epochs_keeps_its_values(row_set, backend, shuffle):
    """A run keeps the batches of its lookahead while the loader reads further batches."""
    options = {"batch_size": 300, "backend": backend, "shuffle": shuffle}
    loader = open_loader(row_set(9000), **options)
    held = [batch for epoch in (0, 1) for batch in loader.epoch(epoch)]
    again = open_loader(row_set(9000), **options)
    number = 0
    for epoch in (0, 1):
        for batch in again.epoch(epoch):
            assert torch.equal(held[number].ids, batch.ids)
            assert torch.equal(held[number].labels, batch.labels)
            number += 1
    assert number == len(held) == 60
