"""The order of a training step's moves as data: which transfers run during which computation.

A step takes one batch, or several as one, and updates once. Every batch makes the same moves, from
its ids to its row gradients, and a schedule is the order of them. The moves that depend on ids
alone run K batches ahead, where K is the lookahead of the run; which batch such a move is of
follows from K and from the order (``StepSchedule.distance``). ``print(OVERLAPPED)`` shows what is
in flight during each move.
"""

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TypeVar

from sbpflow.runtime.ranks.world import World


@dataclass(frozen=True, slots=True)
class Move:
    """Waits for transfers, computes, starts transfers."""

    name: str
    says: str
    waits: tuple[str, ...] = ()
    starts: tuple[str, ...] = ()


# Ids of a known number leave at once; of lists and of unique rows the counts go first.
IDS, COUNTS, COUNTED_IDS = "ids", "counts", "counted ids"
VECTORS, ROW_GRADIENTS, DENSE_GRADIENTS = "vectors", "row gradients", "dense gradients"
TRANSFERS = (IDS, COUNTS, COUNTED_IDS, VECTORS, ROW_GRADIENTS, DENSE_GRADIENTS)

START_ID_EXCHANGE = Move("start_id_exchange", "ids checked, sorted, counted", starts=(IDS, COUNTS))
EXCHANGE_IDS = Move(
    "exchange_ids", "room made for what comes", waits=(COUNTS,), starts=(COUNTED_IDS,)
)
RECEIVE_IDS = Move("receive_ids", "ids here, as rows of the storage", waits=(IDS, COUNTED_IDS))
LOOKUP = Move("lookup", "rows read, group by group", starts=(VECTORS,))
GATHER_OUTPUTS = Move("gather_outputs", "rows expanded, pooled, joined", waits=(VECTORS,))
FORWARD = Move("forward", "dense forward, loss")
BACKWARD = Move("backward", "dense backward")
SEND_GRADS = Move("send_grads", "gradients summed by row", starts=(ROW_GRADIENTS,))
RECEIVE_GRADS = Move("receive_grads", "gradients kept for the update", waits=(ROW_GRADIENTS,))
SEND_DENSE = Move("send_dense", "dense gradients into buckets", starts=(DENSE_GRADIENTS,))
UPDATE = Move("update", "one optimizer step on the rows")
RECEIVE_DENSE = Move("receive_dense", "buckets back to gradients", waits=(DENSE_GRADIENTS,))
UPDATE_DENSE = Move("update_dense", "dense optimizer step")

# Only where gradients are clipped; the norm waits for all that is in it.
CLIP = Move("clip", "dense gradients scaled to a norm")
CLIP_ROWS = Move("clip", "all gradients scaled to a norm")

