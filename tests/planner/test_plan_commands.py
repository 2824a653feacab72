"""Tests the planner's commands: their files, reports, and errors."""

import json
import math
import re
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
import yaml

from sbpflow.errors import ConfigError, PlanError
from sbpflow.planner.__main__ import calibrate
from sbpflow.planner.clusters import described, profile_of
from sbpflow.planner.costs.cost import TaskCost
from sbpflow.planner.costs.profile import Link
from sbpflow.planner.plan_command import clusters, compare, explain, plan
from sbpflow.planner.planners import (
    make_plan,
    planner_of,
)
from sbpflow.planner.shapes import assignment_of, problem_of
from sbpflow.planner.tables_file import read_tables
from sbpflow.planner.task import plan_from_yaml

PROFILE = described("h100-dgx")


TABLES = {
    "batch_size": 512,
    "device_gb": 1,
    "tables": [
        {"name": "C1", "rows": 5000, "dim": 8, "zipf": {"s": 1.05, "q": 2.0}},
        {"name": "C2", "rows": 90, "dim": 16, "ids_per_sample": 2.5, "zipf": {"s": 0.5}},
        {"name": "C3", "rows": 800, "dim": 8, "sample": [1, 2, 2, 3, 9, 1]},
    ],
}


def test_explain_reads_the_file_that_plan_writes(tmp_path):
    tables, out, report = tmp_path / "tables.json", tmp_path / "plan.yaml", tmp_path / "plan.json"
    tables.write_text(json.dumps(TABLES))
    common = ["--tables", str(tables), "--ranks", "2", "--profile", "h100-dgx"]
    text = plan([*common, "--output", str(out), "--report", str(report)])
    tree = json.loads(report.read_text())
    assert f"predicted step {tree['predicted_ms']:.3f} ms" in text
    again = explain([*common, "--plan", str(out)])
    assert f"predicted step {tree['predicted_ms']:.3f} ms" in again
    rows = compare([*common, "--planners", "auto", "size"]).splitlines()
    assert [row.split()[0] for row in rows] == ["planner", "auto", "size"]
    cost = TaskCost(PROFILE, read_tables(tables).task(2, "cuda"))
    problem = problem_of(cost)
    answer = make_plan("dim", cost)
    assert assignment_of(problem, answer.plan) == answer.assignment


@pytest.mark.parametrize(
    ("rule", "ranks", "line"),
    [
        ("{sbp: S(0), ranks: [3, 0, 1], exchange: unique}", 4, "C1: S(0) unique 3x1 on 3,0,1;"),
        ("{sbp: S(1), ranks: [2, 0, 1]}", 4, "C1: S(1) columns 1x3 on 2,0,1;"),
        ("{sbp: S(1), ranks: [1]}", 2, "C1: S(1) columns on 1;"),
        ("{sbp: S(0), ranks: [1], exchange: columns}", 2, "C1: S(0) columns on 1;"),
        ("{sbp: '(S(0), S(1))', ranks: [[0], [1]]}", 2, "C1: (S(0), S(1)) reduce 2x1 on 0,1;"),
        ("{sbp: S(0), exchange: unique}", 1, "C1: S(0) unique on 0"),
    ],
)
def test_explain_prices_shapes_that_a_search_does_not_try(tmp_path, rule, ranks, line):
    tables, file = tmp_path / "tables.json", tmp_path / "plan.yaml"
    tables.write_text(json.dumps(TABLES))
    file.write_text(f"tables: {{'*': {{sbp: B}}, C1: {rule}}}")
    words = ["--tables", str(tables), "--ranks", str(ranks), "--profile", "h100-dgx"]
    text = explain([*words, "--plan", str(file)])
    assert line in text
    cost = TaskCost(PROFILE, read_tables(tables).task(ranks, "cuda"))
    ms = cost.predict(plan_from_yaml(file, cost.task)).step_ms
    assert f"predicted step {ms:.3f} ms" in text


