"""Tests ``parallel.plan``, from the planner or from a file: saving the plan, and comparing its
prediction with the measured time.
"""

import json
import math
import os
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from glob import escape
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import polars as pl
import pytest
import torch
import yaml

from sbpflow.commands import train
from sbpflow.commands.explain import explain
from sbpflow.commands.export import export
from sbpflow.commands.predict import predict
from sbpflow.config.load import load_config
from sbpflow.config.parse import plain
from sbpflow.config.table_plan import read_table_plan
from sbpflow.config.table_rules import TableRule
from sbpflow.config.topology_file import read_topology
from sbpflow.data import fields_of, load_manifest
from sbpflow.data.stats import load_stats
from sbpflow.errors import ConfigError, PlanError
from sbpflow.models.registry import MODELS
from sbpflow.planner.costs.cost import TaskCost
from sbpflow.planner.costs.profile import Link, Profile, default_path, load, write_profile
from sbpflow.planner.costs.run_corrections import LEAST_STEPS
from sbpflow.planner.for_run import plan_tables
from sbpflow.planner.task import embedding_plan, rules
from sbpflow.run.planning.build_plan import plan_run
from sbpflow.run.planning.explain import describe
from sbpflow.run.planning.plan_file import plan_from_json
from sbpflow.run.saved.saved_model import find_checkpoint, saved_config, saved_layouts
from sbpflow.runtime.files.run_folder import TABLE_PLAN_FILE
from sbpflow.runtime.ranks.topology import Topology
from tests import deadlines

ROOT = Path(__file__).parents[2]
CONFIG = str(ROOT / "configs/scheme3.yaml")
COMMAND = "sbpflow.planner.calibration.calibrate"
CALIBRATION = "sbpflow.planner.for_run._calibration"
SMALL = ["model.hidden=[16]", "data.batch_size=1000", "parallel.scheme=null"]


def profile(step_row=1e-3, vector_byte=1e-6):
    """Return the profile of a machine with these prices of row updates and vector bytes."""
    work_ms = {"step_rows": step_row, "step_elements": 1e-6, "read_rows": 1e-5, "always": 1.0}
    link = Link(within_gb_per_s=1e-6 / vector_byte, within_call_ms=0.1)
    return Profile(work_ms=work_ms, link=link, world_size=2, backend="gloo")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def calibrated(own_cache):
    profile().save(default_path("cpu"))


def plan_with(prices, synth_set, words, world_size=2, device_type="cpu"):
    """Plan a run on a machine with the profile ``prices``."""
    words = [*SMALL, f"data.path={synth_set}", "parallel.plan=auto", *words]
    config, manifest = load_config(CONFIG, words, models=MODELS), load_manifest(synth_set)
    fields, stats, rows = fields_of(manifest), load_stats(manifest), manifest.splits["train"]
    ranks = {"world_size": world_size, "device_type": device_type}
    with patch(CALIBRATION, return_value=(default_path("cpu"), prices)):
        return config, fields, plan_tables(config, fields, stats, rows, **ranks)


@cache
def planned(synth_set, words=(), prices=()):
    return plan_with(profile(*prices), synth_set, words)


def test_planned_runs_save_their_plan_and_rate_its_prediction(
    synth_set, tmp_path, calibrated, capsys
):
    folder = tmp_path / "run"
    words = [*SMALL, f"data.path={synth_set}", f"run.dir={folder}"]
    assert train.main(["--config", CONFIG, *words, "parallel.plan=auto"]) == 0
    assert re.search(r"step time:\s+predicted [0-9.]+ ms.*measured", capsys.readouterr().err)
    first = plan_from_json((folder / "plan.json").read_text())
    tables, start = len(first.layouts), (folder / "start.txt").read_text()
    assert re.search(rf"{tables} of {tables} tables planned in [0-9.]+ s; predicted step", start)
    kept = folder / TABLE_PLAN_FILE
    with pytest.raises(ConfigError, match=r"parallel\.plan: .*/tables\.yaml is in run\.dir"):
        train.main(["--config", CONFIG, *words, f"parallel.plan={kept}"])
    assert yaml.safe_load(kept.read_text())["notes"]["predicted_step_ms"] > 0
    again = tmp_path / "again"
    words[-1] = f"run.dir={again}"
    assert train.main(["--config", CONFIG, *words, f"parallel.plan={kept}"]) == 0
    second = plan_from_json((again / "plan.json").read_text())
    assert second.embeddings == first.embeddings
    assert {layout.key for layout in first.layouts.values()} == {"parallel.plan auto"}


