"""Tests calibration on two ranks: the measured, stored and fitted values, and the predicted
memory.
"""

import json
import math
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch

from benchmarks.planner_memory import growth_bytes
from sbpflow.boxing.agreement import gather_values
from sbpflow.boxing.executor import Boxing
from sbpflow.costs.counts import INDEX, NUM_FEATURES, vector_of
from sbpflow.costs.prices import PHASES, SENT, WORK_MS, by_phase, transfer_ms
from sbpflow.errors import ConfigError, DataError
from sbpflow.planner import workloads
from sbpflow.planner.calibration import design, measure
from sbpflow.planner.calibration.calibrate import (
    QUICK,
    Journal,
    _locked,
    calibrate,
    default_ranks,
    describe,
    save_on_all_hosts,
)
from sbpflow.planner.calibration.design import (
    Law,
    draw_batches,
    draw_ids,
    draw_plans,
    draw_sample,
    drawing,
    shapes_for,
)
from sbpflow.planner.calibration.fit import Record, errors_of, fit, fitted_prices, predicted_ms
from sbpflow.planner.calibration.measure import make_trainer, measure_in_turns
from sbpflow.planner.clusters import described
from sbpflow.planner.costs.cost import TaskCost, count_work
from sbpflow.planner.costs.profile import ERROR, load
from sbpflow.planner.task import Choice, Shape
from sbpflow.runtime.ranks.topology import Topology
from tests.planner.tasks import laws_of, make_task, mixed_plan, random_plan

PROFILE = described("h100-dgx")
FACTS = {"cpu": "one", "world": "2 gloo", "hosts": "1"}
ENTRY = {
    "sample": 1,
    "name": "a",
    "totals": [[0.5] * NUM_FEATURES] * 2,
    "rounds_ms": [3.0, 4.0],
    "facts": FACTS,
}
SETTINGS = replace(QUICK, seconds=0.0, plans_per_sample=2, most_rows=500, rounds=2, steps=1)


def calibrate_twice(world, path):
    """Calibrate twice on every rank; the second run resumes from the first run's journal."""
    boxing, counts = Boxing(world), []
    for _ in range(2):
        profile = calibrate(boxing, SETTINGS, path)
        counts.append(len(path.read_text().splitlines()))
    if profile is not None:
        profile.save(path.with_suffix(".json"))
    return counts, profile is not None


@pytest.mark.slow
def test_a_second_calibration_repeats_no_measurement(ranks, tmp_path):
    path = tmp_path / "measured.jsonl"
    (counts, first), (_, second) = ranks(2, calibrate_twice, path)
    assert (first, second) == (True, False)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert counts == [3 * 2, 3 * 2]
    assert len({(line["sample"], line["name"]) for line in lines}) == len(lines)
    assert {line["facts"]["tasks"] for line in lines} == {drawing()}
    assert any(line["name"].startswith("all ") for line in lines)
    for line in lines:
        assert np.array(line["totals"]).shape == (2, NUM_FEATURES)
        assert len(line["rounds_ms"]) in (1, 2)  # one on a busy machine
        assert min(line["rounds_ms"]) > 0
    profile = load(tmp_path / "measured.json")
    assert "GB/s" in describe(profile)
    assert profile.about["plans"] == str(len(lines))
    assert profile.world_size == 2
    assert profile.sources["work"] == "measured"
    assert (profile.prices(2) >= 0).all()
    task = make_task(world_size=2)
    plan = {table.name: Choice(Shape("S(0)", "unique", (2, 1)), (0, 1)) for table in task.tables}
    assert TaskCost(profile, task).predict(plan).step_ms > 0


def test_a_second_calibration_at_the_same_time_is_refused(tmp_path):
    journal = tmp_path / "cache" / "profile.measured.jsonl"
    for _ in range(2):  # the first has ended, and its lock with it
        with _locked(journal, 0), pytest.raises(ConfigError, match="in use by another calibration"):
            _locked(journal, 0)
    assert not Journal(journal, FACTS).records


def test_the_journal_of_another_machine_is_ignored(tmp_path):
    path = tmp_path / "measured.jsonl"
    path.write_text(json.dumps(ENTRY) + "\n" + '{"cut off')
    assert set(Journal(path, FACTS).records) == {(1, "a")}
    assert not Journal(path, {**FACTS, "cpu": "other"}).records


