"""Tests calibration on two ranks: the measured, stored and fitted values, and the predicted
memory.
"""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from sbpflow.boxing.agreement import gather_texts
from sbpflow.boxing.executor import Boxing
from sbpflow.costs.counts import INDEX, MEMORY
from sbpflow.embedding.rules.registry import RULES
from sbpflow.errors import DataError
from sbpflow.planner.calibration import corrections, design
from sbpflow.planner.calibration.calibrate import QUICK, Journal, calibrate
from sbpflow.planner.calibration.command import describe, save_on_all_hosts
from sbpflow.planner.calibration.cross_validation import (
    cross_validation,
    predicted_phases,
    predicted_steps,
)
from sbpflow.planner.calibration.design import (
    draw_batches,
    draw_plans,
    draw_sample,
    drawing,
    shapes_for,
)
from sbpflow.planner.calibration.fit import TERMS, fit
from sbpflow.planner.calibration.least_squares import nonnegative_least_squares
from sbpflow.planner.calibration.measure import MoveTimer, make_trainer, measure_in_turns, phases_of
from sbpflow.planner.calibration.records import (
    Record,
    count_work,
    drift_of,
    empty_profile,
    on_one_clock,
    plan_of_tree,
    plan_tree,
    session_of,
)
from sbpflow.planner.calibration.time_dense import DENSE_MOVES
from sbpflow.planner.costs.cost import TaskCost
from sbpflow.planner.costs.profile import load, weights_from
from sbpflow.planner.costs.simulate import NUM_PHASES, PHASE, PHASES, step_ms
from sbpflow.planner.costs.transfers import SKEWS, transfer_of
from sbpflow.planner.task import Choice, Shape
from sbpflow.runtime.ranks.topology import Topology
from tests.planner.tasks import laws_of, make_task, mixed_plan, random_plan

ENTRY = {
    "sample": 1,
    "name": "a",
    "plan": {"t": ["S(0)", "unique", [2, 1], [0, 1]]},
    "phases": [[0.5] * NUM_PHASES] * 2,
    "step_ms": 3.5,
    "rounds_ms": [3.0, 4.0],
    "peak_bytes": [1000, 2000],
}
SETTINGS = replace(
    QUICK,
    seconds=0.0,
    plans_per_sample=2,
    picks_per_round=1,
    most_rows=500,
    turns=1,
    serial=1,
    overlapped=1,
)


def calibrate_twice(world, path):
    """Calibrate twice on every rank; the second run resumes from the first run's journal."""
    boxing, counts = Boxing(world), []
    for _ in range(2):
        profile = calibrate(boxing, SETTINGS, path)
        counts.append(len(path.read_text().splitlines()))
    if profile is not None:
        profile.save(path.with_suffix(".json"))
    return counts, profile is not None


