"""Tests growing tables in collections: results with any ranks, layouts, lookahead, and kernels, and
checkpoints.
"""

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from sbpflow.embedding.cache.factory import stores_of
from sbpflow.embedding.plan.embedding_plan import plan_embeddings
from sbpflow.embedding.plan.growth import MIN_ROWS, Eviction, Growth
from sbpflow.embedding.plan.row_storage import RowStorage, StorageRule
from sbpflow.embedding.plan.tables import FeatureConfig, OutputConfig, TableConfig, TableLayout
from sbpflow.embedding.rules.registry import sparse_optimizer
from sbpflow.embedding.vocabulary import key_map as km
from sbpflow.errors import ConfigError, DataError
from sbpflow.runtime.random.streams import fill_uniform, mix, stream_key, uniform_rows
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Split
from tests.embedding.cases import Spec
from tests.embedding.growing_case import (
    BATCH,
    CancelingRun,
    GrowingCase,
    Run,
    addresses_of,
    check_equal,
    coefficients,
    ids_of,
    joined,
    run_case,
    saved_tensors,
    size_of,
)
from tests.embedding.vocabulary_reference import ReferenceVocabulary
from tests.quick import diagonal, quick

CASE = GrowingCase()
EVICTING = Growth(
    evict=Eviction(max_rows=MIN_ROWS, idle_samples=150), admit_count=2, forget_after_samples=100
)
SHARE = 0.0003  # this fraction gives 40 slots for the 64 rows of live keys
TIMED = Growth(evict=Eviction(max_rows=MIN_ROWS, idle_time=30.0), admit_count=2)
LAYOUTS = {
    "unique": (Spec("S(0)", "unique"), Spec("S(0)", "unique")),
    "reduce": (Spec("S(0)", "reduce"), Spec("S(0)", "reduce")),
    "columns": (Spec("S(1)", "columns"), Spec("S(0)", "unique")),
    "unique columns": (Spec("S(1)", "unique"), Spec("S(0)", "reduce")),
    "whole": (Spec("S(1)", "columns"), Spec("S(0)", "reduce", ranks=(1,))),
}


@pytest.fixture
def ranks(ranks):
    pytest.importorskip("numba", reason="growing tables need numba")
    return ranks


def start_of(table: str, address: int | None, dim: int) -> np.ndarray:
    """Return the initial values of a key's row, or of the shared row if ``address`` is None."""
    if address is None:
        row = torch.empty(1, dim, dtype=torch.float64)
        fill_uniform(row, seed=11, name=table, bound=0.05, num_columns=dim)
        return row[0].numpy()
    counter = mix(torch.tensor([address]) + stream_key(11, table))
    return uniform_rows(counter, dim, 0.05)[0].numpy()


def reference(case: GrowingCase) -> tuple[list[dict[str, np.ndarray]], dict[str, dict]]:
    """Return the outputs of a case with SGD, and its rows by address (None: shared)."""
    vocabularies = {name: ReferenceVocabulary(case.growth, MIN_ROWS) for name in "fg"}
    rows: dict[str, dict] = {}
    fixed = {}
    for output in case.outputs():
        for table in output.tables:
            rows[table.name] = {None: start_of(table.name, None, table.dim)}
            if table.growth is None:
                whole = torch.empty(table.num_rows, table.dim, dtype=torch.float64)
                fill_uniform(whole, seed=11, name=table.name, bound=0.05, num_columns=table.dim)
                fixed[table.name] = whole.numpy()
    outputs = []
    for batch in range(case.batches):
        size = size_of(batch)
        where: dict[str, list] = {"h": ids_of(case, batch, slice(0, size))["h"].tolist()}
        for name in "fg":
            before = set(vocabularies[name].live)
            addresses = list(addresses_of(batch, name))[:size]
            has_row = vocabularies[name].step(addresses, size)
            where[name] = [a if own else None for a, own in zip(addresses, has_row, strict=True)]
            live = vocabularies[name].live
            for kind, dim in (("deep", 8), ("wide", 1)):
                table = f"{kind}.{name}"
                for address in before - set(live):
                    del rows[table][address]
                for address in set(where[name]) - {None} - before:
                    rows[table][address] = start_of(table, address, dim)
        outputs.append(train(case, batch, where, rows, fixed))
    return outputs, rows


