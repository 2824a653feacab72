"""Tests that all kernels give equal values, weights, and state after several updates."""

import logging
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from sbpflow.embedding.plan.tables import HALF_DTYPES, Shard, TableConfig
from sbpflow.embedding.rules.base import SparseOptimizer
from sbpflow.embedding.rules.registry import sparse_optimizer
from sbpflow.embedding.storage.base import RowKernel
from sbpflow.embedding.storage.choose import KernelChoice, make_kernel, warm_up_kernels
from sbpflow.embedding.storage.initial import RowInitializer, _fill
from sbpflow.embedding.storage.lookup import Lookup
from sbpflow.embedding.storage.rounding import RowNoise
from sbpflow.runtime.random.streams import fill_uniform

CPU = torch.device("cpu")
SGD = sparse_optimizer("sgd", lr=0.1)
RULES = [
    SGD,
    sparse_optimizer("adagrad", lr=0.1, eps=1e-3, initial_accumulator=0.2),
    sparse_optimizer("rowwise_adagrad", lr=0.1, eps=1e-2, initial_accumulator=0.1),
]
ALL_RULES = [
    *RULES,
    replace(SGD, weight_decay=0.2),
    sparse_optimizer("rowwise_adagrad", lr=0.1, weight_decay=0.1),
    sparse_optimizer("lazy_adam", lr=0.1),
    sparse_optimizer("lazy_adam", lr=0.1, betas=(0.3, 0.9), weight_decay=0.1),
    sparse_optimizer("ftrl", lr=0.1, beta=1.0, l1=0.02, l2=0.1, initial_accumulator=0.1),
    sparse_optimizer("ftrl", lr=0.1, beta=0.0),
]
NEEDS = {"numba": "numba", "fbgemm": "fbgemm_gpu"}


def storage_of(kernel: str, rule: SparseOptimizer, width: int = 8, **options) -> RowKernel:
    return make_kernel(
        KernelChoice(kernel, "for the test"),
        50,
        width,
        dim=width,
        optimizer=rule,
        device=CPU,
        **{"dtype": torch.float32, **options},
    )


def lookups(dtype: torch.dtype):
    """Yield lookups of rows 0 to 39: of single rows and of bags, with and without weights."""
    for step in range(9):
        addresses = torch.randint(0, 40, (30,), dtype=torch.int32 if step > 5 else torch.int64)
        offsets = torch.tensor([0, 0, 7, 8, 30, 30]) if step % 2 else None
        weights = torch.rand(30, dtype=dtype) if step % 3 == 0 else None
        yield step, (addresses, offsets, weights)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("kernel", ["fbgemm", "numba"])
def test_kernels_match_torch(kernel, rule):
    pytest.importorskip(NEEDS[kernel])
    torch.manual_seed(0)
    plain, fused = storage_of("torch", rule), storage_of(kernel, rule)
    assert (plain.name, fused.name) == ("torch", kernel)
    start = torch.randn(50, 8)
    for storage in (plain, fused):
        storage.weights.copy_(start)
        assert all(bool((s == rule.initial_accumulator).all()) for s in storage.state.values())
    for step, uses in lookups(torch.float32):
        one, two = Lookup(*uses), Lookup(*uses)
        lr = 0.1 * 0.9**step
        vectors = plain.lookup(one)
        torch.testing.assert_close(vectors, fused.lookup(two, lr), rtol=0, atol=1e-5)
        torch.testing.assert_close(vectors, fused.lookup(two), rtol=0, atol=1e-5)
        grads = torch.randn(one.num_bags, 8)
        if step == 4:  # an update without a lookup, as for rows that other ranks looked up
            two = Lookup(*uses)
        plain.update(one, grads, lr, step + 1)
        fused.update(two, grads, lr, step + 1)
    # Each of nine float32 updates of values up to 4 has a rounding error of a few 1e-7.
    torch.testing.assert_close(plain.weights, fused.weights, rtol=1e-5, atol=1e-5)
    assert plain.state.keys() == fused.state.keys()
    for name, value in plain.state.items():
        torch.testing.assert_close(value, fused.state[name], rtol=1e-5, atol=1e-5)
    assert torch.equal(plain.weights[40:], start[40:])
    assert torch.equal(fused.weights[40:], start[40:])