def test_a_second_calibration_measures_nothing_again(ranks, tmp_path):
    path = tmp_path / "measured.jsonl"
    (counts, first), (_, second) = ranks(2, calibrate_twice, path)
    assert (first, second) == (True, False)
    first_line, second_line, *lines = map(json.loads, path.read_text().splitlines())
    transfers = [transfer_of(tree) for tree in first_line["transfers"]]
    assert {transfer.name for transfer in transfers} == set(SKEWS)
    assert [set(tree["ms"]) for tree in second_line["dense"]] == [set(DENSE_MOVES)]
    assert len(lines) == 3 * 2 + 3 * 2
    assert counts[0] == counts[1] == 2 + len(lines)
    assert len({(line["sample"], line["name"]) for line in lines}) == len(lines)
    assert {line["facts"]["tasks"] for line in lines} == {drawing()}
    assert any(line["name"].startswith("pick 1.") for line in lines)
    assert any(line["name"].startswith("all ") for line in lines)
    again = [line for line in lines if line["name"].startswith("again 1 ")]
    assert len(again) == 3  # the best random plan of every task, for the drift
    times = {(line["sample"], line["name"]): line["step_ms"] for line in lines}
    for line in again:
        drawn = [
            ms
            for (sample, name), ms in times.items()
            if sample == line["sample"] and not name.startswith(("pick", "again"))
        ]
        assert times[line["sample"], line["name"].removeprefix("again 1 ")] == min(drawn)
    line = lines[0]
    assert plan_tree(plan_of_tree(line["plan"])) == line["plan"]
    assert np.array(line["phases"]).shape == (2, NUM_PHASES)
    assert line["step_ms"] > 0
    profile = load(tmp_path / "measured.json")
    assert profile.transfers == tuple(transfers)
    assert "rows to all" in describe(profile)
    assert profile.about["plans"] == str(len(lines))
    assert profile.world_size == 2
    assert profile.step_factors["rowwise_adagrad"] == 1.0
    assert set(profile.step_factors) == set(RULES)
    assert profile.step_factors["lazy_adam"] > profile.step_factors["sgd"] > 0
    assert (profile.matrix >= 0).all()
    task = make_task(world_size=2)
    plan = {table.name: Choice(Shape("S(0)", "unique", (2, 1)), (0, 1)) for table in task.tables}
    assert TaskCost(profile, task).predict(plan).step_ms > 0


def test_the_journal_of_another_machine_is_ignored(tmp_path):
    path = tmp_path / "measured.jsonl"
    entry = {**ENTRY, "facts": {"cpu": "one"}}
    path.write_text(json.dumps(entry) + "\n" + '{"cut off')
    assert set(Journal(path, {"cpu": "one"}).entries) == {(1, "a")}
    assert not Journal(path, {"cpu": "other"}).entries


def test_entries_after_an_incomplete_line_are_read(tmp_path, caplog):
    path = tmp_path / "measured.jsonl"
    path.write_text('{"cut off')
    Journal(path, {"cpu": "one"}).add_transfers([])
    assert "1 lines are damaged or incomplete" in caplog.text
    assert Journal(path, {"cpu": "one"}).transfers == []


def test_a_sample_is_the_same_wherever_it_is_drawn():
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


def test_the_digest_of_the_drawing_depends_on_its_code(monkeypatch, tmp_path):
    """Otherwise, the measurements of one task could be used for another task."""
    (tmp_path / "design.py").write_text("changed")
    before = drawing()
    monkeypatch.setattr(design, "__file__", str(tmp_path / "design.py"))
    assert drawing() != before == before.lower()


def test_one_sample_in_seven_has_as_many_ids_as_a_large_batch():
    def ids(number):
        task = draw_sample(number, 2, "cpu", "sgd").task
        return sum(task.lookups(table) for table in task.tables)

    assert all(ids(number) <= 400_000 for number in range(6))
    assert all(600_000 < ids(number) <= 1_600_000 for number in (6, 13, 20, 27))


def texts_of(world):
    return gather_texts(Boxing(world), "x" * (10 ** (world.rank + 1)))


def test_texts_of_any_length_reach_all_ranks(ranks):
    assert [[len(text) for text in texts] for texts in ranks(2, texts_of)] == [[10, 100]] * 2


def timed_step(world):
    """Return (times of a serial step's moves, bytes sent, bytes counted, whether the hook is
    removed).
    """
    boxing, task = Boxing(world), make_task(world_size=2, rows=(2000, 500))
    plan = {table.name: Choice(Shape("S(0)", "unique", (2, 1)), (0, 1)) for table in task.tables}
    sample = laws_of(task)
    trainer = make_trainer(boxing, task, plan)
    batches = draw_batches(sample, world.rank, 2, world.device)
    trainer.step(batches[0])
    world.log.clear()
    with MoveTimer(boxing) as timer:
        trainer.move_watch = timer
        trainer.step(batches[1])
    sent = sum(r.bytes_sent for r in world.log.records if r.step_id.endswith("bwd/vectors"))
    counted = count_work(task, plan)[world.rank, INDEX["gradient_bytes"]]
    return timer.times, sent, counted, world.on_wait is None


