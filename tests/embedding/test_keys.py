"""Tests ``by_key`` tables: addresses, owners, valid ids, and the keyed store."""

import threading
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch

from sbpflow.boxing.executor import Boxing
from sbpflow.checkpoint.read import open_checkpoint
from sbpflow.checkpoint.save import Saver
from sbpflow.checkpoint.spill import SpillFile
from sbpflow.checkpoint.undo import RowLog
from sbpflow.embedding.ids.addresses import LocalAddresses, OwnerAddresses
from sbpflow.embedding.ids.batch_ids import Bags, BatchIds
from sbpflow.embedding.ids.reader import IdReader
from sbpflow.embedding.plan.embedding_plan import plan_embeddings
from sbpflow.embedding.plan.numbering import NUMBERINGS, keys_of
from sbpflow.embedding.plan.tables import FeatureConfig, OutputConfig, TableConfig, shards_of
from sbpflow.embedding.rules.registry import sparse_optimizer
from sbpflow.embedding.storage.lookup import Lookup
from sbpflow.embedding.storage.store import WEIGHTS, StoreRequest, device_store
from sbpflow.errors import CheckpointError, ConfigError, DataError
from sbpflow.runtime.random.streams import mix
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import balanced_sizes
from tests.embedding.cases import Spec
from tests.embedding.key_map import KeyedStores
from tests.embedding.mixes import Mix, make_collection, train
from tests.embedding.test_mixes import mix_of

CPU = torch.device("cpu")
LOWEST, HIGHEST = -(2**63), 2**63 - 1
KEYS = NUMBERINGS[True]
EXTREME = torch.tensor([0, -1, 1, LOWEST, HIGHEST, LOWEST + 1, HIGHEST - 1, 2**32, -(2**31)])
TABLE = TableConfig(name="t", features=("f",), num_rows=100, dim=4, by_key=True)


def plan_of(table, spec, size, *, features=None, others=(), **more):
    """Return a plan with ``table`` in the layout of ``spec``, and other tables in S(0)."""
    tables = (table, *others)
    layouts = {other.name: Spec("S(0)", "reduce").layout(size) for other in others}
    return plan_embeddings(
        [OutputConfig(name="deep", tables=tables)],
        layouts | {table.name: spec.layout(size)},
        features=features or [FeatureConfig(name="f")],
        optimizer=sparse_optimizer("adagrad", lr=0.1),
        dtype=torch.float32,
        world=Placement.line("cpu", size),
        backend="gloo",
        batch_size=8,
        **more,
    )


def stack_of(plan, name="t"):
    (stack,) = (
        stack
        for group in plan.groups
        for stack in group.stacks
        if name in [table.name for table in stack.tables]
    )
    return stack


def test_addresses_of_keys_are_unique():
    many = torch.cat([EXTREME, torch.arange(-5000, 5000) * 2**49, torch.arange(10_000)])
    addresses = KEYS.addresses(many)
    assert torch.equal(keys_of(addresses), many)
    assert addresses.unique().numel() == many.unique().numel()
    for end in (LOWEST, HIGHEST):  # every address has a key
        address = torch.tensor([end])
        assert torch.equal(KEYS.addresses(keys_of(address)), address)
    assert torch.equal(
        KEYS.addresses(torch.tensor([-7, 9], dtype=torch.int32)), mix(torch.tensor([-7, 9]))
    )


def test_consecutive_keys_are_spread_evenly():
    for step in (1, 2**20, 2**40):
        addresses = KEYS.addresses(torch.arange(64_000) * step)
        counts = torch.bincount((addresses >> 58) + 32, minlength=64)
        assert counts.min() > 850, (step, counts)
        assert counts.max() < 1150, (step, counts)


