"""Tests that a step's collectives match ``explain`` in name, bytes and order, and that each of them
is needed.
"""

import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from sbpflow.boxing.executor import Boxing, Pending
from sbpflow.config.schema import Config
from sbpflow.config.table_rules import TableRule
from sbpflow.embedding.exchange.all_to_all import RowTransfer
from sbpflow.run.planning.build_plan import plan_run
from sbpflow.run.planning.explain import describe
from sbpflow.runtime.ranks.world import World
from sbpflow.training.health import check_replicas
from tests.quick import diagonal, quick
from tests.ranks import RanksFailed
from tests.training.wdl_case import FIELDS, make_batches, make_config, make_job, to_device

SCHEMES = ["dp", "1", "2", "3"]
MIXED = {
    "deep.C1": TableRule(sbp="S(0)", ranks=(1,)),
    "deep.C2": TableRule(sbp="S(0)", ranks=(1, 0), sizes=(4, 7), exchange="unique"),
    "deep.C3": TableRule(sbp="S(0)", ranks=(0,)),
    "deep.C4": TableRule(sbp="B"),
}
UNIQUE_COLUMNS = {"deep.*": TableRule(sbp="S(1)", exchange="unique")}


SPLIT = {"mlp.0.*": "S(0)", "mlp.1.weight": "S(1)"}


def dense_conversions(config: Config, world_size: int) -> list[str]:
    """Return the collectives that the layouts of the dense layers cause."""
    _, plan = plan_run(config, FIELDS, world_size=world_size, device_type="cpu")
    return [step.id for step in plan.dense_forward]


def steps_of_one_iteration(world: World, config: Config) -> dict[str, Any]:
    """Return the transfers in the second step of a run, from the plan and from the log."""
    job = make_job(world, config)
    first, second = make_batches(3, config.data.batch_size)[:2]
    job.trainer.step(to_device(first.part(world.rank, world.size), world.device))
    world.log.records.clear()
    job.trainer.step(to_device(second.part(world.rank, world.size), world.device))
    return {
        "plan": describe(job.plan),
        "records": [
            (r.step_id, r.collective, list(r.group), r.bytes_sent) for r in world.log.records
        ],
    }


# By scheme, the collective of each step id on gloo, where a reduce-scatter is an all-to-all and a
# local sum.
EXPECTED = {
    # C2 and C4 have few rows, so their dense gradients are smaller than the rows that 30 samples
    # touch.
    "dp": {
        "wide/local/fwd/counts": "all_to_all",
        "deep/local.0/fwd/counts": "all_to_all",
        "wide/local/fwd/ids": "all_gather",
        "deep/local.0/fwd/ids": "all_gather",
        "wide/local/bwd/vectors": "all_gather",
        "deep/local.0/bwd/vectors": "all_gather",
        "deep/local.1/bwd/gradients": "all_reduce",
        "dense/bwd/0": "all_reduce",
    },
    "1": {
        "ids/fwd": "all_gather",
        "wide/reduce/fwd/vectors": "all_to_all",
        "deep/columns/fwd/vectors": "all_to_all",
        "wide/reduce/bwd/vectors": "all_gather",
        "deep/columns/bwd/vectors": "all_to_all",
        "dense/bwd/0": "all_reduce",
    },
    "2": {
        "ids/fwd": "all_gather",
        "wide/reduce/fwd/vectors": "all_to_all",
        "deep/reduce/fwd/vectors": "all_to_all",
        "wide/reduce/bwd/vectors": "all_gather",
        "deep/reduce/bwd/vectors": "all_gather",
        "dense/bwd/0": "all_reduce",
    },
    "3": {
        "wide/unique/fwd/counts": "all_to_all",
        "deep/unique/fwd/counts": "all_to_all",
        "wide/unique/fwd/ids": "all_to_all",
        "deep/unique/fwd/ids": "all_to_all",
        "wide/unique/fwd/vectors": "all_to_all",
        "deep/unique/fwd/vectors": "all_to_all",
        "wide/unique/bwd/vectors": "all_to_all",
        "deep/unique/bwd/vectors": "all_to_all",
        "dense/bwd/0": "all_reduce",
    },
}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_scheme_runs_only_its_own_collectives(ranks, scheme):
    for result in ranks(2, steps_of_one_iteration, make_config(scheme, "sgd")):
        got = [(step_id, name) for step_id, name, _, _ in result["records"]]
        assert got == list(EXPECTED[scheme].items())


