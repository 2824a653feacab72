"""Tests that every planner returns a plan that the engine runs."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.peer_torchrec_planner import machine
from sbpflow.errors import ConfigError
from sbpflow.planner.clusters import described
from sbpflow.planner.costs.cost import TaskCost
from sbpflow.planner.costs.profile import ERROR
from sbpflow.planner.feasible import infeasible_text
from sbpflow.planner.plan_command import NEAR, to_measure
from sbpflow.planner.planners import (
    GREEDY,
    LEARNED,
    make_plan,
    published,
    published_seeds,
)
from sbpflow.planner.published import autoshard, dreamshard, neuroshard
from sbpflow.planner.published.embark import embark
from sbpflow.planner.published.model_cache import load_model, save_model
from sbpflow.planner.published.setting import Setting
from sbpflow.planner.report import as_html, as_text, report_of
from sbpflow.planner.search.problem import BYTES, Move, price_of
from sbpflow.planner.shapes import WHOLE, plan_of, problem_of, shapes_of
from sbpflow.planner.task import Choice, Shape
from sbpflow.planner.workloads import POOL_LOOKUPS, pool, random_task, split_pool
from tests.quick import quick

PROFILE = described("h100-dgx")
SMALL = 100  # insertions


def setting(num_tables=9, world_size=4, seed=0, **changes):
    task = random_task(seed, num_tables=num_tables, world_size=world_size, held_out=True)
    task = replace(task, **changes)
    return Setting(task, problem_of(TaskCost(PROFILE, task)), seed)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_the_engine_runs_every_shape_of_the_search(world_size):
    task = random_task(1, num_tables=3, world_size=world_size, held_out=True)
    for table in task.tables:
        for shape in shapes_of(task, table):
            ranks = range(world_size if shape.copied else shape.num_shards)
            rest = Choice(Shape("B", "local"), tuple(range(world_size)))
            chosen = {other.name: rest for other in task.tables}
            task.check(chosen | {table.name: Choice(shape, tuple(ranks))})


@pytest.mark.parametrize("name", [*GREEDY, "embark"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_the_engine_runs_the_plans_of_heuristics(name, world_size):
    task_setting = setting(world_size=world_size)
    answer = (embark if name == "embark" else GREEDY[name])(task_setting)
    task_setting.task.check(plan_of(task_setting.task, task_setting.problem, answer))


@pytest.mark.parametrize(
    ("device_type", "memory"),
    [("cpu", {"ddr_cap", "ddr_mem_bw"}), ("cuda", {"hbm_cap", "hbm_mem_bw"})],
)
def test_torchrec_plans_for_the_device_of_the_task(device_type, memory):
    """The task's device determines the shardings, memory and bandwidth that TorchRec's planner
    assumes.
    """
    task_setting = setting(world_size=2, device_type=device_type)
    arguments = machine(task_setting)
    assert arguments["compute_device"] == device_type
    assert arguments.keys() - {"compute_device", "intra_host_bw", "inter_host_bw"} == memory
    assert all(arguments[name] > 0 for name in memory)


def test_greedy_balances_its_score():
    task_setting = setting(num_tables=40)
    devices = [move.ranks[0] for move in GREEDY["dim"](task_setting)]
    loads = np.bincount(devices, task_setting.dims)
    assert loads.max() - loads.min() <= task_setting.dims.max()
    drawn = [move.ranks[0] for move in GREEDY["random"](task_setting)]
    assert np.bincount(drawn, task_setting.dims).max() > loads.max()


def test_greedy_avoids_a_device_without_enough_memory():
    task_setting = setting(num_tables=20)
    limit = task_setting.problem.limit_bytes.copy()
    limit[1] = 0.0
    narrow = Setting(task_setting.task, replace(task_setting.problem, limit_bytes=limit))
    assert all(move.ranks != (1,) for move in GREEDY["lookup"](narrow))


def test_embark_splits_a_table_that_is_much_larger():
    task_setting = setting(num_tables=3)
    rows = [100, 100, 3_000_000]
    tables = tuple(
        replace(table, num_rows=count, dim=64)
        for table, count in zip(task_setting.task.tables, rows, strict=True)
    )
    features = tuple(
        replace(feature, hotness=h)
        for feature, h in zip(task_setting.task.features, (1, 1, 40), strict=True)
    )
    outputs = (replace(task_setting.task.outputs[0], tables=tables),)
    task = replace(task_setting.task, outputs=outputs, features=features)
    changed = Setting(task, problem_of(TaskCost(PROFILE, task)))
    planned = plan_of(task, changed.problem, embark(changed))
    assert planned["t2"].shape.num_shards > 1


def test_embark_counts_the_transfers_of_all_ranks():
    """On 2 ranks, a whole table saves its own rank more transfers than it adds."""
    task_setting = setting(num_tables=30, world_size=2)
    assert task_setting.rows[:, 1:BYTES].sum() < 0
    round_robin = price_of(task_setting.problem, task_setting.whole([0, 1] * 15))
    assert 0 < task_setting.transfer_ms < round_robin.loads[:, 1:BYTES].sum()
    greedy = min(price_of(task_setting.problem, plan(task_setting)).ms for plan in GREEDY.values())
    assert price_of(task_setting.problem, embark(task_setting)).ms < 1.1 * greedy


DREAMSHARD = dreamshard.Amount(iterations=1, placements=2, cost_steps=3)
NEUROSHARD = neuroshard.Amount(sets=40, placements=20, epochs=2)
AUTOSHARD = autoshard.Amount(steps=40, episodes=2, cost_updates=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", quick(LEARNED, lambda n: n == 0))
def test_a_trained_planner_is_cached_for_the_same_arguments(tmp_path, monkeypatch, name):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    task_setting = setting(6, 2, 9)
    cost = TaskCost(PROFILE, task_setting.task)
    small = {"dreamshard": DREAMSHARD, "neuroshard": NEUROSHARD, "autoshard": AUTOSHARD}[name]
    kind = LEARNED[name]
    train = kind.trained
    monkeypatch.setattr(kind, "trained", lambda tasks, seed: train(tasks[:3], seed, small))
    learned = published(name, cost, 3)(task_setting)
    monkeypatch.setattr(kind, "trained", lambda *_: pytest.fail("trained again"))
    assert published(name, cost, 3)(task_setting) == learned
    with pytest.raises(pytest.fail.Exception, match="trained again"):
        published(name, cost, 4)


@pytest.mark.parametrize("damage", [b"", b"PK\x03\x04", b"\x80\x04.", b"junk" * 99])
def test_a_damaged_file_of_a_learned_planner_is_ignored(tmp_path, caplog, damage):
    path = tmp_path / "dreamshard.pt"
    path.write_bytes(damage)
    assert not load_model(dreamshard.DreamShard(2), path)
    assert f"{path}: not a valid cached planner" in caplog.text


def test_a_trained_planner_that_cannot_be_cached_is_used(tmp_path, caplog):
    path = tmp_path / "a file" / "dreamshard.pt"
    path.parent.touch()
    save_model(dreamshard.DreamShard(2), path)
    assert f"{path}: the trained planner is not cached, so" in caplog.text


@pytest.mark.parametrize(
    ("kind", "amount"),
    [
        (dreamshard.DreamShard, DREAMSHARD),
        (neuroshard.NeuroShard, NEUROSHARD),
        (autoshard.AutoShard, AUTOSHARD),
    ],
)
def test_training_is_reproducible(kind, amount):
    train = [setting(6, 2, seed) for seed in range(2)]
    held_out = setting(7, 2, 5)
    first, second = (kind.trained(train, 3, amount).plan(held_out) for _ in range(2))
    assert first == second
    held_out.task.check(plan_of(held_out.task, held_out.problem, first))


@pytest.mark.parametrize("kind", LEARNED.values())
def test_learned_planners_plan_for_a_single_rank(kind):
    alone = setting(3, 1)
    planned = plan_of(alone.task, alone.problem, kind(1).plan(alone))
    assert set(planned.values()) == {Choice(Shape("B", "local"), (0,))}
    assert price_of(alone.problem, kind(1).plan(alone)).ms > 0


def cost_error(net, model, one):
    """Return a cost network's error in ms for tables placed on the devices alternately."""
    devices = torch.arange(len(one.tables)) % one.num_ranks
    latents = net.table(model.scaling(one.features))
    predicted = net.whole(dreamshard.sums(latents, devices, one.num_ranks)).item()
    return abs(predicted * model.unit_ms - price_of(one.problem, one.whole(devices.tolist())).ms)