def test_every_move_of_a_step_is_timed_and_bytes_are_as_counted(ranks):
    for times, sent, counted, hook_removed in ranks(2, timed_step):
        assert set(times) == set(PHASES)
        moved = {name for name, ms in times.items() if ms > 0}
        assert {
            "start_id_exchange",
            "lookup",
            "forward",
            "backward",
            "send_grads",
            "update",
        } <= moved
        assert {"ids", "vectors", "row gradients", "dense gradients"} <= moved
        assert sent == pytest.approx(counted, rel=0.1)
        assert hook_removed


def rows_sent(world, shape):
    """Return [(bytes that this rank sent in a step, bytes counted)] of ids, vectors and
    gradients.
    """
    boxing, task = Boxing(world), make_task(world_size=world.size, rows=(2000, 500))
    everyone = tuple(range(world.size))
    plan = {table.name: Choice(shape, everyone) for table in task.tables}
    trainer = make_trainer(boxing, task, plan)
    batches = draw_batches(laws_of(task), world.rank, 2, world.device)
    trainer.step(batches[0])
    world.log.clear()
    trainer.step(batches[1])
    counted = count_work(task, plan)[world.rank]
    return [
        (
            sum(r.bytes_sent for r in world.log.records if r.step_id.endswith(step)),
            counted[INDEX[feature]],
        )
        for step, feature in (
            ("fwd/ids", "counted_bytes"),
            ("fwd/vectors", "vector_bytes"),
            ("bwd/vectors", "gradient_bytes"),
        )
    ]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("sbp", ["S(0)", "S(1)"])
def test_as_many_unique_rows_travel_as_counted(ranks, size, sbp):
    parts = (size, 1) if sbp == "S(0)" else (1, size)  # one of 3 ranks has 2 of 8 columns
    for rank in ranks(size, rows_sent, Shape(sbp, "unique", parts)):
        for sent, counted in rank:
            assert sent == pytest.approx(counted, rel=0.15)


def test_a_transfer_lasts_from_the_last_start_to_the_last_end():
    """The sender continues immediately, because the link has room; the bytes arrive 8 ms later."""
    sender, receiver = ([[0.0] * NUM_PHASES] for _ in range(2))
    for row, work, wait in ((sender[0], 5.0, 0.1), (receiver[0], 1.0, 12.0)):
        row[PHASE["lookup"]], row[PHASE["vectors"]] = work, wait
    times = phases_of([sender, receiver])
    assert [row[PHASE["vectors"]] for row in times] == [8.0, 8.0]
    assert [row[PHASE["lookup"]] for row in times] == [5.0, 1.0]
    assert sum(map(sum, times)) == 22.0


def peak_and_prediction(world):
    """Return (this process's growth for a plan with 50 MB of tables, the predicted bytes)."""
    boxing = Boxing(world)
    task = make_task(world_size=2, batch_size=2048, rows=(400_000, 50, 300_000), dim=16)
    plan = {
        "t0": Choice(Shape("S(0)", "unique", (2, 1)), (0, 1)),
        "t1": Choice(Shape("B", "local"), (0, 1)),
        "t2": Choice(Shape("B", "columns"), (1,)),
    }
    sample = laws_of(task)
    batches = draw_batches(sample, world.rank, 2, world.device)
    measure_in_turns(boxing, task, [plan], batches, rounds=1)  # one-time allocations
    (measured,) = measure_in_turns(boxing, task, [plan], batches, rounds=1)
    cost = TaskCost(empty_profile(2, "gloo"), task)
    return measured.peak_bytes, cost.memory(cost.totals(plan)).tolist()


