"""Tests the lookahead window: no window size changes a result or breaks an invariant."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sbpflow.config.schema import TrainConfig
from sbpflow.errors import ConfigError, DataError
from sbpflow.run.planning.build_plan import plan_run
from sbpflow.run.planning.explain import describe, format_plan
from sbpflow.runtime.ranks.world import World
from sbpflow.training.step_schedule import OVERLAPPED, SERIAL
from tests.quick import quick
from tests.training.wdl_case import (
    FIELDS,
    dense_of,
    make_batches,
    make_config,
    make_job,
    pieces_of,
)

KS = (0, 1, 4, 16)
NUM = 12


def parts(world: World, count: int = NUM, rows: int = 30) -> list[Any]:
    return [batch.part(world.rank, world.size) for batch in make_batches(count, rows)]


def outcome(job: Any, losses: list[float]) -> dict[str, Any]:
    return {"losses": losses, "pieces": pieces_of(job), "dense": dense_of(job)}


def assert_same(found: dict[str, Any], want: dict[str, Any]) -> None:
    assert found["losses"] == want["losses"]
    for name, value in want["dense"].items():
        np.testing.assert_array_equal(found["dense"][name], value, err_msg=name)
    for (name, place, rows, state), (_, same, others, kept) in zip(
        found["pieces"], want["pieces"], strict=True
    ):
        assert place == same
        np.testing.assert_array_equal(rows, others, err_msg=name)
        for key, value in state.items():
            np.testing.assert_array_equal(value, kept[key], err_msg=f"{name}/{key}")


def train(world: World, config: Any, lookahead: int, overlapped: bool) -> Any:
    """Return losses, and the id transfers in the order in which this rank started them."""
    job = make_job(world, config)
    job.trainer.lookahead = lookahead
    job.trainer.schedule = OVERLAPPED if overlapped else SERIAL
    batches = parts(world)
    world.log.records.clear()
    world.log.enabled = True
    losses: list[float] = []
    announced = 0
    for step in range(0, NUM, 2):  # two batches per step, and an evaluation in the middle
        while announced < min(NUM, step + 2 + lookahead):
            job.trainer.announce(batches[announced])
            announced += 1
        losses.append(float(job.trainer.step(batches[step : step + 2])))
        if step == 4:
            world.log.enabled = False
            losses += job.trainer.predict(batches[0]).tolist()
            world.log.enabled = True
    world.log.enabled = False
    order = [
        (record.step_id, record.bytes_sent)
        for record in world.log.records
        if record.channel == "ids"
    ]
    world.log.records.clear()
    return {**outcome(job, losses), "order": order}


@pytest.mark.few(1)
@pytest.mark.parametrize("scheme", quick(["dp", "1", "2", "3"], lambda n: n % 2 == 1))
def test_no_lookahead_changes_a_bit_or_the_order_of_a_channel(ranks, scheme):
    config = make_config(scheme, "rowwise_adagrad", dense="adam")
    want = ranks(2, train, config, 0, False)
    assert want[0]["order"] or scheme == "dp"
    for lookahead in KS:
        for overlapped in (True, False):
            results = ranks(2, train, config, lookahead, overlapped)
            for one, other in zip(results, want, strict=True):
                assert_same(one, other)
                assert one["order"] == other["order"]


def switching(world: World, config: Any, lookaheads: list[int]) -> Any:
    """Change the lookahead from step to step, and use the serial schedule in every third step."""
    job = make_job(world, config)
    batches = parts(world)
    for batch in batches:
        job.trainer.announce(batch)
    losses = []
    for number, batch in enumerate(batches):
        job.trainer.lookahead = lookaheads[number % len(lookaheads)]
        job.trainer.schedule = (OVERLAPPED, SERIAL)[number % 3 == 2]
        losses.append(float(job.trainer.step(batch)))
    return outcome(job, losses)


@pytest.mark.slow
def test_a_lookahead_may_change_from_step_to_step(ranks):
    config = make_config("3", "rowwise_adagrad", dense="adam")
    want = ranks(4, switching, config, [0])
    for lookaheads in ([1, 4, 0, 16], [16, 0], [3, 5]):
        for one, other in zip(ranks(4, switching, config, lookaheads), want, strict=True):
            assert_same(one, other)


def drained(world: World, config: Any, lookahead: int) -> Any:
    """Run five steps with a full window, drain it, and run five more steps."""
    job = make_job(world, config)
    job.trainer.lookahead = lookahead
    batches = parts(world)
    for batch in batches[: 5 + lookahead]:
        job.trainer.announce(batch)
    losses = [float(job.trainer.step(batch)) for batch in batches[:5]]
    held = job.trainer.num_announced
    job.trainer.drain()
    assert job.trainer.num_announced == 0
    losses += [float(loss) for loss in job.trainer.train_on(batches[7:])]
    return {**outcome(job, losses), "held": held}


@pytest.mark.few(1)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_drained_batches_have_no_effect(ranks, world_size):
    config = make_config("3", "lazy_adam", dense="adam")
    want = ranks(world_size, drained, config, 0)
    for lookahead in (1, 4):
        results = ranks(world_size, drained, config, lookahead)
        assert results[0]["held"] == lookahead
        for one, other in zip(results, want, strict=True):
            assert_same(one, other)


def bad_on_each_rank(world: World, config: Any, lookahead: int) -> tuple[int, str]:
    """Return the number of steps that this rank trained before an id in the sixth batch caused an
    error, and the error.
    """
    job = make_job(world, config)
    job.trainer.lookahead = lookahead
    batches = parts(world)
    ids = batches[5].ids.clone()
    ids[2, 1] = 10_000
    batches[5] = replace(batches[5], ids=ids)
    steps = 0
    try:
        for loss in job.trainer.train_on(batches):
            float(loss)
            steps += 1
    except DataError as error:
        return steps, str(error)
    return steps, "nothing"


@pytest.mark.parametrize("lookahead", KS)
def test_a_bad_id_fails_in_its_own_step_regardless_of_announcements(ranks, lookahead):
    config = make_config("3", "sgd")
    for rank, (steps, message) in enumerate(ranks(2, bad_on_each_rank, config, lookahead)):
        assert steps == 5
        assert message.startswith(f"field C2 has id 10000 in row 2 of rank {rank}'s part")


def counted(world: World, config: Any, lookahead: int) -> list[list[int]]:
    """Return the counts of out-of-range ids that a save or a metric would read after each of four
    steps, and after draining the remaining batches.
    """
    job = make_job(world, config)
    job.trainer.lookahead = lookahead
    batches = parts(world, 8)
    for number, batch in enumerate(batches):
        batch.ids[: number + 1, 0] = 50_000
    seen = []
    for batch in batches:
        job.trainer.announce(batch)
    for batch in batches[:4]:
        job.trainer.step(batch)
        seen.append(job.embeddings.out_of_range.tolist())
    job.trainer.drain()
    seen.append(job.embeddings.out_of_range.tolist())
    return seen


@pytest.mark.parametrize("policy", ["clamp", "hash"])
def test_counters_count_trained_batches_only(ranks, policy):
    config = make_config("3", "sgd")
    config = replace(config, data=replace(config.data, out_of_range=policy))
    want = [1, 3, 6, 10, 10]
    for lookahead in KS:
        for seen in ranks(2, counted, config, lookahead):
            assert [step[0] for step in seen] == want


def test_explain_shows_the_window_and_its_memory():
    found = {}
    for lookahead in (0, 1, 4):
        config = make_config("3", "sgd")
        config = replace(config, train=replace(config.train, lookahead=lookahead))
        _, plan = plan_run(config, FIELDS, world_size=2, device_type="cpu")
        facts = describe(plan)
        assert facts["lookahead"] == lookahead
        batches = {move["move"]: move["batch"] for move in facts["schedule"]}
        assert batches["lookup"] == "this"
        assert batches["start_id_exchange"] == {0: "this", 1: "next", 4: "+4"}[lookahead]
        assert batches["receive_ids"] == {0: "this", 1: "this", 4: "+3"}[lookahead]
        found[lookahead] = [rank["window_bytes"] for rank in facts["ranks"]]
        assert f"the {1 + lookahead} batches in the lookahead window" in format_plan(plan)
    assert all(each > 0 for each in found[0])
    assert found[1] == [2 * each for each in found[0]]
    assert found[4] == [5 * each for each in found[0]]


def test_the_lookahead_key_accepts_a_number_or_auto():
    from sbpflow.config.parse import build

    assert build(TrainConfig, {}, {}).lookahead == "auto"
    assert build(TrainConfig, {"lookahead": 16}, {}).lookahead == 16
    for value, message in (
        (-1, " must .* got -1"),
        ("all", ": 'all' is not one of auto"),
        (2.5, ": 2.5"),
    ):
        with pytest.raises(ConfigError, match=rf"lookahead{message}"):
            build(TrainConfig, {"lookahead": value}, {})