def test_entries_after_an_incomplete_line_are_read(tmp_path, caplog):
    path = tmp_path / "measured.jsonl"
    path.write_text('{"cut off')
    sample = draw_sample(5, 2, "cpu", "sgd")
    ((name, plan),) = draw_plans(sample, 5, 1)
    Journal(path, FACTS).add(sample, 5, name, plan, [2.0, 3.0])
    assert "damaged or incomplete lines: 1" in caplog.text
    (record,) = Journal(path, FACTS).records.values()
    assert record.step_ms == 2.5
    np.testing.assert_allclose(record.totals, count_work(sample.task, plan), rtol=1e-5)


def test_a_sample_is_reproducible():
    first, second = (draw_sample(5, 2, "cpu", "sgd") for _ in range(2))
    assert first.task.tables == second.task.tables
    ids = [draw_batches(first, 1, 1, torch.device("cpu"))[0].ids for _ in range(2)]
    assert torch.equal(*ids)
    widths = [feature.hotness for feature in first.task.features]
    for table, columns in zip(first.task.tables, ids[0].split(widths, 1), strict=True):
        assert int(columns.max()) < table.num_rows
    names = [name for name, _ in draw_plans(first, 5, 8)]
    assert names == [name for name, _ in draw_plans(second, 5, 8)]
    assert any(name.startswith("all ") for name in names)
    assert all(
        shape.copied or shape.num_shards <= 4
        for table in first.task.tables
        for shape in shapes_for(table, 4)
    )


def test_samples_of_several_hosts_have_plans_in_two_hops():
    sample = draw_sample(5, 4, "cpu", "sgd", num_hosts=2)
    plans = dict(draw_plans(sample, 5, 16))
    shapes = {choice.shape for plan in plans.values() for choice in plan.values()}
    assert Shape("(S(0), S(0))", "unique", (2, 2)) in shapes
    assert "all (S(0), S(0)) unique" in plans
    one = draw_sample(5, 4, "cpu", "sgd")
    assert not any("(S(0), S(0))" in name for name, _ in draw_plans(one, 5, 16))
    for plan in plans.values():
        sample.task.check(plan)


@pytest.mark.parametrize(
    ("device", "gpus", "ranks"),
    [("auto", 0, 2), ("auto", 1, 1), ("cuda", 8, 8), ("cpu", 1, 2), ("cpu", 8, 2)],
)
def test_a_calibration_has_a_rank_per_gpu(monkeypatch, device, gpus, ranks):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert default_ranks(device) == ranks


@pytest.mark.parametrize("num_rows", [1, 500, 7919, 2 * 7919])
def test_drawn_ids_reach_every_row_of_a_table(num_rows):
    ids = draw_ids(np.random.default_rng(0), num_rows, Law(s=0.0, q=1.0), (20 * num_rows,))
    assert np.unique(ids).tolist() == list(range(num_rows))


@pytest.mark.parametrize("module", [design, workloads], ids=["design", "workloads"])
def test_the_digest_of_the_drawing_depends_on_its_code(module, monkeypatch, tmp_path):
    """If the sampling code changes, the journal must not be reused, because its sample numbers then
    refer to other tasks.
    """
    (tmp_path / "code.py").write_text("changed")
    before = drawing()
    monkeypatch.setattr(module, "__file__", str(tmp_path / "code.py"))
    assert drawing() != before == before.lower()


def test_one_sample_in_seven_has_as_many_ids_as_a_large_batch():
    def ids(number):
        task = draw_sample(number, 2, "cpu", "sgd").task
        return sum(task.lookups(table) for table in task.tables)

    assert all(ids(number) <= 400_000 for number in range(6))
    assert all(600_000 < ids(number) <= 1_600_000 for number in (6, 13, 20, 27))


def texts_of(world):
    return gather_values(Boxing(world), "x" * (10 ** (world.rank + 1)))


def test_texts_of_any_length_reach_all_ranks(ranks):
    assert [[len(text) for text in texts] for texts in ranks(2, texts_of)] == [[10, 100]] * 2


def rows_sent(world, shape):
    """Return, for ids, vectors, gradients, and row state, the bytes that this rank sent in a step,
    and the bytes that the planner counts.
    """
    boxing, task = Boxing(world), make_task(world_size=world.size, rows=(2000, 500))
    everyone = tuple(range(world.size))
    plan = {table.name: Choice(shape, everyone) for table in task.tables}
    trainer = make_trainer(boxing, task, plan)
    batches = draw_batches(laws_of(task), world.rank, 2, world.device)
    trainer.step(batches[0])
    world.log.records.clear()
    trainer.step(batches[1])
    counted = count_work(task, plan)[world.rank]
    return [
        (
            sum(r.bytes_sent for r in world.log.records if step in r.step_id),
            counted[INDEX[feature]],
        )
        for step, feature in (
            ("fwd/ids", "counted_bytes"),
            ("fwd/vectors", "vector_bytes"),
            ("bwd/vectors", "gradient_bytes"),
            ("bwd/row_state", "reduced_bytes"),
        )
    ]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("sbp", ["S(0)", "S(1)"])