def ragged_steps(world, folder):
    """Return (ms of a step with lists, shape of the matrix, mean lengths, largest ids of two
    lists).
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
    (measured,) = measure_in_turns(Boxing(world), task, [plan], batches, rounds=1)
    usual, world.topology = world.topology, Topology(hosts=((0,), (1,)))
    profile = empty_profile(2, "gloo") if world.rank == 0 else None
    save_on_all_hosts(Boxing(world), profile, folder / f"{world.rank}.json")
    world.topology = usual
    ids = batches[0].ids
    lists = ids.lists
    largest = [int(lists.take(torch.tensor([n])).values.max()) for n in range(2)]
    return measured.step_ms, ids.matrix.shape, lists.lengths.float().mean(0).tolist(), largest


def test_lists_of_ids_are_measured_and_every_host_gets_the_profile(ranks, tmp_path):
    for ms, matrix, lengths, largest in ranks(2, ragged_steps, tmp_path):
        assert ms > 0
        assert matrix == (200, 3)
        assert lengths == pytest.approx([2.25, 0.5], abs=0.15)
        # the counts are shares of t0's 500 rows and t2's 90 rows
        assert largest[0] >= 90 > largest[1]
    assert load(tmp_path / "0.json") == load(tmp_path / "1.json") == empty_profile(2, "gloo")


def test_predicted_memory_is_what_the_ranks_use(ranks):
    peak, predicted = ranks(2, peak_and_prediction)[0]
    assert predicted == [pytest.approx(used, rel=0.25) for used in peak]
    assert predicted[1] > predicted[0] + 15e6  # the whole table is on rank 1


# Fitting


def test_non_negative_least_squares_finds_the_weights():
    random = np.random.default_rng(2)
    x = random.random((80, 5))
    true = np.array([2.0, 0.0, 0.5, 0.0, 3.0])
    np.testing.assert_allclose(nonnegative_least_squares(x, x @ true), true, atol=1e-4)
    clipped = nonnegative_least_squares(x, x @ np.array([1.0, -2.0, 0.5, 0.0, 1.0]))
    assert clipped[1] == 0.0
    assert (clipped >= 0).all()
    most = np.array([0.5, np.inf, 0.25, np.inf, np.inf])
    bounded = nonnegative_least_squares(x, x @ true, most=most)
    assert (bounded <= most).all()
    assert bounded[0] == 0.5


def synthetic_records(noise, samples=12):
    """Return records of a machine with known prices, with six plans for each task."""
    terms = {
        "start_id_exchange": {"always": 0.3, "home_sort": 2e-5},
        "lookup": {"read_rows": 4e-5, "read_elements": 3e-6, "num_stacks": 0.3},
        "send_grads": {"home_elements": 4e-6, "expand_elements": 6e-6},
        "update": {"step_elements": 2e-5, "update_ids": 3e-5, "always": 0.2},
        "vectors": {"vector_bytes": 4e-6, "num_row_transfers": 0.3, "num_dense_groups": 0.2},
        "row gradients": {"gradient_bytes": 4e-6, "num_row_transfers": 0.2},
    }
    weights = np.array(weights_from(terms))
    random = np.random.default_rng(4)
    records = []
    for sample in range(samples):
        rows = tuple(int(x) for x in np.exp(random.uniform(3, 9, 9)))
        task = make_task(batch_size=int(random.choice([512, 2048, 4096])), rows=rows)
        plans = [mixed_plan(task), *(random_plan(task, 10 * sample + n) for n in range(5))]
        for number, plan in enumerate(plans):
            totals = count_work(task, plan)
            exact = totals @ weights
            exact[:, PHASE["update"]] *= (exact[:, PHASE["update"]] / 3.0) ** 0.15  # not linear
            noisy = exact * np.exp(random.normal(0, noise, exact.shape))
            step = float(step_ms(exact[None], {"vectors": 0.5})[0])
            records.append(
                Record(
                    sample=sample,
                    name=f"plan {number}",
                    totals=totals,
                    phases=noisy,
                    step_ms=step * float(np.exp(random.normal(0, noise))),
                    rounds_ms=(step, step),
                )
            )
    return records


@pytest.fixture(scope="module")
def fitted():
    return fit(synthetic_records(0.03), backend="gloo")


def test_a_fit_predicts_steps_and_chooses_well_on_new_tasks(fitted):
    assert fitted.errors["step relative"] < 0.08
    assert fitted.errors["regret"] < 0.03 < fitted.errors["regret of a random plan"]
    assert fitted.errors["rank correlation"] > 0.8


def test_a_correction_learns_what_a_sum_cannot_describe(fitted):
    fresh = synthetic_records(0.0, samples=14)[12 * 6 :]  # two more tasks

    def error(profile):
        phases, steps = predicted_phases(profile, fresh), predicted_steps(profile, fresh)
        return cross_validation(fresh, phases, steps)["update relative"]

    assert error(fitted) < 0.7 * error(replace(fitted, members=()))


def test_a_correction_is_kept_only_if_it_helps_on_other_tasks(fitted):
    assert "update" in fitted.members[0]
    # the times are sums, except for noise
    assert not {"lookup", "vectors"} & set(fitted.members[0])


@pytest.mark.parametrize(("gain", "kept"), [(0.04, False), (0.06, True)])
def test_a_correction_with_a_small_gain_is_not_kept(gain, kept):
    """A small gain does not justify its predictions for tasks larger than those measured."""
    y, linear = np.full(8, 10.0), np.full(8, 12.0)
    floor = corrections.FLOOR_MS
    error = (1.0 - gain) * math.log((12.0 + floor) / (10.0 + floor))
    corrected = np.full((1, 8), math.exp(error) * (10.0 + floor) - floor)
    assert corrections._helps(corrected, linear, y, counted=np.zeros((1, 8))) is kept


def test_sessions_are_judged_separately_and_scaled_to_one_clock():
    """The second session ran on a machine with half the speed; only the plans determine the
    choices.
    """
    exact = synthetic_records(0.0, samples=1)
    names = ["all whole", "mix 1", "mix 3", "pick 1.0", "pick 1.1", "again 1 mix 1"]
    exact[5] = replace(exact[5], totals=exact[1].totals, step_ms=exact[1].step_ms)
    records = [
        replace(record, name=name, session=session_of(name), step_ms=record.step_ms * (1 + (n > 2)))
        for n, (name, record) in enumerate(zip(names, exact, strict=True))
    ]
    assert [record.session for record in records] == [0, 0, 0, 1, 1, 1]
    assert drift_of(records) == {(0, 1): pytest.approx(2.0)}
    steps = np.array([record.step_ms for record in on_one_clock(records)])
    np.testing.assert_allclose(steps, [record.step_ms for record in exact])
    errors = cross_validation(records, [record.phases for record in records], steps)
    assert errors["step relative"] == errors["regret"] == errors["regret of one round"] == 0.0
    assert errors["rank correlation"] == pytest.approx(1.0)
    assert errors["drift between sessions"] == pytest.approx(np.log(2.0))
    wrong = cross_validation(records, [record.phases for record in records], -steps)
    assert wrong["regret"] == pytest.approx(max(steps[:3]) / min(steps[:3]) - 1.0)
    gain = steps[3] / steps[5] - 1.0
    assert errors["pick over the best drawn plan"] == pytest.approx(gain)


def test_weights_are_only_of_terms_that_the_phase_can_depend_on(fitted):
    for phase, terms in TERMS.items():
        used = {name for name, place in INDEX.items() if fitted.matrix[place, PHASE[phase]] > 0}
        if terms:
            assert used <= set(terms)
    assert fitted.matrix[MEMORY].sum() == 0


def test_too_few_tasks_are_refused():
    with pytest.raises(DataError, match="2 measured samples; use 3 or more"):
        fit(synthetic_records(0.0, samples=2), backend="gloo")