def test_explain_takes_two_hops_over_the_hosts_of_the_profile(tmp_path):
    tables, file = tmp_path / "tables.json", tmp_path / "plan.yaml"
    tables.write_text(json.dumps(TABLES))
    words = ["--tables", str(tables), "--profile", "h100-dgx", "--plan", str(file), "-n", "16"]
    file.write_text("tables: {'*': {sbp: '(S(0), S(0))'}}")
    assert "C1: (S(0), S(0)) unique 2x8 on 0..15;" in explain(words)
    assert "C1: (S(0), S(0)) unique 1x8 on 0,1,2,3,4,5,6,7;" in explain([*words[:-1], "8"])
    file.write_text(f"tables: {{'*': {{sbp: '(S(0), S(0))', ranks: [{list(range(16))}]}}}}")
    with pytest.raises(ConfigError, match="in one row, but they are on different hosts"):
        explain(words)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{C1: {sbp: B}}", r"plan.yaml: no pattern of the plan matches C2"),
        ("{'*': {sbp: B}, C9: {sbp: B}}", r"parallel.plan .*plan.yaml.C9 matches no table"),
        ("{'*': {sbp: B, comm_dtype: bfloat16}}", r"tables.\*.comm_dtype is bfloat16, .* float32"),
        ("{'*': {sbp: S(0), ranks: [0, 2]}}", r"\(C1\): \[2\] are not in a world of 2"),
        ("{'*': {sbp: S(0), sizes: [10, 4990]}}", "it has 90|adds up to 5000"),
    ],
)  # fmt: skip
def test_explain_reports_the_faults_of_a_plan(tmp_path, text, message):
    tables, file = tmp_path / "tables.json", tmp_path / "plan.yaml"
    tables.write_text(json.dumps(TABLES))
    file.write_text(f"tables: {text}")
    with pytest.raises(ConfigError, match=message):
        explain(["--tables", str(tables), "--profile", "h100-dgx", "--plan", str(file)])


def test_without_a_profile_both_ways_to_get_one_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=r"sbpflow calibrate .*--profile h100-dgx"):
        profile_of(None)
    with pytest.raises(ConfigError, match=r"--profile: h100 is neither .*h100-dgx, a100-dgx"):
        profile_of("h100")
    assert profile_of("h100-dgx") == PROFILE


def test_a_described_machine_has_the_memory_of_its_data_sheet(tmp_path):
    path = tmp_path / "tables.json"
    large = {**TABLES["tables"][0], "rows": 2_000_000_000, "dim": 64}
    whole = {"batch_size": 512, "tables": [large]}
    words = ["--tables", str(path), "--ranks", "2", "--profile", "h100-dgx"]
    words += ["--planner", "size"]
    path.write_text(json.dumps(whole))
    with pytest.raises(PlanError, match=r"fits in 68.00 GB per rank.*the largest table is C1"):
        plan(words)
    path.write_text(json.dumps({**whole, "device_gb": 600}))
    plan(words)
    path.write_text(json.dumps({**whole, "device_gb": [1, 600]}))
    output = tmp_path / "plan.yaml"
    plan([*words[:-2], "--output", str(output)])
    assert yaml.safe_load(output.read_text())["tables"]["C1"]["ranks"] == [1]
    path.write_text(json.dumps({**whole, "device_gb": [600, 600, 600]}))
    with pytest.raises(ConfigError, match="device_gb: got 3 numbers for 2 ranks; give one number"):
        plan(words)


def test_a_slow_rank_gets_less_work(tmp_path):
    path, report = tmp_path / "tables.json", tmp_path / "plan.json"
    tables = [{**TABLES["tables"][0], "name": f"C{n}", "dim": 128} for n in range(12)]
    words = ["--tables", str(path), "-n", "3", "--profile", "h100-dgx", "--report", str(report)]
    held = list[int]()
    for speed in (1, [1, 0.1, 1]):
        path.write_text(json.dumps({"batch_size": 2**16, "tables": tables, "speed": speed}))
        plan(words)
        ranks = json.loads(report.read_text())["ranks"]
        held.append(ranks[1]["memory_bytes"])
    assert held[1] < held[0]
    for speed, message in (
        (0, r"speed must be a number, above 0 and below 1e\+18, got 0"),
        ([1, -1, 1], r"speed\[1\] must be a number, above 0"),
        ([1, True, 1], r"speed\[1\] must be a number.* got True"),
        ("fast", r"speed must be a number.* got 'fast'"),
        ([], r"speed: the list is empty"),
        ([1, 1], r"speed: got 2 numbers for 3 ranks; give one number"),
    ):
        path.write_text(json.dumps({"batch_size": 2**16, "tables": tables, "speed": speed}))
        with pytest.raises(ConfigError, match=message):
            plan(words)