def test_dreamshard_learns_costs_and_a_placement_policy():
    """Placing all tables on one device is expensive, so the planner learns to use both."""
    train = [setting(6, 2, seed) for seed in range(3)]
    amount = dreamshard.Amount(iterations=3, placements=8, cost_steps=60, policy_steps=10)
    model = dreamshard.DreamShard.trained(train, 0, amount)
    nets = (model.net, dreamshard.Net())
    trained, untrained = (sum(cost_error(net, model, case) for case in train) for net in nets)
    assert trained < 0.3 * untrained
    ms = [price_of(case.problem, model.plan(case)).ms for case in train]
    worst = [price_of(case.problem, case.whole([0] * 6)).ms for case in train]
    assert np.mean(ms) < 0.95 * np.mean(worst)


def test_the_targets_of_vtrace_are_returns_if_nothing_differs():
    """With equal policies and no discount, every target is the reward, whatever the values are."""
    values = torch.tensor([[0.3, 0.1], [0.7, 0.2], [0.5, 0.9]])
    rewards = torch.tensor([1.0, 2.0])
    targets, advantages = autoshard.vtrace(torch.zeros(3, 2), values, rewards)
    torch.testing.assert_close(targets, rewards.expand(3, 2))
    torch.testing.assert_close(advantages, rewards - values)
    halved, _ = autoshard.vtrace(torch.full((3, 2), 0.5).log(), values, rewards)
    assert (halved - values).abs().sum() < (targets - values).abs().sum()