@pytest.mark.slow
def test_two_runs_correct_a_calibration_that_is_too_slow(synth_set, tmp_path, calibrated):
    """The calibration predicts more than three times the real step time."""
    path = default_path("cpu")
    slow = profile()
    replace(slow, work_ms={**slow.work_ms, "always": 500.0}).save(path)
    words = [*SMALL, f"data.path={synth_set}", "parallel.plan=auto", "train.max_steps=24"]
    words += [
        "train.epochs=100",
        "parallel.kernel=torch",
        "train.eval_every=0",
        "data.batch_size=100",
        "train.eval_rows=100",
    ]
    errors, factors = list[float](), [1.0]
    for number in range(2):
        done = deadlines.run(
            [*(sys.executable, "-m", "sbpflow", "train", "-n", "2", "--config", CONFIG),
             *words, f"run.dir={tmp_path / str(number)}"],
            120,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            cwd=ROOT,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found = re.search(r"step time:\s+predicted ([0-9.]+) ms.* measured ([0-9.]+)", done.stderr)
        assert found, done.stderr
        errors.append(math.log(float(found[1]) / float(found[2])))
        assert len(load(path).runs) == number + 1
        assert re.search(rf"costs:\s+calibration of .*, corrected by {number + 1} run", done.stderr)
        factors.append(load(path).run_factor)
    # the error of a third run that is as fast as the second
    third = errors[1] + math.log(factors[2] / factors[1])
    assert errors[0] > max(errors[1], math.log(3))
    assert abs(third) < min(errors[1], 0.5 * errors[0])


def test_runs_end_without_a_writable_cache(synth_set, tmp_path, calibrated, capsys, monkeypatch):
    def full(path, text):
        raise OSError(28, "No space left on device", str(path))

    replace(profile(), world_size=1).save(default_path("cpu"))
    before = default_path("cpu").read_text()
    words = [*SMALL, f"data.path={synth_set}", f"run.dir={tmp_path / 'run'}", "parallel.plan=auto"]
    words += ["data.batch_size=100", "train.max_steps=24"]
    monkeypatch.setattr(f"{COMMAND}.write_profile", full)
    assert train.main(["--config", CONFIG, *words]) == 0
    assert "not added to the calibration: [Errno 28] No space left" in capsys.readouterr().err
    assert default_path("cpu").read_text() == before


def test_runs_that_end_at_the_same_time_keep_each_others_corrections(
    synth_set, calibrated, monkeypatch
):
    config, fields, run = planned(synth_set)
    _, plan = plan_run(config, fields, world_size=2, device_type="cpu", planned=run.rules)
    run = replace(run, path=default_path("cpu"))
    boxing = SimpleNamespace(world=SimpleNamespace(rank=0, topology=Topology.one_host(2)))

    def slowly(path, text):
        time.sleep(0.2)
        write_profile(path, text)

    monkeypatch.setattr(f"{COMMAND}.gather_values", lambda boxing, value: [value])
    monkeypatch.setattr(f"{COMMAND}.write_profile", slowly)
    with ThreadPoolExecutor() as pool:
        jobs = [pool.submit(run.finished, plan, 5.0 + n, LEAST_STEPS, boxing) for n in range(3)]
        assert all("costs" in job.result() for job in jobs)
    assert sorted(other.measured_ms for other in load(default_path("cpu")).runs) == [5.0, 6.0, 7.0]


def test_planned_runs_resume_without_planner_or_plan_file(
    synth_set, tmp_path, calibrated, monkeypatch
):
    """``predict`` and ``export`` need neither the calibration nor the plan file."""
    folder, file = tmp_path / "run", tmp_path / "plan.yaml"
    words = [*SMALL, f"data.path={synth_set}", f"run.dir={folder}", "checkpoint.every=2"]
    scores: list[list[float]] = []
    file.write_text("tables: {'*': {sbp: S(0), exchange: unique}}")
    for number, plan in enumerate(("auto", str(file))):
        words[-2] = f"run.dir={folder}{number}"
        assert train.main(["--config", CONFIG, *words, f"parallel.plan={plan}"]) == 0
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    file.unlink()
    for number in range(2):
        run, output = f"{folder}{number}", tmp_path / f"{number}.parquet"
        read = ["--checkpoint", run, "--input", str(synth_set), "--output", str(output)]
        assert predict(read) == 0
        scores.append(pl.read_parquet(output)["score"].to_list())
        assert export(["--checkpoint", run, "--output", str(tmp_path / f"out{number}")]) == 0
    np.testing.assert_allclose(scores[0], scores[1], rtol=1e-4)
    found, config, plan = saved(Path(f"{folder}0"))
    _, laid = saved_layouts(found, config, 1)
    assert set(laid) == {escape(name) for name in plan.layouts}
    assert {rule.comm_dtype for rule in laid.values()} == {None}, "parallel.comm_dtype applies"
    assert saved_layouts(found, config, 2) == (config, {"*": TableRule(sbp="S(0)")})
    other = replace(config, parallel=replace(config.parallel, plan="other.yaml"))
    assert saved_layouts(found, other, 1) == (other, None)


def test_a_run_plans_for_the_speeds_of_the_topology_file(synth_set, tmp_path):
    file = tmp_path / "hosts.yaml"
    file.write_text("{hosts: [[0, 1]], speed: [1.0, 0.05]}")
    slow = planned(synth_set, (f"parallel.topology={file}",), (1e-1, 1e-6))[2]
    equal = planned(synth_set, (), (1e-1, 1e-6))[2]
    assert slow.task.speeds == (1.0, 0.05)
    assert equal.task.speeds is None
    held = [sum(1 in choice.ranks for choice in run.plan.values()) for run in (slow, equal)]
    assert held[0] < held[1]
    blind = slow.cost.predict(equal.plan).step_ms
    assert slow.prediction.step_ms < 0.8 * blind


def test_a_run_without_a_plan_that_fits_names_the_usable_part_of_the_memory(synth_set, tmp_path):
    file = tmp_path / "topology.yaml"
    file.write_text("{hosts: [[0, 1]], memory_gb: 1.0e-4}")
    with pytest.raises(
        PlanError, match=r"fits in 85\.00 kB per rank: .* limit of a rank is 85% of"
    ):
        planned(synth_set, (f"parallel.topology={file}",))


def test_two_hops_are_planned_only_if_the_run_supports_them(synth_set, tmp_path):
    file = tmp_path / "hosts.yaml"
    file.write_text("{hosts: 2, ranks_per_host: 2}")
    slow = Link(ranks_per_node=2, within_gb_per_s=100.0, between_gb_per_s=1e-4)
    prices = Profile(work_ms={"always": 0.1}, link=slow, world_size=4, backend="nccl")
    fixed = "'deep.C[!3]*': {sbp: S(0), exchange: unique}, 'wide.*': {sbp: S(0), exchange: unique}"
    words = [f"parallel.tables={{{fixed}}}", f"parallel.topology={file}", "parallel.device=cuda"]
    for more, sbp in (([], "(S(0), S(0))"), (["parallel.row_buffer_fraction=0.5"], "S(0)")):
        config, fields, run = plan_with(prices, synth_set, [*words, *more], 4, "cuda")
        assert run.plan["deep.C3"].shape.sbp == sbp
        assert run.task.num_hosts == 2
        plan_run(config, fields, planned=run.rules, world_size=4, device_type="cuda")


@pytest.mark.parametrize(
    ("measured", "hosts", "rate"),
    [
        (2, [[0], [1]], 0.02),
        (2, [[0, 1]], 2.0),
        # Two thirds of the bytes go to the other host, over half of its 0.02 GB/s.
        (1, [[0, 1], [2, 3]], 0.015),
        (1, [[0, 1]], 2.0),
    ],
)
def test_a_run_has_the_links_of_its_own_hosts(
    synth_set, tmp_path, monkeypatch, measured, hosts, rate
):
    """The profile is of two hosts with ``measured`` ranks each, which share 0.02 GB/s."""
    monkeypatch.setattr("sbpflow.planner.clusters.os.cpu_count", lambda: 8)
    file, size = tmp_path / "hosts.yaml", sum(map(len, hosts))
    rates = {"within_gb_per_s": 2.0, "between_gb_per_s": 0.02 / measured}
    link = Link(ranks_per_node=measured, ranks_per_link=measured, **rates)
    prices = Profile(work_ms={"always": 0.1}, link=link, world_size=2 * measured, backend="gloo")
    file.write_text(f"hosts: {hosts}")
    _, _, run = plan_with(prices, synth_set, [f"parallel.topology={file}"], size)
    assert run.cost.profile.link.byte_ms(size) == pytest.approx(1e-6 / rate)


def test_a_run_with_a_suggested_cache_fits(synth_set, tmp_path):
    """By default, a cache has a lookahead of 64 batches, whose ids take more memory."""
    file = tmp_path / "topology.yaml"
    file.write_text("{hosts: [[0, 1]], memory_gb: 0.014}")
    fixed = "'deep.C[!3]*': {sbp: S(0), exchange: unique}, 'wide.*': {sbp: S(0), exchange: unique}"
    words = (f"parallel.topology={file}", f"parallel.tables={{{fixed}}}", "model.embedding_dim=64")
    with pytest.raises(PlanError, match=r"train\.lookahead: 2 .slower") as refused:
        planned(synth_set, words)
    hint = re.search(r"(parallel\.storage): (.*) and (train\.lookahead): (\d)", str(refused.value))
    cached = planned(synth_set, (*words, f"{hint[1]}={hint[2]}", f"{hint[3]}={hint[4]}"))[2]
    assert max(cached.prediction.memory_bytes) <= 0.85 * 14e6


def test_a_run_on_described_hosts_saves_them_and_predicts_without_the_file(synth_set, tmp_path):
    file, run = tmp_path / "hosts.yaml", tmp_path / "run"
    file.write_text("{hosts: [[0]], memory_gb: 3, host_link: {gb_per_s: 1.5}}")
    words = [f"data.path={synth_set}", f"run.dir={run}", "checkpoint.every=2"]
    words += ["model.hidden=[16]", "data.batch_size=1000", f"parallel.topology={file}"]
    assert train.main(["--config", CONFIG, *words]) == 0
    found = plan_from_json((run / "plan.json").read_text()).topology
    assert found == read_topology(file, world_size=1)
    assert "1 host of 1 rank (given): [0]" in (run / "start.txt").read_text()
    file.unlink()
    output = tmp_path / "scores.parquet"
    read = ["--checkpoint", str(run), "--input", str(synth_set), "--output", str(output)]
    assert predict(read) == 0


def test_automatic_layouts_on_missing_ranks_are_replaced():
    text = '{"deep.C1": {"sbp": "B", "ranks": [1]}, "deep.C2": {"sbp": "S(0)", "ranks": [0]}, '
    text += '"deep.C4": {"sbp": "S(1)", "ranks": [0, 1], "exchange": "unique"}, '
    text += '"deep.C3": {"sbp": "S(0)", "sizes": [3, 9]}}'
    config = load_config(CONFIG, [f"parallel.tables={text}"], models=MODELS)
    run = SimpleNamespace(documents={"config": plain(config)})
    there, _ = saved_layouts(run, config, 2)
    assert there == config
    more, _ = saved_layouts(run, config, 4)  # this exchange needs the columns on all ranks
    assert more.parallel.tables["deep.C4"] == TableRule(sbp="S(0)")
    laid, planned = saved_layouts(run, config, 1)
    assert planned is None
    for name in ("deep.C1", "deep.C3"):
        assert laid.parallel.tables[name] == TableRule(sbp="S(0)")
    assert laid.parallel.tables["deep.C2"] == config.parallel.tables["deep.C2"]
    asked = load_config(
        CONFIG, [f"parallel.tables={text}", "parallel.tables.deep.C1.sbp=S(0)"], models=MODELS
    )
    laid, _ = saved_layouts(run, asked, 1)
    assert laid.parallel.tables["deep.C1"] == asked.parallel.tables["deep.C1"]


def test_keys_of_other_ranks_and_devices_are_not_required_for_scoring():
    more = ["train.early_rows=true", "train.late_gradients=true", "parallel.tf32=true"]
    more += ["parallel.kernel=triton", 'parallel.storage={"*": {"kind": "host", "cache": "10%"}}']
    more += ['parallel.tables={"deep.*": {"sbp": "B", "ranks": [0, 1]}}']
    config = load_config(CONFIG, more, models=MODELS)
    run = SimpleNamespace(documents={"config": plain(config)})
    laid, _ = saved_layouts(run, config, 1)
    assert (laid.train.early_rows, laid.train.late_gradients) == ("auto", "auto")
    assert (laid.parallel.tf32, laid.parallel.kernel, laid.parallel.storage) == (False, "auto", {})
    laid, _ = saved_layouts(run, config, 4)
    assert laid.parallel.tables["deep.*"] == TableRule(sbp="S(0)")
    asked = load_config(CONFIG, [*more, "parallel.kernel=numba"], models=MODELS)
    assert saved_layouts(run, asked, 1)[0].parallel.kernel == "numba"


def saved(folder):
    checkpoint = find_checkpoint(folder)
    config = saved_config(checkpoint, (), models=MODELS, own_model=None)
    return checkpoint, config, plan_from_json(json.dumps(checkpoint.documents["plan"]))


def test_the_planner_task_matches_the_run(synth_set):
    config, fields, planned_run = planned(synth_set)
    task = planned_run.task
    _, plan = plan_run(config, fields, world_size=2, device_type="cpu", planned=planned_run.rules)
    assert embedding_plan(task, planned_run.plan) == plan.embeddings
    assert task.batch_size == 1000
    assert task.dense.parameters == sum(p.num_elements(0) for p in plan.dense)
    layers = [weight.shape for weight in plan.dense if len(weight.shape) == 2]
    assert task.dense.elements_per_sample == sum(map(sum, layers)) > 0
    manifest = load_manifest(synth_set)
    stats = {field_stats.name: field_stats for field_stats in load_stats(manifest)}
    table = task.tables[0]
    ratio = stats[table.features[0]].unique_ratio["1024"]
    assert task.stats[table.name].touched(1024) == pytest.approx(1024 * ratio, rel=0.02)
    assert rules(planned_run.plan) == planned_run.rules


def test_plans_depend_on_the_prices_of_the_machine(synth_set):
    _, _, dear_bytes = planned(synth_set, prices=(1e-9, 1e-3))
    _, _, dear_rows = planned(synth_set, prices=(10.0, 1e-12))
    sent = [sum(one.prediction.sent_bytes) for one in (dear_bytes, dear_rows)]
    assert sent[0] < sent[1]
    assert dear_bytes.plan != dear_rows.plan


def test_layouts_set_by_the_user_are_not_changed(synth_set):
    pin = "parallel.tables={deep.C1: {sbp: S(1)}}"
    config, fields, planned_run = planned(synth_set, (pin,))
    assert planned_run.plan["deep.C1"].shape.sbp == "S(1)"
    _, plan = plan_run(config, fields, world_size=2, device_type="cpu", planned=planned_run.rules)
    entry = next(table for table in describe(plan)["tables"] if table["name"] == "deep.C1")
    assert entry["sbp"] == "S(1)"


def test_nothing_is_searched_if_the_user_sets_all_tables(synth_set):
    _, _, planned_run = planned(synth_set, ("parallel.tables={'*': {sbp: S(1), exchange: columns}, "
        "'wide.*': {sbp: S(0)}}",))  # fmt: skip
    assert {choice.shape.sbp for choice in planned_run.plan.values()} == {"S(0)", "S(1)"}
    assert planned_run.prediction.step_ms > 0


def test_comm_dtype_of_a_table_does_not_change_other_prices(synth_set):
    pin = "parallel.tables={deep.C1: {sbp: S(0), comm_dtype: float32}}"
    _, _, planned_run = planned(synth_set, (pin, "parallel.comm_dtype=bfloat16"))
    assert planned_run.task.comm_dtype == torch.bfloat16


def test_accumulated_steps_are_predicted_as_one_step(synth_set):
    _, _, planned_run = planned(synth_set)
    _, _, four = planned(synth_set, ("train.accumulate=4",))
    assert four.task.accumulate == 4
    # The dense part and the rows are updated only once.
    assert 2 < four.prediction.step_ms / planned_run.prediction.step_ms < 4.1
    once = replace(four.task, accumulate=1)
    sent = TaskCost(four.cost.profile, once).predict(four.plan).sent_bytes
    assert [4 * each for each in sent] == pytest.approx(four.prediction.sent_bytes, abs=4)
    assert re.fullmatch(r"predicted .* ms.*, measured 5.00 ms \([+-].* %\)", four.against(5.0))
    assert "not measured, because the first step" in four.against(math.nan)


def test_explain_plans_as_a_run_does(synth_set, calibrated, capsys):
    words = ["--config", CONFIG, "--ranks", "2", "--json"]
    auto = ["parallel.plan=auto", "parallel.device=cpu"]
    explain([*words, *SMALL, f"data.path={synth_set}", *auto])
    tables = json.loads(capsys.readouterr().out)["tables"]
    _, _, planned_run = planned(synth_set)
    exchanges = {table["name"]: table["exchange"] for table in tables}
    assert exchanges == {name: choice.shape.exchange for name, choice in planned_run.plan.items()}


def test_explain_prints_the_times_of_each_rank_and_the_alternatives(synth_set, calibrated, capsys):
    words = ["--config", CONFIG, "--ranks", "2", *SMALL, f"data.path={synth_set}"]
    fixed = "parallel.tables={deep.C3: {sbp: S(1)}}"
    explain([*words, "parallel.plan=auto", "parallel.device=cpu", fixed])
    text = capsys.readouterr().out
    _, _, run = planned(synth_set, (fixed,))
    shown = float(re.search(r"^parallel\.plan: auto: predicted step ([\d.]+) ms", text, re.M)[1])
    assert shown == pytest.approx(run.prediction.step_ms, abs=1e-3)
    assert re.search(r"^rank +work +ids +vectors +gradients .*\n +0 .*\n +1 ", text, re.M)
    for name, choice in run.plan.items():
        more = re.search(rf"^{re.escape(f'{name}: {choice.shape} on ')}.*", text, re.M)[0]
        assert (" ms" in more) == (name != "deep.C3")


# Mistakes


def test_missing_calibrations_name_the_command(synth_set, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    words = [*SMALL, f"data.path={synth_set}", f"run.dir={tmp_path}"]
    with pytest.raises(ConfigError, match="sbpflow calibrate"):
        train.main(["--config", CONFIG, *words, "parallel.plan=auto"])


def test_plans_for_gpus_need_the_calibration_of_a_gpu(synth_set, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    words = ["--config", CONFIG, "--ranks", "2", *SMALL, f"data.path={synth_set}"]
    with pytest.raises(ConfigError, match=r"no usable GPU; use parallel\.device: cpu, or parallel"):
        explain([*words, "parallel.plan=auto", "parallel.device=cuda"])


def test_plan_and_scheme_exclude_each_other():
    with pytest.raises(ConfigError, match=r"one of them .for example, parallel\.scheme=null"):
        load_config(CONFIG, ["parallel.plan=auto", "parallel.scheme=1"], models=MODELS)


def test_programs_without_a_planner_are_reported(synth_set):
    config, fields, _ = planned(synth_set)
    with pytest.raises(ConfigError, match=r"parallel\.plan: auto .* planner"):
        plan_run(config, fields, world_size=2, device_type="cpu")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "tables: {'*.C1': {sbp: S(0)}}",
            r"plan.yaml: no pattern of the plan matches wide.C1xC2",
        ),
        (
            "tables: {'*': {sbp: S(0), ranks: [1, 2]}}",
            r"\(wide.*\[2\] are not in a world of 2.*made for",
        ),
        ("tables: {nothing: {sbp: S(0)}, '*': {sbp: S(0)}}", "matches no table"),
        ("tables: {'*': {sbp: S(9)}}", "is not a table layout"),
        ("table: {}", "unknown key"),
        ("[1]", "it contains a list"),
    ],
)
def test_invalid_plan_files_are_refused(synth_set, tmp_path, text, words):
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    config = load_config(CONFIG, [*SMALL, f"parallel.plan={path}"], models=MODELS)
    fields = fields_of(load_manifest(synth_set))
    with pytest.raises(ConfigError, match=words):
        plan_run(config, fields, world_size=2, device_type="cpu")
    with pytest.raises(ConfigError, match="does not exist"):
        read_table_plan(tmp_path / "other.yaml")


@pytest.mark.parametrize(("world_size", "warned"), [(2, False), (4, True)])
def test_plans_for_other_world_sizes_log_a_warning(tmp_path, caplog, world_size, warned):
    path = tmp_path / "plan.yaml"
    path.write_text("tables: {'*': {sbp: S(0)}}\nnotes: {world_size: 2}\n")
    assert read_table_plan(path, world_size=world_size)["*"].sbp == "S(0)"
    message = "planned for 2 ranks, but this run has 4"
    assert (message in caplog.text) == warned
