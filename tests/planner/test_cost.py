"""Tests counts, prices and the simulated step, compared with the engine's own plan."""

import json
from dataclasses import replace

import numpy as np
import pytest

from sbpflow.costs.counts import INDEX, MEMORY, NUM_FEATURES
from sbpflow.errors import ConfigError
from sbpflow.planner.calibration.records import count_work
from sbpflow.planner.clusters import described
from sbpflow.planner.costs.cost import TaskCost
from sbpflow.planner.costs.profile import Fusion, Profile, load, weights_from
from sbpflow.planner.costs.simulate import (
    NUM_PHASES,
    PHASE,
    step_ms,
)
from sbpflow.planner.task import Choice, Shape, embedding_plan, plan_from_yaml, plan_to_yaml
from sbpflow.training.step_schedule import IDS, OVERLAPPED, SERIAL, VECTORS
from tests.planner.tasks import every_shape, make_task, mixed_plan, random_plan

TASK = make_task()


def price(profile=None, task=TASK):
    return TaskCost(profile or described("h100-dgx"), task)


@pytest.mark.parametrize("seed", range(6))
def test_memory_and_groups_equal_the_engines_plan(seed):
    plan = random_plan(TASK, seed)
    totals, engine = count_work(TASK, plan), embedding_plan(TASK, plan)
    held = [0] * TASK.world_size
    for stack in (stack for group in engine.groups for stack in group.stacks):
        for rank in range(TASK.world_size):
            shards = stack.shards(rank)
            held[rank] += sum(4 * (shard.num_elements + shard.num_rows) for shard in shards)
    # rows, and one number of rowwise Adagrad for each row
    assert totals[:, MEMORY].tolist() == held
    groups = sum(
        totals[0, INDEX[name]]
        for name in (
            "num_dense_groups",
            "num_summed_groups",
            "num_row_transfers",
            "num_row_gathers",
            "num_whole_groups",
        )
    )
    assert groups == len(engine.groups)
    assert totals[0, INDEX["num_stacks"]] == sum(len(group.stacks) for group in engine.groups)


def test_columns_and_kernels_separate_groups_as_in_the_engine():
    task = make_task(rows=(400, 500, 600), dim=10)  # parts of 3, 3, 2 and 2 columns
    columns = Shape("S(1)", "unique", (1, 4))
    reversed_ranks = Choice(columns, (3, 2, 1, 0))
    plan = {"t0": Choice(columns, (0, 1, 2, 3)), "t1": reversed_ranks, "t2": reversed_ranks}
    totals, engine = count_work(task, plan), embedding_plan(task, plan)
    assert totals[0, INDEX["num_row_transfers"]] == len(engine.groups) == 2
    assert totals[0, INDEX["num_squares"]] == 2

    first = replace(task.tables[0], kernel="torch")
    output = replace(task.outputs[0], tables=(first, *task.tables[1:]))
    requested = replace(task, outputs=(output,))
    for choice in (Choice(Shape("S(0)", "unique", (4, 1)), (0, 1, 2, 3)), every_shape()[2]):
        plan = {table.name: choice for table in task.tables}
        totals, engine = count_work(requested, plan), embedding_plan(requested, plan)
        stacks = sum(len(group.stacks) for group in engine.groups)
        assert totals[0, INDEX["num_stacks"]] == stacks == 2
        groups = totals[0, INDEX["num_row_transfers"]] + totals[0, INDEX["num_dense_groups"]]
        assert groups == len(engine.groups)


@pytest.mark.parametrize(
    "choice", [c for c in every_shape() if c.shape.exchange in ("columns", "reduce")], ids=str
)
def test_bytes_of_vectors_equal_the_engines_steps(choice):
    task = make_task(rows=(3000, 60, 800))
    plan = {table.name: choice for table in task.tables}
    totals, engine = count_work(task, plan), embedding_plan(task, plan)
    for name, steps in (
        ("vector_bytes", engine.forward_steps(task.batch_size)),
        ("gradient_bytes", engine.push_steps(task.batch_size)),
        ("ids_bytes", engine.id_steps(task.batch_size)),
    ):
        sent = [sum(step.bytes_sent(rank) for step in steps) for rank in range(4)]
        np.testing.assert_allclose(totals[:, INDEX[name]], sent, rtol=0.01, err_msg=name)


@pytest.mark.parametrize("choice", every_shape(), ids=str)
def test_ranks_receive_what_other_ranks_send(choice):
    totals = count_work(TASK, {table.name: choice for table in TASK.tables}).sum(0)
    for sent, received in (
        ("vector_bytes", "vector_in_bytes"),
        ("gradient_bytes", "gradient_in_bytes"),
    ):
        np.testing.assert_allclose(totals[INDEX[sent]], totals[INDEX[received]], err_msg=sent)