def test_auto_is_no_worse_than_any_heuristic_and_respects_pinned_tables():
    task_setting = setting(12, 4)
    cost = TaskCost(PROFILE, task_setting.task)
    planned = make_plan("auto", cost, insertions=SMALL)
    for name, answer in published_seeds(task_setting).items():
        assert planned.priced.rank <= price_of(task_setting.problem, answer).rank, name
    assert cost.predict(planned.plan).step_ms == pytest.approx(planned.priced.ms)
    pinned = {"t3": Choice(Shape("S(0)", "unique", (2, 1)), (1, 3)), "t5": Choice(WHOLE, (2,))}
    held = TaskCost(PROFILE, replace(task_setting.task, pinned=pinned))
    respecting = make_plan("auto", held, insertions=SMALL)
    assert {name: respecting.plan[name] for name in pinned} == pinned
    assert held.predict(respecting.plan).step_ms == pytest.approx(respecting.priced.ms)
    assert list(respecting.plan) == list(planned.plan)


def test_a_report_has_alternatives_and_a_bound_below_the_plan():
    task_setting = setting(8, 2)
    cost = TaskCost(PROFILE, task_setting.task)
    planned = make_plan("auto", cost, insertions=SMALL)
    report = report_of(planned, cost)
    assert 0 < report.bound.ms <= planned.priced.ms * (1 + 1e-9)
    for name, other in report.runners_up.items():
        changed = {**planned.plan, name: other.choice}
        more = cost.predict(changed).step_ms - planned.priced.ms
        assert more == pytest.approx(other.more_ms, abs=1e-9)
    assert "t0: " in as_text(report)
    assert "based on data sheets; nothing was measured" in as_text(report)
    assert as_html(report).count("<rect") == 2 * 4
    measured = TaskCost(replace(PROFILE, errors={ERROR: 0.25}), task_setting.task)
    assert "9 of 10 held-out steps were within 25 %" in as_text(report_of(planned, measured))


def test_plans_to_measure_differ_and_include_homogeneous_ones():
    task = random_task(3, num_tables=10, world_size=2, held_out=True)
    cost = TaskCost(PROFILE, task)
    ours = make_plan("auto", cost, insertions=SMALL)
    named = to_measure(ours, 4)
    mine = [plan for name, plan in named.items() if name.startswith("auto ")]
    assert mine[0] == ours.assignment
    assert 1 < len(mine) == len(set(mine)) <= 4
    assert all(price_of(ours.problem, plan).ms < NEAR * ours.priced.ms for plan in mine)
    assert any(name.startswith("all ") for name in named)
    assert all(price_of(ours.problem, plan).feasible for plan in named.values())
    assert list(to_measure(make_plan("size", cost), 4)) == ["size 1"]


