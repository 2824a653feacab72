"""Tests counts, prices, and the predicted step against the engine's own plan."""

import json
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

from sbpflow.costs.counts import INDEX, MEMORY, vector_of
from sbpflow.costs.ids import click_curve
from sbpflow.embedding.cache.slot_planner import planning_bytes
from sbpflow.embedding.plan.price import plan_totals, price_plan
from sbpflow.embedding.plan.row_storage import RowStorage
from sbpflow.embedding.rules.registry import sparse_optimizer
from sbpflow.errors import ConfigError
from sbpflow.planner.clusters import described
from sbpflow.planner.costs.cost import TaskCost, count_work
from sbpflow.planner.costs.profile import ERROR, Link, Profile, default_path, load
from sbpflow.planner.costs.work import shape_work
from sbpflow.planner.search.problem import price_of
from sbpflow.planner.shapes import assignment_of, problem_of
from sbpflow.planner.task import (
    Choice,
    DenseWork,
    Shape,
    embedding_plan,
    plan_from_yaml,
    plan_to_yaml,
)
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
    # rows, and one number per row for rowwise Adagrad
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


def test_an_output_of_several_groups_is_joined_once():
    task = make_task(rows=(400, 500, 600))
    whole = {f"t{n}": Choice(Shape("B", "columns"), (n,)) for n in range(3)}
    copied, unique = every_shape()[0], every_shape()[4]
    plans = {1: whole, 2: {**whole, "t1": copied}, 3: {**whole, "t1": copied, "t2": unique}}
    samples, width = task.batch_size / task.world_size, task.outputs[0].width
    for groups, plan in plans.items():
        assert len(embedding_plan(task, plan).groups) == groups
        copied_bytes = count_work(task, plan)[0, INDEX["copied_bytes"]]
        for table in task.tables:
            option = shape_work(task, table, plan[table.name].shape)
            shards = dict(zip(plan[table.name].ranks, option.shards, strict=False))
            copied_bytes -= (option.home + shards.get(0, 0.0))[INDEX["copied_bytes"]]
        assert copied_bytes == pytest.approx((groups > 1) * 5 * samples * width * 4)
        problem = problem_of(price(task=task))
        ms = price_of(problem, assignment_of(problem, plan)).ms
        assert ms == pytest.approx(price(task=task).predict(plan).step_ms)


def test_cached_tables_take_memory_for_the_planning_of_their_slots():
    task = make_task(rows=(4000,), world_size=2)
    storage = RowStorage(kind="file", share=0.25, key="parallel.storage.*")
    (output,) = task.outputs
    cached = replace(output, tables=(replace(output.tables[0], storage=storage),))
    plan = {"t0": Choice(Shape("S(0)", "unique", (2, 1)), (0, 1))}
    on_cpu, on_cuda = (
        count_work(replace(task, outputs=(cached,), device_type=device), plan)[:, MEMORY]
        for device in ("cpu", "cuda")
    )
    # The number of rows is rounded to whole words.
    assert on_cpu - on_cuda == pytest.approx([planning_bytes(2000, 500)] * 2, rel=0.01)


def test_ranks_wait_for_the_sums_of_squares():
    task = make_task(rows=(400,))
    plan = {"t0": Choice(Shape("S(1)", "unique", (1, 4)), (0, 1, 2, 3))}
    rowwise, adagrad = (
        price_plan(embedding_plan(replace(task, optimizer=sparse_optimizer(name)), plan), 512)
        for name in ("rowwise_adagrad", "adagrad")
    )
    assert rowwise.work_ms > adagrad.work_ms + 2.0


def test_columns_and_kernels_separate_groups_as_in_the_engine():
    task = make_task(rows=(400, 500, 600), dim=10)  # parts of 3, 3, 2 and 2 columns
    columns = Shape("S(1)", "unique", (1, 4))
    reversed_ranks = Choice(columns, (3, 2, 1, 0))
    plan = {"t0": Choice(columns, (0, 1, 2, 3)), "t1": reversed_ranks, "t2": reversed_ranks}
    totals, engine = count_work(task, plan), embedding_plan(task, plan)
    assert totals[0, INDEX["num_row_transfers"]] == len(engine.groups) == 2
    assert totals[0, INDEX["num_squares"]] == 2

    stored = RowStorage(kind="file", share=0.2, key="parallel.storage.t0")
    wanted = [{"kernel": "torch"}, {"kernel": "torch"}, {"storage": stored}]
    choices = [Choice(Shape("S(0)", "unique", (4, 1)), (0, 1, 2, 3)), every_shape()[2]]
    for change, choice in zip(wanted, [*choices, choices[0]], strict=True):
        first = replace(task.tables[0], **change)
        output = replace(task.outputs[0], tables=(first, *task.tables[1:]))
        requested = replace(task, outputs=(output,))
        plan = {table.name: choice for table in task.tables}
        totals, engine = count_work(requested, plan), embedding_plan(requested, plan)
        stacks = sum(len(group.stacks) for group in engine.groups)
        assert totals[0, INDEX["num_stacks"]] == stacks == 2
        groups = totals[0, INDEX["num_row_transfers"]] + totals[0, INDEX["num_dense_groups"]]
        assert groups == len(engine.groups)