@pytest.mark.parametrize("num_rows", [64, 100, 2**31 + 11])
def test_ranges_of_ranks_cover_every_address_once(num_rows):
    for size in range(1, 65):
        ends = [sum(balanced_sizes(num_rows, size)[:n]) for n in range(size + 1)]
        spans = [KEYS.span(*part, num_rows) for part in pairwise(ends)]
        assert spans[0][0] == LOWEST
        assert spans[-1][1] == HIGHEST
        assert all(first <= last for first, last in spans)
        assert all(one[1] + 1 == other[0] for one, other in pairwise(spans))
        fair = 2**64 / size
        assert all(abs(last + 1 - first - fair) <= 2**64 / num_rows for first, last in spans)
        # The address ranges of the parts of a table make up the range of the table.
        for start, stop in pairwise(ends):
            middle = (start + stop) // 2
            halves = KEYS.span(start, middle, num_rows), KEYS.span(middle, stop, num_rows)
            assert (halves[0][0], halves[1][1]) == KEYS.span(start, stop, num_rows)
            assert halves[0][1] + 1 == halves[1][0]


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize(("size", "sizes"), [(1, None), (2, None), (3, (1, 90, 9)), (64, None)])
def test_exactly_one_rank_owns_and_finds_a_key(size, sizes, ragged):
    features = [FeatureConfig(name="f", ragged=ragged, hotness=1)]
    plan = plan_of(TABLE, Spec("S(0)", "unique", sizes=sizes), size, features=features)
    stack = stack_of(plan)
    spans = [shard.span for shard in shards_of(TABLE, stack.layouts[0])]
    ends = torch.tensor([end for span in spans for end in span])
    keys = torch.cat([EXTREME, keys_of(ends), torch.arange(200)])
    ids = BatchIds(keys.unsqueeze(1), None)
    if ragged:
        reader = IdReader(plan, 0, CPU)
        ids = reader.read({"f": Bags(keys, torch.arange(keys.numel() + 1))})
    owners = OwnerAddresses(stack, size, CPU)
    assert owners.num_addresses is None
    addresses = owners.make_lookup(ids).addresses
    assert torch.equal(addresses, mix(keys))
    owner = torch.searchsorted(torch.tensor(owners.lasts), addresses)
    for rank, (first, last) in enumerate(spans):
        mine = (addresses >= first) & (addresses <= last)
        assert torch.equal(mine, owner == rank)
        found = LocalAddresses(stack, rank, CPU).make_lookup(ids, pooled=False)
        assert torch.equal(found.addresses, addresses[mine])
        if size > 1:
            assert torch.equal(found.offsets.diff(), mine.long())
    named = (
        Lookup(addresses)
        .unique_up_to(torch.tensor(owners.lasts))
        .diff(prepend=torch.zeros(1).long())
    )
    assert torch.equal(named, torch.bincount(mixed_owner(addresses, spans), minlength=size))


def mixed_owner(addresses, spans):
    unique = addresses.unique().tolist()
    return torch.tensor([
        next(n for n, (first, last) in enumerate(spans) if first <= one <= last) for one in unique
    ])  # fmt: skip


def test_every_64_bit_key_is_a_valid_id():
    row = TableConfig(name="r", features=("g",), num_rows=7, dim=4)
    both = TableConfig(name="b", features=("h",), num_rows=7, dim=2)
    keyed = replace(TABLE, features=("f", "h"))
    names = [FeatureConfig(name=name) for name in "fgh"]
    for policy in ("error", "clamp"):
        others = (row, both) if policy == "error" else (row,)
        plan = plan_of(
            keyed, Spec("S(0)", "reduce"), 2, others=others, features=names, out_of_range=policy
        )
        assert plan.ids_dtype == torch.int64
        reader = IdReader(plan, 0, CPU)
        narrow = torch.tensor([[-4, 6, 3]], dtype=torch.int32)
        assert torch.equal(reader.read(narrow).matrix, narrow.long())
        wide = torch.stack([EXTREME, EXTREME % 7, EXTREME.abs() % 7], 1)
        assert torch.equal(reader.read(wide).matrix, wide)
        wide[2, 1] = 7
        if policy == "error":
            with pytest.raises(DataError, match=r"field g: id 7 in row 2 .* use 0\.\.6"):
                reader.read(wide)
            # If a table of row numbers shares the feature, its size limits the ids.
            with pytest.raises(DataError, match="field h: id -1 in row 0"):
                reader.read(torch.tensor([[1, 1, -1]]))
        else:
            clamped = wide.clone()
            clamped[2, 1] = 6
            assert torch.equal(reader.read(wide).matrix, clamped)
            assert reader.out_of_range.tolist() == [0, 1, 0]


def test_keys_in_lists_are_unchanged():
    features = [FeatureConfig(name="f", hotness=4, ragged=True)]
    for policy in ("error", "clamp", "hash"):
        plan = plan_of(TABLE, Spec("S(0)", "unique"), 2, features=features, out_of_range=policy)
        bags = Bags(EXTREME, torch.tensor([0, 4, 4, 7, 9]))
        batch_ids = IdReader(plan, 0, CPU).read({"f": bags})
        assert batch_ids.lists is not None
        assert torch.equal(batch_ids.lists.values, EXTREME)


