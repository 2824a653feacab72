"""Tests how training runs correct a calibration."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from sbpflow.planner.costs.cost import TaskCost
from sbpflow.planner.costs.profile import RANKS_HERE, Link, Profile, RunPrices, load
from sbpflow.planner.costs.run_journal import (
    MOST_LINES,
    RunLine,
    add_run,
    belongs,
    differences,
    facts_of,
    origin_of,
    with_runs,
)
from sbpflow.planner.task import Choice, Shape
from sbpflow.runtime.ranks.topology import Topology
from tests.planner.tasks import make_task

FACTS = facts_of("cpu (test) on host", "gloo", Topology.one_host(2))
PROFILE = Profile(
    work_ms={"always": 1.0, "step_rows": 1e-3, "read_rows": 1e-4},
    link=Link(within_gb_per_s=0.5, within_call_ms=0.1),
    world_size=2,
    backend="gloo",
    about={**FACTS, "taken": "2026-01-05T00:00:00+00:00"},
)
TASK = make_task(world_size=2, batch_size=400, rows=(500, 60, 90))
PLAN = {table.name: Choice(Shape("S(0)", "unique", (2, 1)), (0, 1)) for table in TASK.tables}


def run_line(slower, profile=PROFILE, **changes):
    """Return the line of a run whose steps took ``slower`` times the predicted time."""
    cost = TaskCost(profile, TASK)
    line = RunLine(
        taken="2026-02-01T00:00:00+00:00",
        facts=FACTS,
        batch_size=TASK.batch_size,
        steps=100,
        step_ms=slower * cost.predict(PLAN).step_ms,
        totals=tuple(map(tuple, cost.step_counts(PLAN).tolist())),
    )
    return replace(line, **changes)


def test_runs_scale_all_prices_toward_their_measured_steps():
    one = with_runs(PROFILE, [run_line(3.0)], FACTS)
    two = with_runs(one, [run_line(3.0), run_line(3.0)], FACTS)
    assert (one.runs.count, two.runs.count) == (1, 2)
    assert one.runs.factor == pytest.approx(3.0**0.5)  # the calibration counts as a run
    assert two.runs.factor == pytest.approx(3.0)
    before, after = (TaskCost(profile, TASK).predict(PLAN).step_ms for profile in (PROFILE, two))
    assert after == pytest.approx(3.0 * before)
    assert TaskCost(two, TASK).prices_digest == TaskCost(PROFILE, TASK).prices_digest
    assert (
        TaskCost(two, TASK).prices_digest
        != TaskCost(replace(PROFILE, backend="nccl"), TASK).prices_digest
    )


def test_runs_on_a_busy_machine_do_not_ruin_the_prices():
    lines = [run_line(slower) for slower in (1.1, 20.0, 1.2, 15.0, 1.3)]
    assert with_runs(PROFILE, lines, FACTS).runs.factor < 1.35


def test_accumulated_batches_count_as_one_step():
    task = replace(TASK, accumulate=3)
    cost = TaskCost(PROFILE, task)
    totals = tuple(map(tuple, cost.step_counts(PLAN).tolist()))
    line = run_line(1.0, step_ms=cost.predict(PLAN).step_ms, totals=totals)
    assert with_runs(PROFILE, [line, line], FACTS).runs.factor == pytest.approx(1.0)


@pytest.mark.parametrize(
    "changes",
    [
        {"facts": {**FACTS, "software": "torch 1.0"}},
        {"facts": {**FACTS, "counts": "always"}},
        {"taken": "2026-01-04T23:59:59+00:00"},
        {"totals": ()},
        {"totals": ((1.0,), (1.0, 2.0))},
    ],
    ids=["versions", "counts", "older than the calibration", "no ranks", "damaged counts"],
)
def test_foreign_runs_are_ignored(changes):
    corrected = with_runs(PROFILE, [run_line(3.0, **changes), run_line(1.0)], FACTS)
    assert corrected.runs.count == 1
    assert corrected.runs.factor == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("world", "4 gloo"),
        ("world", "2 nccl"),
        (RANKS_HERE, "1"),
        ("hosts", "2"),
        ("device", "cuda:0 (test)"),
        ("cpu", "another"),
    ],
)
def test_calibrations_of_other_ranks_links_and_devices_stay_unchanged(key, value):
    facts = {**FACTS, key: value}
    assert belongs(PROFILE, FACTS)
    assert not belongs(PROFILE, facts)
    assert with_runs(PROFILE, [run_line(3.0, facts=facts)], facts).runs == RunPrices()


def test_damaged_lines_are_ignored_and_old_lines_are_dropped(tmp_path, caplog):
    path = tmp_path / "profile.runs.jsonl"
    line = run_line(2.0)
    damaged = line.as_json().replace('"steps": 100', '"steps": -1')
    path.write_bytes(f"{line.as_json()}\n{damaged}\n[]\n".encode() + b"\xff\xfe{\n" + b'{"cut')
    lines = add_run(path, run_line(3.0))
    assert len(lines) == 2
    assert "4 lines are damaged" in caplog.text
    ratio = lines[1].step_ms / lines[0].step_ms
    assert ratio == pytest.approx(1.5)
    text = path.read_text(errors="replace")
    path.write_text("".join(f"{line.as_json()}\n" for _ in range(MOST_LINES)) + text)
    lines = add_run(path, run_line(4.0))
    assert len(lines) == MOST_LINES == path.read_text().count("\n")
    assert lines[-1].step_ms == pytest.approx(2 * line.step_ms)
    assert add_run(path, line)[-2].step_ms == lines[-1].step_ms


def test_profiles_keep_their_runs_and_older_files_have_none(tmp_path):
    corrected = with_runs(PROFILE, [run_line(3.0)], FACTS)
    corrected.save(tmp_path / "profile.json")
    assert load(tmp_path / "profile.json") == corrected
    older = corrected.as_json().replace('"runs"', '"not_runs"')
    (tmp_path / "profile.json").write_text(older[: older.index(',\n "not_runs"')] + "}")
    assert load(tmp_path / "profile.json") == PROFILE


def test_a_calibration_states_its_age_its_runs_and_what_differs():
    days = datetime.now(UTC) - timedelta(days=40, hours=1)
    corrected = with_runs(PROFILE, [run_line(3.0)], FACTS)
    about = {**FACTS, "software": "torch 1.0, 8 torch threads", "taken": days.isoformat()}
    text = origin_of(replace(corrected, about=about), {**FACTS, "software": "torch 2.0"})
    assert (
        "(40 days ago), corrected by 1 run, measured with software torch 1.0 (now torch 2.0)"
        in text
    )
    assert differences(FACTS, FACTS) == []
    assert "unknown age" in origin_of(replace(PROFILE, about={}), FACTS)
