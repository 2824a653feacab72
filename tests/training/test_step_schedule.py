"""Tests that the order of a step's moves does not affect results, and that overlap is shown and
measured."""

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sbpflow.boxing.executor import Boxing
from sbpflow.config.model_tables import FieldRule
from sbpflow.embedding.plan.growth import Eviction
from sbpflow.errors import DataError, SbpError, TrainingError
from sbpflow.models.wdl import WdlConfig, WideConfig
from sbpflow.run.execution.job import build_job
from sbpflow.run.model.spec import Fields, IdField
from sbpflow.run.planning.build_plan import plan_run
from sbpflow.run.planning.explain import describe
from sbpflow.runtime.ranks.world import World
from sbpflow.training import step_schedule as moves
from sbpflow.training.overlap import OverlapWatch
from sbpflow.training.step_schedule import OVERLAPPED, SERIAL, StepSchedule
from tests.quick import quick
from tests.training.wdl_case import (
    FIELDS,
    Rows,
    dense_of,
    make_batches,
    make_config,
    make_job,
    pieces_of,
)

NO_WIDE = WideConfig(crosses=())

# This schedule starts the exchange of the next ids first, and waits for gradients right after
# sending them.
ANOTHER = StepSchedule(
    each_batch=(
        moves.START_ID_EXCHANGE,
        moves.RECEIVE_IDS,
        moves.LOOKUP,
        moves.GATHER_OUTPUTS,
        moves.EXCHANGE_IDS,
        moves.FORWARD,
        moves.BACKWARD,
        moves.SEND_GRADS,
        moves.RECEIVE_GRADS,
    ),
    each_step=(moves.UPDATE, moves.SEND_DENSE, moves.RECEIVE_DENSE, moves.UPDATE_DENSE),
)


def train(world: World, config: Any, schedules: list[StepSchedule], announce: bool) -> Any:
    """Train 12 batches as 6 steps with alternating schedules; return losses, pieces and dense
    parameters.
    """
    job = make_job(world, config)
    batches = [b.part(world.rank, world.size) for b in make_batches(12, 30)]
    losses = []
    for step in range(6):
        job.trainer.schedule = schedules[step % len(schedules)]
        if announce:
            for batch in batches[2 * step + bool(step) : 2 * step + 3]:
                job.trainer.announce(batch)
        losses.append(float(job.trainer.step(batches[2 * step : 2 * step + 2])))
    return {"losses": losses, "pieces": pieces_of(job), "dense": dense_of(job)}


@pytest.mark.parametrize("scheme", quick(["dp", "1", "2", "3"], lambda n: n % 3 == 0))
def test_no_schedule_changes_a_bit(ranks, scheme):
    config = make_config(scheme, "rowwise_adagrad", dense="adam")
    want = ranks(3, train, config, [SERIAL], False)
    for schedules, announce in (
        ([OVERLAPPED], True),
        ([OVERLAPPED], False),
        ([ANOTHER], True),
        ([OVERLAPPED, SERIAL, ANOTHER], True),
    ):
        for one, other in zip(ranks(3, train, config, schedules, announce), want, strict=True):
            assert one["losses"] == other["losses"]
            for name, value in one["dense"].items():
                np.testing.assert_array_equal(value, other["dense"][name])
            for (name, place, weights, _), (_, same, others, _) in zip(
                one["pieces"], other["pieces"], strict=True
            ):
                assert place == same
                np.testing.assert_array_equal(weights, others, err_msg=name)


def order_of(schedule: StepSchedule, batches: int, window: int, lookahead: int = 1) -> list[str]:
    """Return a step's moves in order, with their batch numbers, if ``window`` batches are announced
    after the step's own.
    """
    made: list[str] = []

    class Numbered(moves.BatchInFlight):
        number = 0

    def numbered(number: int) -> Numbered:
        one = Numbered()
        one.number = number
        return one

    world: Any = SimpleNamespace()
    schedule.run(
        lambda move, one: made.append(f"{move.name} {one.number}"),
        lambda move: made.append(move.name),
        [numbered(n) for n in range(batches)],
        [numbered(batches + n) for n in range(window)],
        lookahead,
        world,
    )
    return made