@pytest.mark.parametrize("width", [1, 6, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rule", ALL_RULES, ids=str)
def test_compiled_updates_match_torch(rule, dtype, width):
    """Updates are bit-equal, except that torch may be off by one unit in the last place in roots,
    and in weighted sums in float64.
    """
    pytest.importorskip("numba")
    torch.manual_seed(0)
    plain, compiled = (storage_of(k, rule, width, dtype=dtype) for k in ("torch", "numba"))
    start = torch.randn(50, width, dtype=dtype)
    plain.weights.copy_(start)
    compiled.weights.copy_(start)
    exact = rule.name == "sgd" and dtype == torch.float32
    tolerance = 0.0 if exact else 20 * torch.finfo(dtype).eps
    for step, uses in lookups(dtype):
        lr = 0.0 if step == 7 and rule.name != "ftrl" else 0.1  # as at the end of a decay
        lookup_request = Lookup(*uses)
        grads = torch.randn(lookup_request.num_bags, width, dtype=dtype)
        sums = lookup_request.row_gradients(grads)
        indexed = compiled._indexed(Lookup(*uses))
        for row_gradient, want in zip(indexed.row_gradients(grads), sums, strict=True):
            if dtype == torch.float32 or uses[2] is None:
                assert torch.equal(row_gradient, want)
            torch.testing.assert_close(row_gradient, want, rtol=tolerance, atol=tolerance)
        assert torch.equal(indexed.inverse(), lookup_request.inverse().int())
        plain.update(lookup_request, grads, lr, step + 1)
        compiled.update(Lookup(*uses), grads, lr, step + 1)
        torch.testing.assert_close(compiled.weights, plain.weights, rtol=tolerance, atol=tolerance)
        for name, value in plain.state.items():
            torch.testing.assert_close(compiled.state[name], value, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("row_dtype", HALF_DTYPES)
def test_compiled_rounding_equals_torch(row_dtype, dtype):
    pytest.importorskip("numba")
    torch.manual_seed(0)
    table = TableConfig(name="t", features=("t",), num_rows=60, dim=16)
    shards = []
    for name, row_start, row_stop, base in (("t", 0, 20, 0), ("u", 30, 60, 20)):
        shards.append(
            Shard(
                table=replace(table, name=name),
                rank=0,
                row_start=row_start,
                row_stop=row_stop,
                col_start=3,
                col_stop=14,
                base=base,
            )
        )
    noise = RowNoise(shards, 7, CPU)
    options = {"dtype": dtype, "row_dtype": row_dtype, "noise": noise}
    plain, compiled = (storage_of(k, SGD, 11, **options) for k in ("torch", "numba"))
    rows = torch.arange(50)
    for step in range(1, 60):
        scale = 10.0 ** (step % 30 - 20)  # from subnormals to values beyond the range of float16
        values = torch.randn(50, 11, dtype=dtype) * scale
        special = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0, -0.0, 1e30])
        values[step % 50, :6] = special.to(dtype)
        for storage in (plain, compiled):
            storage.weights.zero_()
            storage.update(Lookup(rows), -values, 1.0, step)
        one, two = (s.weights.view(torch.int16) for s in (plain, compiled))
        same = (one == two) | (plain.weights.isnan() & compiled.weights.isnan())
        assert same.all(), (step, (~same).nonzero()[0])


@pytest.mark.parametrize("width", [1, 11, 16])
@pytest.mark.parametrize("row_dtype", HALF_DTYPES)
def test_compiled_half_precision_reads_equal_torch(row_dtype, width):
    pytest.importorskip("numba")
    generator = torch.Generator().manual_seed(0)
    options = {"dtype": torch.float32, "row_dtype": row_dtype}
    plain, compiled = (storage_of(k, SGD, width, **options) for k in ("torch", "numba"))
    every = torch.randint(-(1 << 15), 1 << 15, (50, width), generator=generator)
    finite = (
        torch.randn(50, width, generator=generator) * 10.0 ** torch.arange(-9, 1).repeat(5)[:, None]
    )
    bits = {"every": every.to(torch.int16), "finite": finite.to(row_dtype).view(torch.int16)}
    # Lookups of single rows copy arbitrary bits; sums need finite rows.
    for name, values in bits.items():
        for storage in (plain, compiled):
            storage.weights.view(torch.int16).copy_(values)
        batches = [uses for _, uses in lookups(torch.float32)]
        for uses in batches if name == "finite" else [(torch.arange(50),)]:
            found, want = (s.lookup(Lookup(*uses)).view(torch.int32) for s in (compiled, plain))
            assert torch.equal(found, want), (name, uses)


@pytest.mark.parametrize("num_addresses", [1, 70, 5000, 10**9])
@pytest.mark.parametrize("count", [0, 1, 2, 999])
def test_compiled_deduplication_equals_a_sort(num_addresses, count):
    pytest.importorskip("numba")
    from sbpflow.embedding.storage.numba_storage import CompiledLookup, Indexer

    indexer = Indexer(num_addresses)
    generator = torch.Generator().manual_seed(count)
    for dtype in (torch.int32, torch.int64, torch.int32):
        addresses = torch.randint(0, num_addresses, (count,), dtype=dtype, generator=generator)
        rows, inverse = torch.unique(addresses, return_inverse=True)
        lookup = CompiledLookup(addresses, indexer=indexer)
        assert torch.equal(lookup.rows(), rows)
        assert torch.equal(lookup.inverse(), inverse.int())


@pytest.mark.parametrize("num_addresses", [1, 2, 63, 64, 65, 130])
def test_compiled_deduplication_finds_every_address(num_addresses):
    pytest.importorskip("numba")
    from sbpflow.embedding.storage.numba_storage import CompiledLookup, Indexer

    addresses = torch.arange(num_addresses, dtype=torch.int32).flip(0)
    lookup = CompiledLookup(addresses, indexer=Indexer(num_addresses))
    assert torch.equal(lookup.rows(), addresses.flip(0))
    assert torch.equal(lookup.inverse(), addresses)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [1, 3, 16, 37])
