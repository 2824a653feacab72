"""Tests that the output of ``explain`` and ``plan`` fits on a screen, and that totals include all
transfers."""

from dataclasses import replace

import pytest

from sbpflow.commands.explain import explain
from sbpflow.data.__main__ import main as data_main
from sbpflow.planner.clusters import profile_of
from sbpflow.planner.costs.cost import TaskCost
from sbpflow.planner.planners import make_plan
from sbpflow.planner.report import as_text, report_of
from sbpflow.run.planning.build_plan import plan_run
from sbpflow.run.planning.explain import describe
from sbpflow.run.planning.summary import format_summary, what_helps
from sbpflow.run.planning.text import format_size
from tests.planner.tasks import make_task
from tests.run.test_explain_at_scale import CRITEO
from tests.training.wdl_case import make_config

LINES, WIDTH = 50, 120
HOSTS = "hosts: [[0, 1], [2, 3]]\nnetwork_link: {gb_per_s: 0.125, latency_ms: 0.4}\n"


def fits(text: str) -> bool:
    lines = text.splitlines()
    return len(lines) <= LINES and max(map(len, lines)) <= WIDTH


@pytest.mark.few(3)
@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("scheme", ["1", "2", "3", "auto"])
def test_28_tables_on_4_ranks_fit_a_screen(tmp_path, scheme, hosts):
    config = make_config(scheme, "adagrad", dtype="float32", dim=16, batch_size=4096)
    if hosts == 2:
        (tmp_path / "hosts.yaml").write_text(HOSTS)
        config = replace(
            config, parallel=replace(config.parallel, topology=tmp_path / "hosts.yaml")
        )
    _, plan = plan_run(config, CRITEO, world_size=4, device_type="cpu")
    helps = what_helps(config, CRITEO, plan, device_type="cpu")
    text = format_summary(plan, helps)
    assert fits(text), text
    for table in plan.layouts:
        assert sum(line.split()[:1] == [table] for line in text.splitlines()) == 1
    facts = describe(plan)
    assert sum(link["bytes"] for link in facts["links"].values()) == facts["bytes_per_iteration"]
    where = ("on a host", "between hosts")[hosts - 1]
    size = format_size(facts["links"][where]["bytes"])
    assert f"sent {where} in an iteration: " in text
    assert f"{size} by all ranks" in text
    largest = sorted(facts["steps"], key=lambda step: -step["total_bytes"])[:3]
    starts = [line.split()[0] for line in text.splitlines() if line]
    at = starts.index("largest") + 1
    assert starts[at : at + 3] == [step["id"] for step in largest]
    sent = [sum(step["bytes_per_rank"][rank] for step in facts["steps"]) for rank in range(4)]
    assert [rank["sent_bytes"] for rank in facts["ranks"]] == sent
    shards = format_summary(plan, helps, shards=True)
    assert len(shards.splitlines()) >= len(text.splitlines()) + len(plan.layouts)


def test_the_times_of_links_follow_their_speed_and_latency(tmp_path):
    config = make_config("1", "sgd", batch_size=4096)
    (tmp_path / "hosts.yaml").write_text(HOSTS)
    config = replace(config, parallel=replace(config.parallel, topology=tmp_path / "hosts.yaml"))
    _, plan = plan_run(config, CRITEO, world_size=4, device_type="cpu")
    facts = describe(plan)
    link = facts["links"]["between hosts"]
    steps = [step for step in facts["steps"] if step["groups"]]
    assert link["transfers"] == len(steps)
    most = sum(max(step["bytes_per_rank"]) for step in steps)
    assert link["ms"] == pytest.approx(0.4 * len(steps) + most / 0.125e6)


def test_suggestions_show_the_cost_of_the_changed_settings():
    config = make_config("3", "adagrad", dtype="float32", dim=16, batch_size=4096)
    _, plan = plan_run(config, CRITEO, world_size=4, device_type="cpu")
    helps = what_helps(config, CRITEO, plan, device_type="cpu")
    narrow = replace(config, parallel=replace(config.parallel, comm_dtype="bfloat16"))
    _, other = plan_run(narrow, CRITEO, world_size=4, device_type="cpu")
    before, after = (format_size(describe(p)["bytes_per_iteration"]) for p in (plan, other))
    (line,) = [line for line in helps if "comm_dtype=bfloat16" in line]
    assert f"sent {before} -> {after}" in line
    assert not any("comm_dtype" in line for line in what_helps(
        narrow, CRITEO, other, device_type="cpu"
    ))  # fmt: skip
    _, alone = plan_run(config, CRITEO, world_size=1, device_type="cpu")
    assert "sent" not in " ".join(what_helps(config, CRITEO, alone, device_type="cpu"))


def test_a_plan_is_shown_even_if_no_other_scheme_fits(tmp_path):
    config = make_config("2", "adagrad", batch_size=4096)
    file = tmp_path / "hosts.yaml"
    file.write_text("hosts: 1\nranks_per_host: 4\nmemory_gb: 0.000001\n")
    config = replace(config, parallel=replace(config.parallel, topology=file))
    _, plan = plan_run(config, CRITEO, world_size=4, device_type="cpu")
    helps = what_helps(config, CRITEO, plan, device_type="cpu")
    assert helps
    assert "scheme=auto:" not in " ".join(helps)


def test_the_command_prints_shards_and_transfers_if_asked(tmp_path, capsys):
    words = ["synth", "--rows", "2000", "--vocab-scale", "0.0005", "--output", str(tmp_path / "s")]
    assert data_main(words) == 0
    words = ["--config", "configs/scheme3.yaml", "-n", "4", f"data.path={tmp_path / 's'}"]
    texts = {}
    for more in ([], ["--shards"], ["--transfers"], ["--transfers", "--shards"]):
        capsys.readouterr()
        assert explain([*words, *more]) == 0
        texts[" ".join(more)] = capsys.readouterr().out
    assert fits(texts[""]), texts[""]
    for option, text in texts.items():
        assert ("  rank 1: rows" in text) == ("--shards" in option)
        assert ("in flight during it" in text) == ("--transfers" in option)
        assert ("largest transfers" in text) == ("--transfers" not in option)


def test_a_plan_of_28_tables_for_4_ranks_fits_a_screen():
    rows = tuple(3 + 10 ** (1 + number % 6) for number in range(28))
    task = make_task(rows=rows, dim=16, world_size=4, batch_size=8192)
    cost = TaskCost(profile_of("h100-dgx"), task)
    text = as_text(report_of(make_plan("auto", cost), cost))
    assert fits(text), text
    for table in task.tables:
        assert any(line.startswith(f"{table.name}: ") for line in text.splitlines())