def train(case, batch, where, rows, fixed) -> dict[str, np.ndarray]:
    """Return the expected outputs of a batch, and take an SGD step on the rows."""
    made = {}
    for output in case.outputs():
        parts = []
        for table in output.tables:
            values = fixed.get(table.name) if table.growth is None else rows[table.name]
            parts.append(np.array([values[key] for key in where[table.features[0]]]))
        sums = output.name == "wide"
        made[output.name] = sum(parts) if sums else np.concatenate(parts, 1)
        width = made[output.name].shape[1]
        grad = coefficients(batch, output.name, width)
        grad = grad * (1 - np.tanh(made[output.name]) ** 2)
        column = 0
        for table in output.tables:
            own = grad if sums else grad[:, column : column + table.dim]
            column += table.dim
            values = fixed.get(table.name) if table.growth is None else rows[table.name]
            for key, change in zip(where[table.features[0]], own, strict=True):
                values[key] = values[key] - case.optimizer.lr * change
    return made


def test_rows_follow_the_rules(ranks, tmp_path):
    case = replace(CASE, optimizer=sparse_optimizer("sgd", lr=0.1), growth=EVICTING, ahead=3)
    expected, rows = reference(case)
    results = ranks(1, run_case, case, tmp_path)
    for made, wanted in zip(joined(results, "outputs"), expected, strict=True):
        for name, value in wanted.items():
            np.testing.assert_allclose(made[name], value, rtol=0, atol=1e-12)
    counts = results[0]["counts"]["f"]
    assert counts.evicted > 10
    assert counts.forgotten > 3
    saved = saved_tensors(tmp_path / f"step-{case.batches}")
    for name in ("deep.f", "wide.g"):
        keys = torch.from_numpy(saved[f"vocabularies/{name[-1]}/keys"])
        order = [None, *mix(keys).tolist()]
        assert set(order) == set(rows[name])
        wanted = np.array([rows[name][address] for address in order])
        np.testing.assert_allclose(saved[f"tables/{name}"], wanted, rtol=0, atol=1e-12)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Return a function that trains a case on one rank without lookahead, once per case, and
    returns the result.
    """
    made = {}

    def result(ranks, case):
        case = replace(case, ahead=0, deep=CASE.deep, wide=CASE.wide, storage=None)
        if case not in made:
            folder = tmp_path_factory.mktemp("alone")
            made[case] = ranks(1, run_case, case, folder), folder
        return made[case]

    return result


def check_as_alone(ranks, alone, size, case, folder: Path, atol=1e-9, kind=Run):
    one, one_folder = alone(ranks, case)
    many = ranks(size, run_case, case, folder, kind)
    for key in ("outputs", "evaluated"):
        for made, wanted in zip(joined(many, key), joined(one, key), strict=True):
            for name, value in wanted.items():
                np.testing.assert_allclose(made[name], value, rtol=0, atol=atol)
    step = f"step-{case.batches}"
    check_equal(one_folder / step, folder / step, atol=atol)
    for field, counts in one[0]["counts"].items():
        assert replace(many[0]["counts"][field], rows_per_rank=()) == replace(
            counts, rows_per_rank=()
        )
        assert sum(many[0]["counts"][field].rows_per_rank) == counts.live
    assert one[0]["counts"]["g"].evicted > 5


@pytest.mark.parametrize("size", quick([2, 3], lambda n: n == 1))
def test_event_times_of_all_ranks_decide(ranks, alone, tmp_path, size):
    """The latest sample of a batch, which is on one rank, sets the time for the keys of every
    owner.
    """
    check_as_alone(ranks, alone, size, replace(CASE, growth=TIMED, ahead=size), tmp_path)


def test_batches_without_event_time_are_refused(ranks):
    case = replace(CASE, growth=TIMED, timed=False)
    assert "field f: evict.idle_time needs an event time" in ranks(1, refused, case)[0]


def refused(world, case):
    with pytest.raises(DataError) as caught:
        Run(world, case).train(1)
    return str(caught.value)


def with_a_full_map(world, case):
    run = Run(world, case)
    state = run.collection.growing.fields[1].part.arrays.state
    state[km.SLOTS], state[km.ENTRIES] = 18 * 10**8, 15 * 10**8
    with pytest.raises(ConfigError) as caught:
        run.train(1)
    return str(caught.value)


def test_a_field_with_a_full_map_is_named(ranks):
    (message,) = ranks(1, with_a_full_map, CASE)
    assert message.startswith("model.fields.g.forget_after_samples is not set: 0 keys")


def largest_transfers(world, case):
    """Return, by step, the largest number of bytes that this rank sends, and its bound."""
    run = Run(world, case)
    world.log.enabled = True
    sent: dict[str, int] = {}
    for record in (run.train(case.batches), world.log.records)[1]:
        sent[record.step_id] = max(sent.get(record.step_id, 0), record.bytes_sent)
    steps = case.plan(world.size).key_steps(BATCH)
    return {step.id: (sent[step.id], step.bound_bytes) for step in steps}


def test_transfers_of_keys_stay_within_their_bounds(ranks):
    case = replace(CASE, deep=LAYOUTS["columns"][0], batches=6)
    for transfers in ranks(3, largest_transfers, case):
        assert {"keys/counts", "keys/changed", "keys/new"} < transfers.keys()
        assert all(0 < sent <= bound for sent, bound in transfers.values()), transfers


@pytest.mark.few(2)
@pytest.mark.parametrize(("layout", "size"), diagonal(list(LAYOUTS), [3, 2]))
def test_layouts_and_ranks_do_not_change_results(ranks, alone, tmp_path, size, layout):
    deep, wide = LAYOUTS[layout]
    case = replace(CASE, deep=deep, wide=wide, growth=EVICTING, ahead=size)
    check_as_alone(ranks, alone, size, case, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks_of_hosts",
    [((0, 1), (2, 3)), pytest.param(((0, 1, 2), (3, 4, 5)), marks=pytest.mark.slow)],
)
def test_two_hops_do_not_change_results(ranks, alone, tmp_path, ranks_of_hosts):
    spec = Spec("(S(0), S(0))", "unique", ranks=ranks_of_hosts)
    case = replace(CASE, deep=spec, wide=spec, growth=EVICTING, ahead=4, clip=1.0)
    check_as_alone(ranks, alone, sum(map(len, ranks_of_hosts)), case, tmp_path)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "wide", [Spec("S(1)", "columns"), Spec("S(0)", "unique", ranks=(0, 2))], ids=str
)
def test_grids_of_rows_and_columns_do_not_change_results(ranks, alone, tmp_path, wide):
    deep = Spec("(S(0), S(1))", "reduce", ranks=((0, 1), (2, 3)))
    case = replace(CASE, deep=deep, wide=wide, growth=EVICTING, ahead=4)
    check_as_alone(ranks, alone, 4, case, tmp_path)


@pytest.mark.few(2)
@pytest.mark.parametrize("ahead", [0, 1, 4, 16, 64])
def test_lookahead_does_not_change_a_bit(ranks, alone, tmp_path, ahead):
    case = replace(CASE, growth=EVICTING, ahead=ahead)
    check_as_alone(ranks, alone, 1, case, tmp_path, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [0, 1, 4, 16, 64])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_any_ranks_and_any_lookahead(ranks, alone, tmp_path, size, ahead):
    case = replace(CASE, growth=EVICTING, ahead=ahead, batches=72)
    check_as_alone(ranks, alone, size, case, tmp_path)


@pytest.mark.slow
def test_eight_ranks(ranks, alone, tmp_path):
    check_as_alone(ranks, alone, 8, replace(CASE, growth=EVICTING, ahead=2), tmp_path)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("rule", "kernel"),
    diagonal(["sgd", "rowwise_adagrad", "lazy_adam", "ftrl"], ["torch", "numba"]),
)
def test_optimizers_and_clipping(ranks, alone, tmp_path, rule, kernel):
    optimizer = sparse_optimizer(rule, lr=0.05)
    case = replace(CASE, optimizer=optimizer, kernel=kernel, clip=2.0, growth=EVICTING)
    check_as_alone(ranks, alone, 2, replace(case, deep=LAYOUTS["columns"][0]), tmp_path)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("kernel", "spec"),
    [
        ("torch", CASE.deep),
        ("numba", CASE.deep),
        ("numba", Spec("S(0)", "unique", ranks=(0, 2))),  # rank 1 stores no rows
    ],
    ids=str,
)
def test_rounding_depends_on_keys(ranks, alone, tmp_path, kernel, spec):
    case = replace(
        CASE, dtype=torch.float32, row_dtype=torch.bfloat16, kernel=kernel, growth=EVICTING,
        deep=spec, wide=spec,
    )  # fmt: skip
    check_as_alone(ranks, alone, 3, case, tmp_path, atol=2e-2)


def test_accumulated_batches_train_growing_tables_equally(ranks, alone, tmp_path):
    case = replace(CASE, accumulate=3, ahead=5)
    check_as_alone(ranks, alone, 2, case, tmp_path)


@pytest.mark.few(1)
@pytest.mark.parametrize("size", [1, 2])
def test_batches_canceled_within_a_step_do_not_change_results(ranks, alone, tmp_path, size):
    case = replace(CASE, growth=EVICTING, accumulate=3, ahead=4)
    check_as_alone(ranks, alone, size, case, tmp_path, kind=CancelingRun)


def test_weighted_lists(ranks, alone, tmp_path):
    check_as_alone(ranks, alone, 3, replace(CASE, ragged=True, ahead=4), tmp_path)


def resumed(world, case, start, stop, source, folder, in_background):
    run = Run(world, case)
    if source is not None:
        run.restore(source, start)
    run.train(stop)
    run.announce()  # batches are in flight during the save
    saver = run.saver(folder)
    if in_background:
        saver.start(stop, {})
        run.train(min(stop + 2, case.batches))
        saver.wait()
    else:
        saver.save(stop, {})
    run.drain()
    return run.outputs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "in_background"),
    quick(product(["unique", "columns"], [False, True]), lambda n: n == 3),
)
def test_reshards_in_the_middle_of_eviction(ranks, alone, tmp_path, layout, in_background):
    deep, wide = LAYOUTS[layout]
    case = replace(CASE, deep=deep, wide=wide, growth=EVICTING, ahead=4)
    one, one_folder = alone(ranks, case)
    source, start = None, 0
    for size, stop in ((4, 6), (3, 12), (1, 18), (8, 24)):
        folder = tmp_path / str(stop)
        folder.mkdir()
        made = ranks(size, resumed, case, start, stop, source, folder, in_background)
        wanted = joined(one, "outputs")[start:stop]
        for at, value in enumerate(wanted):
            whole = np.concatenate([outputs[at]["deep"] for outputs in made])
            np.testing.assert_allclose(whole, value["deep"], rtol=0, atol=1e-9)
        source, start = folder / f"step-{stop}", stop
    check_equal(one_folder / "step-24", source)


def interrupted(world, case, folder):
    whole = Run(world, case)
    whole.train(case.batches)
    first = Run(world, case)
    first.train(12)
    first.saver(folder).save(12, {})
    again = Run(world, case)
    again.restore(folder / "step-12", 12)
    again.train(case.batches)
    for one, other in zip(whole.outputs[12:], again.outputs, strict=True):
        for name, value in one.items():
            assert np.array_equal(value, other[name])
    whole.saver(folder).save(24, {})
    (folder / "again").mkdir(exist_ok=True)
    again.saver(folder / "again").save(24, {})


@pytest.mark.few(1)
@pytest.mark.parametrize("size", [1, 2])
def test_a_resumed_run_has_the_same_bits(ranks, tmp_path, size):
    optimizer = sparse_optimizer("lazy_adam", lr=0.05)
    case = replace(CASE, optimizer=optimizer, clip=1.0, growth=EVICTING, ahead=3)
    ranks(size, interrupted, case, tmp_path)
    check_equal(tmp_path / "step-24", tmp_path / "again" / "step-24", atol=0)


def cached(world, case, folder, start=0, stop=24, source=None):
    """Return the outputs, and whether rows left their slots and came back."""
    rule = StorageRule(kind="file", path=folder)
    run = Run(world, case, stores=stores_of(lambda key: rule, world.device))
    if source is not None:
        run.restore(source, start)
    run.train(stop)
    run.announce()  # batches are in flight during the save
    run.saver(folder).save(stop, {})
    run.drain()
    moved = run.collection.cache_counts()
    return run.outputs, moved is not None and moved.written > 0 and moved.fetched > moved.new


@pytest.mark.parametrize("kind", quick(["host", "file"], lambda n: n == 1))
def test_cached_tables_grow(ranks, alone, tmp_path, kind):
    storage = RowStorage(kind=kind, share=SHARE, key="parallel.storage.deep")
    case = replace(CASE, growth=EVICTING, ahead=4)
    one, one_folder = alone(ranks, case)
    ((outputs, moved),) = ranks(1, cached, replace(case, storage=storage), tmp_path)
    assert moved
    for wanted, value in zip(one[0]["outputs"], outputs, strict=True):
        assert np.array_equal(wanted["deep"], value["deep"])
    check_equal(one_folder / "step-24", tmp_path / "step-24", atol=0)


@pytest.mark.few(1)
@pytest.mark.parametrize("shares", [(SHARE, None), (None, SHARE), (SHARE, 0.0004)])
def test_resumed_cached_tables_grow(ranks, alone, tmp_path, shares):
    case = replace(CASE, growth=EVICTING, ahead=4)
    one, one_folder = alone(ranks, case)
    source = None
    for share, start, stop in zip(shares, (0, 12), (12, 24), strict=True):
        storage = share and RowStorage(kind="file", share=share, key="parallel.storage.deep")
        ((outputs, moved),) = ranks(
            1, cached, replace(case, storage=storage), tmp_path, start, stop, source
        )
        assert moved == (share is not None)
        for wanted, value in zip(one[0]["outputs"][start:stop], outputs, strict=True):
            assert np.array_equal(wanted["deep"], value["deep"])
        source = tmp_path / f"step-{stop}"
    check_equal(one_folder / "step-24", source, atol=0)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"deep": Spec("B", "local")}, r"table deep.f: grows: layout B@.*; use S\(0\) or S\(1\)"),
        ({"deep": Spec("S(0)", "reduce", ranks=(1, 0))}, "ranks out of order; list them"),
        (
            {"deep": Spec("(S(0), S(0))", "unique", ranks=((1,), (0,)))},
            r"ranks out of order; use sbp: S\(0\)",
        ),
        (
            {"deep": Spec("S(0)", "reduce", sizes=(101, MIN_ROWS - 101))},
            r"101, .* a single key bucket; .*\(for example, \[32768, 32768\]\)",
        ),
        (
            {"deep": Spec("S(0)", "reduce", sizes=(4, MIN_ROWS - 4))},
            "table wide.f splits its rows differently from table deep.f",
        ),
    ],
)  # fmt: skip
def test_unsupported_plans_are_rejected(change, says):
    case = replace(CASE, **change)
    if "sizes" in str(change) and "101" in str(change):
        case = replace(case, wide=case.deep)
    with pytest.raises(ConfigError, match=says):
        case.plan(2)


@pytest.mark.parametrize(("ranks", "fits"), [(1, 2**30), (2, 2**31)])
def test_a_rank_has_at_most_as_many_rows_as_its_map_has_room_for(ranks, fits):
    def plan(num_rows: int) -> None:
        growth = Growth(evict=Eviction(max_rows=num_rows))
        world = Placement.line("cpu", ranks)
        table = TableConfig(name="t", features=("f",), num_rows=num_rows, dim=4, growth=growth)
        layout = TableLayout(layout=Layout(world, (Split(0),)), exchange="reduce")
        plan_embeddings(
            [OutputConfig(name="o", tables=(table,))],
            {"t": layout},
            features=[FeatureConfig(name="f")],
            optimizer=sparse_optimizer("sgd", lr=0.1),
            dtype=torch.float32,
            world=world,
            backend="gloo",
            batch_size=8,
        )

    plan(fits)
    with pytest.raises(ConfigError, match=rf"evict\.max_rows {2 * fits} .*; use {fits} or fewer"):
        plan(2 * fits)


def read_in_step(world, case):
    run = Run(world, case)
    tables, ids = run.collection, ids_of(case, 0, slice(0, BATCH))
    outputs = tables.forward(ids, size_of(0), training=True)
    for read in (tables.state, lambda: run.evaluate(0)):
        with pytest.raises(RuntimeError, match=r"its update; call update or apply_gradients first"):
            read()
    torch.cat([value.flatten() for value in outputs.values()]).sum().backward()
    tables.apply_gradients(1)
    assert tables.state()
    assert run.evaluate(0)


def test_rows_are_not_read_between_a_lookup_and_its_update(ranks):
    ranks(1, read_in_step, CASE)