def test_merged_lists_equal_torch(width, dtype):
    pytest.importorskip("numba")
    from sbpflow.embedding.storage.numba_storage import CompiledLookup, Indexer

    generator = torch.Generator().manual_seed(width)
    for first, second in ((0, 0), (1, 0), (0, 3), (40, 40), (90, 5), (100, 100)):
        for index in (torch.int32, torch.int64):
            lists = [
                torch.randperm(100, generator=generator)[:length].sort().values.to(index)
                for length in (first, second)
            ]
            addresses = torch.cat(lists)
            grads = torch.randn(addresses.numel(), width, dtype=dtype, generator=generator)
            grads[::7] = float("inf")
            grads[3::11] = float("nan")
            plain, lookup = Lookup(addresses), CompiledLookup(addresses, indexer=Indexer(100))
            for found, want in zip(
                lookup.row_gradients(grads), plain.row_gradients(grads), strict=True
            ):
                assert torch.allclose(found, want, rtol=0, atol=0, equal_nan=True)
            assert lookup._indexed is None  # the lists were merged
            assert torch.equal(lookup.row_slots(), plain.rows())
            assert torch.equal(lookup.inverse(), plain.inverse().int())


@pytest.mark.parametrize("addresses", [[1, 1, 2], [3, 4, 2, 5, 0], [9, 8, 7], [2, 3, 3, 1]])
def test_only_two_ascending_lists_are_merged(addresses):
    pytest.importorskip("numba")
    from sbpflow.embedding.storage.numba_storage import CompiledLookup, Indexer

    at = torch.tensor(addresses)
    grads = torch.randn(at.numel(), 4)
    lookup = CompiledLookup(at, indexer=Indexer(10))
    rows, sums = lookup.row_gradients(grads)
    ascends = (at.diff() <= 0).sum() < 2
    assert (lookup._indexed is None) == ascends
    assert torch.equal(rows, at.unique())
    assert torch.equal(sums, Lookup(at).row_gradients(grads)[1])


@pytest.mark.parametrize("loop", [True, False])
@pytest.mark.parametrize("width", [0, 1, 16, 37])
def test_copied_rows_equal_torch_with_either_copy(monkeypatch, width, loop):
    pytest.importorskip("numba")
    from sbpflow.embedding.storage import numba_storage

    chosen = []
    monkeypatch.setattr(
        numba_storage, "_loop_is_faster", lambda *shape: chosen.append(shape) or loop
    )
    for dtype in (torch.float32, torch.float64):
        block = torch.randn(50, width).to(dtype)
        for at in (torch.randint(0, 50, (99,)), torch.empty(0, dtype=torch.int32)):
            assert torch.equal(numba_storage.take(block, at), block[at.long()])
    assert len(chosen) == 4