def test_ids_shared_by_keys_and_rows_cannot_be_replaced():
    rows = TableConfig(name="r", features=("f",), num_rows=100, dim=4)
    with pytest.raises(ConfigError, match=r"t \(keys\), r \(100 rows\)"):
        plan_of(TABLE, Spec("S(0)", "reduce"), 2, others=(rows,), out_of_range="clamp")


def test_by_key_tables_have_a_stack_of_their_own():
    others = tuple(
        TableConfig(name=name, features=("f",), num_rows=100, dim=4, by_key=name < "c")
        for name in "abcd"
    )
    plan = plan_of(TABLE, Spec("S(0)", "reduce"), 2, others=others)
    (group,) = plan.groups
    names = [[table.name for table in stack.tables] for stack in group.stacks]
    assert names == [["t"], ["a"], ["b"], ["c", "d"]]
    assert plan_of(TABLE, Spec("S(0)", "unique"), 2).groups[0].address_dtype() == torch.int64


@pytest.mark.parametrize(
    ("table", "spec", "more", "says"),
    [
        (TABLE, Spec("S(1)", "columns"), {}, r"layout S\(1\).*use S\(0\)"),
        (TABLE, Spec("S(1)", "unique"), {}, r"layout S\(1\).*map of a key.*use S\(0\)"),
        (TABLE, Spec("B", "local"), {}, r"layout B.*use S\(0\)"),
        (TABLE, Spec("S(0)", "reduce", ranks=(2, 0)), {}, "ranks.*ascending order"),
        (TABLE, Spec("S(0)", "unique", ranks=(0, 2)), {}, "1 of 3 ranks store no rows; use all"),
        (replace(TABLE, num_rows=2), Spec("S(0)", "unique"), {}, "num_rows of 3 or more"),
        (TABLE, Spec("S(0)", "reduce"), {"row_dtype": torch.bfloat16}, "row_dtype torch.bfloat16"),
    ],
)  # fmt: skip
def test_unsupported_layouts_of_by_key_tables_are_rejected(table, spec, more, says):
    with pytest.raises(ConfigError, match=f"table t: .*by_key.*{says}"):
        plan_of(table, spec, 3, **more)


def test_by_key_tables_on_cuda_are_rejected():
    layout = replace(Spec("S(0)", "reduce").layout(2, "cuda"))
    with pytest.raises(ConfigError, match=r"by_key: device cuda .*; use device cpu"):
        plan_embeddings(
            [OutputConfig(name="deep", tables=(TABLE,))],
            {"t": layout},
            features=[FeatureConfig(name="f")],
            optimizer=sparse_optimizer("adagrad", lr=0.1),
            dtype=torch.float32,
            world=Placement.line("cuda", 2),
            backend="nccl",
            batch_size=8,
        )


def collected(world, mix: Mix, stores=None):
    made = KeyedStores() if stores is None else stores
    collection = make_collection(world, mix, made)
    return collection, made


def keyed_mix(num_rows=40) -> Mix:
    table = replace(TABLE, num_rows=num_rows)
    return Mix(
        features=(FeatureConfig(name="f"),),
        outputs=(OutputConfig(name="deep", tables=(table,)),),
        specs={"t": Spec("S(0)", "unique")},
        optimizer=sparse_optimizer("lazy_adam", lr=0.1),
        world_size=1,
        ids_dtype=torch.int64,
    )


def refused_default(world):
    with pytest.raises(ConfigError, match=r"table t: by_key=True .* DeviceStore"):
        make_collection(world, keyed_mix(), device_store)


def store_of_rows_for_keys(world, mix):
    stores = KeyedStores()

    def wrong(request: StoreRequest):
        shards = tuple(replace(s, table=replace(s.table, by_key=True)) for s in request.shards[:1])
        return stores(replace(request, shards=shards))

    with pytest.raises(ConfigError, match=r"by_key=False .* KeyedStore"):
        make_collection(world, mix, wrong)


def test_store_must_match_by_key(ranks):
    ranks(1, refused_default)
    ranks(1, store_of_rows_for_keys, mix_of("reduce", 8, sparse_optimizer("sgd", lr=0.1)))


def trained_on(collection, keys, step=1):
    outputs = collection.forward(keys.unsqueeze(1), keys.numel(), training=True)
    outputs["deep"].square().sum().backward()
    collection.apply_gradients(step)


def initial_of(collection, keys):
    """Return the values that an evaluation reads for untrained keys."""
    return collection.forward(keys.unsqueeze(1), keys.numel(), training=False)["deep"]