def test_the_moves_of_two_batches_in_one_step():
    assert " ".join(order_of(OVERLAPPED, 2, 1)) == (
        "start_id_exchange 0 exchange_ids 0 receive_ids 0 lookup 0 start_id_exchange 1 "
        "gather_outputs 0 forward 0 exchange_ids 1 backward 0 send_grads 0 receive_ids 1 lookup 1 "
        "start_id_exchange 2 gather_outputs 1 forward 1 exchange_ids 2 backward 1 receive_grads 0 "
        "send_grads 1 send_dense receive_grads 1 update receive_dense update_dense"
    )
    assert " ".join(order_of(SERIAL, 1, 0)) == (
        "start_id_exchange 0 exchange_ids 0 receive_ids 0 lookup 0 gather_outputs 0 forward 0 "
        "backward 0 send_grads 0 receive_grads 0 send_dense receive_dense update update_dense"
    )


def test_the_window_fills_batch_by_batch():
    made = " ".join(order_of(OVERLAPPED, 1, 5, lookahead=3))
    assert made.startswith(
        "start_id_exchange 0 exchange_ids 0 receive_ids 0 start_id_exchange 1 exchange_ids 1 "
        "receive_ids 1 start_id_exchange 2 exchange_ids 2 receive_ids 2 lookup 0 start_id_exchange "
        "3 gather_outputs 0 forward 0 exchange_ids 3 backward 0 "
    )
    assert "4" not in made, "it is beyond the lookahead"
    without = " ".join(order_of(OVERLAPPED, 1, 5, lookahead=0))
    assert without.startswith(
        "start_id_exchange 0 exchange_ids 0 receive_ids 0 lookup 0 gather_outputs 0 forward 0 "
        "backward"
    )
    assert "1" not in without


def test_ids_must_be_received_before_the_lookup():
    for order in (
        (moves.LOOKUP, moves.RECEIVE_IDS, moves.START_ID_EXCHANGE, moves.EXCHANGE_IDS),
        (moves.RECEIVE_IDS, moves.EXCHANGE_IDS, moves.START_ID_EXCHANGE, moves.LOOKUP),
    ):
        rest = (moves.GATHER_OUTPUTS, moves.FORWARD, moves.BACKWARD, moves.SEND_GRADS)
        with pytest.raises(ValueError, match="receive_ids"):
            replace(OVERLAPPED, each_batch=(*order, *rest))


def test_moves_are_compared_by_identity():
    assert moves.Move("update", "same text") != moves.Move("update", "same text")
    for move in moves.KNOWN:
        assert moves.saved_move(move.name, move.says) is move
    assert moves.saved_move("push", "any text") is moves.SEND_GRADS
    with pytest.raises(ValueError, match=r"'pull' is not a move.*send_grads"):
        moves.saved_move("pull", "")


def test_the_order_of_a_step_is_computed_once(monkeypatch):
    calls = []
    distance = StepSchedule.distance

    def counted(*args: Any) -> int:
        calls.append(args)
        return distance(*args)

    monkeypatch.setattr(StepSchedule, "distance", counted)
    first = order_of(OVERLAPPED, 1, 7, lookahead=6)
    calls.clear()
    assert order_of(OVERLAPPED, 1, 7, lookahead=6) == first
    assert not calls