def test_names_in_any_script_are_reported(tmp_path):
    tables = tmp_path / "tables.json"
    named = json.loads(json.dumps(TABLES))
    named["tables"][0]["name"] = "Gr\u00f6\u00dfe"
    tables.write_text(json.dumps(named))
    common = ["--tables", str(tables), "--profile", "h100-dgx", "--planner", "size"]
    for suffix in (".txt", ".json", ".html"):
        out, report = tmp_path / "plan.yaml", tmp_path / f"plan{suffix}"
        assert "Gr\u00f6\u00dfe: " in plan([*common, "--output", str(out), "--report", str(report)])
        assert report.read_text(encoding="utf-8")
    assert "Gr\u00f6\u00dfe: " in explain([*common[:4], "--plan", str(out)])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--report", "plan.pdf"], "--report must end in one of .txt, .json, .html"),
        (["--measure", "-1"], "--measure must be 0 or more, got -1"),
        (["--measure", "2"], "--measure samples ids by each table's key zipf"),
        (
            ["--output", "nowhere/plan.yaml"],
            "--output nowhere/plan.yaml: the folder nowhere does not exist",
        ),
        (["--output", "."], r"--output: \. is a folder; use a file, such as --output plan.yaml"),
        (["--planner", "best"], "--planner must be one of auto, random"),
    ],
)
def test_impossible_outputs_and_measurements_are_refused_before_planning(
    tmp_path, monkeypatch, words, message
):
    tables = tmp_path / "tables.json"
    tables.write_text(json.dumps(TABLES))
    monkeypatch.setattr("sbpflow.planner.plan_command.make_plan", None)
    with pytest.raises(ConfigError, match=message):
        plan(["--tables", str(tables), "--profile", "h100-dgx", *words])


def test_outputs_do_not_replace_other_files_of_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr("sbpflow.planner.plan_command.make_plan", None)
    tables, shared = tmp_path / "tables.json", tmp_path / "plan.txt"
    tables.write_text(json.dumps(TABLES))
    words = ["--tables", str(tables), "--profile", "h100-dgx"]
    for more, message in (
        (["--output", str(tables)], r"--output .*: this is also the file of --tables; .*-output\."),
        (["--report", str(tables)], "--report .*: this is also the file of --tables"),
        (["--output", str(shared), "--report", str(shared)], "also the file of --output"),
    ):
        with pytest.raises(ConfigError, match=message):
            plan([*words, *more])
    with pytest.raises(ConfigError, match=r"--report .*: this is also the file of --plan"):
        explain([*words, "--plan", str(shared), "--report", str(shared)])
    assert json.loads(tables.read_text()) == TABLES


def test_plans_for_gpus_are_not_measured_on_cpus(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path = tmp_path / "tables.json"
    path.write_text(json.dumps({**TABLES, "tables": TABLES["tables"][:2]}))
    with pytest.raises(ConfigError, match="the profile h100-dgx describes GPUs"):
        plan(["--tables", str(path), "--profile", "h100-dgx", "--measure", "2"])


def test_plans_are_measured_on_the_devices_of_the_profile(tmp_path, monkeypatch):
    """A machine with GPUs can plan for its CPU ranks."""
    path, profile, commands = tmp_path / "tables.json", tmp_path / "cpu.json", []
    path.write_text(json.dumps({**TABLES, "tables": TABLES["tables"][:2]}))
    replace(PROFILE, backend="gloo").save(profile)
    monkeypatch.setattr(
        "sbpflow.planner.plan_command.start_ranks", lambda words, *_: commands.append(words) or 1
    )
    with pytest.raises(ConfigError, match="--measure: a rank failed with exit code 1"):
        plan(["--tables", str(path), "--profile", str(profile), "--measure", "2"])
    assert commands[0][-2:] == ["--device", "cpu"]


def test_no_table_touches_more_rows_than_it_has(tmp_path):
    path = tmp_path / "tables.json"
    few = json.loads(json.dumps(TABLES))
    few["tables"][2]["sample"] = list(range(800))
    path.write_text(json.dumps(few))
    assert read_tables(path).one_rank.stats["C3"].touched(1e6) == 800


def test_the_message_on_a_missing_tables_file_names_the_format(tmp_path):
    with pytest.raises(ConfigError, match=r"none.json does not exist; planner/tables_file.py"):
        read_tables(tmp_path / "none.json")


SAMPLE, BINS = "as sample", "as bins"  # each replaces the table's zipf key


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": 0}, r"tables\[0\].rows must be a whole number, 1 or more .*got 0"),
        ({"zipf": None, "bins": 3}, r"tables\[0\] has zipf and bins; give exactly one of"),
        ({"zipf": {"s": "x"}}, r"zipf.s must be a number, 0 or more .*got 'x'"),
        ({"width": 3}, "unknown keys width; the valid keys are name, rows"),
        ({"name": "C2"}, "several tables are named C2"),
        ({"name": 7}, r"tables\[0\].name must be a non-empty string.* got 7"),
        ({"rows": 0.5}, r"tables\[0\].rows must be a whole number, 1 or more .*got 0.5"),
        ({"rows": math.inf}, "tables.json: not JSON .Infinity is not a JSON number"),
        ({"dim": 16.5}, r"tables\[0\].dim must be a whole number, 1 or more .*got 16.5"),
        (
            {"ids_per_sample": 1e9},
            r"tables\[0\].ids_per_sample must be 1,000,000 or less, got 1e\+09",
        ),
        ({"zipf": {"s": -1}}, "zipf.s must be a number, 0 or more .*got -1"),
        ({SAMPLE: 5}, r"tables\[0\].sample must be a list of 2 or more ids"),
        ({SAMPLE: [4999, 5000]}, r"sample\[1\] must be the id of a row, 0 to 4999, got 5000"),
        ({SAMPLE: [1, -1]}, r"sample\[1\] must be the id of a row, .* got -1"),
        ({SAMPLE: [1, 1.5]}, r"sample\[1\] must be the id of a row, .* got 1.5"),
        ({BINS: {"rows": [1.0] * 16, "lookups": [1.0] * 17}}, "bins.rows must be a list of 17"),
        ({BINS: {"rows": [1.0] * 17}}, "bins.lookups must be a list of 17 numbers"),
        (
            {BINS: {"rows": [1.0] * 17, "lookups": [-1.0] * 17}},
            r"lookups\[0\] must be a number.* got -1.0",
        ),
        (
            {BINS: {"rows": ["a"] * 17, "lookups": [1.0] * 17}},
            r"bins.rows\[0\] must be a number.* got 'a'",
        ),
        ({BINS: {"rows": [0] * 17, "lookups": [1.0] * 17}}, "bins.rows: all shares are 0"),
        (
            {BINS: {"rows": [1.0] + [0] * 16, "lookups": [0] + [1.0] * 16}},
            r"tables\[0\].bins: no bin has both rows and lookups; give shares above 0 for the same",
        ),
    ],
)
def test_a_wrong_key_of_a_tables_file_is_named(tmp_path, change, message):
    path = tmp_path / "tables.json"
    wrong = json.loads(json.dumps(TABLES))
    law = next((key.split()[1] for key in change if " " in key), None)
    if law is not None:
        del wrong["tables"][0]["zipf"]
        change = {law: next(iter(change.values()))}
    wrong["tables"][0] |= change
    path.write_text(json.dumps(wrong))
    with pytest.raises(ConfigError, match=message):
        read_tables(path)


