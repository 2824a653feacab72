"""Tests that compiled loops over lists of ids give the same results as torch."""

from functools import partial

import numpy as np
import pytest
import torch

from sbpflow.embedding.ids import addresses, reader
from sbpflow.embedding.ids.addresses import LocalAddresses, OwnerAddresses
from sbpflow.embedding.ids.batch_ids import Bags
from sbpflow.embedding.ids.list_loops import find_loops
from sbpflow.embedding.ids.reader import IdReader
from sbpflow.embedding.plan.embedding_plan import plan_embeddings
from sbpflow.embedding.plan.tables import FeatureConfig, OutputConfig, TableConfig, TableLayout
from sbpflow.embedding.rules.registry import sparse_optimizer
from sbpflow.embedding.storage.initial import _uniform_rows
from sbpflow.errors import DataError
from sbpflow.runtime.random.streams import uniform_rows
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Split

pytest.importorskip("numba", reason="the loops are numba's")
CPU = torch.device("cpu")
SAMPLES, ROWS = 23, (41, 90)
FEATURES = (
    FeatureConfig(name="a", hotness=7, ragged=True),
    FeatureConfig(name="b", hotness=2),
    FeatureConfig(name="c", hotness=4, ragged=True, weighted=True),
)


def make_plan(size, exchange, *, weighted=True, pooling="sum", policy="error", ragged=True):
    features = [f if weighted else FeatureConfig(name=f.name, hotness=f.hotness, ragged=True)
                for f in FEATURES]  # fmt: skip
    if not ragged:
        features = [FeatureConfig(name=f.name, hotness=f.hotness) for f in FEATURES]
    # a has lists and b has a matrix, but they share a table: the ids of b become lists of two ids.
    tables = [
        TableConfig(name="t.a", features=("a", "b"), num_rows=ROWS[0], dim=4, pooling=pooling),
        TableConfig(name="t.c", features=("c",), num_rows=ROWS[1], dim=4, pooling=pooling),
    ]
    line = Placement.line("cpu", size)
    layouts = {
        t.name: TableLayout(layout=Layout(line, (Split(0),)), exchange=exchange) for t in tables
    }
    return plan_embeddings(
        [OutputConfig(name="deep", tables=tuple(tables))],
        layouts,
        features=features,
        optimizer=sparse_optimizer("sgd", lr=0.1),
        dtype=torch.float32,
        world=line,
        backend="gloo",
        batch_size=SAMPLES * size,
        out_of_range=policy,
    )


def make_ids(plan, seed, *, high=5):
    random = torch.Generator().manual_seed(seed)
    ids = {}
    for feature in plan.features:
        if not feature.ragged:
            ids[feature.name] = torch.randint(0, high, (SAMPLES, feature.hotness), generator=random)
            continue
        lengths = torch.randint(0, feature.hotness + 1, (SAMPLES,), generator=random)
        ends = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        values = torch.randint(0, high, (int(ends[-1]),), generator=random, dtype=torch.int32)
        weights = torch.randn(values.shape, generator=random) if feature.weighted else None
        ids[feature.name] = Bags(values, ends, weights)
    return ids


def without_loops(monkeypatch, make):
    """Return the result of ``make`` as if numba were not installed."""
    with monkeypatch.context() as patch:
        for module in (addresses, reader):
            patch.setattr(module, "find_loops", lambda *_, **__: None)
        return make()


def equal(one, other):
    for name in ("addresses", "offsets", "weights"):
        a, b = getattr(one, name), getattr(other, name)
        assert (a is None) == (b is None), name
        assert a is None or (a.dtype == b.dtype and torch.equal(a, b)), name


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 40])
def test_compiled_addresses_equal_torch(monkeypatch, size, pooling, weighted):
    for exchange in ("unique", "reduce"):
        plan = make_plan(size, exchange, weighted=weighted, pooling=pooling)
        ids = IdReader(plan, 0, CPU).read(make_ids(plan, size, high=5))
        (stack,) = (stack for group in plan.groups for stack in group.stacks if stack.ragged)
        for kind in (torch.int32, torch.int64):
            own = partial(OwnerAddresses, stack, range(size), CPU, address_dtype=kind)
            equal(own().make_lookup(ids), without_loops(monkeypatch, own).make_lookup(ids))
        for rank in range(min(size, 4)):
            local = partial(LocalAddresses, stack, rank, CPU)
            slow = without_loops(monkeypatch, local)
            for pooled in (False, True):
                equal(local().make_lookup(ids, pooled=pooled), slow.make_lookup(ids, pooled=pooled))


@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("size", [1, 2, 5, 40])
def test_compiled_addresses_of_a_matrix_equal_torch(monkeypatch, size, pooling):
    plan = make_plan(size, "unique", pooling=pooling, ragged=False)
    ids = IdReader(plan, 0, CPU).read(make_ids(plan, size, high=40))
    ((stack,),) = (group.stacks for group in plan.groups)
    for kind in (torch.int32, torch.int64):
        own = partial(OwnerAddresses, stack, range(size), CPU, address_dtype=kind)
        equal(own().make_lookup(ids), without_loops(monkeypatch, own).make_lookup(ids))
    for rank in range(min(size, 4)):
        local = partial(LocalAddresses, stack, rank, CPU)
        slow = without_loops(monkeypatch, local)
        for options in ({"pooled": False}, {"pooled": True}, {"pooled": False, "absent": 99}):
            equal(local().make_lookup(ids, **options), slow.make_lookup(ids, **options))


