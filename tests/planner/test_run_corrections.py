"""Tests how training runs correct a calibration."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from sbpflow.errors import ConfigError
from sbpflow.planner.costs.cost import TaskCost
from sbpflow.planner.costs.profile import RANKS_HERE, Link, MeasuredRun, Profile, load
from sbpflow.planner.costs.run_corrections import (
    MOST_RUNS,
    belongs,
    differences,
    facts_of,
    origin_of,
    with_run,
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


def with_runs(*slower, profile=PROFILE, **changes):
    """Return the profile after runs whose steps took ``slower`` times the calibration's time."""
    for number, times in enumerate(slower):
        run = MeasuredRun(
            taken=f"2026-02-01T00:00:{number:02d}+00:00",
            software=FACTS["software"],
            predicted_ms=TaskCost(PROFILE, TASK).predict(PLAN).step_ms,
            measured_ms=times * TaskCost(PROFILE, TASK).predict(PLAN).step_ms,
        )
        profile = with_run(profile, replace(run, **changes))
    return profile


def test_runs_scale_all_prices_toward_their_measured_steps():
    one, two = with_runs(3.0), with_runs(3.0, 3.0)
    assert (len(one.runs), len(two.runs)) == (1, 2)
    assert one.run_factor == pytest.approx(3.0**0.5)  # the calibration counts as a run
    assert two.run_factor == pytest.approx(3.0)
    before, after = (TaskCost(profile, TASK).predict(PLAN).step_ms for profile in (PROFILE, two))
    assert after == pytest.approx(3.0 * before)
    assert TaskCost(two, TASK).prices_digest == TaskCost(PROFILE, TASK).prices_digest
    assert (
        TaskCost(two, TASK).prices_digest
        != TaskCost(replace(PROFILE, backend="nccl"), TASK).prices_digest
    )


def test_runs_on_a_busy_machine_do_not_ruin_the_prices():
    assert with_runs(1.1, 20.0, 1.2, 15.0, 1.3).run_factor < 1.35


def test_accumulated_batches_count_as_one_step():
    task = replace(TASK, accumulate=3)
    before, after = (TaskCost(p, task).predict(PLAN).step_ms for p in (PROFILE, with_runs(4.0)))
    assert after == pytest.approx(2.0 * before)


def test_runs_with_other_software_are_dropped():
    corrected = with_runs(1.0, profile=with_runs(3.0, 3.0, software="torch 1.0"))
    assert len(corrected.runs) == 1
    assert corrected.run_factor == pytest.approx(1.0)


def test_only_the_newest_runs_count():
    corrected = with_runs(*[9.0] * MOST_RUNS, *[2.0] * MOST_RUNS)
    assert len(corrected.runs) == MOST_RUNS
    assert corrected.run_factor == pytest.approx(2.0)


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
def test_runs_of_other_ranks_links_and_devices_do_not_belong_to_a_calibration(key, value):
    assert belongs(PROFILE, FACTS)
    assert not belongs(PROFILE, {**FACTS, key: value})


def test_profiles_keep_their_runs_and_older_files_have_none(tmp_path):
    corrected = with_runs(3.0, 2.0)
    corrected.save(tmp_path / "profile.json")
    assert load(tmp_path / "profile.json") == corrected
    older = corrected.as_json().replace('"runs"', '"not_runs"')
    (tmp_path / "profile.json").write_text(older[: older.index(',\n "not_runs"')] + "}")
    assert load(tmp_path / "profile.json") == PROFILE


def test_damaged_runs_are_refused_with_their_key(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(with_runs(3.0).as_json().replace('"measured_ms": ', '"measured_ms": -'))
    with pytest.raises(ConfigError, match=r"runs\S*measured_ms.*rerun sbpflow calibrate"):
        load(path)


def test_a_calibration_states_its_age_its_runs_and_what_differs():
    days = datetime.now(UTC) - timedelta(days=40, hours=1)
    corrected = with_runs(3.0)
    about = {**FACTS, "software": "torch 1.0, 8 torch threads", "taken": days.isoformat()}
    text = origin_of(replace(corrected, about=about), {**FACTS, "software": "torch 2.0"})
    assert (
        "(40 days ago), corrected by 1 run, measured with software torch 1.0 (now torch 2.0)"
        in text
    )
    assert differences(FACTS, FACTS) == []
    assert "unknown age" in origin_of(replace(PROFILE, about={}), FACTS)
