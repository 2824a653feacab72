"""Tests that a fixed-size store, whose ops do not depend on the addresses, equals a plain store."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sbpflow.embedding.rules.registry import RULES, sparse_optimizer
from sbpflow.embedding.storage.lookup import Lookup
from sbpflow.embedding.storage.sorted_segments import SortedSegments
from sbpflow.embedding.storage.torch_storage import TorchStorage

ROWS, WIDTH = 23, 5


def storages(name: str) -> list[TorchStorage]:
    optimizer = sparse_optimizer(name, lr=0.1)
    start = torch.rand(ROWS, WIDTH, dtype=torch.float64) - 0.5
    made = []
    for fixed in (False, True):
        storage = TorchStorage(
            ROWS,
            WIDTH,
            dim=WIDTH,
            optimizer=optimizer,
            dtype=torch.float64,
            device=torch.device("cpu"),
            fixed_size=fixed,
        )
        storage.weights.copy_(start)
        made.append(storage)
    return made


@st.composite
def batches(draw):
    """Return addresses, a mask of the addresses on this rank, and offsets and weights, either of
    which may be None.
    """
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    count = draw(st.integers(0, 60))
    addresses = (torch.rand(count, generator=generator) ** 2 * ROWS).long()
    share = draw(st.sampled_from([0.0, 0.5, 1.0]))
    here = torch.rand(count, generator=generator) < share
    offsets = None
    if draw(st.booleans()):
        cuts = torch.randint(0, count + 1, (draw(st.integers(0, 9)),), generator=generator)
        offsets = torch.cat([torch.tensor([0]), cuts.sort().values, torch.tensor([count])])
    weights = torch.randn(count, generator=generator).double() if draw(st.booleans()) else None
    return addresses, here, offsets, weights


def both_lookups(addresses, here, offsets, weights) -> list[Lookup]:
    """Return a lookup of only the local rows, and a lookup of all rows with the absent address in
    place of remote rows.
    """
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), here.cumsum(0)])
    kept = ends if offsets is None else ends[offsets]
    left_out = Lookup(addresses[here], kept, None if weights is None else weights[here])
    return [left_out, Lookup(torch.where(here, addresses, ROWS), offsets, weights)]


@pytest.mark.parametrize("name", RULES)
@settings(max_examples=40, deadline=None)
@given(batches())
def test_fixed_size_lookups_and_updates_are_bit_equal(name, batch):
    plain, fixed = storages(name)
    for step in (1, 2):
        lookups = both_lookups(*batch)
        looked_up = [s.lookup(a) for s, a in zip((plain, fixed), lookups, strict=True)]
        assert torch.equal(*looked_up)
        grads = torch.randn(lookups[0].num_bags, WIDTH, dtype=torch.float64)
        for storage, lookup in zip((plain, fixed), lookups, strict=True):
            storage.update(lookup, grads, 0.1, step)
    assert torch.equal(plain.weights, fixed.weights)
    for key in plain.state:
        assert torch.equal(plain.state[key], fixed.state[key])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=40))
def test_sorted_segments_have_the_length_of_the_batch(addresses):
    runs = SortedSegments.of(torch.tensor(addresses))
    assert runs.keys.tolist() == sorted(addresses)
    assert [addresses[at] for at in runs.order.tolist()] == runs.keys.tolist()
    unique = sorted(set(addresses))
    assert [unique[number] for number in runs.number.tolist()] == runs.keys.tolist()
    firsts = [runs.keys.tolist().index(row) for row in unique]
    left = len(addresses) - len(unique)
    assert runs.starts.tolist() == firsts + [len(addresses)] * left
    last = len(unique) - 1
    assert runs.slots.tolist() == [*range(len(unique)), *[last] * left]
    assert runs.start.tolist() == [firsts[number] for number in runs.number.tolist()]
    stops = [*firsts[1:], len(addresses)]
    assert runs.stop.tolist() == [stops[number] for number in runs.number.tolist()]


def test_a_known_count_of_unique_rows_changes_no_result():
    addresses = torch.tensor([3, 1, 3, 7, 1, 1])
    plain, known = Lookup(addresses), Lookup(addresses)
    known.num_unique = 3
    assert torch.equal(plain.rows(), known.rows())
    grads = torch.randn(6, 2)
    assert torch.equal(plain.row_gradients(grads)[1], known.row_gradients(grads)[1])
    assert torch.equal(plain.inverse(), known.inverse())