@pytest.mark.parametrize(
    ("dense", "message"),
    [
        (3, r"dense must be an object such as .* got 3"),
        ({"macs_per_sample": 5}, "dense.parameters must be a whole number.* got None"),
        (
            {"parameters": 5, "macs_per_sample": -1},
            "macs_per_sample must be a number, above 0 .*got -1",
        ),
        (
            {"parameters": 10**18},
            "dense.parameters must be a whole number, 1 or more and bel.*000",
        ),
        ({"parameters": 5, "macs_per_sample": 10**18}, "must be a number, above 0 and below 1e.18"),
        ({"parameters": 10**400}, "tables.json: a whole number has 401 digits"),
        (
            {"parameters": 5, "elements_per_sample": "a"},
            "elements_per_sample must be a number.* got 'a'",
        ),
        (
            {"parameters": 5, "layers": 2},
            "dense has unknown keys layers; the valid keys are parameters",
        ),
    ],
)
def test_a_wrong_key_of_a_dense_part_is_named(tmp_path, dense, message):
    path = tmp_path / "tables.json"
    path.write_text(json.dumps({**TABLES, "dense": dense}))
    with pytest.raises(ConfigError, match=message):
        read_tables(path)


def test_the_dense_part_is_priced_with_the_tables(tmp_path):
    path = tmp_path / "tables.json"
    path.write_text(json.dumps(TABLES))
    alone = read_tables(path).task(2)
    path.write_text(json.dumps({**TABLES, "dense": {"parameters": 500_000}}))
    both = read_tables(path).task(2)
    assert both.dense.macs_per_sample == both.dense.parameters == 500_000
    assert both.dense.elements_per_sample == 500_000 / 128, "of layers 256 wide"
    plan = make_plan("size", TaskCost(PROFILE, alone)).plan
    less, more = (TaskCost(PROFILE, task).predict(plan) for task in (alone, both))
    assert more.step_ms > less.step_ms
    for with_dense, without in zip(more.memory_bytes, less.memory_bytes, strict=True):
        # Each parameter has four numbers: its value, its gradient, and two from Adam.
        assert with_dense - without == pytest.approx(16 * 500_000, abs=2)