def test_as_many_unique_rows_are_sent_as_counted(ranks, size, sbp):
    parts = (size, 1) if sbp == "S(0)" else (1, size)  # one of 3 ranks has 2 of 8 columns
    for rank in ranks(size, rows_sent, Shape(sbp, "unique", parts)):
        for sent, counted in rank:
            assert sent == pytest.approx(counted, rel=0.15)


def peak_and_prediction(world):
    """Return how many bytes each process grows by for a plan with 90 MB of tables, and the
    prediction. The result is the lower of two measurements, because messages that wait in shared
    memory on a busy machine increase the growth.
    """
    boxing = Boxing(world)
    task = make_task(world_size=2, batch_size=4096, rows=(800_000, 50, 600_000), dim=16)
    plan = {
        "t0": Choice(Shape("S(0)", "unique", (2, 1)), (0, 1)),
        "t1": Choice(Shape("B", "local"), (0, 1)),
        "t2": Choice(Shape("B", "columns"), (1,)),
    }
    measure_in_turns(boxing, laws_of(task), [plan], rounds=1)  # trigger one-time allocations
    used: list[list[int]] = []
    for _ in range(2):
        used.append(gather_values(boxing, growth_bytes(boxing, laws_of(task), plan)))
    lower = [min(pair) for pair in zip(*used, strict=True)]
    return lower, TaskCost(PROFILE, task).predict(plan).memory_bytes


def ragged_steps(world, folder):
    """Return the ms of a step with lists, the shape of the matrix, and the mean length and the
    largest id of each of two lists.
    """
    task = make_task(world_size=2, batch_size=400, rows=(500, 60, 90))
    means = {"f0": 2.25, "f2": 0.5}
    features = [
        replace(f, hotness=math.ceil(means[f.name]), ragged=True) if f.name in means else f
        for f in task.features
    ]
    task = replace(task, features=tuple(features), ids_per_sample=means)
    batches = draw_batches(laws_of(task), world.rank, 2, world.device)
    plan = {t.name: Choice(Shape("S(0)", "unique", (2, 1)), (0, 1)) for t in task.tables}
    ((ms,),) = measure_in_turns(Boxing(world), laws_of(task), [plan], rounds=1)
    usual, world.topology = world.topology, Topology(hosts=((0,), (1,)))
    profile = PROFILE if world.rank == 0 else None
    save_on_all_hosts(Boxing(world), profile, folder / f"{world.rank}.json")
    world.topology = usual
    ids = batches[0].ids
    lists = ids.lists
    largest = [int(lists.take(torch.tensor([n])).values.max()) for n in range(2)]
    return ms, ids.matrix.shape, lists.lengths.float().mean(0).tolist(), largest


def test_lists_of_ids_are_measured_and_every_host_gets_the_profile(ranks, tmp_path):
    for ms, matrix, lengths, largest in ranks(2, ragged_steps, tmp_path):
        assert ms > 0
        assert matrix == (200, 3)
        assert lengths == pytest.approx([2.25, 0.5], abs=0.15)
        # the largest ids show that the lists refer to t0 (500 rows) and t2 (90 rows)
        assert largest[0] >= 90 > largest[1]
    assert load(tmp_path / "0.json") == load(tmp_path / "1.json") == PROFILE


def turns_of_slow_steps(world):
    """Return the number of steps of every turn, and the number of rounds of two measurements. Steps
    are slow only for rank 1, and the time is over only for rank 0, which decides.
    """
    task = make_task(world_size=2, batch_size=400, rows=(500,))
    plan = {"t0": Choice(Shape("S(0)", "unique", (2, 1)), (0, 1))}
    run, steps, rounds = measure._Turn.run, [], []
    over, slow = (0.0, 1.0) if world.rank == 0 else (math.inf, 1e9)

    def counted(turn, number):
        steps.append(number)
        return [slow * ms for ms in run(turn, number)] if len(steps) == 1 else run(turn, number)

    for seconds in (math.inf, over):
        with patch.object(measure._Turn, "run", counted), patch.object(measure, "TURN_MS", 1e6):
            ((*ms,),) = measure_in_turns(
                Boxing(world), laws_of(task), [plan], rounds=2, steps=4, seconds=seconds
            )
        rounds.append(len(ms))
    return steps, rounds