@pytest.mark.few(8)
@pytest.mark.parametrize(
    ("world_size", "tables", "dense"),
    [
        (1, None, None),
        (2, None, None),
        (2, MIXED, None),
        (3, None, SPLIT),
        (3, MIXED, None),
        (3, UNIQUE_COLUMNS, None),
    ],
    ids=["1", "2", "2-mixed", "3-split-linears", "3-mixed", "3-unique-columns"],
)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_explain_matches_the_log(ranks, world_size, scheme, tables, dense):
    config = make_config(scheme, "rowwise_adagrad", tables=tables, dense_layouts=dense)
    if dense:
        assert dense_conversions(config, world_size)
    for rank, result in enumerate(ranks(world_size, steps_of_one_iteration, config)):
        planned = [
            (step, group)
            for step in result["plan"]["steps"]
            for group in step["groups"]
            if rank in group
        ]
        assert len(planned) == len(result["records"])
        for (step, group), record in zip(planned, result["records"], strict=True):
            step_id, collective, log_group, bytes_sent = record
            assert (step_id, collective, log_group) == (step["id"], step["collective"], group)
            if step["exact"]:
                assert bytes_sent == step["bytes_per_rank"][rank]
            else:
                assert bytes_sent <= step["bytes_per_rank"][rank]
        if world_size == 1:
            assert not result["records"]


def update_of_three_batches(world: World, config: Config) -> tuple[list[str], list[str]]:
    """Return the sums of squared gradients in the plan and in the log, with this rank's bytes."""
    job = make_job(world, config)
    batches = make_batches(4, config.data.batch_size)[:3]
    job.trainer.step([batch.part(world.rank, world.size) for batch in batches])
    planned = [
        f"{step.id} {step.bytes_sent(world.rank)}"
        for phase, step in job.plan.steps()
        if phase == "update" and any(world.rank in group for group in step.groups)
    ]
    sent = [f"{r.step_id} {r.bytes_sent}" for r in world.log.records if "row_state" in r.step_id]
    return planned, sent


def test_explain_matches_the_log_of_an_accumulated_step(ranks):
    tables = {"deep.*": TableRule(sbp="S(1)", ranks=(0, 1))}
    config = make_config("1", "rowwise_adagrad", tables=tables)
    config = replace(config, train=replace(config.train, accumulate=3))
    found = ranks(3, update_of_three_batches, config)
    assert [len(planned) for planned, _ in found] == [1, 1, 0]
    for planned, sent in found:
        assert planned == sent


def test_scheme_volumes_follow_the_derivations(ranks):
    """The formulas are OneFlow's for B rows, f deep columns, 1 summed wide column, 8-byte elements,
    and P ranks.
    """
    batch, num_ranks, deep, item = 30, 3, 4 * 5, 8
    wide = batch * item * (num_ranks - 1)
    expected = {
        "1": {
            "wide/reduce": wide,
            "deep/columns": batch * deep * item * (num_ranks - 1) / num_ranks,
        },
        "2": {"wide/reduce": wide, "deep/reduce": batch * deep * item * (num_ranks - 1)},
    }
    for scheme, groups in expected.items():
        results = ranks(num_ranks, steps_of_one_iteration, make_config(scheme, "sgd"))
        for group, total in groups.items():
            for way in ("fwd", "bwd"):
                sent = sum(
                    size
                    for result in results
                    for step_id, _, _, size in result["records"]
                    if step_id == f"{group}/{way}/vectors"
                )
                # 5 columns on 3 ranks are uneven (2, 2, 1), so ranks send slightly different
                # numbers of bytes
                assert sent == pytest.approx(total, rel=0.0 if group.endswith("reduce") else 0.05)


# Wrong shapes and inconsistent counts are refused at once; diverging copies are detected at the end
# of a run.
EXPECTED_FAULTS = tuple(
    f"sbpflow.errors.{name}" for name in ("ReplicaError", "SbpError", "TrainingError")
)


def step_without(world: World, config: Config, step_id: str) -> int:
    """Train with one conversion replaced by the identity; return the number of completed steps."""
    job = make_job(world, config)
    real_issue, real_start = Boxing._issue, RowTransfer.start
    real_for_all = RowTransfer.start_for_all
    skipped = []

    def issue(self, step, part, *args, **kwargs):
        if step.id == step_id:
            skipped.append(step.id)
            return lambda: part
        return real_issue(self, step, part, *args, **kwargs)

    def start(self, step, send, out, into):
        if step.id == step_id:
            skipped.append(step.id)
            return Pending(lambda: send, world)
        return real_start(self, step, send, out, into)

    def start_for_all(self, step, send, into):
        if step.id == step_id:
            skipped.append(step.id)
            return Pending(lambda: send, world)
        return real_for_all(self, step, send, into)

    Boxing._issue, RowTransfer.start = issue, start
    RowTransfer.start_for_all = start_for_all
    try:
        for batch in make_batches(4, config.data.batch_size)[:3]:
            job.trainer.step(batch.part(world.rank, world.size))
        check_replicas(job.model.parameters, job.embeddings, job.boxing)
    finally:
        Boxing._issue, RowTransfer.start = real_issue, real_start
        RowTransfer.start_for_all = real_for_all
        assert skipped, f"{step_id} never ran"
    return 3