@pytest.mark.slow
def test_an_infeasible_plan_is_reported_with_the_fullest_rank_and_remedies():
    task_setting = setting(6, 2, device_bytes=(30_000_000,) * 2)
    cost = TaskCost(PROFILE, task_setting.task)
    planned = make_plan("auto", cost, insertions=SMALL)
    assert not planned.priced.feasible
    text = infeasible_text(planned, cost)
    rank = int(planned.priced.memory.argmax())
    held = f"{math.ceil(planned.priced.memory[rank] / 1e7) / 100:.2f} GB"
    assert "fits in 30.00 MB per rank" in text
    assert f"rank {rank} needs {held} " in text
    assert f"would fit with {held} per rank" in text  # the size is rounded up, so it is enough
    assert "cache" not in text  # even caching 10 % of the rows takes too much memory
    limit = int(0.4 * planned.priced.memory.sum() / 2)
    total = replace(task_setting.task, device_bytes=(limit,) * 2)
    tight = TaskCost(PROFILE, total)
    text = infeasible_text(make_plan("auto", tight, insertions=SMALL), tight)
    # ranks of one host share its memory, so more of them there would not help
    assert re.search("would fit with [48] ranks with as much memory each;", text)
    assert "bfloat16" not in text  # halving the bytes of rows is not enough
    assert "would fit with parallel.storage: {'*': {kind: file, cache: 25%}}" in text
    needed = float(planned.priced.memory.max())
    enough = TaskCost(PROFILE, replace(task_setting.task, device_bytes=(int(needed) + 1,) * 2))
    assert make_plan("auto", enough, insertions=SMALL).priced.feasible


@pytest.mark.slow
def test_each_rank_has_its_own_memory_limit():
    task_setting = setting(10, 2)
    planned = make_plan("auto", TaskCost(PROFILE, task_setting.task), insertions=SMALL)
    total = planned.priced.memory.sum()
    limits = (int(0.75 * total), int(0.33 * total))
    uneven = TaskCost(PROFILE, replace(task_setting.task, device_bytes=limits))
    planned = make_plan("auto", uneven, insertions=SMALL)
    assert planned.priced.feasible
    assert (planned.priced.memory <= limits).all()
    assert planned.priced.memory[0] > limits[1]
    less = replace(task_setting.task, device_bytes=(10**12, 1000))
    text = infeasible_text(make_plan("auto", TaskCost(PROFILE, less), insertions=SMALL), uneven)
    assert "fits in 1.00 kB on rank 1: " in text
    small = TaskCost(PROFILE, replace(setting(2, 2).task, device_bytes=(1000, 2000)))
    planned = make_plan("size", small)
    sizes = [f"{math.ceil(size / 1e4) / 100:.2f} MB" for size in planned.priced.memory]
    text = infeasible_text(planned, small)
    assert f"a plan would fit with {sizes[0]} on rank 0, {sizes[1]} on rank 1" in text
    with pytest.raises(ConfigError, match="1 memory limits for 2 ranks"):
        replace(task_setting.task, device_bytes=(1,))


def test_the_pool_has_the_published_sums_and_its_halves_share_no_table():
    tables = pool()
    total = 65_536 * sum(table.pooling for table in tables)
    assert total == pytest.approx(POOL_LOOKUPS, rel=0.01)
    assert not set(split_pool(held_out=True)) & set(split_pool(held_out=False))
    assert len(tables) == 856


def test_an_alternative_fits_if_the_plan_fits():
    task_setting = setting(1, 2)
    plain = TaskCost(PROFILE, task_setting.task)
    held = [price_of(task_setting.problem, (Move(n, tuple(range(option.num_shards))),)).memory.max()
            for n, option in enumerate(task_setting.problem.options[0])]  # fmt: skip
    limit = int(min(held)) + 1  # only the smallest option fits
    cost = TaskCost(PROFILE, replace(task_setting.task, device_bytes=(limit,) * 2))
    tight = make_plan("auto", cost, insertions=SMALL)
    assert tight.priced.feasible
    for name, other in report_of(tight, cost).runners_up.items():
        assert max(cost.predict({**tight.plan, name: other.choice}).memory_bytes) <= limit
    assert report_of(make_plan("auto", plain, insertions=SMALL), plain).runners_up