def test_slow_plans_are_measured_with_fewer_steps_and_slow_tasks_with_fewer_rounds(ranks):
    first, second = [2, 1, 1], [2, 4]  # each starts with two steps to warm up
    assert ranks(2, turns_of_slow_steps) == [([*first, *second], [2, 1])] * 2


def test_predicted_memory_is_what_the_ranks_use(ranks):
    peak, predicted = ranks(2, peak_and_prediction)[0]
    assert list(predicted) == [pytest.approx(used, rel=0.25) for used in peak]
    assert predicted[1] > predicted[0] + 30e6  # the whole table is on rank 1


# Fitting


def machine(num_hosts=1):
    """Return the prices ([4, F]) of an imaginary machine: work costs three times the constants, and
    the link has its own prices. Four ranks on two hosts send 4/3 of a rank's evenly sent bytes to
    the other host, and in an all-reduce as much as one rank sends.
    """
    prices = 3.0 * vector_of({"read_elements": 4e-7}) + 3.0 * WORK_MS
    work = prices + vector_of({"always": 0.5})
    reduced = {1: 4e-6, 2: 3e-6}[num_hosts]
    return np.stack([work, *by_phase(transfer_ms(4e-6, 0.1, (4e-6, 4e-6), reduced))])


def synthetic_records(noise, samples=24, num_hosts=1, ranks_per_link=1):
    """Return records of tasks, with six plans each, on a machine with known prices."""
    random = np.random.default_rng(4)
    records = []
    for sample in range(samples):
        rows = tuple(int(x) for x in np.exp(random.uniform(3, 9, 9)))
        dim = int(random.choice([4, 16, 64]))
        task = make_task(batch_size=int(random.choice([512, 4096, 16384])), rows=rows, dim=dim)
        for plan in (mixed_plan(task), *(random_plan(task, 10 * sample + n) for n in range(5))):
            record = Record(
                sample=sample,
                totals=count_work(task, plan),
                rounds_ms=(1.0,),
                num_hosts=num_hosts,
                ranks_per_link=ranks_per_link,
            )
            (ms,) = predicted_ms(machine(num_hosts), [record])
            rounds = tuple((ms * np.exp(random.normal(0, noise, 2))).tolist())
            records.append(replace(record, rounds_ms=rounds))
    return records


@pytest.mark.slow
def test_a_fit_predicts_steps_and_chooses_well_on_new_tasks():
    errors = fit(synthetic_records(0.03), backend="gloo").errors
    assert errors["step relative"] < 0.05
    assert errors["step relative"] < errors[ERROR] < 0.15
    assert errors["regret"] < 0.03 < errors["regret of a random plan"]
    assert errors["rank correlation"] > 0.9


def test_a_fit_finds_the_link_and_adapts_the_constants():
    profile = fit(synthetic_records(0.0), backend="gloo")
    assert profile.link.within_gb_per_s == pytest.approx(0.25, rel=0.15)
    prices = profile.prices(4)
    assert (prices >= 0).all()
    assert prices[INDEX["update_ids"], 0] == pytest.approx(
        machine()[0, INDEX["update_ids"]], rel=0.3
    )
    records = synthetic_records(0.0)
    kept = fitted_prices(records, math.inf)
    ratios = kept[0, WORK_MS > 0] / WORK_MS[WORK_MS > 0]
    np.testing.assert_allclose(ratios, ratios[0])  # prices keep the constants' ratios


def test_a_fit_on_several_hosts_finds_the_link_between_them():
    """On two hosts of two ranks, two thirds of the evenly sent bytes go to the other host."""
    records = synthetic_records(0.0, samples=6, num_hosts=2)
    profile = fit(records, backend="gloo")
    flat = fit(synthetic_records(0.0, samples=6), backend="gloo")
    assert profile.link.ranks_per_node == 2
    assert profile.link.num_hosts(4) == 2
    within = flat.link.within_gb_per_s
    assert profile.link.between_gb_per_s == pytest.approx(2 / 3 * within, rel=0.01)
    assert "assumed within a host" in profile.sources["transfers"]
    ours, theirs = profile.prices(4), flat.prices(4)
    sent = [INDEX[name] for name in ("vector_bytes", "ids_bytes", "num_id_calls")]
    np.testing.assert_allclose(ours[sent], theirs[sent], rtol=0.02)
    vectors = 1 + PHASES.index("vectors")
    network, even = ours[INDEX["network_bytes"], vectors], theirs[INDEX["vector_bytes"], vectors]
    assert network == pytest.approx(1.5 * even, rel=0.01)
    assert even > 0