def versions(world):
    collection, made = collected(world, keyed_mix())
    (store,) = made.made
    starts = initial_of(collection, EXTREME)
    assert starts.unique(dim=0).shape == starts.shape, "each key starts with values of its own"
    assert store.num_live == store.num_trained == 0, "an evaluation adds no keys"

    def begun(keys):
        batch = collection.start_id_exchange(keys.unsqueeze(1), keys.numel(), training=True)
        collection.receive_ids(batch)
        return batch

    first, second, third = begun(EXTREME[:3]), begun(EXTREME[1:5]), begun(EXTREME[4:])
    assert (store.num_live, store.num_trained) == (9, 0)
    assert torch.equal(initial_of(collection, EXTREME), starts), "what is in flight is untrained"
    assert collection.state()["tables/t/keys"].shape == (0,)
    collection.lookup(first)
    collection.gather_outputs(first)["deep"].square().sum().backward()
    collection.send_grads(first)
    collection.receive_grads(first)
    collection.update(1)
    state = collection.state()
    assert store.num_trained == state["tables/t"].shape[0] == 3
    (keys,) = state["tables/t/keys"].rectangles
    keys = keys.values.read()
    assert torch.equal(mix(keys), mix(EXTREME[:3]).sort().values)
    (rows,) = state["tables/t"].rectangles
    trained = initial_of(collection, keys)
    assert torch.equal(rows.values.read(), trained)
    assert not torch.equal(trained, initial_of(collected(world, keyed_mix())[0], keys))
    collection.cancel(second)
    collection.cancel(third)
    assert store.num_live == store.num_trained == 3, "canceled batches leave no keys behind"
    assert len(store._map.rows) == 3
    # New keys start as if the canceled ones had never existed.
    trained_on(collection, EXTREME[6:], 2)
    again, _ = collected(world, keyed_mix())
    trained_on(again, EXTREME[:3], 1)
    trained_on(again, EXTREME[6:], 2)
    assert torch.equal(initial_of(collection, EXTREME), initial_of(again, EXTREME))


def test_store_has_the_keys_of_trained_batches(ranks):
    ranks(1, versions)


def begun_save(world, folder):
    """Start a save in which only the writer thread sorts the keys, while training continues."""
    collection, _ = collected(world, keyed_mix(num_rows=300))
    keys = torch.cat([EXTREME, keys_of(torch.arange(100) * 2**50)])
    for part in keys.flip(0).split(20):
        trained_on(collection, part)
    before = initial_of(collection, keys)
    saver = Saver(
        folder, Boxing(world), collection.state, run="r", deadline_s=60, stores=collection.stores
    )
    sort, sorting = torch.sort, []

    def recorded(*args, **options):
        sorting.append(threading.current_thread())
        return sort(*args, **options)

    with patch.object(torch, "sort", recorded):
        saver.start(1, {})
    trained_on(collection, torch.cat([keys, torch.arange(200, 300)]), 2)
    saver.wait()
    assert threading.current_thread() not in sorting
    saved = open_checkpoint(folder / "step-1")
    saved_keys = saved.tensor("tables/t/keys")
    assert torch.equal(mix(saved_keys), mix(keys).unique())
    place = torch.searchsorted(mix(saved_keys), mix(keys))
    assert torch.equal(saved.tensor("tables/t")[place], before)
    assert not torch.equal(initial_of(collection, keys), before)


def test_save_starts_without_sorting(ranks, memory):
    ranks(1, begun_save, memory)


def logged(world, folder):
    """The log reads rows in address order from a store whose other rows change before each read."""
    collection, made = collected(world, keyed_mix(num_rows=300))
    for part in torch.arange(30).split(7):
        trained_on(collection, part)
    store, rows = made.made[0], made.made[0].trained()
    before = {name: values.clone() for name, values in rows.read(slice(0, 30)).items()}
    assert not torch.equal(before[WEIGHTS], store.read(slice(0, 30))[WEIGHTS])
    log, spill = RowLog(rows.store, torch.ones(30, dtype=torch.bool), 4, rows), SpillFile(folder)
    for number in range(8):
        some = torch.arange(40)[7 - number :: 8]  # the log includes rows that did not exist before
        log.before_update(some)
        store.write(some, {WEIGHTS: torch.full((some.numel(), 4), number + 1.0)})
        found = log.read(number, spill)
        for name, values in before.items():
            assert torch.equal(found[name], values[4 * number : 4 * number + 4]), (number, name)
    log.close()