def test_the_transfers_in_flight_during_a_move_are_listed():
    during = {move.name: flying for move, flying in OVERLAPPED.in_flight()}
    assert during["start_id_exchange"] == ("vectors",)
    assert during["forward"] == ("next ids", "next counts")
    assert during["backward"] == ("next ids", "next counted ids")
    assert during["update"] == ("next ids", "next counted ids", "dense gradients")
    assert not any(flying for _, flying in SERIAL.in_flight())
    far = {move.name: flying for move, flying in OVERLAPPED.in_flight(lookahead=4)}
    assert far["backward"] == ("ids +4", "counted ids +4")
    assert far["lookup"] == ()
    only = {move.name: flying for move, flying in OVERLAPPED.in_flight({moves.IDS})}
    assert only["lookup"] == only["start_id_exchange"] == ()
    assert only["gather_outputs"] == ("next ids",)
    assert re.search(
        r"update +the step +one optimizer step on the rows next ids, ", str(OVERLAPPED)
    )


@pytest.mark.parametrize(
    ("scheme", "world_size", "made"),
    [
        ("dp", 2, {"counts", "counted ids", "row gradients", "dense gradients"}),
        ("1", 2, {"ids", "vectors", "row gradients", "dense gradients"}),
        ("3", 2, set(moves.TRANSFERS) - {"ids", "flags", "early vectors", "late gradients"}),
        ("3", 1, set()),
    ],
)
def test_a_run_knows_which_transfers_it_makes(scheme, world_size, made):
    _, plan = plan_run(make_config(scheme, "sgd"), FIELDS, world_size=world_size, device_type="cpu")
    assert plan.transfers() == made
    under_way = {name for move in describe(plan)["schedule"] for name in move["under_way"]}
    assert {name.removeprefix("next ") for name in under_way} == made


def fails_and_goes_on(world: World, config: Any) -> list[str]:
    """Return the error messages from a step that fails midway and from the next step."""
    job = make_job(world, config)
    good, bad = (b.part(world.rank, world.size) for b in make_batches(4, 30)[:2])
    messages = []
    job.trainer.step(good)
    for step in ([good, replace(bad, labels=bad.labels[:1])], good):
        try:
            job.trainer.step(step)
        except (SbpError, TrainingError) as error:
            messages.append(str(error))
    return messages


def test_no_step_after_a_failed_step(ranks):
    for first, second in ranks(2, fails_and_goes_on, make_config("3", "sgd")):
        assert "[15, 1]" in first
        assert second.startswith("step: an earlier step failed (SbpError: ")


def another_than_announced(world: World, config: Any) -> tuple[list[float], list[str]]:
    job = make_job(world, config)
    first, second = (b.part(world.rank, world.size) for b in make_batches(6, 30)[:2])
    job.trainer.announce(first)
    job.trainer.announce(second)
    losses, messages = [float(job.trainer.step(first))], []
    for _ in range(2):
        try:
            job.trainer.step(first)
        except SbpError as error:
            messages.append(str(error))
    return [*losses, float(job.trainer.step(second))], messages


def test_unannounced_batches_are_rejected_without_side_effects(ranks):
    config = make_config("3", "rowwise_adagrad")
    want = ranks(2, train_two, config)
    for (losses, messages), expected in zip(
        ranks(2, another_than_announced, config), want, strict=True
    ):
        assert losses == expected
        assert len(messages) == 2
        assert all(
            text.startswith("step: batch 0 of 1 is not the batch that was announced")
            for text in messages
        )


def announced_for_two_steps(world: World) -> tuple[list[Any], list[float], list[float]]:
    """Return the refusal of one step over two batches that were announced for two steps, with the
    number of batches still announced; the losses of two steps over them; and the losses of a job
    that was not refused.
    """
    names = {"C1": 37, "C2": 11}
    fields = Fields(
        dense=("I1",),
        sparse=tuple(IdField(name=name, rows=0, keyed=True) for name in names),
    )
    growth = {"*": FieldRule(vocabulary="dynamic", evict=Eviction(max_rows=1 << 18))}
    config = make_config("3", "sgd")
    config = replace(config, model=WdlConfig(hidden=(7,), fields=growth, wide=NO_WIDE))
    batches = [
        Rows(b.labels, b.dense[:, :1], b.ids[:, :2].long() + 2, b.batch_size)
        for b in (b.part(world.rank, world.size) for b in make_batches(6, 30)[:2])
    ]
    losses: list[list[float]] = []
    refusal: list[Any] = []
    for refused in (True, False):
        spec, plan = plan_run(config, fields, world_size=world.size, device_type="cpu")
        trainer = build_job(config, spec, plan, Boxing(world)).trainer
        for batch in batches:
            trainer.announce(batch)
        if refused:
            try:
                trainer.step(batches)
            except SbpError as error:
                refusal = [str(error), trainer.num_announced]
        losses.append([float(trainer.step(batch)) for batch in batches])
    return refusal, *losses


