"""Tests the cache of chosen plans: all ranks of a machine share one search."""

import errno
import hashlib
import json
import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from sbpflow.config.parse import plain
from sbpflow.errors import PlanError
from sbpflow.planner import plan_cache
from sbpflow.planner.clusters import described
from sbpflow.planner.costs.cost import TaskCost
from sbpflow.planner.plan_cache import chosen_once
from sbpflow.planner.planners import make_plan
from sbpflow.planner.workloads import random_task
from sbpflow.runtime.files.cache_dir import cache_dir

TASK = random_task(0, num_tables=6, world_size=2, held_out=True)
COST = TaskCost(described("h100-dgx"), TASK)
PLAN = make_plan("dim", COST).plan


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


class Chooser:
    """Returns ``PLAN``, and counts its calls."""

    def __init__(self, seconds=0.0):
        self.calls, self.seconds = 0, seconds

    def __call__(self):
        self.calls += 1
        time.sleep(self.seconds)
        return PLAN


def test_later_callers_wait_and_get_the_same_plan():
    chooser = Chooser(seconds=0.2)
    with ThreadPoolExecutor(4) as ranks:
        plans = list(ranks.map(lambda _: chosen_once(COST, 7, chooser), range(4)))
    assert plans == [PLAN] * 4
    assert chooser.calls == 1


@pytest.mark.parametrize("changed", ["seed", "batch", "prices", "code"])
def test_the_file_name_depends_on_everything_that_affects_the_choice(changed, monkeypatch):
    chooser = Chooser()
    chosen_once(COST, 7, chooser)
    task, profile, seed = TASK, COST.profile, 7
    if changed == "seed":
        seed = 8
    elif changed == "batch":
        task = replace(TASK, batch_size=2 * TASK.batch_size)
    elif changed == "prices":
        profile = replace(profile, world_size=4)
    else:
        monkeypatch.setattr(plan_cache, "_code", lambda: "other")
    chosen_once(TaskCost(profile, task), seed, chooser)
    assert chooser.calls == 2
    chosen_once(TaskCost(profile, task), seed, chooser)
    assert chooser.calls == 2


def test_a_truncated_file_is_chosen_again_and_failures_are_not_cached():
    chooser = Chooser()
    chosen_once(COST, 7, chooser)
    (file,) = (cache_dir() / "plans").iterdir()
    file.write_text(file.read_text()[:-9])
    assert chosen_once(COST, 7, chooser) == PLAN
    assert chosen_once(COST, 7, chooser) == PLAN
    assert chooser.calls == 2

    def fails():
        raise PlanError("nothing fits")

    with pytest.raises(PlanError, match="nothing fits"):
        chosen_once(COST, 8, fails)
    assert chosen_once(COST, 8, chooser) == PLAN


def cached(tree) -> str:
    """Return the content of a cache file, with the right checksum."""
    digest = hashlib.sha256(json.dumps(tree).encode()).hexdigest()
    return json.dumps({"sha256": digest, "plan": tree})


def choice(sbp="B", exchange="columns", parts=(1, 1), rank=0):
    return {"shape": {"sbp": sbp, "exchange": exchange, "parts": parts}, "ranks": [rank]}


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "null", "{}", "[" * 100_000, '{"a": 1}', "\0", "NaN"),
        *(cached({}), cached([]), cached(None), cached({"other": choice()})),
        cached({name: choice(sbp="Q") for name in PLAN}),
        cached({name: choice(exchange="none") for name in PLAN}),
        cached({name: choice(rank=9) for name in PLAN}),
        cached({name: choice(parts=3) for name in PLAN}),
        cached(plain(PLAN)).replace("[0", "[1", 1),
    ],
)
def test_an_invalid_cached_plan_is_replaced(text, caplog):
    chooser = Chooser()
    chosen_once(COST, 7, chooser)
    (file,) = (cache_dir() / "plans").iterdir()
    file.write_text(text)
    assert chosen_once(COST, 7, chooser) == PLAN
    assert chosen_once(COST, 7, chooser) == PLAN
    assert chooser.calls == 2
    assert len(caplog.records) == bool(text), "one warning, but none for a new file"


def test_a_full_disk_loses_the_cache_but_not_the_run(monkeypatch, caplog):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(plan_cache.os, "write", full)
    chooser = Chooser()
    with caplog.at_level(logging.WARNING):
        assert chosen_once(COST, 7, chooser) == PLAN
    assert "the plan is not cached ([Errno 28]" in caplog.text
    assert chosen_once(COST, 7, chooser) == PLAN
    assert chooser.calls == 2


def test_without_a_cache_folder_every_rank_chooses_with_a_warning(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING):
        assert chosen_once(COST, 7, Chooser()) == PLAN
    assert "every rank chooses its own" in caplog.text


def test_the_oldest_plans_are_deleted(monkeypatch):
    monkeypatch.setattr(plan_cache, "MOST_PLANS", 2)
    chooser = Chooser()
    for seed in range(4):
        chosen_once(COST, seed, chooser)
        time.sleep(0.02)  # so that each file has a later modification time than the one before
    assert len(list((cache_dir() / "plans").iterdir())) == 2
    chosen_once(COST, 3, chooser)
    assert chooser.calls == 4
    odd = cache_dir() / "plans" / "folder.json"
    odd.mkdir()
    os.utime(odd, (0, 0))
    assert chosen_once(COST, 5, chooser) == PLAN
    assert odd.is_dir(), "what cannot be deleted stays"