@pytest.mark.parametrize(
    ("scheme", "step_id"),
    [
        *(
            pytest.param(scheme, step, marks=[pytest.mark.slow] * (number > 0))
            for scheme in SCHEMES
            for number, step in enumerate(EXPECTED[scheme])
        ),
        ("1", "deep/columns/bwd/row_state.0"),
    ],
)
def test_runs_fail_if_a_conversion_is_missing(ranks, scheme, step_id):
    config = make_config(scheme, "rowwise_adagrad")
    with pytest.raises(RanksFailed) as failure:
        ranks(2, step_without, config, step_id)
    assert "never ran" not in str(failure.value)
    lines = [line for text in failure.value.errors.values() for line in text.splitlines()]
    wrong_size = "Received data size doesn't match expected size" in str(failure.value)  # gloo
    assert wrong_size or any(line.startswith(EXPECTED_FAULTS) for line in lines), lines[-8:]


def train_and_compare(world: World, config: Config) -> list[tuple[str, int, int]]:
    """Check that a step changes only rows of its batch; return (table, number of changed rows,
    number of rows in the batch) for this rank's shards.
    """
    job = make_job(world, config)
    batch = make_batches(3, config.data.batch_size)[0]
    job.trainer.step(batch.part(world.rank, world.size))
    before = [
        (s.weights.clone(), {k: v.clone() for k, v in s.state.items()})
        for s in job.embeddings.stored()
    ]
    batch = make_batches(3, config.data.batch_size, seed=9)[0]
    job.trainer.step(batch.part(world.rank, world.size))
    features = [feature.name for feature in job.plan.embeddings.features]
    changed: list[tuple[str, int, int]] = []
    for stored, (weights, state) in zip(job.embeddings.stored(), before, strict=True):
        piece = stored.shard
        ids = batch.ids[:, features.index(piece.table.features[0])].unique().long()
        here = ids[(ids >= piece.row_start) & (ids < piece.row_stop)] - piece.row_start
        untouched = torch.ones(piece.num_rows, dtype=torch.bool)
        untouched[here] = False
        assert torch.equal(stored.weights[untouched], weights[untouched])
        for name, value in state.items():
            assert torch.equal(stored.state[name][untouched], value[untouched])
        moved = (stored.weights != weights).any(1).sum()
        changed.append((piece.table.name, int(moved), len(here)))
    return changed


@pytest.mark.parametrize(
    ("scheme", "sparse", "kernel"),
    diagonal(SCHEMES, ["sgd", "adagrad", "rowwise_adagrad", "lazy_adam"], ["auto", "torch"]),
)
def test_an_update_touches_only_the_rows_of_its_batch(ranks, scheme, sparse, kernel):
    config = make_config(scheme, sparse, dtype="float32", dim=8, kernel=kernel)
    changes = np.concatenate(
        [np.array([(m, n) for _, m, n in r]) for r in ranks(2, train_and_compare, config)]
    )
    assert (changes[:, 0] == changes[:, 1]).all()
    assert changes[:, 1].sum() > 0


def die_at(world: World, config: Config, step_id: str) -> None:
    """Make rank 1 exit at the named transfer in the second batch."""
    job = make_job(world, config)
    batches = [batch.part(world.rank, world.size) for batch in make_batches(2, 30)]
    job.trainer.step(batches[0])
    real_issue, real_start = Boxing._issue, RowTransfer.start
    real_for_all = RowTransfer.start_for_all

    def leave_at(step):
        if world.rank == 1 and step.id == step_id:
            os._exit(9)

    def issue(self, step, *args, **kwargs):
        leave_at(step)
        return real_issue(self, step, *args, **kwargs)

    def start(self, step, *args):
        leave_at(step)
        return real_start(self, step, *args)

    def start_for_all(self, step, *args):
        leave_at(step)
        return real_for_all(self, step, *args)

    Boxing._issue, RowTransfer.start = issue, start
    RowTransfer.start_for_all = start_for_all
    try:
        job.trainer.step(batches[1])
    finally:
        Boxing._issue, RowTransfer.start = real_issue, real_start
        RowTransfer.start_for_all = real_for_all


@pytest.mark.parametrize(
    ("scheme", "step_id"),
    quick(
        [
            ("dp", "deep/local.0/bwd/vectors"),
            ("dp", "deep/local.1/bwd/gradients"),
            ("1", "ids/fwd"),
            ("1", "deep/columns/fwd/vectors"),
            ("2", "deep/reduce/bwd/vectors"),
            ("3", "deep/unique/fwd/counts"),
            ("3", "deep/unique/fwd/vectors"),
            ("3", "dense/bwd/0"),
        ],
        lambda n: n in (0, 2, 4, 7),
    ),
)
def test_a_rank_that_dies_in_an_exchange_is_reported_with_the_step(ranks, scheme, step_id):
    with pytest.raises(RanksFailed) as failure:
        ranks(2, die_at, make_config(scheme, "sgd"), step_id)
    words = str(failure.value)
    # The remaining rank was waiting for this transfer or for another one in flight.
    under_way = [
        step for step in EXPECTED[scheme] if f"{step}, {EXPECTED[scheme][step]}: " in words
    ]
    assert under_way, words
