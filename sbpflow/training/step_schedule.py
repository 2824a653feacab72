"""Defines the order of a training step's moves, which determines which transfers overlap
computation.

A step trains on one batch, or on several accumulated batches, and updates the parameters once.
Every batch goes through the same moves, from its ids to its row gradients; a schedule orders these
moves. Moves that depend only on ids run up to K batches ahead, where K is the lookahead of the run;
``StepSchedule.distance`` returns how far ahead a move runs. ``print(OVERLAPPED)`` shows the
transfers in flight during each move.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from typing import TypeVar

from sbpflow.runtime.ranks.world import World


@dataclass(frozen=True, slots=True, eq=False)
class Move:
    """A part of a step that waits for transfers, computes, and starts transfers. Moves are compared
    by identity."""

    name: str
    says: str
    waits: tuple[str, ...] = ()
    starts: tuple[str, ...] = ()

    def __reduce__(self) -> tuple[Callable[[str, str], "Move"], tuple[str, str]]:
        # Unpickling must return this process's constant, because moves are compared by identity.
        return saved_move, (self.name, self.says)


# Ids are sent immediately if the receiver knows how many to expect. For id lists and unique rows,
# counts are sent first.
IDS, COUNTS, COUNTED_IDS = "ids", "counts", "counted ids"
FLAGS, EARLY_VECTORS = "flags", "early vectors"
VECTORS, ROW_GRADIENTS, DENSE_GRADIENTS = "vectors", "row gradients", "dense gradients"
LATE_GRADIENTS = "late gradients"
TRANSFERS = (
    *(IDS, COUNTS, COUNTED_IDS, FLAGS, EARLY_VECTORS),
    *(VECTORS, ROW_GRADIENTS, DENSE_GRADIENTS, LATE_GRADIENTS),
)

START_ID_EXCHANGE = Move("start_id_exchange", "ids checked, sorted, counted", starts=(IDS, COUNTS))
EXCHANGE_IDS = Move(
    "exchange_ids", "receive buffers allocated", waits=(COUNTS,), starts=(COUNTED_IDS,)
)
RECEIVE_IDS = Move("receive_ids", "ids received, as storage rows", waits=(IDS, COUNTED_IDS))
LOOKUP = Move("lookup", "rows read, group by group", starts=(VECTORS,))
GATHER_OUTPUTS = Move(
    "gather_outputs", "rows expanded, pooled, joined", waits=(VECTORS, EARLY_VECTORS)
)
FORWARD = Move("forward", "dense forward, loss")
BACKWARD = Move("backward", "dense backward")
SEND_GRADS = Move("send_grads", "gradients summed by row", starts=(ROW_GRADIENTS,))
RECEIVE_GRADS = Move("receive_grads", "gradients kept for the update", waits=(ROW_GRADIENTS,))
SEND_DENSE = Move("send_dense", "dense gradients into buckets", starts=(DENSE_GRADIENTS,))
UPDATE = Move("update", "one optimizer step on the rows", waits=(LATE_GRADIENTS,))
RECEIVE_DENSE = Move("receive_dense", "buckets back to gradients", waits=(DENSE_GRADIENTS,))
UPDATE_DENSE = Move("update_dense", "dense optimizer step")

# A schedule contains a clip move only if gradients are clipped. The clip move must come after all
# moves that compute the gradients that it scales.
CLIP = Move("clip", "dense gradients clipped")
CLIP_ROWS = Move("clip", "all gradients clipped")

# A schedule contains the following moves only with early rows. The first two moves prepare the
# batch after the current batch, so they need the ids of two batches.
MARK_EARLY = Move("mark_early", "early rows chosen", starts=(FLAGS,))
SEND_EARLY = Move("send_early", "chosen rows read", waits=(FLAGS,), starts=(EARLY_VECTORS,))
SEND_LATE = Move("send_late", "last batch's late gradients", starts=(LATE_GRADIENTS,))
OF_THE_NEXT = (MARK_EARLY, SEND_EARLY)
EARLY = (*OF_THE_NEXT, SEND_LATE)
EARLY_LOOKAHEAD = 2

# The moves that exchange ids do not depend on trained values, so they may run in earlier steps.
OF_IDS = (START_ID_EXCHANGE, EXCHANGE_IDS, RECEIVE_IDS)
OF_A_BATCH = (*OF_IDS, LOOKUP, GATHER_OUTPUTS, FORWARD, BACKWARD, SEND_GRADS, RECEIVE_GRADS)
OF_A_STEP = (SEND_DENSE, RECEIVE_DENSE, UPDATE, UPDATE_DENSE)
KNOWN = (*OF_A_BATCH, *EARLY, *OF_A_STEP, CLIP, CLIP_ROWS)
_AFTER = {
    **{later: (earlier.name,) for earlier, later in pairwise(OF_A_BATCH)},
    MARK_EARLY: (RECEIVE_IDS.name,),
    SEND_EARLY: (MARK_EARLY.name,),
    SEND_DENSE: (BACKWARD.name,),
    RECEIVE_DENSE: (SEND_DENSE.name,),
    UPDATE: (RECEIVE_GRADS.name,),
    UPDATE_DENSE: (RECEIVE_DENSE.name,),
    CLIP: (RECEIVE_DENSE.name,),
    CLIP_ROWS: (RECEIVE_DENSE.name, RECEIVE_GRADS.name),
}


_FORMER_NAMES = {
    "begin": START_ID_EXCHANGE.name,
    "advance": EXCHANGE_IDS.name,
    "receive": RECEIVE_IDS.name,
    "look_up": LOOKUP.name,
    "outputs": GATHER_OUTPUTS.name,
    "push": SEND_GRADS.name,
    "collect": RECEIVE_GRADS.name,
}


def saved_move(name: str, says: str) -> Move:
    """Return the move that a file names; ``says`` distinguishes the two moves named ``clip``.

    Files of earlier versions contain former names. Raises ValueError for an unknown name.
    """
    name = _FORMER_NAMES.get(name, name)
    named = [move for move in KNOWN if move.name == name]
    if not named:
        raise ValueError(
            f"{name!r} is not a move; the moves are {', '.join(m.name for m in KNOWN)}"
        )
    return next((move for move in named if move.says == says), named[0])


def _after(move: Move, moves: Collection[Move]) -> tuple[str, ...]:
    """Return the names of the moves that must precede ``move`` in a schedule of ``moves``."""
    waits_for_clip = (move is UPDATE_DENSE and CLIP in moves) or (
        move in (UPDATE, UPDATE_DENSE) and CLIP_ROWS in moves
    )
    # ``mark_early`` also decides which gradients are late.
    waits_for_flags = move is SEND_GRADS and MARK_EARLY in moves
    return (
        *_AFTER.get(move, ()),
        *((CLIP.name,) if waits_for_clip else ()),
        *((MARK_EARLY.name,) if waits_for_flags else ()),
    )


@dataclass(slots=True, eq=False)
class BatchInFlight:
    """Tracks one batch during a step; ``done`` lists the moves already made for the batch."""

    done: set[str] = field(default_factory=set[str], init=False)


BatchT = TypeVar("BatchT", bound=BatchInFlight)
MoveWatch = Callable[[str], AbstractContextManager[object]]
"""A function that returns a context manager for the move of a name"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSchedule:
    """Runs ``each_batch`` for one batch after another, and then ``each_step`` once.

    A move of ``OF_A_BATCH`` within ``each_step`` runs for every batch of the step. The gradients of
    a batch are received before those of the next batch are sent, so that the number of messages in
    flight does not grow with the number of batches. With ``wait_at_once``, the schedule waits for
    each transfer right after starting it. Moves of ``OF_IDS`` may come before or after ``LOOKUP``;
    they prepare the batch that is ``distance`` batches after the current batch. The three moves of
    ``OF_IDS`` for a batch may be spread over consecutive steps. Raises ValueError if a move would
    use a result before it exists.
    """

    each_batch: tuple[Move, ...]
    each_step: tuple[Move, ...]
    wait_at_once: bool = False

    def __post_init__(self) -> None:
        moves = [*self.each_batch, *self.each_step]
        names = [move.name for move in moves]
        optional = [move for move in (CLIP, *EARLY) if move.name in names]
        required = [*OF_A_BATCH, *OF_A_STEP, *optional]
        if sorted(names) != sorted(move.name for move in required):
            raise ValueError(f"a schedule must make every move once, got {', '.join(names)}")
        for place, move in enumerate(moves):
            if move not in KNOWN:
                raise ValueError(f"{move} is not defined in step_schedule; use {move.name.upper()}")
            in_batch = place < len(self.each_batch)
            if move in (*OF_IDS, *EARLY) and not in_batch:
                raise ValueError(f"{move.name} is a move of each batch, not of a step")
            if move in (*OF_A_STEP, CLIP, CLIP_ROWS) and in_batch:
                raise ValueError(f"{move.name} is a move of a step, not of each batch")
            if move in (*OF_IDS, LOOKUP):
                continue  # checked below, because these moves may belong to different batches
            for before in _after(move, moves):
                if names.index(before) > place:
                    raise ValueError(f"{move.name} must come after {before}")
        if self._cycle(RECEIVE_IDS) and names.index(RECEIVE_IDS.name) > names.index(LOOKUP.name):
            raise ValueError("lookup must come after receive_ids")
        if self._cycle(RECEIVE_IDS) > 1:
            order = ", ".join(move.name for move in self.each_batch if move in OF_IDS)
            raise ValueError(
                f"{order}: this order spreads a batch over more than two steps; use "
                f"{', '.join(move.name for move in OF_IDS)}"
            )

    def _cycle(self, move: Move) -> int:
        """Return the number of steps from a batch's START_ID_EXCHANGE to this move of
        ``OF_IDS``."""
        places = [self.each_batch.index(earlier) for earlier in OF_IDS[: OF_IDS.index(move) + 1]]
        return sum(later < earlier for earlier, later in pairwise(places))

    def moves(self, lookahead: int) -> tuple[Move, ...]:
        """Return the moves of ``each_batch`` in the order of a step. Without lookahead, moves of
        ``OF_IDS`` come first. With a lookahead below 2, moves of early rows and late
        gradients are left out.
        """
        moves = self.each_batch
        if lookahead < EARLY_LOOKAHEAD:
            moves = tuple(move for move in moves if move not in EARLY)
        if lookahead:
            return moves
        return (*OF_IDS, *(move for move in moves if move not in OF_IDS))

    def distance(self, move: Move, lookahead: int) -> int:
        """Return the distance, in batches, from the current batch to the batch of ``move``."""
        if move in OF_THE_NEXT:
            return 1
        return lookahead - self._cycle(move) if move in OF_IDS and lookahead else 0

    def run(
        self,
        make_of_batch: Callable[[Move, BatchT], None],
        make_of_step: Callable[[Move], None],
        batches: Sequence[BatchT],
        window: Sequence[BatchT],
        lookahead: int,
        world: World,
        watch: MoveWatch | None = None,
    ) -> None:
        """Make the moves of one step over ``batches``; ``window`` contains the announced batches
        after ``batches``.

        Moves of ``OF_IDS`` are made for the current batch and up to ``lookahead`` batches after it.
        ``make_of_batch`` makes a move of a batch, and ``make_of_step`` any other move;
        ``watch(name)`` wraps each move. No move is made twice for a batch. A batch that was
        announced late first catches up on its overdue moves, so that the transfers on each channel
        always start in batch order.
        """
        world.wait_at_once = self.wait_at_once
        previous = {later: earlier for earlier, later in pairwise(batches)}

        def make(move: Move, batch: BatchT) -> None:
            if move.name in batch.done:
                return
            if move is SEND_GRADS and batch in previous:
                make(RECEIVE_GRADS, previous[batch])
            _call(move, watch, make_of_batch, batch)
            batch.done.add(move.name)

        order, overdue = _order_of_step(self, lookahead)
        queue = [*batches, *window]
        for place in range(len(batches)):
            ahead = queue[place : place + lookahead + 1]
            for batch, moves in zip(ahead, overdue, strict=False):
                for move in moves:
                    make(move, batch)
            for move, distance in order:
                if distance < len(ahead):
                    make(move, ahead[distance])
        for move in self.each_step:
            if move not in OF_A_BATCH:
                _call(move, watch, make_of_step)
            else:
                for batch in batches:
                    make(move, batch)

    @property
    def clips(self) -> Move | None:
        """Return the schedule's clip move, or ``None`` if it has none."""
        return next((move for move in self.each_step if move in (CLIP, CLIP_ROWS)), None)

    def serial(self) -> "StepSchedule":
        """Return a schedule that makes the same moves without overlap."""
        return SERIAL if self.clips is None else clipped(SERIAL, rows=self.clips is CLIP_ROWS)

    def in_flight(
        self, transfers: Collection[str] = TRANSFERS, lookahead: int = 1
    ) -> list[tuple[Move, tuple[str, ...]]]:
        """Return every move of a one-batch step, and the transfers in flight during the move.

        ``transfers`` names the transfers that the run makes (none on a single rank).
        """
        moves = (*self.moves(lookahead), *self.each_step)
        during: list[tuple[Move, tuple[str, ...]]] = []
        flying: list[tuple[int, str]] = []  # (distance of the batch, transfer's name)
        # Transfers still in flight at the end of one step are in flight at the start of the next
        # step, so two steps are simulated.
        for _ in range(2):
            during = []
            flying = [(distance - 1, name) for distance, name in flying]
            for move in moves:
                distance = self.distance(move, lookahead)
                ended = [(distance, name) for name in move.waits]
                flying = [transfer for transfer in flying if transfer not in ended]
                during.append((move, tuple(_of(*transfer) for transfer in flying)))
                if not self.wait_at_once:
                    flying += [(distance, name) for name in move.starts if name in transfers]
        return during

    def describe(self, transfers: Collection[str] = TRANSFERS, lookahead: int = 1) -> str:
        """Return the result of ``in_flight`` as a text table."""
        lines = [f"{'move':<18} {'of':<11} {'what it does':<30} in flight during it"]
        for move, in_flight in self.in_flight(transfers, lookahead):
            of_step = move in self.each_step and move not in OF_A_BATCH
            distance = self.distance(move, lookahead)
            of = "the step" if of_step else _of(distance, "batch") if distance else "this batch"
            flying = ", ".join(in_flight) or "-"
            lines.append(f"{move.name:<18} {of:<11} {move.says:<30} {flying}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.describe()


@cache
def _order_of_step(
    schedule: StepSchedule, lookahead: int
) -> tuple[tuple[tuple[Move, int], ...], tuple[tuple[Move, ...], ...]]:
    """Return a step's moves with the distances of their batches, and the overdue moves by distance.

    For a batch at a given distance, the overdue moves are those that belong to earlier steps. The
    result is cached, because it stays the same for many steps and takes about 100 Python calls to
    compute.
    """
    order = tuple((move, schedule.distance(move, lookahead)) for move in schedule.moves(lookahead))
    overdue = tuple(
        tuple(move for move in OF_IDS if distance < schedule.distance(move, lookahead))
        for distance in range(lookahead)
    )
    return order, overdue


def _of(distance: int, name: str) -> str:
    """Return ``name`` labeled with the distance from the current batch, such as "next batch"."""
    if distance == 0:
        return name
    return f"next {name}" if distance == 1 else f"{name} +{distance}"


def _call(move: Move, watch: MoveWatch | None, make: Callable[..., None], *args: object) -> None:
    """Make a move; add a note with the move's name to any error that it raises."""
    try:
        if watch is None:
            make(move, *args)
        else:
            with watch(move.name):
                make(move, *args)
    except Exception as error:
        error.add_note(f"in the move {move.name}: {move.says}")
        raise


OVERLAPPED = StepSchedule(
    each_batch=(
        RECEIVE_IDS,
        LOOKUP,
        START_ID_EXCHANGE,
        GATHER_OUTPUTS,
        FORWARD,
        EXCHANGE_IDS,
        BACKWARD,
        SEND_GRADS,
    ),
    each_step=(SEND_DENSE, RECEIVE_GRADS, UPDATE, RECEIVE_DENSE, UPDATE_DENSE),
)
SERIAL = StepSchedule(
    each_batch=(
        START_ID_EXCHANGE,
        EXCHANGE_IDS,
        RECEIVE_IDS,
        LOOKUP,
        GATHER_OUTPUTS,
        FORWARD,
        BACKWARD,
        SEND_GRADS,
        RECEIVE_GRADS,
    ),
    each_step=(SEND_DENSE, RECEIVE_DENSE, UPDATE, UPDATE_DENSE),
    wait_at_once=True,
)


def with_early_moves(schedule: StepSchedule, *, late: bool) -> StepSchedule:
    """Return ``schedule`` with the moves of early rows and, if ``late``, of late gradients.

    Early rows and late gradients are sent after the vectors of the current batch have arrived, so
    that the vectors are not delayed. Late gradients are sent before early rows, because the update
    of this step waits for the gradients.
    """
    moves, sends_late = list[Move](), [SEND_LATE] if late else []
    for move in schedule.each_batch:
        moves.append(move)
        moves += {LOOKUP: [MARK_EARLY], GATHER_OUTPUTS: [*sends_late, SEND_EARLY]}.get(move, [])
    return replace(schedule, each_batch=tuple(moves))


def clipped(schedule: StepSchedule, *, rows: bool) -> StepSchedule:
    """Return ``schedule`` with a clip move; with ``rows``, table updates follow the clip move."""
    last = (UPDATE, UPDATE_DENSE) if rows else (UPDATE_DENSE,)
    first = tuple(move for move in schedule.each_step if move not in last)
    return replace(schedule, each_step=(*first, CLIP_ROWS if rows else CLIP, *last))
