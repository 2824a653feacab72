"""How long a step takes from what its moves and transfers take: the step's schedule, rank by rank.

A transfer begins on a rank where a move starts it, and is over on all ranks when the last one's
has begun and its bytes are through; transfers take turns on the link. A transfer in the
background takes some of the host's time (gloo copies on the host's cores): the share that overlap
can hide is measured, the rest delays the rank that started it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from sbpflow.costs.ids import Floats
from sbpflow.training.step_schedule import (
    COUNTED_IDS,
    COUNTS,
    DENSE_GRADIENTS,
    IDS,
    OF_A_BATCH,
    OF_A_STEP,
    OVERLAPPED,
    RECEIVE_GRADS,
    RECEIVE_IDS,
    ROW_GRADIENTS,
    SERIAL,
    UPDATE,
    VECTORS,
    Move,
    StepSchedule,
)

REST = "rest"  # what a step takes beside its moves: calls, threads that take turns
# ``receive`` waits for ids; what it computes is measured with the lookup that follows.
MOVES = (*(move.name for move in (*OF_A_BATCH, *OF_A_STEP) if move is not RECEIVE_IDS), REST)
TRANSFERS = (IDS, COUNTS, COUNTED_IDS, VECTORS, ROW_GRADIENTS, DENSE_GRADIENTS)
PHASES = (*MOVES, *TRANSFERS)
PHASE = {name: place for place, name in enumerate(PHASES)}
NUM_PHASES = len(PHASES)
# Steps that are simulated one after another, the later with what the earlier left under way. Their
# mean rises with every phase, which the last one alone need not.
_STEPS = 3


@dataclass(slots=True)
class _Clock:
    """Of [N, D] ranks: when each is free; when the transfers under way are over, [N] each."""

    now: Floats
    link: Floats  # [N], when the last transfer has left it
    # (transfer, whether of the next batch)
    over: dict[tuple[str, bool], Floats] = field(
        default_factory=dict
    )  # (transfer, of the next batch)


def step_ms(
    phases: Floats,
    hidden: Mapping[str, float],
    schedule: StepSchedule = OVERLAPPED,
    *,
    batches: int = 1,
) -> Floats:
    """[N] milliseconds of a step from ``phases`` [N, D ranks, P], over a run of many steps.

    ``hidden`` is the share of a transfer that overlap can hide, by kind, 0 to 1. Rises with every
    phase of every rank. A step of several ``batches`` updates the rows of all of them at once, and
    the dense part once; ``phases`` are of one.
    """
    clock = _Clock(np.zeros(phases.shape[:2]), np.zeros(phases.shape[0]))
    steps = math.ceil(_STEPS / batches)
    for _ in range(steps):
        for _ in range(batches):
            clock.over = {(kind, False): at for (kind, _), at in clock.over.items()}
            for move in schedule.each_batch:
                _make(clock, move, phases, hidden, schedule)
        for move in schedule.each_step:
            of_rows = move in (RECEIVE_GRADS, UPDATE)
            _make(clock, move, phases, hidden, schedule, times=batches if of_rows else 1)
        clock.now = clock.now + batches * phases[:, :, PHASE[REST]]
    return clock.now.max(1) / steps


def _make(
    clock: _Clock,
    move: Move,
    phases: Floats,
    hidden: Mapping[str, float],
    schedule: StepSchedule,
    times: int = 1,
) -> None:
    of_next = schedule.distance(move, lookahead=1) > 0
    for kind in move.waits:
        at = clock.over.pop((kind, of_next), None)
        if at is not None:
            clock.now = np.maximum(clock.now, at[:, None])
    if move.name in PHASE:
        clock.now = clock.now + times * phases[:, :, PHASE[move.name]]
    for kind in reversed(move.starts):  # counts before the ids, which are long
        _start(clock, phases[:, :, PHASE[kind]], kind, of_next, hidden, schedule)


def _start(
    clock: _Clock,
    duration: Floats,
    kind: str,
    of_next: bool,
    hidden: Mapping[str, float],
    schedule: StepSchedule,
) -> None:
    longest = duration.max(1)
    if schedule.wait_at_once:
        done = clock.now.max(1) + longest
        travels = longest > 0
        clock.now = np.where(travels[:, None], done[:, None], clock.now)
        return
    share = hidden.get(kind, 0.0)
    clock.now = clock.now + (1.0 - share) * duration
    start = clock.now.max(1)
    travels = longest > 0
    clock.link = np.where(travels, np.maximum(clock.link, start) + share * longest, clock.link)
    clock.over[kind, of_next] = np.where(travels, clock.link, start)


def sum_of_maxima(phases: Floats) -> Floats:
    """[N]: the slowest rank of each phase, one after the other; nothing overlaps."""
    return phases.max(1).sum(1)


def max_of_sums(phases: Floats) -> Floats:
    """[N]: the rank with the most work; nobody waits for anybody."""
    return phases.sum(2).max(1)


# What each phase is a part of, for reports with four kinds of time.
KINDS: Mapping[str, str] = {
    **dict.fromkeys(("start_id_exchange", "exchange_ids", "lookup", "gather_outputs"), "forward"),
    **dict.fromkeys(
        ("forward", "backward", "send_dense", "receive_dense", "update_dense"), "dense"
    ),
    **dict.fromkeys(("send_grads", "receive_grads", "update", REST), "backward"),
    **dict.fromkeys((IDS, COUNTS, COUNTED_IDS, VECTORS), "forward exchange"),
    **dict.fromkeys((ROW_GRADIENTS, DENSE_GRADIENTS), "backward exchange"),
}


def hidden_by(phases: Floats, hidden: Mapping[str, float]) -> dict[str, Floats]:
    """{transfer: [N] ms of it that a step with overlap does not show}."""
    found: dict[str, Floats] = {}
    full = step_ms(phases, hidden)
    for kind in TRANSFERS:
        without = phases.copy()
        without[:, :, PHASE[kind]] = 0.0
        shown = full - step_ms(without, hidden)
        found[kind] = np.maximum(phases[:, :, PHASE[kind]].max(1) - shown, 0.0)
    return found


SCHEDULES = {True: OVERLAPPED, False: SERIAL}
