"""Tests the exchange of row-split tables in two hops: within hosts, then between hosts.

The ranks of a test share one machine; a grid or a topology says which of them form a host.
"""

import json
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.torchrec_models import config_of, fields_of
from benchmarks.two_level import SHAPE
from sbpflow.boxing.executor import Boxing
from sbpflow.config.parse import plain
from sbpflow.config.schema import ClipConfig
from sbpflow.config.table_layouts import resolve_table_layouts
from sbpflow.config.table_rules import ParallelConfig, TableRule
from sbpflow.costs.counts import INDEX
from sbpflow.costs.ids import click_curve
from sbpflow.embedding.collection import EmbeddingCollection
from sbpflow.embedding.plan.embedding_plan import plan_embeddings
from sbpflow.embedding.plan.price import price_plan
from sbpflow.embedding.plan.tables import FeatureConfig, OutputConfig, TableConfig
from sbpflow.embedding.plan.two_level import UniqueTwoLevel, is_two_level
from sbpflow.embedding.rules.registry import sparse_optimizer
from sbpflow.errors import ConfigError
from sbpflow.planner.clusters import described
from sbpflow.planner.costs.cost import TaskCost, count_work
from sbpflow.planner.search.auto import search
from sbpflow.planner.shapes import plan_of, problem_of, shapes_of
from sbpflow.planner.task import Shape, embedding_plan, plan_of_tree
from sbpflow.run.planning.build_plan import plan_run
from sbpflow.run.planning.explain import describe
from sbpflow.run.planning.plan_file import plan_to_json
from sbpflow.run.planning.summary import expected_traffic, traffic_lines
from sbpflow.run.saved.saved_model import saved_layouts
from sbpflow.runtime.ranks.topology import Link, Topology
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import balanced_sizes
from tests.embedding.cases import Case, Spec
from tests.embedding.cases import train as train_case
from tests.embedding.growing_case import GrowingCase
from tests.embedding.test_equality import DEEP, OPTIMIZERS, WIDE, check
from tests.embedding.test_mixes import KERNELS
from tests.planner.problems import with_exchange
from tests.planner.tasks import make_task
from tests.training.test_lookahead import assert_same
from tests.training.test_lookahead import train as train_ahead
from tests.training.wdl_case import FIELDS, make_config
from tests.training.wdl_case import train as train_wdl

GRIDS = {
    "2x2": ((0, 1), (2, 3)),
    "interleaved": ((0, 2), (1, 3)),
    "crossed": ((0, 3), (1, 2)),
    "2x1": ((0,), (1,)),
    "1x1": ((0,),),
    "1x4": ((0, 1, 2, 3),),
    "2x3": ((0, 1, 2), (3, 4, 5)),
    "3x2": ((0, 1), (2, 3), (4, 5)),
}
RULE = TableRule(sbp="(S(0), S(0))", ranks=((0, 1), (2, 3)))
HOSTS = Topology(hosts=((0, 1), (2, 3)))
# A link of 100 Mbit/s, shared by two ranks.
SLOW = replace(HOSTS, network_link=Link(gb_per_s=0.00625))


def two_level(grid):
    return Spec("(S(0), S(0))", "unique", ranks=grid)


def make_case(grid, optimizer="sgd", kernel="torch", **changes) -> Case:
    return Case(
        tables={"wide": WIDE, "deep": DEEP},
        specs={name: two_level(grid) for name, _, _ in (*WIDE, *DEEP)},
        optimizer=sparse_optimizer(optimizer, lr=0.1),
        sums=("wide",),
        kernel=kernel,
        **changes,
    )


def size_of(grid):
    return sum(map(len, grid))


def on_hosts(world, hosts, fn, *args):
    """Run ``fn`` as if the ranks were on these hosts, without shared memory."""
    usual, world.topology = world.topology, Topology(hosts=hosts)
    shared, world._shared = world._shared, None
    links, world._links = world._links, vars(world).setdefault("_apart", {})
    try:
        return fn(world, *args)
    finally:
        world.topology, world._shared, world._links = usual, shared, links


