"""The order of a step's moves: no order changes a number, what overlaps is told and measured."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sbpflow.dist import World
from sbpflow.training import step_schedule as moves
from sbpflow.training.overlap import OverlapWatch
from sbpflow.training.step_schedule import OVERLAPPED, SERIAL, StepSchedule, ahead
from tests.training.wdl_case import dense_of, make_batches, make_config, make_job, pieces_of

# The next ids sorted before anything else, gradients waited for where they start.
ANOTHER = StepSchedule(
    each_batch=(
        ahead(moves.BEGIN),
        moves.LOOK_UP,
        moves.OUTPUTS,
        ahead(moves.ADVANCE),
        moves.FORWARD,
        moves.BACKWARD,
        moves.PUSH,
        moves.COLLECT,
    ),
    each_step=(moves.UPDATE, moves.SEND_DENSE, moves.RECEIVE_DENSE, moves.UPDATE_DENSE),
)


def train(world: World, config: Any, schedules: list[StepSchedule], announce: bool) -> Any:
    """12 batches as 6 steps, the schedules taking turns; losses, pieces and dense parameters."""
    world.checked = False
    job = make_job(world, config)
    batches = [b.part(world.rank, world.size) for b in make_batches(12, 30)]
    losses = []
    for step in range(6):
        job.trainer.schedule = schedules[step % len(schedules)]
        coming = batches[2 * step + 2] if announce and step < 5 else None
        losses.append(float(job.trainer.step(batches[2 * step : 2 * step + 2], coming)))
    return {"losses": losses, "pieces": pieces_of(job), "dense": dense_of(job)}


@pytest.mark.parametrize("scheme", ["dp", "1", "2", "3"])
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


def order_of(schedule: StepSchedule, batches: int, coming: bool) -> list[str]:
    """The moves as they are made, with the batch's number, for a step of that many batches."""
    made: list[str] = []

    class Numbered(moves.Pass):
        number = 0

    def numbered(number: int) -> Numbered:
        one = Numbered()
        one.number = number
        return one

    def of_batch(name: str) -> Any:
        return lambda one: made.append(f"{name} {one.number}")

    world: Any = SimpleNamespace()
    schedule.run(
        {move.name: of_batch(move.name) for move, _ in SERIAL.beside()},
        {
            name: lambda name=name: made.append(name)
            for name in ("send_dense", "receive_dense", "update", "update_dense")
        },
        [numbered(n) for n in range(batches)],
        numbered(batches) if coming else None,
        world,
    )
    return made


def test_the_moves_of_two_batches_in_one_step():
    assert " ".join(order_of(OVERLAPPED, 2, True)) == (
        "begin 0 advance 0 look_up 0 begin 1 outputs 0 forward 0 advance 1 backward 0 push 0 "
        "look_up 1 begin 2 outputs 1 forward 1 advance 2 backward 1 push 1 "
        "send_dense collect 0 collect 1 update receive_dense update_dense"
    )
    assert " ".join(order_of(SERIAL, 1, True)) == (
        "begin 0 advance 0 look_up 0 outputs 0 forward 0 backward 0 push 0 collect 0 "
        "send_dense receive_dense update update_dense"
    )


def test_what_is_under_way_beside_a_move():
    beside = {move.name: under_way for move, under_way in OVERLAPPED.beside()}
    assert beside["begin"] == ("vectors",)
    assert beside["backward"] == ("next ids",)
    assert beside["update"] == ("next ids", "dense gradients")
    assert not any(under_way for _, under_way in SERIAL.beside())
    assert "update         this   one optimizer step on the rows     next ids, dense" in str(
        OVERLAPPED
    )


@pytest.mark.parametrize(
    ("each_batch", "each_step", "said"),
    [
        (OVERLAPPED.each_batch[:-1], OVERLAPPED.each_step, "every move once"),
        ((ahead(moves.LOOK_UP), *OVERLAPPED.each_batch[1:]), OVERLAPPED.each_step, "look_up ahead"),
        (
            (*OVERLAPPED.each_batch[:4], moves.BACKWARD, ahead(moves.ADVANCE), moves.PUSH),
            (
                moves.COLLECT,
                moves.UPDATE,
                moves.RECEIVE_DENSE,
                moves.SEND_DENSE,
                moves.UPDATE_DENSE,
            ),
            "receive_dense comes after send_dense",
        ),
        (
            (moves.LOOK_UP, moves.BEGIN, moves.ADVANCE, *SERIAL.each_batch[3:]),
            SERIAL.each_step,
            "look_up comes after advance",
        ),
        (
            (ahead(moves.ADVANCE), ahead(moves.BEGIN), *SERIAL.each_batch[2:]),
            SERIAL.each_step,
            "advance comes after begin",
        ),
        (
            (ahead(moves.ADVANCE), *SERIAL.each_batch[:1], *SERIAL.each_batch[2:]),
            SERIAL.each_step,
            "advance comes after begin",
        ),
        (
            (*SERIAL.each_batch, moves.UPDATE),
            (moves.SEND_DENSE, moves.RECEIVE_DENSE, moves.UPDATE_DENSE),
            "update is a move of a step",
        ),
        (
            SERIAL.each_batch[2:],
            (*SERIAL.each_step, ahead(moves.BEGIN), ahead(moves.ADVANCE)),
            "begin ahead: goes beside",
        ),
    ],
)
def test_an_order_that_uses_what_is_not_there_is_refused(each_batch, each_step, said):
    with pytest.raises(ValueError, match=said):
        StepSchedule(each_batch=each_batch, each_step=each_step)


class Switch:
    """A trainer as far as the watch knows it."""

    schedule = OVERLAPPED


def test_the_watch_takes_turns_and_reports(monkeypatch):
    trainer, now, seen = Switch(), [0.0], []
    monkeypatch.setattr("sbpflow.training.overlap.time.perf_counter", lambda: now[0])
    watch = OverlapWatch(trainer, 2, 500)
    for step in range(1, 61):
        with watch.step(step):
            seen.append(trainer.schedule is OVERLAPPED)
            now[0] += 0.002 if trainer.schedule is OVERLAPPED else 0.005
    assert seen[:10] == [True] * 10
    assert seen[10:50] == ([True] * 5 + [False] * 5) * 4
    assert seen[50:] == [True] * 10
    assert watch.summary().startswith("hides 3.00 ms of a step of 5.00 ms (medians of 16 steps")


@pytest.mark.parametrize(
    ("world_size", "schedule", "steps", "line"),
    [
        (1, OVERLAPPED, 500, "one rank"),
        (2, SERIAL, 500, "off"),
        (2, OVERLAPPED, 199, "200 steps or more"),
    ],
)
def test_the_watch_says_why_it_did_not_measure(world_size, schedule, steps, line):
    trainer = Switch()
    trainer.schedule = schedule
    watch = OverlapWatch(trainer, world_size, steps)
    for step in range(1, 60):
        with watch.step(step):
            assert trainer.schedule is schedule
    assert line in watch.summary()