@pytest.mark.parametrize("loop", [True, False])
@pytest.mark.parametrize("width", [0, 1, 13, 16])
def test_pooled_rows_equal_torch_with_either_method(monkeypatch, width, loop):
    pytest.importorskip("numba")
    from sbpflow.embedding.storage import numba_storage

    chosen = []
    monkeypatch.setattr(
        numba_storage, "_pool_loop_is_faster", lambda *shape: chosen.append(shape) or loop
    )
    offsets = torch.tensor([0, 3, 3, 4, 99])
    for dtype in (torch.float32, torch.float64):
        block = torch.randn(50, width, dtype=dtype)
        for index in (torch.int32, torch.int64):
            at = torch.randint(0, 50, (99,), dtype=index)
            for weights in (None, torch.randn(99, dtype=dtype)):
                lookup = numba_storage.CompiledLookup(
                    at, offsets, weights, indexer=numba_storage.Indexer(50)
                )
                found = lookup.pool(block)
                assert torch.equal(found, Lookup(at, offsets, weights).pool(block))
                assert not found[1].any()
    assert len(chosen) == 6  # products of float64 are always summed by torch


def test_measurements_choose_a_method():
    pytest.importorskip("numba")
    from sbpflow.embedding.storage import numba_storage

    for choice in (numba_storage._loop_is_faster, numba_storage._pool_loop_is_faster):
        assert choice.__wrapped__(16, torch.float32, torch.int32) in (True, False)

    def slow() -> object:
        return sum(range(100_000))

    assert numba_storage._is_faster(int, slow)
    assert not numba_storage._is_faster(slow, int)
    assert not numba_storage._is_faster(slow, int, tolerance=2.0)


def test_compiled_initial_values_equal_torch():
    pytest.importorskip("numba")
    table = TableConfig(name="t", features=("f",), num_rows=1 << 34, dim=11, initial_range=0.05)
    shard = Shard(
        table=table, rank=0, row_start=1 << 33, row_stop=(1 << 33) + 100, col_start=2, col_stop=9
    )
    for dtype in (torch.float32, torch.float64):
        want = torch.empty(100, 7, dtype=dtype)
        fill_uniform(
            want, seed=3, name="t", bound=0.05, num_columns=11, first_row=1 << 33, first_column=2
        )
        found = torch.empty(100, 7, dtype=dtype)
        _fill(found, shard, 3)
        assert found.equal(want)


@pytest.mark.parametrize("row_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("optimizer", RULES, ids=lambda rule: rule.name)
def test_initial_values_put_into_slots_equal_the_returned_ones(optimizer, row_dtype):
    pytest.importorskip("numba")
    tables = [
        TableConfig(name=f"t{n}", features=("f",), num_rows=70, dim=11, initial_range=0.1 * (n + 1))
        for n in range(3)
    ]
    shards = [
        Shard(table=table, rank=1, row_start=20, row_stop=60, col_start=4, col_stop=11, base=40 * n)
        for n, table in enumerate(tables)
    ]
    initial = RowInitializer(
        shards, seed=3, optimizer=optimizer, width=7, dtype=torch.float32, row_dtype=row_dtype
    )
    rows = torch.randperm(120, generator=torch.Generator().manual_seed(1))[:90]
    slots = torch.arange(199, 19, -2)
    want: dict[str, torch.Tensor] = {}
    found: dict[str, torch.Tensor] = {}
    for key, values in initial(rows).items():
        found[key] = torch.full((200, *values.shape[1:]), 9.0, dtype=values.dtype)
        want[key] = found[key].clone()
        want[key][slots] = values
    initial.put(rows.to(torch.int32).numpy(), slots.to(torch.int32).numpy(), found)
    assert want.keys() == found.keys()
    assert all(torch.equal(want[key], found[key]) for key in want)


@pytest.mark.parametrize("seconds", [0.0, 0.3], ids=["from the cache", "compiled"])
def test_slow_compilation_is_announced_in_the_log(monkeypatch, caplog, seconds):
    pytest.importorskip("numba")
    from sbpflow.embedding.storage import numba_storage

    monkeypatch.setattr(numba_storage, "_warm_up_loops", lambda *_: time.sleep(seconds))
    monkeypatch.setattr(numba_storage, "_NOTICE_AFTER_S", 0.1)
    stack = SimpleNamespace(optimizer=SGD, tables=[SimpleNamespace(name="t")])
    plan = SimpleNamespace(groups=[SimpleNamespace(stacks=[stack])], dtype=None, row_dtype=None)
    with caplog.at_level(logging.INFO):
        warm_up_kernels(plan, {"t": KernelChoice("numba", "for the test")})
    messages = [record.message for record in caplog.records]
    notice = "loading numba kernels; the first start on a machine compiles them ..."
    assert (messages[0] == notice) == bool(seconds)
    assert messages[-1].startswith("numba kernels ready in")