def test_unknown_planners_and_impossible_tasks_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="must be one of auto, random"):
        planner_of("best")
    path = tmp_path / "tables.json"
    path.write_text(json.dumps({**TABLES, "device_gb": 0.00001}))
    words = ["--tables", str(path), "--ranks", "2", "--profile", "h100-dgx"]
    words += ["--planner", "size"]
    output, report = tmp_path / "plan.yaml", tmp_path / "report.txt"
    output.write_text("a plan that fits")
    with pytest.raises(PlanError, match="the largest table is C1"):
        plan([*words, "--output", str(output), "--report", str(report)])
    assert output.read_text() == "a plan that fits"
    assert "size" in report.read_text()


def test_a_suggested_cache_leaves_out_tables_that_a_run_cannot_cache(tmp_path):
    path = tmp_path / "tables.json"
    shapes = {"deep.C1": (200_000, 64), "wide.C1": (50, 1), "wide.C2": (50, 1), "deep.C2": (50, 1)}
    tables = [
        {"name": name, "rows": rows, "dim": dim, "zipf": {"s": 1.05}}
        for name, (rows, dim) in shapes.items()
    ]
    path.write_text(json.dumps({"batch_size": 512, "device_gb": 0.02, "tables": tables}))
    rules = "'*': {kind: host, cache: 50%}, 'deep.C2': {kind: device}, 'wide.*': {kind: device}"
    with pytest.raises(PlanError, match=rf"parallel\.storage: {{{re.escape(rules)}}}"):
        plan(["--tables", str(path), "--profile", "h100-dgx", "--planner", "size"])


def test_changes_that_would_help_are_for_the_planner_that_they_name(tmp_path):
    path, words = tmp_path / "tables.json", ["--tables", str(tmp_path / "tables.json")]
    words += ["--profile", "h100-dgx", "--planner", "size"]
    table = {"name": "C1", "rows": 10_000, "dim": 16, "zipf": {"s": 1.05}}
    for device_gb, hint in (
        (5e-4, r"would fit with --planner auto$"),
        (3e-4, r"would fit with --planner auto and \d ranks with"),
    ):
        file = {"batch_size": 512, "device_gb": device_gb, "tables": [table]}
        path.write_text(json.dumps(file))
        with pytest.raises(PlanError, match=hint):
            plan(words)


def test_tables_that_do_not_fit_are_reported_with_a_profile_of_one_rank(tmp_path):
    path, alone = tmp_path / "tables.json", tmp_path / "profile.json"
    replace(PROFILE, world_size=1, link=Link()).save(alone)
    path.write_text(json.dumps({**TABLES, "device_gb": 1e-5}))
    with pytest.raises(PlanError, match=r"fits in 10\.00 kB per rank"):
        plan(["--tables", str(path), "-n", "1", "--profile", str(alone)])


@pytest.mark.parametrize("seed", ["-1", "1.5", "99999999999999999999"])
def test_a_seed_is_a_whole_number_that_every_generator_accepts(seed):
    for command in (plan, compare, explain, clusters, calibrate):
        with pytest.raises(ConfigError, match=f"--seed: '{seed}' is not a whole number from 0 to"):
            command(["--tables", "t.json", "--seed", seed][2 * (command is calibrate) :])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seconds", "nan"], "--seconds must be above 0 and finite, got nan"),
        (["--seconds", "inf"], "--seconds must be above 0 and finite, got inf"),
        (["--rounds", "0"], "--rounds must be 1 or more, got 0; for example, --rounds 2"),
        (["--output", "."], r"--output: \. is a folder; use a file"),
        (["--ranks", "4"], r"--ranks is 4, but another launcher has started 1 .*; omit --ranks"),
    ],
)
def test_a_calibration_checks_its_options_before_it_measures(words, message, monkeypatch):
    monkeypatch.setenv("RANK", "0")  # as one of the launched ranks
    with pytest.raises(ConfigError, match=message):
        calibrate(words)


def test_machines_compare_the_options_of_a_calibration(monkeypatch):
    """With other options, ranks would draw other tasks, and wait for each other."""
    started = Mock(side_effect=ConfigError("rank 1 differs"))
    monkeypatch.setattr("sbpflow.planner.calibration.calibrate.World.start", started)
    monkeypatch.setenv("RANK", "0")
    given = {"seconds": "9.0", "rounds": "3", "optimizer": "sgd", "seed": "7"}
    with pytest.raises(ConfigError, match="rank 1 differs"):
        calibrate([*(f"--{key}={text}" for key, text in given.items()), "--quick"])
    facts = started.call_args.kwargs["facts"]
    assert facts == {f"--{key}": text for key, text in given.items()} | {"--quick": "True"}
