"""The order of a training step's moves as data: what travels while what is computed.

A step takes one batch, or several as one, and updates once. Every batch makes the same moves, from
its ids to its row gradients, and a schedule is the order of them; moves on ids alone may be made
one batch ahead. ``print(OVERLAPPED)`` shows what each move has under way beside it.
"""

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TypeVar

from sbpflow.runtime.world import World


@dataclass(frozen=True, slots=True)
class Move:
    """Waits for transfers, computes, starts transfers; ``ahead`` is of the batch after this."""

    name: str
    says: str
    waits: tuple[str, ...] = ()
    starts: tuple[str, ...] = ()
    ahead: bool = False


def ahead(move: Move) -> Move:
    """The same move, of the next batch."""
    return replace(move, ahead=True)


# Ids of a known number leave at once; of lists and of unique rows the counts go first.
IDS, COUNTS, COUNTED_IDS = "ids", "counts", "counted ids"
VECTORS, ROW_GRADIENTS, DENSE_GRADIENTS = "vectors", "row gradients", "dense gradients"
TRANSFERS = (IDS, COUNTS, COUNTED_IDS, VECTORS, ROW_GRADIENTS, DENSE_GRADIENTS)

BEGIN = Move("begin", "ids checked, sorted, counted", starts=(IDS, COUNTS))
ADVANCE = Move("advance", "room made for what comes", waits=(COUNTS,), starts=(COUNTED_IDS,))
LOOK_UP = Move("look_up", "rows read, group by group", waits=(IDS, COUNTED_IDS), starts=(VECTORS,))
OUTPUTS = Move("outputs", "rows expanded, pooled, joined", waits=(VECTORS,))
FORWARD = Move("forward", "dense forward, loss")
BACKWARD = Move("backward", "dense backward")
PUSH = Move("push", "gradients summed by row", starts=(ROW_GRADIENTS,))
COLLECT = Move("collect", "gradients kept for the update", waits=(ROW_GRADIENTS,))
SEND_DENSE = Move("send_dense", "dense gradients into buckets", starts=(DENSE_GRADIENTS,))
UPDATE = Move("update", "one optimizer step on the rows")
RECEIVE_DENSE = Move("receive_dense", "buckets back to gradients", waits=(DENSE_GRADIENTS,))
UPDATE_DENSE = Move("update_dense", "dense optimizer step")

# Only where gradients are clipped; the norm waits for all that is in it.
CLIP = Move("clip", "dense gradients scaled to a norm")
CLIP_ROWS = Move("clip", "all gradients scaled to a norm")

OF_A_BATCH = (BEGIN, ADVANCE, LOOK_UP, OUTPUTS, FORWARD, BACKWARD, PUSH, COLLECT)
OF_A_STEP = (SEND_DENSE, RECEIVE_DENSE, UPDATE, UPDATE_DENSE)
KNOWN = (*OF_A_BATCH, *OF_A_STEP, CLIP, CLIP_ROWS)
_AFTER = {
    **{later.name: (earlier.name,) for earlier, later in pairwise(OF_A_BATCH)},
    SEND_DENSE.name: (BACKWARD.name,),
    RECEIVE_DENSE.name: (SEND_DENSE.name,),
    UPDATE.name: (COLLECT.name,),
    UPDATE_DENSE.name: (RECEIVE_DENSE.name,),
}


def _after(move: Move, moves: Collection[Move]) -> tuple[str, ...]:
    """The moves that come before ``move`` in a schedule of ``moves``."""
    if move == CLIP:
        return (RECEIVE_DENSE.name,)
    if move == CLIP_ROWS:
        return (RECEIVE_DENSE.name, COLLECT.name)
    scaled = move == UPDATE_DENSE and CLIP in moves
    scaled = scaled or (move in (UPDATE, UPDATE_DENSE) and CLIP_ROWS in moves)
    return (*_AFTER.get(move.name, ()), *((CLIP.name,) if scaled else ()))


@dataclass(slots=True)
class BatchInFlight:
    """One batch's way through a step; ``made`` are the moves it has made."""

    made: set[str] = field(default_factory=set[str], init=False)