def test_a_fit_on_hosts_of_one_rank_finds_the_link_between_them():
    records = synthetic_records(0.0, samples=4)
    flat = fit(records, backend="gloo")
    apart = fit([replace(record, num_hosts=4) for record in records], backend="gloo")
    assert (apart.link.ranks_per_node, apart.link.num_hosts(4)) == (1, 4)
    ours, theirs = (
        np.delete(profile.prices(4), INDEX["host_bytes"], axis=0) for profile in (apart, flat)
    )
    np.testing.assert_allclose(ours, theirs)
    distinct = replace(apart, link=replace(apart.link, between_gb_per_s=0.123))
    assert "0.123 GB/s per rank" in describe(distinct)


def test_a_fit_knows_which_ranks_share_a_link():
    records = synthetic_records(0.0, samples=6, num_hosts=2, ranks_per_link=2)
    prices = fitted_prices(records)
    measured = [record.step_ms for record in records]
    np.testing.assert_allclose(predicted_ms(prices, records), measured, rtol=0.05)
    alone = [replace(record, ranks_per_link=1) for record in records]
    apart = np.abs(np.log(predicted_ms(fitted_prices(alone), alone) / measured)).max()
    assert apart > np.abs(np.log(predicted_ms(prices, records) / measured)).max()
    link = fit(records, backend="gloo").link
    assert (link.ranks_per_node, link.ranks_per_link) == (2, 2)
    assert link.sharing(4) == 2
    assert link.sharing(2) == 1, "one node"


@pytest.mark.parametrize(
    ("world", "hosts", "ranks_per_link"),
    [("4 gloo", 1, 1), ("4 gloo", 2, 2), ("4 gloo", 4, 1), ("4 nccl", 2, 1)],
)
def test_the_ranks_of_a_host_share_its_link_with_gloo(tmp_path, world, hosts, ranks_per_link):
    journal = Journal(tmp_path / "journal", {"world": world, "hosts": str(hosts)})
    sample = draw_sample(0, 4, "cpu", "sgd", num_hosts=hosts)
    ((name, plan),) = draw_plans(sample, 0, 1)
    journal.add(sample, 0, name, plan, [1.0])
    assert journal.records[0, name].ranks_per_link == ranks_per_link


def test_a_slow_link_does_not_remove_the_prices_of_work():
    """If transfers hide the work, the factor of the work stays above 0, so that plans are
    balanced.
    """
    records = [
        replace(record, rounds_ms=(float(1e-3 * (record.totals @ SENT).max()) + 40.0,))
        for record in synthetic_records(0.0, samples=3)
    ]
    assert (fitted_prices(records, math.inf)[0, WORK_MS > 0] > 0).all()


def test_the_profile_of_one_rank_includes_the_fixed_time_of_a_step():
    """Most of a step on one GPU is fixed time, and a single rank has no transfers."""
    work = described("h100-dgx").prices(1)[:, 0]
    tasks = [draw_sample(number, 1, "cuda", "sgd").task for number in range(4)]
    plans = [{t.name: Choice(Shape("B", "local"), (0,)) for t in task.tables} for task in tasks]
    records = [
        Record(sample=number, totals=totals, rounds_ms=(float((totals @ work).sum()) + 8.0,))
        for number, totals in enumerate(map(count_work, tasks, plans))
    ]
    profile = fit(records, backend="nccl")
    for task, plan, record in zip(tasks, plans, records, strict=True):
        predicted = TaskCost(profile, task).predict(plan).step_ms
        assert predicted == pytest.approx(record.step_ms, rel=0.1)


def test_shrinkage_keeps_prices_near_the_constants_with_few_measurements():
    """With only three noisy tasks, a fit without shrinkage sets most prices to 0."""
    records = synthetic_records(0.3, samples=3)
    used = WORK_MS > 0
    free, shrunk = (fitted_prices(records, weight)[0, used] for weight in (1e-9, 1.0))
    assert (free == 0).sum() > (shrunk == 0).sum()


def test_the_regret_is_of_the_plan_that_the_model_chooses():
    records = synthetic_records(0.0, samples=1)[:3]
    steps = np.array([record.step_ms for record in records])
    assert errors_of(records, steps)["regret"] == [0.0]
    assert errors_of(records, steps)["rank correlation"] == pytest.approx([1.0])
    wrong = errors_of(records, 1.0 / steps)
    assert wrong["regret"] == pytest.approx([steps.max() / steps.min() - 1.0])
    double = errors_of(records, 2 * steps)
    assert double["step relative"] == double[ERROR] == pytest.approx([1.0])


def test_too_few_tasks_are_refused():
    with pytest.raises(DataError, match="at least 3 measured samples, got 2"):
        fit(synthetic_records(0.0, samples=2), backend="gloo")