@pytest.mark.few(6)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_grid_equals_the_reference(ranks, grid, kernel):
    check(ranks, size_of(grid), make_case(grid, "rowwise_adagrad", kernel))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizer_equals_the_reference(ranks, optimizer):
    check(ranks, 4, make_case(GRIDS["2x2"], optimizer))


def _with_log(world, hosts, case):
    world.log.records.clear()
    world.log.enabled = True
    try:
        return on_hosts(world, hosts, train_case, case)
    finally:
        world.log.enabled = False


def _requests(case, grid, ids, stack):
    """Return the distinct (rank, table, row, owner) tuples for a batch's ids ([batch,
    features]).
    """
    sizes = balanced_sizes(len(ids), size_of(grid))
    of_rank = np.repeat(np.arange(len(sizes)), sizes).tolist()
    requests = set()
    for table, layout in zip(stack.tables, stack.layouts, strict=True):
        parts = {rank: layout.part_slices(table.shape, rank)[0] for rank in range(len(sizes))}
        owners = {row: rank for rank, part in parts.items() for row in range(part.start, part.stop)}
        column = ids[:, case.features().index(table.name)].tolist()
        rows = zip(of_rank, column, strict=True)
        requests |= {(rank, table.name, row, owners[row]) for rank, row in rows}
    return requests


@pytest.mark.parametrize("name", ["2x2", "2x3"])
def test_each_host_sends_a_distinct_id_only_once(ranks, name):
    """A host sends only its distinct ids that other hosts own; one vector and one gradient are sent
    for each of these ids.
    """
    grid = GRIDS[name]
    case = make_case(grid, dtype=torch.float32)
    sent = Counter()
    for result in ranks(size_of(grid), _with_log, grid, case):
        for step, _, num_bytes in result["records"]:
            sent[step] += num_bytes
    place_of = {rank: (host, n) for host, row in enumerate(grid) for n, rank in enumerate(row)}
    for group in case.plan(size_of(grid)).groups:
        near = far = 0
        for ids, _ in case.batches():
            requests = _requests(case, grid, ids, group.stacks[0])
            near += sum(place_of[rank][1] != place_of[owner][1] for rank, *_, owner in requests)
            merged = {(place_of[rank][0], *rest) for rank, *rest in requests}
            far += sum(host != place_of[owner][0] for host, *_, owner in merged)
        assert near > far > 0
        for level, rows in (("host", near), ("network", far)):
            assert sent[f"{group.name}/fwd/ids.{level}"] == 4 * rows
            assert sent[f"{group.name}/fwd/vectors.{level}"] == 4 * group.stacks[0].dim * rows
            assert sent[f"{group.name}/bwd/gradients.{level}"] == 4 * group.stacks[0].dim * rows


def test_hosts_that_send_messages_give_equal_bits(ranks):
    case = make_case(GRIDS["2x2"], "adagrad", dtype=torch.float32)
    usual = ranks(4, train_case, case)
    for one, other in zip(usual, ranks(4, on_hosts, GRIDS["2x2"], train_case, case), strict=True):
        for (_, _, weights, _), (_, _, same, _) in zip(one["pieces"], other["pieces"], strict=True):
            np.testing.assert_array_equal(weights, same)


_GRADS = (257.0, 1.0, 1.0, 1.0)  # by rank; the hosts are (0, 1) and (2, 3)


def _rounded(world, comm_dtype):
    """Train one row, which starts at 0, with one gradient per rank; return the row."""
    table = TableConfig(name="t", features=("f",), num_rows=1, dim=4, initial_range=0.0)
    plan = plan_embeddings(
        [OutputConfig(name="out", tables=(table,))],
        {"t": replace(two_level(GRIDS["2x2"]).layout(4), comm_dtype=comm_dtype)},
        features=[FeatureConfig(name="f")],
        optimizer=sparse_optimizer("sgd", lr=1.0),
        dtype=torch.float32,
        world=Placement.line("cpu", 4),
        backend="gloo",
        batch_size=4,
    )
    collection = EmbeddingCollection(plan, Boxing(world), seed=1)
    out = collection.forward(torch.zeros(1, 1, dtype=torch.int32), 4, training=True)["out"]
    (out * _GRADS[world.rank]).sum().backward()
    collection.apply_gradients(1)
    return [shard.weights.tolist() for shard in collection.stored()]