BatchT = TypeVar("BatchT", bound=BatchInFlight)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSchedule:
    """``each_batch`` is made batch after batch; then ``each_step`` once, where a move of a batch
    is made for all of them. ``wait_at_once`` waits for every transfer where it starts.

    Raises ValueError for an order in which something is used before it is there.
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
        for move in moves:
            if replace(move, ahead=False) not in KNOWN:
                raise ValueError(f"{move} is none of this module's; use {move.name.upper()}")
        for place, move in enumerate(moves):
            within = place < len(self.each_batch)
            if move.ahead and move.name not in (BEGIN.name, ADVANCE.name):
                raise ValueError(f"{move.name} ahead: it would use rows that are yet to be updated")
            if move.ahead and not within:
                raise ValueError(f"{move.name} ahead: goes beside the moves of a batch")
            if move in (*OF_A_STEP, CLIP, CLIP_ROWS) and within:
                raise ValueError(f"{move.name} is a move of a step, not of each batch")
            for before in _after(replace(move, ahead=False), moves):
                earlier = names.index(before)
                alike = moves[earlier].ahead == move.ahead
                if not (earlier < place if alike else not move.ahead):
                    raise ValueError(f"{move.name} comes after {before}")

    def run(
        self,
        of_batch: Mapping[str, Callable[[BatchT], None]],
        of_step: Mapping[str, Callable[[], None]],
        batches: Sequence[BatchT],
        coming: BatchT | None,
        world: World,
        watch: Callable[[str], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Make the moves of one step over ``batches``; ``coming`` is the first of the next step.

        ``watch(name)`` is around each.

        The functions make the moves, by name. A batch that none went before makes its moves ahead
        now; a move made ahead is not made again.
        """
        world.wait_at_once = self.wait_at_once
        early = [move for move in self.each_batch if move.ahead]

        def make(move: Move, one: BatchT | None) -> None:
            if one is not None and move.name not in one.made:
                with _named(move), watch(move.name):
                    of_batch[move.name](one)
                one.made.add(move.name)

        for this, following in zip(batches, [*batches[1:], coming], strict=True):
            for move in early:
                make(move, this)
            for move in self.each_batch:
                make(move, following if move.ahead else this)
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

    def beside(self, made: Collection[str] = TRANSFERS) -> list[tuple[Move, tuple[str, ...]]]:
        """Every move of a step of one batch, and what is under way while it computes.

        ``made`` are the transfers that a run makes; one of a single rank makes none.
        """
        moves = (*self.each_batch, *self.each_step)
        found: list[tuple[Move, tuple[str, ...]]] = []
        under_way: list[str] = []
        for _ in range(2):  # the second time round with what the first left under way
            found = []
            under_way = [name.removeprefix("next ") for name in under_way]
            for move in moves:
                whose = "next " if move.ahead else ""
                ended = [whose + name for name in move.waits]
                under_way = [name for name in under_way if name not in ended]
                found.append((move, tuple(under_way)))
                if not self.wait_at_once:
                    under_way += [whose + name for name in move.starts if name in made]
        return found

    def describe(self, made: Collection[str] = TRANSFERS) -> str:
        """``beside`` as a table."""
        lines = [f"{'move':<14} {'of':<11} {'what it does':<30} under way meanwhile"]
        for move, under_way in self.beside(made):
            step = move in self.each_step and move not in OF_A_BATCH
            of = "the step" if step else "next batch" if move.ahead else "this batch"
            beside = ", ".join(under_way) or "-"
            lines.append(f"{move.name:<14} {of:<11} {move.says:<30} {beside}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.describe()


@contextmanager
def _named(move: Move) -> Generator[None]:
    """An error of a move names it in its traceback."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in the move {move.name}: {move.says}")
        raise


OVERLAPPED = StepSchedule(
    each_batch=(LOOK_UP, ahead(BEGIN), OUTPUTS, FORWARD, ahead(ADVANCE), BACKWARD, PUSH),
    each_step=(SEND_DENSE, COLLECT, UPDATE, RECEIVE_DENSE, UPDATE_DENSE),
)
SERIAL = StepSchedule(
    each_batch=(BEGIN, ADVANCE, LOOK_UP, OUTPUTS, FORWARD, BACKWARD, PUSH, COLLECT),
    each_step=(SEND_DENSE, RECEIVE_DENSE, UPDATE, UPDATE_DENSE),
    wait_at_once=True,
)


def clipped(schedule: StepSchedule, *, rows: bool) -> StepSchedule:
    """``schedule`` with a move that clips; with ``rows`` the tables' update waits for it, too."""
    last = (UPDATE, UPDATE_DENSE) if rows else (UPDATE_DENSE,)
    first = tuple(move for move in schedule.each_step if move not in last)
    return replace(schedule, each_step=(*first, CLIP_ROWS if rows else CLIP, *last))
