"""Calibration on two ranks: what is measured, kept and fitted; memory as predicted."""

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
from sbpflow.planner.calibration.command import describe, keep
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
from sbpflow.planner.costs.cost import CostModel
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
    """On every rank; the second goes on with what the first wrote."""
    boxing, counts = Boxing(world), []
    for _ in range(2):
        profile = calibrate(boxing, SETTINGS, path)
        counts.append(len(path.read_text().splitlines()))
    if profile is not None:
        profile.save(path.with_suffix(".json"))
    return counts, profile is not None


def test_a_calibration_is_kept_and_goes_on_where_it_stopped(ranks, tmp_path):
    path = tmp_path / "measured.jsonl"
    (counts, first), (_, second) = ranks(2, calibrate_twice, path)
    assert (first, second) == (True, False)
    first_line, second_line, *lines = map(json.loads, path.read_text().splitlines())
    transfers = [transfer_of(one) for one in first_line["transfers"]]
    assert {one.name for one in transfers} == set(SKEWS)
    assert [set(one["ms"]) for one in second_line["dense"]] == [set(DENSE_MOVES)]
    assert len(lines) == 3 * 2 + 3 * 2
    assert counts[0] == counts[1] == 2 + len(lines)  # nothing is measured twice
    assert len({(one["sample"], one["name"]) for one in lines}) == len(lines)
    assert {one["facts"]["tasks"] for one in lines} == {drawing()}
    assert any(one["name"].startswith("pick 1.") for one in lines)
    assert any(one["name"].startswith("all ") for one in lines)
    again = [one for one in lines if one["name"].startswith("again 1 ")]
    assert len(again) == 3  # the best drawn plan of every task, for the noise
    times = {(one["sample"], one["name"]): one["step_ms"] for one in lines}
    for one in again:
        drawn = [
            ms
            for (sample, name), ms in times.items()
            if sample == one["sample"] and not name.startswith(("pick", "again"))
        ]
        assert times[one["sample"], one["name"].removeprefix("again 1 ")] == min(drawn)
    one = lines[0]
    assert plan_tree(plan_of_tree(one["plan"])) == one["plan"]
    assert np.array(one["phases"]).shape == (2, NUM_PHASES)
    assert one["step_ms"] > 0
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
    assert CostModel(profile).of(task).predict(plan).step_ms > 0


def test_the_journal_of_another_machine_is_not_taken(tmp_path):
    path = tmp_path / "measured.jsonl"
    entry = {**ENTRY, "facts": {"cpu": "one"}}
    path.write_text(json.dumps(entry) + "\n" + '{"cut off')
    assert set(Journal(path, {"cpu": "one"}).entries) == {(1, "a")}
    assert not Journal(path, {"cpu": "other"}).entries


def test_what_is_written_behind_a_line_that_was_cut_off_is_read(tmp_path, caplog):
    path = tmp_path / "measured.jsonl"
    path.write_text('{"cut off')
    Journal(path, {"cpu": "one"}).add_transfers([])
    assert "1 lines are damaged or cut off; what they had is measured again" in caplog.text
    assert Journal(path, {"cpu": "one"}).transfers == []


def test_samples_are_the_same_wherever_they_are_drawn():
    one, other = (draw_sample(5, 2, "cpu", "sgd") for _ in range(2))
    assert one.task.tables == other.task.tables
    ids = [draw_batches(one, 1, 1, torch.device("cpu"))[0].ids for _ in range(2)]
    assert torch.equal(*ids)
    widths = [feature.hotness for feature in one.task.features]
    for table, columns in zip(one.task.tables, ids[0].split(widths, 1), strict=True):
        assert int(columns.max()) < table.num_rows
    names = [name for name, _ in draw_plans(one, 5, 8)]
    assert names == [name for name, _ in draw_plans(other, 5, 8)]
    assert any(name.startswith("all ") for name in names)
    assert all(
        shape.copied or shape.num_shards <= 4
        for table in one.task.tables
        for shape in shapes_for(table, 4)
    )


def test_a_number_drawn_otherwise_is_another_task(monkeypatch, tmp_path):
    """So that what was measured of a task is not taken for that of another."""
    (tmp_path / "design.py").write_text("drawn otherwise")
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
    assert [[len(text) for text in one] for one in ranks(2, texts_of)] == [[10, 100]] * 2


def move_names(world):
    """Moves with time, of one serial step; and the bytes that travelled against those counted."""
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
    for times, sent, counted, let_go in ranks(2, move_names):
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
        assert let_go