def test_batches_announced_for_two_steps_can_be_trained_on_after_the_refusal(ranks):
    pytest.importorskip("numba", reason="growing tables need numba")
    for (message, announced), after, without in ranks(2, announced_for_two_steps):
        assert message.startswith("step: the 2 batches were announced for different steps")
        assert announced == 2
        assert after == without


def bad_ids_ahead(world: World, config: Any) -> str:
    job = make_job(world, config)
    good, bad = make_batches(4, 30)[:2]
    bad = replace(bad, ids=torch.full_like(bad.ids, 1000))
    job.trainer.announce(good)
    job.trainer.announce(bad)
    job.trainer.step(good)
    try:
        job.trainer.step(bad)
    except DataError as error:
        return str(error)
    return "nothing"


def test_a_bad_id_fails_in_its_own_step(ranks):
    (message,) = ranks(1, bad_ids_ahead, make_config("3", "sgd"))
    assert message.startswith("field C1 has id 1000 in row 0")


def misshapen_ahead(world: World, config: Any) -> str:
    job = make_job(world, config)
    good, bad = make_batches(4, 30)[:2]
    job.trainer.announce(good)
    job.trainer.announce(replace(bad, ids=bad.ids[:, :2]))
    try:
        job.trainer.step(good)
    except DataError as error:
        return str(error)
    return "nothing"


def test_ids_that_cannot_be_sent_name_their_batch(ranks):
    (message,) = ranks(1, misshapen_ahead, make_config("3", "sgd"))
    assert message.startswith("batch 1 announced after step 1: ids must be int32 or int64")


def steps_with_empty(world: World, config: Any) -> tuple[list[float], list[str]]:
    job = make_job(world, config)
    batches = [b.part(world.rank, world.size) for b in make_batches(6, 30)[:2]]
    none = replace(batches[0], labels=torch.empty(0), dense=torch.empty(0, 3),
                   ids=torch.empty(0, 6, dtype=torch.int32), batch_size=0)  # fmt: skip
    job.trainer.announce(none)
    losses = [
        job.trainer.step([none, batches[0], none]),
        job.trainer.step([batches[1], none]),
    ]
    messages = []
    for given in ([], none, [none], (batches[0],), None):
        try:
            job.trainer.step(given)
        except SbpError as error:
            messages.append(str(error))
    return [float(loss) for loss in losses], messages


def test_batches_without_rows_are_skipped(ranks):
    config = make_config("3", "rowwise_adagrad")
    want = ranks(2, train_two, config)
    for (losses, messages), expected in zip(ranks(2, steps_with_empty, config), want, strict=True):
        assert losses == expected
        assert (
            messages[:3]
            == ["step: none of the batches has rows; pass at least one batch with rows"] * 3
        )
        assert messages[3].startswith(
            "step: a tuple is not a batch, because it has no attribute labels"
        )
        assert messages[4].startswith("step: a NoneType is not a batch")


def train_two(world: World, config: Any) -> list[float]:
    job = make_job(world, config)
    batches = [b.part(world.rank, world.size) for b in make_batches(6, 30)[:2]]
    return [float(job.trainer.step(batch)) for batch in batches]