def test_totals_are_the_base_and_the_counts_of_each_table():
    cost, plan = price(), mixed_plan(TASK)
    totals = np.tile(cost.base(), (4, 1))
    keys = set()
    for table in TASK.tables:
        choice = plan[table.name]
        counts = cost.shape_cost(table, choice.shape)
        num_shards = 0 if choice.shape.copied else choice.shape.num_shards
        assert counts.shards.shape == (num_shards, NUM_FEATURES)
        totals += counts.home
        for rank, shard in zip(choice.ranks, counts.shards, strict=False):
            totals[rank] += shard
        keys |= set(counts.keys(choice.ranks))
    for key in keys:
        totals[:, key[0]] += 1
    np.testing.assert_allclose(cost.totals(plan), totals)
    assert (totals >= -1e-6).all()


def test_plans_priced_together_cost_what_each_costs_alone():
    cost = price()
    plans = [random_plan(TASK, seed) for seed in range(5)]
    steps = cost.combine(cost.rank_ms(np.stack([cost.totals(plan) for plan in plans])))
    np.testing.assert_allclose(steps, [cost.predict(plan).step_ms for plan in plans])


def test_a_written_plan_is_read_back(tmp_path):
    plan, path = mixed_plan(TASK), tmp_path / "tables.yaml"
    path.write_text(plan_to_yaml(plan, {"predicted_step_ms": 1.5}))
    assert plan_from_yaml(path, TASK) == plan
    alike = {
        table.name: Choice(Shape("S(0)", "unique", (4, 1)), (0, 1, 2, 3)) for table in TASK.tables
    }
    text = plan_to_yaml(alike)
    assert text.count("S(0)") == 1  # one pattern for all
    path.write_text(text)
    assert plan_from_yaml(path, TASK) == alike


def test_a_plan_that_the_engine_cannot_run_is_refused():
    plan = mixed_plan(TASK)
    plan["t2"] = Choice(Shape("B", "columns"), (0, 1))
    with pytest.raises(ConfigError, match="B needs all ranks or a single one"):
        TASK.check(plan)
    del plan["t2"]
    with pytest.raises(ConfigError, match="tables t2 are in only one of task and plan"):
        TASK.check(plan)


# The simulated step


def phases(**ms):
    """Return [1, 2 ranks, P] times of the named phases, by rank."""
    times = np.zeros((1, 2, NUM_PHASES))
    for name, values in ms.items():
        times[0, :, PHASE[name.replace("_", " ") if name not in PHASE else name]] = values
    return times


def test_a_serial_step_is_a_sum():
    given = phases(start_id_exchange=(1, 2), lookup=(3, 1), update=(2, 2), vectors=(4, 4))
    # Rank 1 ends its lookup at 3 ms, rank 0 at 4 ms; vectors take 4 ms more, and then the update
    # follows.
    assert step_ms(given, {}, SERIAL) == pytest.approx([4 + 4 + 2])


def test_transfers_sent_ahead_are_hidden_by_the_moves_between():
    given = phases(
        lookup=(1, 1), gather_outputs=(1, 1), forward=(2, 2), backward=(3, 3), ids=(4, 4)
    )
    assert step_ms(given, {IDS: 1.0}, OVERLAPPED) == pytest.approx([7.0])
    assert step_ms(given, {IDS: 0.0}, OVERLAPPED) == pytest.approx([11.0])
    longer = phases(
        lookup=(1, 1), gather_outputs=(1, 1), forward=(2, 2), backward=(3, 3), ids=(9, 9)
    )
    # The ids of the next batch are sent after the lookup and needed before the next lookup: the
    # first step has its ids and takes 7 ms, and each later step takes 10 ms.
    assert step_ms(longer, {IDS: 1.0}, OVERLAPPED) == pytest.approx([(7 + 10 + 10) / 3])


def test_transfers_take_turns_on_the_link():
    both = phases(lookup=(1, 1), vectors=(5, 5), ids=(5, 5), gather_outputs=(1, 1))
    alone = phases(lookup=(1, 1), vectors=(5, 5), gather_outputs=(1, 1))
    hidden = {VECTORS: 1.0, IDS: 1.0}
    assert step_ms(both, hidden)[0] > step_ms(alone, hidden)[0] + 2


