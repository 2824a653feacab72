"""Tests that ``scheme: auto`` prices and ranks complete plans and runs the cheapest one."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from sbpflow.config.storage_rules import StorageRule
from sbpflow.config.table_rules import TableRule
from sbpflow.costs.ids import click_curve, exponent_of
from sbpflow.embedding.plan.id_statistics import IdFrequencies
from sbpflow.embedding.plan.price import price_plan
from sbpflow.embedding.plan.tables import FeatureConfig, TableConfig
from sbpflow.errors import PlanError
from sbpflow.run.planning.auto_scheme import candidates, rank_candidates, table_bytes
from sbpflow.run.planning.build_plan import plan_run
from sbpflow.run.planning.explain import describe, format_plan
from sbpflow.runtime.ranks.topology import Link, Topology
from tests.embedding.cases import Spec
from tests.embedding.test_plan import make_case
from tests.training.wdl_case import FIELDS, make_config, train


def auto(**changes):
    config = make_config("dp", "rowwise_adagrad", dtype="float32", dim=8)
    return replace(config, parallel=replace(config.parallel, scheme="auto", **changes))


@pytest.mark.parametrize(("rows", "draws"), [(10, 1000), (1000, 1000), (100_000, 1000), (500, 3)])
def test_touched_matches_a_random_draw(rows, draws):
    generator = torch.Generator().manual_seed(1)
    counts = [
        (torch.rand(draws, generator=generator) ** 3 * rows).long().unique().numel()
        for _ in range(200)
    ]
    assert click_curve(rows).touched(draws) == pytest.approx(sum(counts) / len(counts), rel=0.06)


@pytest.mark.parametrize("exponent", [1.0, 3.0, 7.5])
@pytest.mark.parametrize("rows", [7, 4000, 3_000_000])
def test_curve_matches_the_exact_sum(rows, exponent):
    """The exact number of touched rows is a sum over groups of rows with equal numbers of lookups;
    the curve interpolates it linearly in log-log space.
    """
    edges = (np.arange(41) / 40) ** exponent
    count = np.diff(edges) * rows
    for draws in np.geomspace(2, 1e9, 97):
        exact = min(draws, (count * -np.expm1(-draws / 40 / count)).sum())
        assert click_curve(rows, exponent).touched(draws) == pytest.approx(exact, rel=0.0065)


def _bins(counts):
    """Return (rows, lookups) of the rows with 0, 1, 2-3, 4-7, ... lookups."""
    edges = [0, 1, *(2**n for n in range(1, 16)), 1 << 40]
    here = [(counts >= low) & (counts < high) for low, high in pairwise(edges)]
    return tuple((int(mask.sum()), int(counts[mask].sum())) for mask in here)


@pytest.mark.parametrize("exponent", [1.0, 2.0, 5.0])
def test_statistics_predict_the_rows_of_a_batch(exponent):
    rows, total, draws = 5000, 200_000, 3000
    generator = torch.Generator().manual_seed(2)
    ids = (torch.rand(total, generator=generator) ** exponent * rows).long()
    known = IdFrequencies(_bins(torch.bincount(ids, minlength=rows)), 1.0).curve
    chosen = [ids[torch.randperm(total, generator=generator)[:draws]] for _ in range(20)]
    found = sum(one.unique().numel() for one in chosen) / len(chosen)
    assert known.touched(draws) == pytest.approx(found, rel=0.03)
    assert exponent_of(known, rows, draws) == pytest.approx(exponent, abs=0.5)
    assert known.touched(0) == IdFrequencies(((5, 0),), 0.0).curve.touched(9) == 0.0


def test_prices_and_measurements_use_data_statistics():
    """If rows are exchanged, the price is lower if ids repeat more often; the default curve is that
    of CTR data.
    """
    hot, even = (IdFrequencies(bins, 1.0) for bins in ([(3, 900), (50, 100)], [(53, 1000)]))
    plans = {}
    for name, known in (("hot", hot), ("even", even), ("unknown", None)):
        sparse = tuple(replace(field, frequencies=known) for field in FIELDS.sparse)
        fields = replace(FIELDS, sparse=sparse)
        _, plans[name] = plan_run(auto(), fields, world_size=2, device_type="cpu")
    prices = {name: next(p.ms for p in plan.priced if p.name == "all unique")
              for name, plan in plans.items()}  # fmt: skip
    assert prices["hot"] < prices["even"]
    assert plans["unknown"].skew == {}
    assert plans["hot"].skew["deep.C3"] > plans["even"].skew["deep.C3"] >= 1.0
    sparse = tuple(replace(field, ragged=True, hotness=9, frequencies=replace(hot, per_sample=0.5))
                   for field in FIELDS.sparse)  # fmt: skip
    ragged = replace(FIELDS, sparse=sparse)
    _, plan = plan_run(auto(), ragged, world_size=2, device_type="cpu")
    assert next(p.ms for p in plan.priced if p.name == "all unique") < prices["hot"]


def test_price_depends_on_bytes_link_and_balance():
    one, other = (
        make_case(**{name: Spec("B", "columns", ranks=(n % 2 if even else 0,))
                     for n, name in enumerate("abcd")}).plan(2)
        for even in (True, False)
    )  # fmt: skip
    assert price_plan(one, 4096).work_ms < price_plan(other, 4096).work_ms
    hosts = Topology.one_host(2)
    fast, slow = (price_plan(one, 4096, hosts.with_link(speed)) for speed in (2.0, 0.1))
    assert fast.sent_bytes == slow.sent_bytes > 0
    assert slow.transfer_ms - fast.transfer_ms == pytest.approx(fast.sent_bytes * 9.5e-6)
    alone = make_case(**{name: Spec("B", "local") for name in "abcd"}).plan(1)
    assert price_plan(alone, 4096).sent_bytes == 0


@pytest.mark.parametrize("exchange", ["columns", "unique", "reduce"])
def test_several_hosts_are_priced_by_the_slower_link(exchange):
    rule = Spec("S(0)", exchange) if exchange != "columns" else Spec("S(1)", exchange)
    plan = make_case(**dict.fromkeys("abcd", rule)).plan(2)
    one, fast, slow = Topology.one_host(2), Link(gb_per_s=9.0), Link(gb_per_s=0.1, latency_ms=7.0)
    apart = replace(one, hosts=((0,), (1,)))
    usual = price_plan(plan, 4096, one)
    assert price_plan(plan, 4096, replace(one, network_link=slow)) == usual
    assert usual.network_bytes == 0
    all_apart = replace(usual, network_bytes=usual.sent_bytes)
    assert price_plan(plan, 4096, apart) == all_apart
    # In this test, the link within a host is slower than the link between hosts.
    assert price_plan(plan, 4096, replace(apart, network_link=fast)) == all_apart
    price = price_plan(plan, 4096, replace(apart, network_link=slow))
    assert replace(price, network_bytes=0) == price_plan(plan, 4096, replace(one, host_link=slow))
    assert price.transfer_ms > usual.transfer_ms + 7
    assert (price.work_ms, price.sent_bytes) == (usual.work_ms, usual.sent_bytes)


@pytest.mark.parametrize("exchange", ["unique", "reduce"])
def test_the_price_is_that_of_the_largest_shard(exchange):
    """Shards of equal size are priced once; the largest shard determines the price, whatever rank
    it is on.
    """
    cuts = [(14, 14, 13), (39, 1, 1), (1, 1, 39)]
    rest = {name: Spec("B", "local") for name in "bcd"}
    even, *others = (
        price_plan(make_case(a=Spec("S(0)", exchange, sizes=sizes), **rest).plan(3), 4096).work_ms
        for sizes in cuts
    )
    assert others[0] == pytest.approx(others[1])
    assert others[0] - even > 1e-4  # milliseconds; groups and calls account for most of a price


def test_equal_rules_keep_their_names_and_are_planned_only_once():
    """Candidates with equal rules share one plan."""
    case = make_case(**{name: Spec("B", "local") for name in "abcd"})
    rule = TableRule(sbp="B", exchange="local")
    asked = []

    def plan(rules):
        asked.append(rules)
        return case.plan(2)

    ranked = rank_candidates(
        {"b": {"a": rule}, "other": {"a": TableRule(sbp="B")}, "a": {"a": rule}},
        plan,
        batch_size=64,
        topology=Topology.one_host(2),
    )
    assert [one.name for one in ranked] == ["b", "other", "a"]
    assert len(asked) == 2
    assert ranked[0].plan is ranked[2].plan


def test_candidates_place_every_table():
    tables = [
        TableConfig(name=f"t[{n}]", features=("f",), num_rows=rows, dim=dim)
        for n, (rows, dim) in enumerate([(10, 8), (10, 1), (900, 8), (90_000, 8), (80_000, 1)])
    ]
    planned_candidates = candidates(tables, [FeatureConfig(name="f", hotness=3)], 4, 128)
    assert all(len(rules) == len(tables) for rules in planned_candidates.values())
    alike = {"all B", "all unique", "all reduce", "all whole", "all S(1)", "all S(1), unique"}
    assert alike < set(planned_candidates)
    assert any(name.startswith("B up to 16 rows, else") for name in planned_candidates)
    whole = planned_candidates["all whole"]
    # The four heaviest tables are on different ranks.
    assert len({rule.ranks for rule in whole.values()}) == 4
    assert [rule.sbp for rule in planned_candidates["all S(1)"].values()] == [
        "S(1)",
        "B",
        "S(1)",
        "S(1)",
        "B",
    ]
    assert list(candidates(tables, [FeatureConfig(name="f")], 1, 128)) == ["all B"]
    hosts = candidates(tables, [FeatureConfig(name="f")], 4, 128, two_level=True)
    assert "all unique, two hops" in hosts, "the term of docs/layouts.md"
    speeds = (1.0, 1.0, 1.0, 0.001)
    uneven = candidates(tables, [FeatureConfig(name="f", hotness=3)], 4, 128, speeds=speeds)
    assert {rule.ranks for rule in uneven["all whole"].values()} == {(0,), (1,), (2,)}


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_run_uses_the_cheapest_plan_and_reports_the_others(world_size):
    _, plan = plan_run(auto(), FIELDS, world_size=world_size, device_type="cpu")
    prices = [candidate.ms for candidate in plan.priced]
    assert prices == sorted(prices)
    assert plan.priced[0].ms == price_plan(plan.embeddings, plan.batch_size).ms
    assert {layout.key for layout in plan.layouts.values()} == {"parallel.scheme auto"}
    text = format_plan(plan)
    assert f"exchange: {plan.priced[0].name} {prices[0]:.1f} ms" in text
    if world_size > 1:
        assert f"; then {plan.priced[1].name} {prices[1]:.1f} ms" in text
        assert len(prices) > 4
    assert describe(plan)["compared"][0]["plan"] == plan.priced[0].name


def test_patterns_override_the_scheme():
    config = auto()
    name = next(iter(plan_run(config, FIELDS, world_size=2, device_type="cpu")[1].layouts))
    rule = TableRule(sbp="S(0)", exchange="reduce")
    config = replace(config, parallel=replace(config.parallel, tables={name: rule}))
    _, plan = plan_run(config, FIELDS, world_size=2, device_type="cpu")
    assert plan.layouts[name].exchange == "reduce"
    assert plan.layouts[name].key == f"parallel.tables.{name}"


def test_tables_that_do_not_fit_are_reported():
    _, plan = plan_run(auto(), FIELDS, world_size=2, device_type="cpu")
    held = table_bytes(plan.embeddings)
    limit = held * 3 // 8
    small = replace(Topology.one_host(2), memory_bytes=(limit, limit))
    with pytest.raises(
        PlanError, match=r"scheme: auto: the tables take at least .* KiB with their"
    ):
        plan_run(auto(), FIELDS, world_size=2, device_type="cpu", topology=small)
    cached = auto(storage={"deep.*": StorageRule(kind="file", cache="5%")})
    _, plan = plan_run(cached, FIELDS, world_size=2, device_type="cpu", topology=small)
    assert held / 4 < table_bytes(plan.embeddings) <= 2 * limit


def test_auto_trains_like_the_other_schemes(ranks):
    losses = [
        ranks(2, train, config, 3)[0]["losses"]
        for config in (auto(), make_config("2", "rowwise_adagrad", dtype="float32", dim=8))
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