def rows_sent(world, shape):
    """[(bytes that this rank sent in a step, those counted)] of ids, vectors and gradients."""
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
            sum(r.bytes_sent for r in world.log.records if r.step_id.endswith(what)),
            counted[INDEX[n]],
        )
        for what, n in (
            ("fwd/ids", "counted_bytes"),
            ("fwd/vectors", "vector_bytes"),
            ("bwd/vectors", "gradient_bytes"),
        )
    ]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("sbp", ["S(0)", "S(1)"])
def test_unique_rows_that_travel_are_as_many_as_counted(ranks, size, sbp):
    parts = (size, 1) if sbp == "S(0)" else (1, size)  # of 3 ranks one has 2 of 8 columns
    for rank in ranks(size, rows_sent, Shape(sbp, "unique", parts)):
        for sent, counted in rank:
            assert sent == pytest.approx(counted, rel=0.15)


def test_a_transfer_lasts_from_the_last_ranks_start_to_the_last_ones_end():
    """The sender goes on at once, for the link has room; 8 ms later all of it is there."""
    sender, receiver = ([[0.0] * NUM_PHASES] for _ in range(2))
    for row, work, wait in ((sender[0], 5.0, 0.1), (receiver[0], 1.0, 12.0)):
        row[PHASE["lookup"]], row[PHASE["vectors"]] = work, wait
    found = phases_of([sender, receiver])
    assert [row[PHASE["vectors"]] for row in found] == [8.0, 8.0]
    assert [row[PHASE["lookup"]] for row in found] == [5.0, 1.0]
    assert sum(map(sum, found)) == 22.0


def peak_and_prediction(world):
    """Growth of this process by a plan of 50 MB of tables, and what is predicted."""
    boxing = Boxing(world)
    task = make_task(world_size=2, batch_size=2048, rows=(400_000, 50, 300_000), dim=16)
    plan = {
        "t0": Choice(Shape("S(0)", "unique", (2, 1)), (0, 1)),
        "t1": Choice(Shape("B", "local"), (0, 1)),
        "t2": Choice(Shape("B", "columns"), (1,)),
    }
    sample = laws_of(task)
    batches = draw_batches(sample, world.rank, 2, world.device)
    measure_in_turns(boxing, task, [plan], batches, rounds=1)  # what is there once
    (found,) = measure_in_turns(boxing, task, [plan], batches, rounds=1)
    cost = CostModel(load_nothing()).of(task)
    return found.peak_bytes, cost.memory(cost.totals(plan)).tolist()


def ragged_steps(world, folder):
    """A step with lists, and of every rank what its batch has."""
    task = make_task(world_size=2, batch_size=400, rows=(500, 60, 90))
    some = {"f0": 2.25, "f2": 0.5}
    features = [
        replace(one, hotness=math.ceil(some[one.name]), ragged=True) if one.name in some else one
        for one in task.features
    ]
    task = replace(task, features=tuple(features), ids_per_sample=some)
    batches = draw_batches(laws_of(task), world.rank, 2, world.device)
    plan = {t.name: Choice(Shape("S(0)", "unique", (2, 1)), (0, 1)) for t in task.tables}
    (found,) = measure_in_turns(Boxing(world), task, [plan], batches, rounds=1)
    usual, world.topology = world.topology, Topology(hosts=((0,), (1,)))
    keep(Boxing(world), load_nothing() if world.rank == 0 else None, folder / f"{world.rank}.json")
    world.topology = usual
    ids = batches[0].ids
    lists = ids.lists
    largest = [int(lists.take(torch.tensor([n])).values.max()) for n in range(2)]
    return found.step_ms, ids.matrix.shape, lists.lengths.float().mean(0).tolist(), largest


def test_lists_of_ids_are_measured_and_every_machine_keeps_the_profile(ranks, tmp_path):
    for ms, matrix, lengths, largest in ranks(2, ragged_steps, tmp_path):
        assert ms > 0
        assert matrix == (200, 3)
        assert lengths == pytest.approx([2.25, 0.5], abs=0.15)
        assert largest[0] >= 90 > largest[1]  # of t0's 500 rows, and of t2's 90
    assert load(tmp_path / "0.json") == load(tmp_path / "1.json") == load_nothing()


def load_nothing():
    return empty_profile(2, "gloo")


def test_predicted_memory_is_what_the_ranks_took(ranks):
    peak, predicted = ranks(2, peak_and_prediction)[0]
    for took, said in zip(peak, predicted, strict=True):
        assert said == pytest.approx(took, rel=0.25)
    assert predicted[1] > predicted[0] + 15e6  # the whole table is on rank 1


