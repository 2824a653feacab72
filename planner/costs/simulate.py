"""Simulates a step from the times of its moves and transfers, following the step's schedule.

A move may start a transfer on its rank. The transfer ends on all ranks when the last rank has
started it and its bytes have arrived. The link carries one transfer at a time. A background
transfer also uses the host (gloo copies data on the host's cores). Overlap hides a measured share
of the transfer; the rest delays the rank that started it.
"""

import math
from collections.abc import Mapping

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
    UPDATE,
    VECTORS,
    Move,
    StepSchedule,
)

REST = "rest"  # the part of a step outside its moves: calls and threads that wait for each other
# The move ``receive`` waits for ids; its computation is measured with the lookup that follows.
MOVES = (*(move.name for move in (*OF_A_BATCH, *OF_A_STEP) if move is not RECEIVE_IDS), REST)
TRANSFERS = (IDS, COUNTS, COUNTED_IDS, VECTORS, ROW_GRADIENTS, DENSE_GRADIENTS)
PHASES = (*MOVES, *TRANSFERS)
PHASE = {name: place for place, name in enumerate(PHASES)}
NUM_PHASES = len(PHASES)
# This is the number of consecutive steps to simulate. Each step starts with the transfers that the
# previous step left in flight. Their mean time increases with every phase; the last step's time may
# not.
_STEPS = 3


class _Clock:
    """Tracks the progress of [N, D] ranks through a step, given their ``phases`` [N, D, P] in
    ms.
    """

    def __init__(self, phases: Floats, hidden: Mapping[str, float], schedule: StepSchedule) -> None:
        self.phases, self.hidden, self.schedule = phases, hidden, schedule
        self.now = np.zeros(phases.shape[:2])  # [N, D], when each rank is free
        self.link = np.zeros(phases.shape[0])  # [N], when the last transfer has left the link
        self.over: dict[tuple[str, bool], Floats] = {}  # (transfer, of the next batch): [N] end

    def make(self, move: Move, times: int = 1) -> None:
        """Wait for the move's transfers, run it, and start the transfers that it starts."""
        of_next = self.schedule.distance(move, lookahead=1) > 0
        for kind in move.waits:
            at = self.over.pop((kind, of_next), None)
            if at is not None:
                self.now = np.maximum(self.now, at[:, None])
        if move.name in PHASE:
            self.now = self.now + times * self.phases[:, :, PHASE[move.name]]
        for kind in reversed(move.starts):  # counts come before the ids, because ids take long
            self._start(kind, of_next)

    def _start(self, kind: str, of_next: bool) -> None:
        duration = self.phases[:, :, PHASE[kind]]
        longest = duration.max(1)
        travels = longest > 0
        if self.schedule.wait_at_once:
            done = self.now.max(1) + longest
            self.now = np.where(travels[:, None], done[:, None], self.now)
            return
        share = self.hidden.get(kind, 0.0)
        self.now = self.now + (1.0 - share) * duration
        start = self.now.max(1)
        self.link = np.where(travels, np.maximum(self.link, start) + share * longest, self.link)
        self.over[kind, of_next] = np.where(travels, self.link, start)


def step_ms(
    phases: Floats,
    hidden: Mapping[str, float],
    schedule: StepSchedule = OVERLAPPED,
    *,
    batches: int = 1,
) -> Floats:
    """Return [N] ms of a step from ``phases`` [N, D ranks, P], as in a run of many steps.

    ``hidden`` is the share of a transfer that overlap can hide, by kind, from 0 to 1. The result
    increases with every phase of every rank. ``phases`` are for one batch. A step of several
    ``batches`` updates the rows of all batches together and the dense part once.
    """
    clock = _Clock(phases, hidden, schedule)
    steps = math.ceil(_STEPS / batches)
    for _ in range(steps):
        for _ in range(batches):
            clock.over = {(kind, False): at for (kind, _), at in clock.over.items()}
            for move in schedule.each_batch:
                clock.make(move)
        for move in schedule.each_step:
            clock.make(move, times=batches if move in (RECEIVE_GRADS, UPDATE) else 1)
        clock.now = clock.now + batches * phases[:, :, PHASE[REST]]
    return clock.now.max(1) / steps


# Reports group the phases by these kinds of time.
KINDS: Mapping[str, str] = {
    **dict.fromkeys(("start_id_exchange", "exchange_ids", "lookup", "gather_outputs"), "forward"),
    **dict.fromkeys(
        ("forward", "backward", "send_dense", "receive_dense", "update_dense"), "dense"
    ),
    **dict.fromkeys(("send_grads", "receive_grads", "update", REST), "backward"),
    **dict.fromkeys((IDS, COUNTS, COUNTED_IDS, VECTORS), "forward exchange"),
    **dict.fromkeys((ROW_GRADIENTS, DENSE_GRADIENTS), "backward exchange"),
}