GATHERED = Choice(Shape("S(0)", "reduce", (4, 1)), (0, 1, 2, 3))  # gradients go to all ranks


@pytest.mark.parametrize(
    "choice",
    [GATHERED, *(c for c in every_shape() if c.shape.exchange in ("columns", "reduce"))],
    ids=str,
)
@pytest.mark.parametrize("combine", ["concat", "sum"])
def test_bytes_of_vectors_equal_the_engines_steps(choice, combine):
    task = make_task(rows=(3000, 60, 800))
    task = replace(task, outputs=(replace(task.outputs[0], combine=combine),))
    plan = {table.name: choice for table in task.tables}
    totals, engine = count_work(task, plan), embedding_plan(task, plan)
    gradients = engine.steps(task.batch_size, "gradients")
    gathered = [step for step in gradients if step.collective == "all_gather"]
    assert bool(gathered) == (choice == GATHERED)
    for name, steps in (
        ("vector_bytes", engine.forward_steps(task.batch_size)),
        ("gradient_bytes", [step for step in gradients if step not in gathered]),
        ("ids_bytes", engine.id_steps(task.batch_size)),
        *([("reduced_bytes", gathered)] if gathered else []),
    ):
        sent = [sum(step.bytes_sent(rank) for step in steps) for rank in range(4)]
        np.testing.assert_allclose(totals[:, INDEX[name]], sent, 0.01, 1e-6, err_msg=name)


@pytest.mark.parametrize(
    "shape", [Shape("S(1)", "columns", (1, 2)), Shape("(S(0), S(1))", "reduce", (2, 2))], ids=str
)
def test_squares_are_padded_to_the_largest_batch_if_ranks_share_different_rows(shape):
    """The batch has fewer ids than the lists may have, and the table has even fewer rows."""
    task = make_task(rows=(60,))
    lists = (replace(task.features[0], hotness=20, ragged=True),)
    task = replace(task, features=lists, ids_per_sample={"f0": 5.0})
    plan = {"t0": Choice(shape, (0, 2) if shape.num_shards == 2 else (0, 1, 2, 3))}
    steps = embedding_plan(task, plan).update_steps(task.batch_size)
    sent = [sum(step.bytes_sent(rank) for step in steps) for rank in range(4)]
    assert sent[0] == 4 * 512 * 20
    assert count_work(task, plan)[:, INDEX["reduced_bytes"]].tolist() == sent


@pytest.mark.parametrize("weighted", [False, True])
def test_lists_of_ids_are_sent_with_their_lengths_and_weights(weighted):
    task = make_task(rows=(3000,))
    lists = (replace(task.features[0], hotness=2, ragged=True, weighted=weighted),)
    task = replace(task, features=lists)
    plan = {"t0": Choice(Shape("S(1)", "columns", (1, 4)), (0, 1, 2, 3))}
    engine, size = embedding_plan(task, plan), task.batch_size
    lengths = [sum(s.bytes_sent(rank) for s in engine.length_steps(size)) for rank in range(4)]
    values = sum(step.bound_bytes for step in engine.list_steps(size))  # all lists have two ids
    sent = [each + values for each in lengths]
    assert 0 < lengths[0] < values
    for totals in (count_work(task, plan), plan_totals(engine, size, {})):
        assert totals[:, INDEX["ids_bytes"]].tolist() == sent


def test_a_written_plan_is_read_back(tmp_path):
    plan, path = mixed_plan(TASK), tmp_path / "tables.yaml"
    path.write_text(plan_to_yaml(plan, {"predicted_step_ms": 1.5}))
    assert plan_from_yaml(path, TASK) == plan
    alike = {
        table.name: Choice(Shape("S(0)", "unique", (4, 1)), (0, 1, 2, 3)) for table in TASK.tables
    }
    text = plan_to_yaml(alike)
    assert text.count("S(0)") == 1  # a single pattern covers all tables
    path.write_text(text)
    assert plan_from_yaml(path, TASK) == alike


def test_a_plan_that_the_engine_cannot_run_is_refused():
    plan = mixed_plan(TASK)
    plan["t2"] = Choice(Shape("B", "columns"), (0, 1))
    with pytest.raises(ConfigError, match="B needs either all"):
        TASK.check(plan)
    del plan["t2"]
    with pytest.raises(ConfigError, match="tables t2 are in only one of the task and the plan"):
        TASK.check(plan)