@pytest.mark.parametrize(
    ("each_batch", "each_step", "message"),
    [
        (OVERLAPPED.each_batch[:-1], OVERLAPPED.each_step, "every move once"),
        (
            (*OVERLAPPED.each_batch[:5], moves.BACKWARD, moves.EXCHANGE_IDS, moves.SEND_GRADS),
            (
                moves.RECEIVE_GRADS,
                moves.UPDATE,
                moves.RECEIVE_DENSE,
                moves.SEND_DENSE,
                moves.UPDATE_DENSE,
            ),
            "receive_dense must come after send_dense",
        ),
        (
            (
                moves.LOOKUP,
                moves.RECEIVE_IDS,
                moves.START_ID_EXCHANGE,
                moves.EXCHANGE_IDS,
                *SERIAL.each_batch[4:],
            ),
            SERIAL.each_step,
            "lookup must come after receive_ids",
        ),
        (
            (moves.GATHER_OUTPUTS, *SERIAL.each_batch[:4], *SERIAL.each_batch[5:]),
            SERIAL.each_step,
            "gather_outputs must come after lookup",
        ),
        (
            (
                moves.RECEIVE_IDS,
                moves.EXCHANGE_IDS,
                moves.LOOKUP,
                moves.START_ID_EXCHANGE,
                *SERIAL.each_batch[4:],
            ),
            SERIAL.each_step,
            "more than two steps; use start_id_exchange, exchange_ids, receive_ids",
        ),
        (
            (*SERIAL.each_batch, moves.UPDATE),
            (moves.SEND_DENSE, moves.RECEIVE_DENSE, moves.UPDATE_DENSE),
            "update is a move of a step",
        ),
        (
            SERIAL.each_batch[2:],
            (*SERIAL.each_step, moves.START_ID_EXCHANGE, moves.EXCHANGE_IDS),
            "start_id_exchange is a move of each batch",
        ),
        (
            (*OVERLAPPED.each_batch[:-1], moves.Move("send_grads", "mine")),
            OVERLAPPED.each_step,
            "use SEND_GRADS",
        ),
    ],
)
def test_orders_that_use_missing_results_are_refused(each_batch, each_step, message):
    with pytest.raises(ValueError, match=message):
        StepSchedule(each_batch=each_batch, each_step=each_step)


class Switch:
    """Has the one trainer attribute that the watch uses."""

    schedule = OVERLAPPED


@pytest.mark.parametrize(
    ("off_ms", "line"),
    [
        (5, "saves 3.00 ms of a step of 5.00 ms (medians of 16 steps"),
        (1, "saves nothing: 2.00 ms per step with overlap, 1.00 ms without (medians of 16"),
    ],
)
def test_the_overlap_watch_alternates_and_reports(monkeypatch, off_ms, line):
    trainer, now, seen = Switch(), [0.0], []
    monkeypatch.setattr("sbpflow.training.overlap.time.perf_counter", lambda: now[0])
    watch = OverlapWatch(trainer, 2, 500, torch.device("cpu"))
    for _ in range(60):
        with watch.step():
            seen.append(trainer.schedule is OVERLAPPED)
            now[0] += 0.002 if trainer.schedule is OVERLAPPED else off_ms / 1e3
    assert seen[:10] == [True] * 10
    assert seen[10:50] == ([True] * 5 + [False] * 5) * 4
    assert seen[50:] == [True] * 10
    assert watch.summary().startswith(line)


@pytest.mark.parametrize(
    ("world_size", "schedule", "steps", "line"),
    [
        (1, OVERLAPPED, 500, "a single rank"),
        (2, SERIAL, 500, "off"),
        (2, OVERLAPPED, 199, "200 steps or more"),
    ],
)
def test_the_overlap_watch_explains_why_it_did_not_measure(world_size, schedule, steps, line):
    trainer = Switch()
    trainer.schedule = schedule
    watch = OverlapWatch(trainer, world_size, steps, torch.device("cpu"))
    for _ in range(59):
        with watch.step():
            assert trainer.schedule is schedule
    assert line in watch.summary()