def test_gradients_are_rounded_after_the_sum_of_a_host(ranks):
    """Above 256, bf16 has only even numbers: 257 becomes 256, but the sum 257 + 1 is exact."""
    plan = make_case(GRIDS["2x2"], dtype=torch.float32).plan(4)
    steps = {step.id: step.dtype for step in plan.steps(16, "gradients")}
    assert steps["deep/unique/bwd/gradients.host"] == torch.float32
    for comm_dtype in (None, torch.bfloat16):
        (row,) = [stored for stored in ranks(4, _rounded, comm_dtype) if stored]
        assert row == [[[-260.0] * 4]]


def wdl(**changes):
    tables = {"*": RULE}
    return make_config("3", "rowwise_adagrad", dense="adam", tables=tables, dim=8, **changes)


def test_lookahead_and_clipping_do_not_change_a_bit(ranks):
    config = wdl()
    clip = ClipConfig(norm=0.05, rows=True)
    config = replace(config, optimizer=replace(config.optimizer, clip=clip))
    want = ranks(4, train_ahead, config, 0, False)
    for lookahead, overlapped in ((0, True), (1, True), (4, True), (4, False)):
        results = ranks(4, train_ahead, config, lookahead, overlapped)
        for one, other in zip(results, want, strict=True):
            assert_same(one, other)
            assert one["order"] == other["order"]


def test_losses_equal_those_of_the_flat_exchange(ranks):
    flat = make_config("3", "rowwise_adagrad", dense="adam", dim=8)
    two, one = (ranks(4, train_wdl, config, 8)[0]["losses"] for config in (wdl(), flat))
    np.testing.assert_allclose(two, one, rtol=1e-12)  # float64 sums are computed in another order
    assert len(set(two)) == 8


def resolve(rule, hosts=HOSTS.hosts, world_size=4):
    parallel = ParallelConfig(tables={"*": rule})
    layouts = resolve_table_layouts(parallel, {"t": (9, 4)}, {}, world_size, hosts=hosts)
    return layouts["t"]