@pytest.mark.parametrize("schedule", [OVERLAPPED, SERIAL], ids=["overlapped", "serial"])
def test_a_step_of_several_batches_has_one_dense_update(schedule):
    given = phases(lookup=(2, 2), backward=(1, 1), update=(3, 3), update_dense=(10, 10))
    given += phases(dense_gradients=(1, 1), row_gradients=(2, 2), receive_grads=(0.5, 0.5))
    one, three = (float(step_ms(given, {}, schedule, batches=n)[0]) for n in (1, 3))
    assert one == pytest.approx(2 + 1 + 2 + 0.5 + 3 + 1 + 10)
    assert three == pytest.approx(3 * one - 2 * (10 + 1))


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_a_longer_phase_never_makes_the_step_shorter(seed, overlap):
    random = np.random.default_rng(seed)
    given = random.random((1, 3, NUM_PHASES)) * 5
    hidden = {IDS: 0.5, VECTORS: float(random.random())}
    more = np.repeat(given, NUM_PHASES, 0)
    for phase in range(NUM_PHASES):
        more[phase, random.integers(3), phase] += random.random() * 4
    schedule = OVERLAPPED if overlap else SERIAL
    for batches in (1, 2, 5):
        later, before = (step_ms(one, hidden, schedule, batches=batches) for one in (more, given))
        assert (later >= before - 1e-9).all()


# Profiles


def learned(low=0.5, high=2.0):
    random = np.random.default_rng(3)
    mix = random.random((2, NUM_FEATURES)) * 1e-4
    fusion = Fusion(
        mix=tuple(map(tuple, mix.tolist())), scale=(1.0, 2.0), power=(0.8, 1.3), low=low, high=high
    )
    weights = weights_from(
        {"update": {"step_rows": 1e-4, "always": 0.2}, "lookup": {"read_rows": 1e-4}}
    )
    return Profile(weights=weights, world_size=2, backend="gloo", members=({"update": fusion},) * 2)


def test_corrections_are_bounded_and_increase_with_work():
    cost = price(learned())
    random = np.random.default_rng(0)
    totals = random.random((200, NUM_FEATURES)) * 10 ** random.uniform(0, 5, (200, NUM_FEATURES))
    ms = cost.rank_ms(totals)
    plain = np.maximum(totals @ cost.linear, 0.0)
    low, high = cost.bounds
    assert (ms >= low * plain - 1e-9).all()
    assert (ms <= high * plain + 1e-9).all()
    assert (ms[:, PHASE["update"]] != plain[:, PHASE["update"]]).any()
    more = cost.rank_ms(totals + random.random(totals.shape) * totals)
    assert (more >= ms - 1e-9).all()


def test_a_written_profile_is_read_back(tmp_path):
    path = tmp_path / "profile.json"
    learned().save(path)
    again = load(path)
    assert again == learned()
    np.testing.assert_allclose(again.weights_for(2), learned().weights_for(2))


def test_a_profile_with_the_former_names_of_phases_is_read(tmp_path):
    path = tmp_path / "profile.json"
    profile = learned()
    fusion = profile.members[0]["update"]
    profile = replace(profile, members=({"lookup": fusion, "update": fusion},))
    tree = json.loads(profile.as_json())
    former = {"start_id_exchange": "begin", "exchange_ids": "advance", "lookup": "look_up"}
    former |= {"gather_outputs": "outputs", "send_grads": "push", "receive_grads": "collect"}
    assert set(former) <= set(tree["phases"])
    tree["phases"] = [former.get(name, name) for name in tree["phases"]]
    tree["members"] = [{former.get(n, n): fusion for n, fusion in tree["members"][0].items()}]
    path.write_text(json.dumps(tree))
    assert load(path) == profile


@pytest.mark.parametrize("content", ["", "{}", '{"format": 99, "features": [], "phases": []}'])
def test_an_invalid_profile_is_refused_with_the_command_that_makes_one(tmp_path, content):
    path = tmp_path / "profile.json"
    with pytest.raises(ConfigError, match="calibrate"):
        load(path)
    path.write_text(content)
    with pytest.raises(ConfigError, match="rerun sbpflow calibrate"):
        load(path)


def test_calls_cost_more_with_more_ranks_and_nothing_on_one():
    weights = weights_from({"vectors": {"num_row_transfers": 0.5, "vector_bytes": 1e-6}})
    profile = Profile(weights=weights, world_size=2, backend="gloo")
    column = PHASE["vectors"]
    assert profile.weights_for(4)[INDEX["num_row_transfers"], column] == pytest.approx(1.5)
    assert profile.weights_for(4)[INDEX["vector_bytes"], column] == pytest.approx(1e-6)
    assert profile.weights_for(1)[:, column].sum() == 0
    alone = replace(profile, world_size=1)
    assert alone.weights_for(1).sum() == 0
    with pytest.raises(ConfigError, match=r"world of 2; .*calibrate --ranks 2"):
        alone.weights_for(2)
    described_link = replace(alone, link=described("h100-dgx").link)
    assert described_link.weights_for(2)[:, column].sum() > 0


def test_an_optimizer_that_was_not_measured_is_named():
    profile = Profile(
        weights=learned().weights, world_size=2, backend="gloo", step_factors={"sgd": 1.0}
    )
    with pytest.raises(ConfigError, match="no times of rowwise_adagrad, only of sgd"):
        TaskCost(profile, TASK).totals(mixed_plan(TASK))