def test_undo_log_uses_row_numbers_of_the_store(ranks, memory):
    ranks(1, logged, memory)


def full(world):
    collection, made = collected(world, keyed_mix(num_rows=5))
    trained_on(collection, EXTREME[:4])
    fine = collection.start_id_exchange(EXTREME[:1].unsqueeze(1), 1, training=True)
    full = collection.start_id_exchange(EXTREME[3:].unsqueeze(1), 6, training=True)
    collection.receive_ids(fine)
    collection.receive_ids(full)
    collection.lookup(fine)  # the previous batch is not affected
    key = keys_of(mix(EXTREME[4:]).sort().values[1:2])
    with pytest.raises(DataError, match=f"table t: no row is free for key {int(key)}: all 5 rows"):
        collection.lookup(full)
    store = made.made[0]
    store = KeyedStores()(request_of(world, keyed_mix(num_rows=5)))
    with pytest.raises(
        CheckpointError, match=r"rank 0 has 5 rows for 6 saved keys; use num_rows of 7"
    ):
        store.load(EXTREME[:6])


def request_of(world, mix):
    found = []

    def stores(request):
        found.append(request)
        return KeyedStores()(request)

    make_collection(world, mix, stores)
    return found[0]


def test_full_table_fails_in_the_step_of_its_batch(ranks):
    ranks(1, full)


def state_of_that_name(world):
    request = request_of(world, keyed_mix())
    rule = SimpleNamespace(name="own", state={"keys": "row"})
    with pytest.raises(ConfigError, match=r"optimizer own has a state 'keys'.*rename"):
        KeyedStores()(replace(request, optimizer=rule))


def test_optimizer_state_named_keys_is_rejected(ranks):
    ranks(1, state_of_that_name)


def exchanged_mix(size, spec, combine) -> Mix:
    """Return ``by_key`` tables with single ids and weighted lists, and a table of row numbers."""
    tables = (
        replace(TABLE, num_rows=150),
        replace(TABLE, name="u", features=("f", "g"), num_rows=150, pooling="mean"),
        TableConfig(name="v", features=("f", "g"), num_rows=30, dim=4),
    )
    return Mix(
        features=(
            FeatureConfig(name="f"),
            FeatureConfig(name="g", hotness=4, ragged=True, weighted=True),
        ),
        outputs=(OutputConfig(name="deep", tables=tables, combine=combine),),
        specs=dict.fromkeys("tuv", spec),
        optimizer=sparse_optimizer("rowwise_adagrad", lr=0.1),
        world_size=size,
        ids_dtype=torch.int64,
        accumulate=2,
    )


def outputs_of(world, mix):
    return [step["deep"] for step in train(world, mix, KeyedStores())["outputs"]]


@pytest.mark.parametrize("combine", ["concat", "sum"])
def test_every_exchange_equals_one_rank(ranks, combine):
    (alone,) = ranks(1, outputs_of, exchanged_mix(1, Spec("S(0)", "unique"), combine))
    for spec in (
        Spec("S(0)", "reduce"),
        Spec("S(0)", "unique"),
        Spec("S(0)", "reduce", ranks=(1,)),
        Spec("S(0)", "columns", ranks=(1,)),
        Spec("B", "columns", ranks=(0,)),
    ):
        results = ranks(2, outputs_of, exchanged_mix(2, spec, combine))
        for one, *parts in zip(alone, *results, strict=True):
            assert np.allclose(np.concatenate(parts), one, rtol=0, atol=1e-12), spec


def initial_values(world, mix):
    requests = []

    def stores(request):
        requests.append((request, KeyedStores()(request)))
        return requests[-1][1]

    make_collection(world, mix, stores)
    for request, store in requests:
        rows = torch.arange(request.num_rows).flip(0).repeat(2)
        for dtype in (torch.int32, torch.int64):
            found, held = request.initial(rows.to(dtype)), store.read(rows)
            assert found.keys() == held.keys()
            for name, values in found.items():
                assert values.dtype == held[name].dtype
                assert torch.equal(values, held[name]), name
        assert request.initial(rows[:0])[WEIGHTS].shape == (0, request.width)


@pytest.mark.parametrize("exchange", ["columns", "reduce"])
def test_store_request_returns_initial_values(ranks, exchange):
    mix = mix_of(exchange, 8, sparse_optimizer("adagrad", lr=0.1))
    ranks(2, initial_values, replace(mix, row_dtype=torch.bfloat16, dtype=torch.float32))