# Fitting


def test_non_negative_least_squares_finds_the_weights_and_no_negative_ones():
    random = np.random.default_rng(2)
    x = random.random((80, 5))
    true = np.array([2.0, 0.0, 0.5, 0.0, 3.0])
    np.testing.assert_allclose(nonnegative_least_squares(x, x @ true), true, atol=1e-4)
    found = nonnegative_least_squares(x, x @ np.array([1.0, -2.0, 0.5, 0.0, 1.0]))
    assert found[1] == 0.0
    assert (found >= 0).all()
    most = np.array([0.5, np.inf, 0.25, np.inf, np.inf])
    bounded = nonnegative_least_squares(x, x @ true, most=most)
    assert (bounded <= most).all()
    assert bounded[0] == 0.5


def made_records(noise, samples=12):
    """Steps of a machine whose prices are known, with plans of as many tasks."""
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
    return fit(made_records(0.03), backend="gloo")


def test_a_fit_predicts_steps_and_chooses_well_on_tasks_it_has_not_seen(fitted):
    assert fitted.errors["step relative"] < 0.08
    assert fitted.errors["regret"] < 0.03 < fitted.errors["regret of a random plan"]
    assert fitted.errors["rank correlation"] > 0.8


def test_a_correction_learns_what_the_sum_cannot_say(fitted):
    fresh = made_records(0.0, samples=14)[12 * 6 :]  # two further tasks

    def error(profile):
        phases, steps = predicted_phases(profile, fresh), predicted_steps(profile, fresh)
        return cross_validation(fresh, phases, steps)["update relative"]

    assert error(fitted) < 0.7 * error(replace(fitted, members=()))


def test_a_correction_is_kept_only_where_it_helps_on_other_tasks(fitted):
    assert "update" in fitted.members[0]
    assert not {"lookup", "vectors"} & set(fitted.members[0])  # sums already, but for noise


@pytest.mark.parametrize(("gain", "kept"), [(0.04, False), (0.06, True)])
def test_a_correction_that_helps_little_is_not_kept(gain, kept):
    """What it says of larger tasks than were measured is worth less than a little."""
    y, linear = np.full(8, 10.0), np.full(8, 12.0)
    floor = corrections.FLOOR_MS
    error = (1.0 - gain) * math.log((12.0 + floor) / (10.0 + floor))
    said = np.full((1, 8), math.exp(error) * (10.0 + floor) - floor)
    assert corrections._helps(said, linear, y, counted=np.zeros((1, 8))) is kept


def test_sessions_are_judged_apart_and_brought_on_one_clock():
    """The second session ran on a machine twice as slow; its model chooses by the plans alone."""
    exact = made_records(0.0, samples=1)
    names = ["all whole", "mix 1", "mix 3", "pick 1.0", "pick 1.1", "again 1 mix 1"]
    exact[5] = replace(exact[5], totals=exact[1].totals, step_ms=exact[1].step_ms)
    records = [
        replace(one, name=name, session=session_of(name), step_ms=one.step_ms * (1 + (n > 2)))
        for n, (name, one) in enumerate(zip(names, exact, strict=True))
    ]
    assert [one.session for one in records] == [0, 0, 0, 1, 1, 1]
    assert drift_of(records) == {(0, 1): pytest.approx(2.0)}
    steps = np.array([one.step_ms for one in on_one_clock(records)])
    np.testing.assert_allclose(steps, [one.step_ms for one in exact])
    errors = cross_validation(records, [one.phases for one in records], steps)
    assert errors["step relative"] == errors["regret"] == errors["regret of one round"] == 0.0
    assert errors["rank correlation"] == pytest.approx(1.0)
    assert errors["drift between sessions"] == pytest.approx(np.log(2.0))
    wrong = cross_validation(records, [one.phases for one in records], -steps)
    assert wrong["regret"] == pytest.approx(max(steps[:3]) / min(steps[:3]) - 1.0)
    gain = steps[3] / steps[5] - 1.0
    assert errors["pick over the best drawn plan"] == pytest.approx(gain)


def test_weights_are_of_terms_that_the_phase_can_depend_on(fitted):
    for phase, terms in TERMS.items():
        used = {name for name, place in INDEX.items() if fitted.matrix[place, PHASE[phase]] > 0}
        if terms:
            assert used <= set(terms)
    assert fitted.matrix[MEMORY].sum() == 0


def test_too_few_tasks_are_refused():
    with pytest.raises(DataError, match="a fit needs 3 at least"):
        fit(made_records(0.0, samples=2), backend="gloo")
