"""``parallel.plan``: chosen by the planner or read from a file, kept, and judged at the end."""

import json
import re
from functools import cache
from pathlib import Path

import pytest
import yaml

import train
from data import fields_of, load_manifest
from data.stats import load_stats
from models.registry import MODELS
from planner.for_run import plan_tables
from planner.profile import Profile, default_path, weights_from
from planner.task import embedding_plan, rules
from sbpflow.__main__ import explain
from sbpflow.config.load import load_config
from sbpflow.config.table_plan import read_table_plan
from sbpflow.errors import ConfigError
from sbpflow.run.build_plan import plan_run
from sbpflow.run.explain import describe
from sbpflow.run.plan_file import plan_from_json
from sbpflow.training.run_folder import TABLE_PLAN_FILE

ROOT = Path(__file__).parents[2]
CONFIG = str(ROOT / "configs/scheme3.yaml")
SMALL = ["model.hidden=[16]", "data.batch_size=1000", "parallel.scheme=null"]


def profile(step_row=1e-3, vector_byte=1e-6):
    """A machine where updates of rows and bytes of vectors are what costs."""
    terms = {
        "update": {"step_rows": step_row, "step_elements": 1e-6, "always": 0.1},
        "look_up": {"read_rows": 1e-5},
        "vectors": {"vector_bytes": vector_byte, "num_unique": 0.3, "num_columns": 0.2},
        "row gradients": {"gradient_bytes": vector_byte, "num_unique": 0.3, "num_local": 0.1},
        "forward": {"always": 1.0},
    }
    return Profile(weights=weights_from(terms), world_size=2, backend="gloo")


@pytest.fixture
def calibrated(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    profile().save(default_path())


@cache
def planned(synth_set, words=(), prices=()):
    config = load_config(
        CONFIG, [*SMALL, f"data.path={synth_set}", "parallel.plan=auto", *words], models=MODELS
    )
    manifest = load_manifest(synth_set)
    found = plan_tables(
        config,
        fields_of(manifest),
        load_stats(manifest),
        manifest.splits["train"],
        world_size=2,
        device_type="cpu",
        profile=profile(*prices),
    )
    return config, fields_of(manifest), found


def test_a_planned_run_leaves_its_plan_and_judges_its_prediction(
    synth_set, tmp_path, calibrated, capsys
):
    folder = tmp_path / "run"
    words = [*SMALL, f"data.path={synth_set}", f"run.dir={folder}"]
    assert train.main(["--config", CONFIG, *words, "parallel.plan=auto"]) == 0
    assert re.search(r"step time:\s+predicted [0-9.]+ ms .*measured", capsys.readouterr().err)
    first = plan_from_json((folder / "plan.json").read_text())
    kept = folder / TABLE_PLAN_FILE
    assert yaml.safe_load(kept.read_text())["notes"]["predicted_step_ms"] > 0
    again = tmp_path / "again"
    words[-1] = f"run.dir={again}"
    assert train.main(["--config", CONFIG, *words, f"parallel.plan={kept}"]) == 0
    second = plan_from_json((again / "plan.json").read_text())
    assert second.embeddings == first.embeddings
    assert {layout.key for layout in first.layouts.values()} == {"parallel.plan auto"}


def test_the_task_of_a_run_is_what_the_run_has(synth_set):
    config, fields, found = planned(synth_set)
    task = found.task
    _, plan = plan_run(config, fields, world_size=2, device_type="cpu", planned=found.rules)
    assert embedding_plan(task, found.plan) == plan.embeddings
    assert task.batch_size == 1000
    assert task.dense.parameters == sum(p.num_elements(0) for p in plan.dense)
    manifest = load_manifest(synth_set)
    stats = {one.name: one for one in load_stats(manifest)}
    table = task.tables[0]
    ratio = stats[table.features[0]].unique_ratio["1024"]
    assert task.stats[table.name].touched(1024) == pytest.approx(1024 * ratio, rel=0.02)
    assert rules(found.plan) == found.rules


def test_a_plan_follows_what_the_machine_is_priced_at(synth_set):
    _, _, dear_bytes = planned(synth_set, prices=(1e-9, 1e-3))
    _, _, dear_rows = planned(synth_set, prices=(10.0, 1e-12))
    sent = [sum(one.prediction.sent_bytes) for one in (dear_bytes, dear_rows)]
    assert sent[0] < sent[1]
    assert dear_bytes.plan != dear_rows.plan


def test_tables_that_the_user_decides_are_kept(synth_set):
    pin = "parallel.tables={deep.C1: {sbp: S(1)}}"
    config, fields, found = planned(synth_set, (pin,))
    assert found.plan["deep.C1"].shape.sbp == "S(1)"
    _, plan = plan_run(config, fields, world_size=2, device_type="cpu", planned=found.rules)
    entry = next(one for one in describe(plan)["tables"] if one["name"] == "deep.C1")
    assert entry["sbp"] == "S(1)"


def test_explain_plans_as_a_run_does(synth_set, calibrated, capsys):
    words = ["--config", CONFIG, "--world-size", "2", "--json"]
    auto = ["parallel.plan=auto", "parallel.device=cpu"]
    explain([*words, *SMALL, f"data.path={synth_set}", *auto])
    tables = json.loads(capsys.readouterr().out)["tables"]
    _, _, found = planned(synth_set)
    exchanges = {one["name"]: one["exchange"] for one in tables}
    assert exchanges == {name: one.shape.exchange for name, one in found.plan.items()}


# Mistakes


def test_without_a_calibration_the_command_that_makes_one_is_named(
    synth_set, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    words = [*SMALL, f"data.path={synth_set}", f"run.dir={tmp_path}"]
    with pytest.raises(ConfigError, match="python -m planner calibrate"):
        train.main(["--config", CONFIG, *words, "parallel.plan=auto"])


def test_a_plan_beside_a_scheme_is_refused():
    with pytest.raises(ConfigError, match=r"leave one out, for example parallel\.scheme=null"):
        load_config(CONFIG, ["parallel.plan=auto"], models=MODELS)


def test_programs_without_a_planner_say_so(synth_set):
    config, fields, _ = planned(synth_set)
    with pytest.raises(ConfigError, match=r"parallel\.plan: auto is chosen by a planner"):
        plan_run(config, fields, world_size=2, device_type="cpu")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tables: {'*.C1': {sbp: S(0)}}", "no pattern of parallel.tables matches"),
        ("tables: {nothing: {sbp: S(0)}, '*': {sbp: S(0)}}", "matches no table"),
        ("tables: {'*': {sbp: S(9)}}", "is no layout of a table"),
        ("table: {}", "unknown key"),
        ("[1]", "holds list"),
    ],
)
def test_a_file_that_is_no_plan_is_refused(synth_set, tmp_path, text, words):
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    config = load_config(CONFIG, [*SMALL, f"parallel.plan={path}"], models=MODELS)
    fields = fields_of(load_manifest(synth_set))
    with pytest.raises(ConfigError, match=words):
        plan_run(config, fields, world_size=2, device_type="cpu")
    with pytest.raises(ConfigError, match="does not exist"):
        read_table_plan(tmp_path / "other.yaml")