OF_IDS = (
    START_ID_EXCHANGE,
    EXCHANGE_IDS,
    RECEIVE_IDS,
)  # they depend on nothing that training changes
OF_A_BATCH = (*OF_IDS, LOOKUP, GATHER_OUTPUTS, FORWARD, BACKWARD, SEND_GRADS, RECEIVE_GRADS)
OF_A_STEP = (SEND_DENSE, RECEIVE_DENSE, UPDATE, UPDATE_DENSE)
KNOWN = (*OF_A_BATCH, *OF_A_STEP, CLIP, CLIP_ROWS)
_AFTER = {
    **{later.name: (earlier.name,) for earlier, later in pairwise(OF_A_BATCH)},
    SEND_DENSE.name: (BACKWARD.name,),
    RECEIVE_DENSE.name: (SEND_DENSE.name,),
    UPDATE.name: (RECEIVE_GRADS.name,),
    UPDATE_DENSE.name: (RECEIVE_DENSE.name,),
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


def current_name(name: str) -> str:
    """The name that a move of a file of an earlier version has now."""
    return _FORMER_NAMES.get(name, name)


def _after(move: Move, moves: Collection[Move]) -> tuple[str, ...]:
    """The moves that come before ``move`` in a schedule of ``moves``."""
    if move == CLIP:
        return (RECEIVE_DENSE.name,)
    if move == CLIP_ROWS:
        return (RECEIVE_DENSE.name, RECEIVE_GRADS.name)
    scaled = move == UPDATE_DENSE and CLIP in moves
    scaled = scaled or (move in (UPDATE, UPDATE_DENSE) and CLIP_ROWS in moves)
    return (*_AFTER.get(move.name, ()), *((CLIP.name,) if scaled else ()))


@dataclass(slots=True, eq=False)
class BatchInFlight:
    """One batch's way through a step; ``made`` are the moves it has made."""

    made: set[str] = field(default_factory=set[str], init=False)


BatchT = TypeVar("BatchT", bound=BatchInFlight)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSchedule:
    """``each_batch`` is made batch after batch; then ``each_step`` once, where a move of a batch
    is made for all of them. ``wait_at_once`` waits for every transfer where it starts.

    Moves of ``OF_IDS`` may stand before or after ``LOOKUP``. Either way they bring a batch into
    the window that is ``distance`` behind the one being trained; a cycle of them may begin in one
    step and end in the next. Raises ValueError for an order in which something is used before it
    is there.
    """

    each_batch: tuple[Move, ...]
    each_step: tuple[Move, ...]
    wait_at_once: bool = False

    def __post_init__(self) -> None:
        moves = [*self.each_batch, *self.each_step]
        names = [move.name for move in moves]
        clips = [move for move in moves if move in (CLIP, CLIP_ROWS)]
        made = (*OF_A_BATCH, *OF_A_STEP, *clips[:1])
        if sorted(names) != sorted(move.name for move in made):
            raise ValueError(f"a schedule makes every move once, not {', '.join(names)}")
        for place, move in enumerate(moves):
            if move not in KNOWN:
                raise ValueError(f"{move} is none of this module's; use {move.name.upper()}")
            within = place < len(self.each_batch)
            if move in OF_IDS and not within:
                raise ValueError(f"{move.name} is a move of each batch, not of a step")
            if move in (*OF_A_STEP, CLIP, CLIP_ROWS) and within:
                raise ValueError(f"{move.name} is a move of a step, not of each batch")
            if move in (*OF_IDS, LOOKUP):
                continue  # of different batches; the order within a batch is checked below
            for before in _after(move, moves):
                if names.index(before) > place:
                    raise ValueError(f"{move.name} comes after {before}")
        if self._cycle(RECEIVE_IDS) and names.index(RECEIVE_IDS.name) > names.index(LOOKUP.name):
            raise ValueError("lookup comes after receive_ids")
        if self._cycle(RECEIVE_IDS) > 1:
            order = ", ".join(move.name for move in self.each_batch if move in OF_IDS)
            raise ValueError(
                f"{order}: they take more than two steps; use "
                f"{', '.join(move.name for move in OF_IDS)}"
            )

    def _cycle(self, move: Move) -> int:
        """How many steps after its START_ID_EXCHANGE a batch makes this move of ``OF_IDS``."""
        places = [self.each_batch.index(one) for one in OF_IDS[: OF_IDS.index(move) + 1]]
        return sum(later < earlier for earlier, later in pairwise(places))

    def moves(self, lookahead: int) -> tuple[Move, ...]:
        """``each_batch`` in the order of a step: without lookahead the ids come first."""
        if lookahead:
            return self.each_batch
        return (*OF_IDS, *(move for move in self.each_batch if move not in OF_IDS))

    def distance(self, move: Move, lookahead: int) -> int:
        """How many batches after the one being trained the batch comes that makes ``move``."""
        return lookahead - self._cycle(move) if move in OF_IDS and lookahead else 0

    def run(
        self,
        of_batch: Mapping[str, Callable[[BatchT], None]],
        of_step: Mapping[str, Callable[[], None]],
        batches: Sequence[BatchT],
        window: Sequence[BatchT],
        lookahead: int,
        world: World,
        watch: Callable[[str], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Make the moves of one step over ``batches``. ``window`` are the batches announced after
        them; up to ``lookahead`` behind the one being trained make moves of ``OF_IDS``.

        The functions make the moves, by name, with ``watch(name)`` around each. A move that a batch
        has made is not made again. A batch that was announced late makes up for it first, so
        that on each channel transfers start in the order of the batches, whatever the lookahead.
        """
        world.wait_at_once = self.wait_at_once

        def make(move: Move, one: BatchT) -> None:
            if move.name not in one.made:
                with _named(move), watch(move.name):
                    of_batch[move.name](one)
                one.made.add(move.name)

        queue = [*batches, *window]
        for place in range(len(batches)):
            ahead = queue[place : place + lookahead + 1]
            for distance, one in enumerate(ahead):
                for move in OF_IDS:
                    if distance < self.distance(move, lookahead):  # due in an earlier step
                        make(move, one)
            for move in self.moves(lookahead):
                distance = self.distance(move, lookahead)
                if distance < len(ahead):
                    make(move, ahead[distance])
        for move in self.each_step:
            if move.name in of_step:
                with _named(move), watch(move.name):
                    of_step[move.name]()
            else:
                for one in batches:
                    make(move, one)

    @property
    def clips(self) -> Move | None:
        """The move that clips, if there is one."""
        return next((move for move in self.each_step if move in (CLIP, CLIP_ROWS)), None)

    def serial(self) -> "StepSchedule":
        """The same moves one after the other."""
        return SERIAL if self.clips is None else clipped(SERIAL, rows=self.clips == CLIP_ROWS)

    def in_flight(
        self, made: Collection[str] = TRANSFERS, lookahead: int = 1
    ) -> list[tuple[Move, tuple[str, ...]]]:
        """Every move of a step of one batch, and the transfers in flight while it computes.

        ``made`` are the transfers that a run makes; a run on a single rank makes none.
        """
        moves = (*self.moves(lookahead), *self.each_step)
        found: list[tuple[Move, tuple[str, ...]]] = []
        flying: list[tuple[int, str]] = []  # (distance of the batch, transfer)
        for _ in range(2):  # the second time with what the first left in flight
            found = []
            flying = [(distance - 1, name) for distance, name in flying]
            for move in moves:
                distance = self.distance(move, lookahead)
                ended = [(distance, name) for name in move.waits]
                flying = [one for one in flying if one not in ended]
                found.append((move, tuple(_of(*one) for one in flying)))
                if not self.wait_at_once:
                    flying += [(distance, name) for name in move.starts if name in made]
        return found

    def describe(self, made: Collection[str] = TRANSFERS, lookahead: int = 1) -> str:
        """``in_flight`` as a table."""
        lines = [f"{'move':<18} {'of':<11} {'what it does':<30} in flight meanwhile"]
        for move, in_flight in self.in_flight(made, lookahead):
            step = move in self.each_step and move not in OF_A_BATCH
            distance = self.distance(move, lookahead)
            of = "the step" if step else _of(distance, "batch") if distance else "this batch"
            flying = ", ".join(in_flight) or "-"
            lines.append(f"{move.name:<18} {of:<11} {move.says:<30} {flying}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.describe()


def _of(distance: int, name: str) -> str:
    """``name`` of the batch that many behind the one being trained."""
    if distance == 0:
        return name
    return f"next {name}" if distance == 1 else f"{name} +{distance}"


@contextmanager
def _named(move: Move) -> Generator[None]:
    """An error of a move names it in its traceback."""
    try:
        yield
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


def clipped(schedule: StepSchedule, *, rows: bool) -> StepSchedule:
    """``schedule`` with a move that clips; with ``rows`` the tables' update waits for it, too."""
    last = (UPDATE, UPDATE_DENSE) if rows else (UPDATE_DENSE,)
    first = tuple(move for move in schedule.each_step if move not in last)
    return replace(schedule, each_step=(*first, CLIP_ROWS if rows else CLIP, *last))
