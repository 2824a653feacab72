"""Tests kernels whose rows are in slots, and leases of batches that are announced well before their
lookup.
"""

from collections import deque
from dataclasses import replace

import numpy as np
import pytest
import torch

from sbpflow.embedding.plan.tables import Shard, TableConfig
from sbpflow.embedding.rules.registry import sparse_optimizer
from sbpflow.embedding.storage.choose import KernelChoice, make_kernel
from sbpflow.embedding.storage.lookup import Lookup
from sbpflow.embedding.storage.rounding import RowNoise
from sbpflow.embedding.storage.store import WEIGHTS, DeviceStore
from sbpflow.sbp.sbp import balanced_sizes
from tests.embedding.dict_store import DictStores
from tests.embedding.mixes import as_input, make_collection
from tests.embedding.test_mixes import UNIQUE_COLUMNS, mix_of
from tests.quick import diagonal

CPU = torch.device("cpu")
ROWS, SLOTS, WIDTH = 70, 20, 8
LOADED = {"numba": "numba", "fbgemm": "fbgemm_gpu", "triton": "triton"}


def kernel_of(name, rule, rows_as, slots=None):
    tables = [TableConfig(name=n, features=(n,), num_rows=ROWS // 2, dim=WIDTH) for n in "ab"]
    shards = [
        Shard(table=table, rank=0, row_start=0, row_stop=ROWS // 2, col_start=0, col_stop=WIDTH,
              base=n * (ROWS // 2))
        for n, table in enumerate(tables)
    ]  # fmt: skip
    noise = RowNoise(shards, 3, CPU) if rows_as else None
    return make_kernel(
        KernelChoice(name, "asked for"), ROWS, WIDTH, dim=WIDTH, optimizer=rule, device=CPU,
        dtype=torch.float32, row_dtype=rows_as or torch.float32, noise=noise, slots=slots,
    )  # fmt: skip


@pytest.mark.few(6)
@pytest.mark.parametrize("form", ["single", "bags"])
@pytest.mark.parametrize("rows_as", [None, torch.bfloat16])
@pytest.mark.parametrize("kernel", ["torch", "numba", "fbgemm", "triton"])
def test_kernels_update_rows_in_arbitrary_slots(kernel, rows_as, form):
    if kernel in LOADED:
        pytest.importorskip(LOADED[kernel])
    if kernel == "fbgemm" and rows_as:
        pytest.skip("FBGEMM does not round rows of half precision at random")
    rule = sparse_optimizer("adagrad", lr=0.1)
    whole, block = kernel_of(kernel, rule, rows_as), kernel_of(kernel, rule, rows_as, SLOTS)
    generator = torch.Generator().manual_seed(0)
    whole.weights.copy_(torch.randn(ROWS, WIDTH, generator=generator))
    rows = torch.randperm(ROWS, generator=generator)[: SLOTS - 2]
    # The address after the last row stands for absent rows.
    slot_of = torch.full((ROWS + 1,), SLOTS)
    slot_of[rows] = torch.randperm(SLOTS, generator=generator)[: rows.numel()]
    block.weights.fill_(float("nan"))
    block.weights[slot_of[rows]] = whole.weights[rows]
    changed, changed_of_block = [], []
    whole.listeners.append(lambda found: changed.append(found.unique()))
    block.listeners.append(lambda found: changed_of_block.append(found.unique()))
    for step in range(1, 4):
        addresses = rows[torch.randint(0, rows.numel(), (60,), generator=generator)]
        if whole.absent is not None:
            addresses[3:6] = whole.absent
        offsets = torch.arange(0, 61, 3) if form == "bags" else None
        weights = torch.rand(60, generator=generator) if form == "bags" else None
        one = Lookup(addresses, offsets, weights)
        other = Lookup(addresses, offsets, weights).place(slot_of[addresses])
        assert torch.equal(whole.lookup(one, 0.1), block.lookup(other, 0.1))
        if step == 3 and kernel != "fbgemm":  # two batches in one step, one of which has few ids
            first, second = Lookup(addresses[:7]), Lookup(addresses[7:])
            one = Lookup.merge([first, second])
            first.place(slot_of[first.addresses])
            other = Lookup.merge([first, second.place(slot_of[second.addresses])])
        grads = torch.randn(one.num_bags, WIDTH, generator=generator)
        whole.update(one, grads, 0.1, step)
        block.update(other, grads, 0.1, step)
    assert torch.equal(block.weights[slot_of[rows]], whole.weights[rows])
    assert torch.equal(block.state["sum"][slot_of[rows]], whole.state["sum"][rows])
    assert len(changed) == len(changed_of_block) == 3
    assert all(torch.equal(a, b) for a, b in zip(changed, changed_of_block, strict=True))


@pytest.mark.parametrize("kernel", ["torch", "numba", "fbgemm"])
def test_device_store_reads_and_writes_in_place(kernel):
    if kernel in LOADED:
        pytest.importorskip(LOADED[kernel])
    store = DeviceStore(kernel_of(kernel, sparse_optimizer("adagrad", lr=0.1), None))
    values = {WEIGHTS: torch.randn(5, WIDTH), "sum": torch.rand(5, WIDTH)}
    store.write(slice(10, 15), values)
    store.write(torch.tensor([60, 2]), {WEIGHTS: torch.ones(2, WIDTH)})
    part = store.read(slice(9, 16))
    assert part[WEIGHTS].data_ptr() == store.kernel.weights[9:].data_ptr()
    assert torch.equal(part[WEIGHTS][1:6], values[WEIGHTS])
    assert torch.equal(part["sum"][1:6], values["sum"])
    for rows, first in ((torch.tensor([60, 14]), 1.0), (slice(60, 62), 1.0)):
        into = {WEIGHTS: torch.empty(2, WIDTH)}
        assert store.read(rows, into) is into
        assert into[WEIGHTS][0].eq(first).all()
    assert torch.equal(store.read(torch.tensor([14]))["sum"], values["sum"][4:])
    assert (store.num_rows, store.width) == (ROWS, WIDTH)
    assert store.memory_bytes == 2 * 4 * ROWS * WIDTH


AHEAD = 4


def train_ahead(world, mix, stores, ahead):
    """Train while announcing ``ahead`` batches in advance; return outputs and rows. The last
    batches are canceled.

    One batch is looked up twice more without training, once with rows read ahead.
    """
    collection = make_collection(world, mix, stores)
    window, outputs = deque(), []
    last = len(mix.batch_sizes) - AHEAD

    def begin(step, *, training=True):
        sizes = balanced_sizes(mix.batch_sizes[step], world.size)
        mine = slice(sum(sizes[: world.rank]), sum(sizes[: world.rank + 1]))
        ids = as_input(mix, mix.bags(step), mine, world.device)
        batch = collection.start_id_exchange(ids, mix.batch_sizes[step], training=training)
        collection.arrive(batch)
        return batch

    given = iter(range(last + ahead))
    for step in range(last):
        while len(window) <= ahead:
            window.append(begin(next(given)))
        batch = window.popleft()
        collection.read(batch)
        vectors = collection.gather_outputs(batch)
        for output in mix.outputs:
            vectors[output.name].tanh().sum().backward()
        outputs += [value.detach().clone() for value in vectors.values()]
        collection.send_grads(batch)
        collection.receive_grads(batch)
        if (step + 1) % mix.accumulate == 0:
            collection.update((step + 1) // mix.accumulate)
        if step == last // 2:
            for is_read_ahead in (False, True):
                scored = begin(last, training=False)
                if is_read_ahead:
                    collection.read_ahead(scored)
                collection.read(scored)
                outputs += collection.gather_outputs(scored).values()
    for batch in window:
        collection.cancel(batch)
    rows = [
        (
            store.shard.table.name,
            store.weights.cpu().numpy().copy(),
            store.state["sum"].cpu().numpy().copy(),
        )
        for store in collection.stored()
    ]
    return outputs, rows


def both_ways(world, mix, slots):
    stores = DictStores(slots)
    plain, rows = train_ahead(world, mix, lambda request: DeviceStore(request.make_kernel(
        request.num_rows)), 0)  # fmt: skip
    found, held = train_ahead(world, mix, stores, AHEAD)
    for one, other in zip(plain, found, strict=True):
        assert torch.equal(one, other)
    for one, other in zip(rows, held, strict=True):
        assert one[0] == other[0]
        assert np.array_equal(one[1], other[1])
        assert np.array_equal(one[2], other[2])
    return [
        (store.most_announced, sum(store._leases.values()), store.evicted) for store in stores.made
    ]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("exchange", "accumulate"), diagonal(["columns", "reduce", "unique", UNIQUE_COLUMNS], [1, 2])
)
def test_slots_are_fixed_for_batches_announced_ahead(ranks, exchange, accumulate):
    rule = sparse_optimizer("rowwise_adagrad", lr=0.1)
    mix = mix_of(exchange, 8, rule, accumulate=accumulate, batch_sizes=(2, 1, 0, 2, 1) * 6)
    (output,) = mix.outputs
    tables = tuple(replace(table, num_rows=10 * table.num_rows) for table in output.tables)
    mix = replace(mix, outputs=(replace(output, tables=tables),))
    found = [one for rank in ranks(2, both_ways, mix, 45) for one in rank]
    assert all(leased == 0 for _, leased, _ in found)
    assert {most for most, _, _ in found} == {AHEAD + accumulate}
    assert sum(evicted for _, _, evicted in found) > 20, found