@pytest.mark.parametrize("columns", [0, 1, 7, 256, 257])
def test_loops_over_a_matrix_take_any_number_of_columns(columns):
    loops, rng = find_loops(CPU, compiled=True), np.random.default_rng(columns)
    assert loops is not None
    ids = rng.integers(0, 100, (300, columns))
    shift, firsts = rng.integers(0, 9, columns), np.full((1, columns), 50)
    steps, out = rng.integers(0, 9, (1, columns)), np.empty_like(ids)
    loops.matrix_addresses(ids, shift, firsts, steps, out)
    assert np.array_equal(out, ids + shift + np.where(ids >= firsts, steps, 0))
    last = np.arange(100, 100 + columns)
    assert loops.are_in_range(ids, last)
    if columns:
        for bad in (-(2**63), -1, 100 + columns, 2**63 - 1):
            ids[-1, -1] = bad
            assert not loops.are_in_range(ids, last)


@pytest.mark.parametrize("column", [0, -1])
@pytest.mark.parametrize("bad", [-1, "limit"])
def test_bad_id_in_a_matrix_is_found_by_the_loop(monkeypatch, column, bad):
    plan = make_plan(2, "unique", ragged=False)
    ids = torch.zeros(SAMPLES, plan.ids.num_columns, dtype=plan.ids_dtype)
    fast = IdReader(plan, 0, CPU)
    slow = without_loops(monkeypatch, lambda: IdReader(plan, 0, CPU))
    limit = ROWS[column]
    ids[3, column] = limit - 1
    assert fast.read(ids).matrix is ids
    ids[3, column] = limit if bad == "limit" else bad
    for reads in (fast, slow):
        with pytest.raises(DataError, match=f"id {int(ids[3, column])} in row 3"):
            reads.read(ids)


@pytest.mark.parametrize("weighted", [True, False])
def test_compiled_lists_equal_torch(monkeypatch, weighted):
    plan = make_plan(2, "unique", weighted=weighted)
    ids = make_ids(plan, 1)
    fast = IdReader(plan, 0, CPU)
    monkeypatch.setattr(fast, "_checked", None)  # the slow path fails without this function
    slow = without_loops(monkeypatch, lambda: IdReader(plan, 0, CPU))
    one, other = fast.read(ids).lists, slow.read(ids).lists
    assert torch.equal(one.lengths, other.lengths)
    assert torch.equal(one.values, other.values)
    assert one.values.dtype == other.values.dtype
    assert (one.weights is None) == (not weighted)
    assert not weighted or torch.equal(one.weights, other.weights)


@pytest.mark.parametrize("policy", ["clamp", "hash", "error"])
def test_bad_id_among_many_is_found(monkeypatch, policy):
    plan = make_plan(2, "unique", policy=policy)
    for place in (0, -1):
        ids = make_ids(plan, 2)
        ids["c"].values[place] = ROWS[1]
        fast = IdReader(plan, 0, CPU)
        slow = without_loops(monkeypatch, lambda: IdReader(plan, 0, CPU))
        if policy == "error":
            with pytest.raises(DataError, match=f"field c has id {ROWS[1]} in row"):
                fast.read(ids)
            continue
        assert torch.equal(fast.read(ids).lists.values, slow.read(ids).lists.values)
        assert fast.out_of_range.tolist() == slow.out_of_range.tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    ("offsets", "message"),
    [([0, 9, 4], "sample 0 has 9 ids"), ([1, 2, 4], "they run from 1"),
     ([0, 2, 3], "they run from 0 to 3"), ([0, 3, 2, 4], "must have the same number of samples")],
)  # fmt: skip
def test_bad_offsets_are_rejected(offsets, message):
    plan = make_plan(2, "unique", weighted=False)
    ids = {
        "a": Bags(torch.tensor([1, 2, 3, 4]), torch.tensor(offsets)),
        "b": Bags(torch.tensor([1, 2]), torch.tensor([0, 1, 2])),
        "c": Bags(torch.tensor([1, 2]), torch.tensor([0, 1, 2])),
    }
    with pytest.raises(DataError, match=message):
        IdReader(plan, 0, CPU).read(ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_compiled_initial_rows_equal_torch(dtype):
    generator = torch.Generator().manual_seed(1)
    counters = torch.randint(-(2**63), 2**63 - 1, (5000,), generator=generator)
    bounds = torch.rand(5000, generator=generator, dtype=torch.float64)
    expected = uniform_rows(counters, 7, bounds.unsqueeze(1), 3).to(dtype)
    assert _uniform_rows(counters, 7, bounds, 3, dtype).equal(expected)
