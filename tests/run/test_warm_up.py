"""Tests that all process groups in the plan are created before the first step, in the same order on
every rank.
"""

import os
from dataclasses import replace

import pytest

from sbpflow.boxing.executor import Boxing
from sbpflow.config.schema import OptimizerConfig
from sbpflow.config.table_rules import TableRule
from sbpflow.config.train_options import ClipConfig
from sbpflow.run.execution.job import build_job
from sbpflow.run.execution.warm_up import groups_of, warm_up
from sbpflow.run.planning.build_plan import plan_run
from sbpflow.runtime.ranks.world import World
from tests.training.test_steps import MIXED, SPLIT
from tests.training.wdl_case import FIELDS, make_batches, make_config, to_device

GRID = {"deep.*": TableRule(sbp="(S(0), S(1))", ranks=((0, 1),))}
CLIPPED = OptimizerConfig(clip=ClipConfig(norm=1.0, rows=True))
CONFIGS = {
    "dp": make_config("dp", "rowwise_adagrad"),
    "1": make_config("1", "rowwise_adagrad"),
    "3": make_config("3", "sgd"),
    "mixed": replace(make_config("2", "sgd", tables=MIXED, dense_layouts=SPLIT), optimizer=CLIPPED),
    "grid": make_config("2", "rowwise_adagrad", tables=GRID),
}


def groups_by_time(world, config):
    """Return groups of a world that starts with none: those in the plan, those built with the job,
    those that exist after a warm-up, those that the warm-up uses, and those that two steps add.

    A group is (ranks, channel).
    """
    fresh = World(world.rank, world.size, world.device, owns_default_group=False)
    fresh.log.enabled = True
    spec, plan = plan_run(config, FIELDS, world_size=world.size, device_type=world.device.type)
    boxing = Boxing(fresh)
    planned = [(use.ranks, use.channel) for use in groups_of(plan)]
    job = build_job(config, spec, plan, boxing)
    before = set(fresh._links)
    fresh.log.records.clear()
    warm_up(plan, boxing)
    made = list(fresh._links)
    used = [(tuple(sorted(r.group)), r.channel) for r in fresh.log.records]
    for batch in make_batches(3, config.data.batch_size)[:2]:
        job.trainer.step(to_device(batch.part(world.rank, world.size), world.device))
    return {
        "planned": planned,
        "built": before,
        "made": made,
        "used": used,
        "in steps": set(fresh._links) - set(made),
    }


def check(found, size):
    for rank, one in enumerate(found):
        assert one["planned"] == found[0]["planned"]
        assert one["made"] == one["planned"]
        assert not one["in steps"]
        mine = [key for key in one["planned"] if rank in key[0]]
        assert list(dict.fromkeys(one["used"])) == mine


@pytest.mark.parametrize("case", CONFIGS)
def test_all_groups_of_a_step_are_created_and_used_before_it(ranks, case):
    results = ranks(2, groups_by_time, CONFIGS[case])
    check(results, 2)
    assert results[0]["built"] == set()  # on gloo, building a job does not create groups
    channels = {channel for _, channel in results[0]["planned"]}
    assert {"ids", "vectors", "dense"} - channels <= ({"vectors"} if case == "dp" else set())
    assert ("main" in channels) == (case == "mixed")


@pytest.mark.parametrize("case", ["dp", "mixed"])
def test_a_job_on_nccl_begins_with_the_warm_up(rehearsed_ranks, case):
    config = CONFIGS[case]
    config = replace(config, parallel=replace(config.parallel, device="cuda"))
    results = rehearsed_ranks(2, groups_by_time, config)
    check(results, 2)
    assert results[0]["built"] == set(results[0]["planned"])


def launch_order(world):
    return os.environ.get("NCCL_LAUNCH_ORDER_IMPLICIT")


def test_nccl_is_configured_to_keep_the_launch_order(rehearsed_ranks):
    assert rehearsed_ranks(1, launch_order) == ["1"]