def test_a_step_takes_the_maximum_work_plus_the_maximum_transfers_of_each_phase():
    cost, plan = price(), mixed_plan(TASK)
    totals, prediction = count_work(TASK, plan), price().predict(plan)
    *times, _ = (totals @ cost.prices).T
    assert prediction.step_ms == pytest.approx(sum(ms.max() for ms in times))
    assert cost.prices[INDEX["reduced_bytes"], 3] > 0, "squares of rowwise optimizers travel"
    problem = problem_of(cost, given=plan)
    planned = price_of(problem, assignment_of(problem, plan))
    assert planned.ms == pytest.approx(prediction.step_ms)
    np.testing.assert_allclose(planned.memory, prediction.memory_bytes, atol=1)


def test_a_step_of_several_batches_has_one_update():
    task = replace(make_task(rows=(3000,)), dense=DenseWork(parameters=10_000_000))
    plan, several = {"t0": every_shape()[8]}, replace(task, accumulate=3)  # S(1), unique
    engine, size = embedding_plan(task, plan), task.batch_size
    stepped = [INDEX[name] for name in ("step_rows", "step_elements", "step_passes")]
    stepped.append(INDEX["reduced_bytes"])
    for curve, one, each in (
        (task.stats["t0"], count_work(task, plan), count_work(several, plan)),
        (click_curve(3000), plan_totals(engine, size, {}), plan_totals(engine, size, {}, 3)),
    ):
        share = curve.touched(3 * size) / curve.touched(size) / 3
        assert share < 0.9
        np.testing.assert_allclose(each[:, stepped], share * one[:, stepped])
    assert each[0, INDEX["num_squares"]] == pytest.approx(1 / 3)
    assert price_plan(engine, size, accumulate=3).ms < price_plan(engine, size).ms - 1.0

    once = ["always", "dense_parameters", "num_squares"]
    times = np.where(vector_of(dict.fromkeys(once, 1.0)) > 0, 1.0, 3.0)
    loads = (times * count_work(several, plan)) @ price(task=task).prices
    predicted = price(task=several).predict(plan).step_ms
    assert predicted == pytest.approx(loads[0, :-1].sum())


# Profiles


def measured(**changes):
    link = Link(within_gb_per_s=2.0, within_call_ms=0.3)
    given = {"work_ms": {"step_rows": 1e-4, "always": 0.2}, "link": link, "errors": {ERROR: 0.3}}
    return Profile(**{**given, "world_size": 2, "backend": "gloo", **changes})


def test_a_written_profile_is_read_back(tmp_path):
    path = tmp_path / "profile.json"
    measured().save(path)
    assert load(path) == measured()
    assert price(load(path)).predict(mixed_plan(TASK)).error == 0.3
    assert np.isnan(price().predict(mixed_plan(TASK)).error), "nothing was measured"


def test_processes_with_equal_pids_on_several_hosts_can_write_the_same_profile(tmp_path):
    path, write = tmp_path / "profile.json", Path.write_text

    def other_host_is_faster(self, text, **settings):
        write(self, text, **settings)
        with patch.object(Path, "write_text", write):
            measured().save(path)

    with patch.object(Path, "write_text", other_host_is_faster):
        measured().save(path)
    assert load(path) == measured()
    assert list(tmp_path.iterdir()) == [path]


def test_a_profile_of_the_former_format_is_refused_with_both_versions(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"format": 5, "work_ms": {}}))
    message = r"not a profile of this version \(its format is 5, but this version reads 6\)"
    with pytest.raises(ConfigError, match=message + "; rerun sbpflow calibrate"):
        load(path)


@pytest.mark.parametrize("content", ["", "{}", '{"format": 99, "work_ms": {}}'])
def test_an_invalid_profile_is_refused_with_the_command_that_makes_one(tmp_path, content):
    path = tmp_path / "profile.json"
    with pytest.raises(ConfigError, match=r"calibrate .*for several machines, under torchrun"):
        load(path)
    path.write_text(content)
    with pytest.raises(ConfigError, match="rerun sbpflow calibrate"):
        load(path)


def test_calls_cost_more_with_more_ranks_and_nothing_on_one():
    calls, sent = INDEX["num_dense_groups"], INDEX["vector_bytes"]
    assert measured().prices(2)[calls, 1] == pytest.approx(2 * 0.3)
    assert measured().prices(4)[calls, 1] == pytest.approx(2 * 0.9)
    assert measured().prices(4)[sent, 2] == pytest.approx(0.5e-6)
    assert measured().prices(1)[:, 1:].sum() == 0
    alone = measured(world_size=1, link=Link())
    assert alone.prices(1)[:, 1:].sum() == 0
    with pytest.raises(ConfigError, match=r"for 2 ranks; .*calibrate --ranks 2"):
        alone.prices(2)


def test_profiles_of_different_backends_and_gpus_have_different_files(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB")
    cpu, first = default_path("cpu"), default_path("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    assert len({cpu, first, default_path("cuda")}) == 3
    assert cpu.name.endswith("-gloo.json")
