"""Tests that damaged planner files either raise one ConfigError that names the key, or give a
finite price.
"""

import json
import math
from pathlib import Path

import pytest

from sbpflow.errors import ConfigError
from sbpflow.planner.calibration.calibrate import Journal
from sbpflow.planner.clusters import described
from sbpflow.planner.costs.cost import TaskCost
from sbpflow.planner.costs.profile import load
from sbpflow.planner.plan_cache import chosen_once
from sbpflow.planner.planners import make_plan
from sbpflow.planner.tables_file import read_tables
from sbpflow.planner.task import plan_from_yaml
from sbpflow.runtime.files.cache_dir import cache_dir
from tests.damage import damaged
from tests.planner.test_calibrate import ENTRY, FACTS

OLD = Path(__file__).parents[1] / "fixtures" / "d4baee1"
TASK = read_tables(OLD / "tables.json").task(2)
PROFILE = described("h100-dgx")
PROFILE_TEXT = PROFILE.as_json()
COST = TaskCost(PROFILE, TASK)
PLAN = make_plan("dim", COST).plan


def refusal(read) -> str:
    """Return the message of a ConfigError, or "" if none is raised; any other error fails the
    test.
    """
    message = ""
    try:
        read()
    except ConfigError as error:
        message = str(error)
    assert message.isprintable() or not message
    assert len(message) < 3000
    return message


def test_a_damaged_profile_is_refused_or_prices_a_plan(tmp_path):
    file, refused = tmp_path / "profile.json", 0
    raw = PROFILE_TEXT.encode()

    def price() -> None:
        profile = load(file)
        assert math.isfinite(TaskCost(profile, TASK).predict(PLAN).step_ms)

    for copy in damaged(raw, 120, others=((OLD / "tables.json").read_bytes(),)):
        file.write_bytes(copy)
        message = refusal(price)
        refused += bool(message)
        expected = (f"planner: {file} is not a profile", "planner: the profile")
        assert not message or message.startswith(expected)
    assert refused > 60


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("work_ms", {"always": float("nan")}, "NaN is not a JSON number"),
        ("work_ms", {"always": 1e300}, r"work_ms.always must be >= 0 and < 1e\+12, got 1e\+300"),
        ("work_ms", {"always": -1.0}, r"work_ms.always must be >= 0 .*got -1.0"),
        ("work_ms", {"idle": 1.0}, "work_ms: 'idle' is not one of this version's counts"),
        ("world_size", 10**30, "a whole number has 31 digits"),
        ("world_size", 0, "world_size must be >= 1 .*got 0"),
        ("backend", "mpi", "backend must be gloo or nccl, got 'mpi'"),
        ("about", {"ranks on a machine": "many"}, "'many' is not a number of ranks"),
        ("link", {"within_gb_per_s": 0.0}, r"link\.within_gb_per_s must be above 0"),
        (
            "link",
            {"within_gb_per_s": 2.0, "between_gb_per_s": 1.0, "ranks_per_node": 4}
            | {"ranks_per_link": 3},
            "link.ranks_per_link must divide link.ranks_per_node, 4, got 3",
        ),
        ("format", 5, "format is 5, but this version reads 6"),
    ],
)
def test_the_wrong_key_of_a_profile_is_named(tmp_path, key, value, message):
    tree = json.loads(PROFILE_TEXT)
    tree[key] = value
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(tree))
    pattern = rf"is not a profile of this version \(.*{message}.*sbpflow calibrate"
    with pytest.raises(ConfigError, match=pattern):
        load(file)


def test_a_missing_key_of_a_profile_is_named(tmp_path):
    file, tree = tmp_path / "profile.json", json.loads(PROFILE_TEXT)
    del tree["link"]
    file.write_text(json.dumps(tree))
    with pytest.raises(ConfigError, match="missing keys: link"):
        load(file)


def test_damaged_tables_are_refused_or_priced(tmp_path):
    file, refused = tmp_path / "tables.json", 0
    raw = (OLD / "tables.json").read_bytes()
    for copy in damaged(raw, 150):
        file.write_bytes(copy)
        refused += bool(refusal(lambda: TaskCost(PROFILE, read_tables(file).task(2))))
    assert refused > 75


def test_a_damaged_plan_of_tables_is_refused(tmp_path):
    file, refused = tmp_path / "plan.yaml", 0
    for copy in damaged((OLD / "plan.yaml").read_bytes(), 80):
        file.write_bytes(copy)
        refused += bool(refusal(lambda: plan_from_yaml(file, TASK)))
    assert refused > 20


def test_a_damaged_cached_plan_is_replaced(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    chosen_once(COST, 7, lambda: PLAN)
    (file,) = (cache_dir() / "plans").iterdir()
    for copy in damaged(file.read_bytes(), 100):
        file.write_bytes(copy)
        assert chosen_once(COST, 7, lambda: PLAN) == PLAN


def test_damaged_lines_of_a_journal_are_measured_again(tmp_path):
    path = tmp_path / "measured.jsonl"
    lines = [{**ENTRY, "sample": number} for number in range(6)]
    raw = "".join(json.dumps(line) + "\n" for line in lines).encode()
    path.write_bytes(raw)
    assert len(Journal(path, FACTS).records) == 6
    lost = 0
    for copy in damaged(raw, 150):
        path.write_bytes(copy)
        journal = Journal(path, FACTS)
        lost += len(journal.records) < 6
        assert all(math.isfinite(record.step_ms) for record in journal.records.values())
    assert lost > 75