def test_default_grid_has_a_row_per_host():
    rule = TableRule(sbp="(S(0), S(0))")
    layout = resolve(rule, ((0, 2), (1, 3)))
    assert layout.layout.placement.nested() == [[0, 2], [1, 3]]
    assert layout.exchange == "unique"
    assert resolve(rule, None).layout.placement.nested() == [[0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("changes", "hosts", "says"),
    [
        ({}, ((0, 1, 2), (3,)), r"number of ranks on every host, but the hosts have 3, 1; use"),
        ({"ranks": ((0, 2), (1, 3))}, HOSTS.hosts, r"ranks \[0, 2\] in one row, .*different hosts"),
        ({"ranks": ((0, 1),)}, HOSTS.hosts, r"\(S\(0\), S\(0\)\) needs all 4 ranks, but .* has 2"),
        ({"exchange": "reduce"}, HOSTS.hosts, r"reduce does not support .*; use unique"),
    ],
)  # fmt: skip
def test_unsupported_grids_are_refused(changes, hosts, says):
    with pytest.raises(ConfigError, match=says):
        resolve(TableRule(sbp="(S(0), S(0))", **changes), hosts)


def test_unsupported_settings_are_refused():
    with pytest.raises(ConfigError, match=r"sizes: \(S\(0\), S\(0\)\) splits rows evenly"):
        TableRule(sbp="(S(0), S(0))", sizes=((5, 4), (1, 1))).check("parallel.tables.t")
    with pytest.raises(ConfigError, match=r"list them in ascending order: \[\[0, 1\], \[2, 3\]\]"):
        make_case(((1, 0), (2, 3))).plan(4)
    config = wdl()
    config = replace(config, parallel=replace(config.parallel, row_buffer_fraction=0.5))
    with pytest.raises(
        ConfigError, match=r"row_buffer_fraction: 0.5 cannot .*exact counts; remove"
    ):
        plan_run(config, FIELDS, world_size=4, device_type="cuda", topology=HOSTS)
    hosts = Spec("(S(0), S(0))", "unique", ranks=((0,), (1,), (2,)))
    with pytest.raises(ConfigError, match=r"65536 rows .* over 3 hosts; use 2, 4, 8, .. hosts, or"):
        GrowingCase(deep=hosts, wide=hosts).plan(3)


ROWS = {"C1": 200_000, "C2": 50_000}


def big_plan(sbp, topology, batch_size=16_384, **changes):
    """Return the plan for two tables with dim 128 on four ranks."""
    tables = [
        TableConfig(name=n, features=(n,), num_rows=rows, dim=128) for n, rows in ROWS.items()
    ]
    rule = TableRule(sbp=sbp, exchange="unique")
    layouts = resolve_table_layouts(
        ParallelConfig(tables={"*": rule}), {t.name: t.shape for t in tables}, {}, 4,
        hosts=topology.hosts,
    )  # fmt: skip
    return plan_embeddings(
        [OutputConfig(name="deep", tables=tuple(tables))], layouts,
        features=[FeatureConfig(name=name) for name in ROWS],
        optimizer=sparse_optimizer("rowwise_adagrad", lr=0.1), dtype=torch.float32,
        world=Placement.line("cpu", 4), backend="gloo", batch_size=batch_size, **changes,
    )  # fmt: skip


def test_prices_count_distinct_ids_of_ranks_and_hosts():
    batch, row_bytes = 16_384, 4 + 2 * 4 * 128
    wanted, merged = (
        sum(click_curve(rows).touched(batch / parts) for rows in ROWS.values()) for parts in (4, 2)
    )
    flat, two = (price_plan(big_plan(sbp, HOSTS), batch, SLOW) for sbp in ("S(0)", "(S(0), S(0))"))
    # Two of the three other ranks are on the other host, and own half of the rows.
    assert flat.network_bytes == pytest.approx(wanted / 2 * row_bytes, rel=1e-4)
    assert two.network_bytes == pytest.approx(merged / 2 / 2 * row_bytes, rel=1e-4)
    assert two.sent_bytes - two.network_bytes == pytest.approx(wanted / 2 * row_bytes, rel=1e-4)
    assert two.ms < flat.ms
    assert two.work_ms > flat.work_ms
    # If links between hosts are as fast as links within a host, the extra work does not pay off.
    flat, two = (price_plan(big_plan(s, HOSTS), batch, HOSTS) for s in ("S(0)", "(S(0), S(0))"))
    assert flat.ms < two.ms


def test_auto_chooses_two_hops_only_for_a_slow_link():
    config = make_config(None, "rowwise_adagrad", dtype="float32", dim=128, batch_size=65_536)
    config = replace(config, parallel=replace(config.parallel, scheme="auto"))
    sparse = tuple(replace(field, rows=200_000) for field in FIELDS.sparse)
    fields = replace(FIELDS, sparse=sparse)
    for name, topology in {"slow": SLOW, "fast": HOSTS, "one host": Topology.one_host(4)}.items():
        _, plan = plan_run(
            config, fields, world_size=4, device_type="cpu", topology=topology, traced=False
        )
        assert ("two hops" in plan.priced[0].name) == (name == "slow")
        names = [priced.name for priced in plan.priced]
        assert ("all unique, two hops" in names) == (name != "one host")
        if name == "slow":
            assert {"(S(0), S(0))"} < {table["sbp"] for table in describe(plan)["tables"]}
            links = describe(plan)["links"]
            assert links["on a host"]["bytes"] > 0 < links["between hosts"]["bytes"]
            expected = expected_traffic(plan, fields)
            assert 0 < expected["between hosts"] < expected["on a host"]
            (line,) = traffic_lines(expected)
            assert "between hosts" in line
    uneven = Topology(hosts=((0, 1, 2), (3,)), network_link=SLOW.network_link)
    _, plan = plan_run(
        config, fields, world_size=4, device_type="cpu", topology=uneven, traced=False
    )
    assert not [priced for priced in plan.priced if "two hops" in priced.name]


@pytest.mark.parametrize("mbit", [100, 1000])
def test_auto_chooses_two_hops_where_they_were_measured_to_be_faster(mbit):
    """The shape and the rates are those of ``benchmarks.two_level``; two ranks share a link."""
    config = make_config(None, "rowwise_adagrad", dtype="float32", batch_size=32_768)
    parallel = replace(config.parallel, scheme="auto")
    config = replace(config, parallel=parallel, model=config_of("wdl", SHAPE))
    topology = replace(HOSTS, network_link=Link(gb_per_s=mbit / 8e3 / 2))
    fields = fields_of(SHAPE)
    _, plan = plan_run(
        config, fields, world_size=4, device_type="cpu", topology=topology, traced=False
    )
    assert plan.priced[0].name == "all unique, two hops"


def test_profiles_contain_their_hosts():
    link = described("h100-dgx").link
    assert [link.num_hosts(size) for size in (4, 8, 12, 16, 64)] == [1, 1, 1, 2, 8]
    assert replace(link, ranks_per_node=0).num_hosts(16) == 1


def test_planner_prices_and_chooses_two_hops():
    task = replace(make_task(rows=(40_000, 90_000, 30_000), dim=128, world_size=4), num_hosts=2)
    hops = Shape("(S(0), S(0))", "unique", (2, 2))
    assert hops in shapes_of(task, task.tables[0])
    assert hops not in shapes_of(replace(task, num_hosts=1), task.tables[0])
    profile = described("h100-dgx")
    slow = replace(profile.link, ranks_per_node=2, between_gb_per_s=0.00625)
    cost = TaskCost(replace(profile, link=slow), task)
    problem = with_exchange(problem_of(cost), "unique")
    plan = plan_of(task, problem, search(problem).assignment)
    assert {choice.shape for choice in plan.values()} == {hops}
    assert plan_of_tree(plain(plan)) == plan
    (group,) = embedding_plan(task, plan).groups
    assert isinstance(group.kind, UniqueTwoLevel)
    pinned = replace(task, pinned={task.tables[0].name: plan[task.tables[0].name]})
    assert problem_of(TaskCost(replace(profile, link=slow), pinned)).num_tables == 2
    merged = sum(task.stats[t.name].touched(task.lookups(t) / 2) / 2 for t in task.tables)
    for rank in count_work(task, plan):  # half of a merged row's requests stay on the host
        assert rank[INDEX["network_bytes"]] == pytest.approx(merged / 2 * (4 + 2 * 4 * 128))


@pytest.mark.parametrize("key", ["plan", "tables"])
def test_saved_layouts_have_two_hops_only_on_hosts_that_they_fit(key):
    """The rules of a saved plan contain ranks, which a user of ``predict`` cannot change."""
    hops = {"*": TableRule(sbp="(S(0), S(0))")}
    config = make_config(None, "sgd", tables=hops if key == "tables" else None)
    if key == "plan":
        config = replace(config, parallel=replace(config.parallel, plan="auto"))
    ranks = {"world_size": 4, "device_type": "cpu"}
    _, plan = plan_run(config, FIELDS, **ranks, planned=hops, topology=HOSTS)
    documents = {"config": plain(config), "plan": json.loads(plan_to_json(plan))}
    run = SimpleNamespace(documents=documents)
    uneven, apart = ((0,), (1, 2, 3)), ((0,), (1,), (2,), (3,))
    for hosts in (HOSTS.hosts, ((0, 1, 2, 3),), apart, uneven):
        laid, rules = saved_layouts(run, config, 4, "cpu", hosts)
        topology = Topology(hosts=hosts)
        _, plan = plan_run(laid, FIELDS, **ranks, planned=rules, topology=topology)
        has_two = {is_two_level(each.layout) for each in plan.layouts.values()}
        assert has_two == {hosts != uneven and not (key == "plan" and hosts == apart)}
    laid, _ = saved_layouts(SimpleNamespace(documents={}), config, 4, "cpu", uneven)
    assert laid.parallel.tables == config.parallel.tables, "overrides are kept"
