"""Damaged files of the planner: one message that names file and key, or a plan of finite price."""

import json
import math
from pathlib import Path

import pytest

from sbpflow.errors import ConfigError
from sbpflow.planner.calibration.calibrate import Journal
from sbpflow.planner.clusters import described
from sbpflow.planner.costs.cost import CostModel
from sbpflow.planner.costs.profile import load
from sbpflow.planner.plan_cache import chosen_once
from sbpflow.planner.planners import make_plan
from sbpflow.planner.tables_file import read_tables
from sbpflow.planner.task import plan_from_yaml
from sbpflow.runtime.files.cache_dir import cache_dir
from tests.damage import damaged
from tests.planner.tasks import make_task
from tests.planner.test_calibrate import ENTRY

OLD = Path(__file__).parents[1] / "fixtures" / "d4baee1"
TASK = read_tables(OLD / "tables.json").task(2)
PROFILE = described("h100-dgx").as_json()
COST = CostModel(described("h100-dgx")).of(TASK)
PLAN = make_plan("dim", COST).plan


def refusal(read) -> str:
    """The message of a ConfigError; "" where there is none, and any other error is a failure."""
    said = ""
    try:
        read()
    except ConfigError as error:
        said = str(error)
    assert said.isprintable() or not said
    assert len(said) < 3000
    return said


def test_a_damaged_profile_is_refused_or_prices_a_plan(tmp_path):
    file, refused = tmp_path / "profile.json", 0
    raw = PROFILE.encode()

    def price() -> None:
        profile = load(file)
        assert math.isfinite(CostModel(profile).of(TASK).predict(PLAN).step_ms)

    for copy in damaged(raw, 120, others=((OLD / "tables.json").read_bytes(),)):
        file.write_bytes(copy)
        said = refusal(price)
        refused += bool(said)
        assert not said or said.startswith(
            (f"planner: {file} is no profile", "planner: the profile")
        )
    assert refused > 60


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("weights", float("nan"), "NaN is not a JSON number"),
        ("weights", 1e300, r"weights\[3\]\[4\]: 1e\+300 is not >= 0 and < 1e\+12"),
        ("weights", -1.0, r"weights\[3\]\[4\]: -1.0 is not >= 0"),
        ("weights", "x", r"weights\[3\]\[4\]: x \(str\) is not a finite number"),
        ("world_size", 10**30, "a whole number of 31 digits"),
        ("world_size", 0, "world_size: 0 is not >= 1"),
        ("hidden", {"ids": 2.0}, "hidden.ids: 2.0 is not >= 0 and <= 1"),
        ("hidden", {"idle": 0.5}, "hidden: 'idle' is not one of"),
        ("backend", "mpi", "backend: 'mpi'; use gloo or nccl"),
        ("about", {"ranks on a machine": "many"}, "'many' is not a number of ranks"),
        ("link", {"within_gb_per_s": 0.0}, r"link\.within_gb_per_s: 0 is not a bandwidth"),
        ("members", [{"idle": {}}], "members"),
        ("format", 2, "format is 2, this version has 3"),
    ],
)
def test_the_key_of_a_profile_that_is_wrong_is_named(tmp_path, key, value, says):
    tree = json.loads(PROFILE)
    if key == "weights":
        tree[key][3][4] = value
    else:
        tree[key] = value
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(tree))
    with pytest.raises(ConfigError, match=rf"is no profile of this version \(.*{says}") as caught:
        load(file)
    assert "run sbpflow calibrate again" in str(caught.value)


def test_a_key_that_a_profile_has_not_is_named(tmp_path):
    file, tree = tmp_path / "profile.json", json.loads(PROFILE)
    del tree["members"]
    file.write_text(json.dumps(tree))
    with pytest.raises(ConfigError, match="it has no members"):
        load(file)


def test_damaged_tables_are_refused_or_priced(tmp_path):
    file, refused = tmp_path / "tables.json", 0
    raw = (OLD / "tables.json").read_bytes()
    model = CostModel(described("h100-dgx"))
    for copy in damaged(raw, 150):
        file.write_bytes(copy)
        said = refusal(lambda: model.of(read_tables(file).task(2)))
        refused += bool(said)
    assert refused > 75


def test_a_damaged_plan_of_tables_is_refused(tmp_path):
    file, refused = tmp_path / "plan.yaml", 0
    for copy in damaged((OLD / "plan.yaml").read_bytes(), 80):
        file.write_bytes(copy)
        refused += bool(refusal(lambda: plan_from_yaml(file, TASK)))
    assert refused > 20


def test_a_damaged_plan_that_was_kept_is_chosen_again(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    chosen_once(COST, 7, lambda: PLAN)
    (file,) = (cache_dir() / "plans").iterdir()
    for copy in damaged(file.read_bytes(), 100):
        file.write_bytes(copy)
        assert chosen_once(COST, 7, lambda: PLAN) == PLAN


def test_lines_of_a_damaged_journal_are_measured_again(tmp_path):
    path, facts = tmp_path / "measured.jsonl", {"cpu": "one"}
    task = make_task(2)
    plan = {table.name: ["S(0)", "unique", [2, 1], [0, 1]] for table in task.tables}
    entries = [{**ENTRY, "name": f"again {n} a", "plan": plan, "facts": facts} for n in range(6)]
    old = json.loads(PROFILE)["transfers"][:3]
    lines = [*entries, {"transfers": old, "facts": facts}]
    raw = "".join(json.dumps(line) + "\n" for line in lines).encode()
    path.write_bytes(raw)
    assert len(Journal(path, facts).entries) == 6
    lost = 0
    for copy in damaged(raw, 150):
        path.write_bytes(copy)
        found = Journal(path, facts)
        lost += len(found.entries) < 6 or found.transfers is None
        assert all(math.isfinite(one.step_ms) for one in found.records(lambda _: task))
    assert lost > 75
