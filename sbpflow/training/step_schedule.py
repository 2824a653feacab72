"""The order of a training step's moves as data: what travels while what is computed.

A step takes one batch, or several as one, and updates once. Every batch makes the same moves, from
its ids to its row gradients, and a schedule is the order of them; moves on ids alone may be made
one batch ahead. ``print(OVERLAPPED)`` shows what each move has under way beside it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TypeVar

from sbpflow.dist import World


@dataclass(frozen=True, slots=True)
class Move:
    """Waits for a transfer, computes, starts a transfer; ``ahead`` is of the batch after this."""

    name: str
    says: str
    waits: str = ""
    starts: str = ""
    ahead: bool = False


def ahead(move: Move) -> Move:
    """The same move, of the next batch."""
    return replace(move, ahead=True)


BEGIN = Move("begin", "ids checked, sorted, counted", starts="counts or ids")
ADVANCE = Move("advance", "buffers as large as what comes", waits="counts or ids", starts="ids")
LOOK_UP = Move("look_up", "rows read, group by group", waits="ids", starts="vectors")
OUTPUTS = Move("outputs", "rows expanded, pooled, joined", waits="vectors")
FORWARD = Move("forward", "dense forward, loss")
BACKWARD = Move("backward", "dense backward")
PUSH = Move("push", "gradients summed by row", starts="row gradients")
COLLECT = Move("collect", "gradients kept for the update", waits="row gradients")
SEND_DENSE = Move("send_dense", "dense gradients into buckets", starts="dense gradients")
UPDATE = Move("update", "one optimizer step on the rows")
RECEIVE_DENSE = Move("receive_dense", "and out of them", waits="dense gradients")
UPDATE_DENSE = Move("update_dense", "dense optimizer step")

_OF_A_BATCH = (BEGIN, ADVANCE, LOOK_UP, OUTPUTS, FORWARD, BACKWARD, PUSH, COLLECT)
_OF_A_STEP = (SEND_DENSE, RECEIVE_DENSE, UPDATE, UPDATE_DENSE)
_AFTER = {
    **{later.name: earlier.name for earlier, later in pairwise(_OF_A_BATCH)},
    SEND_DENSE.name: BACKWARD.name,
    RECEIVE_DENSE.name: SEND_DENSE.name,
    UPDATE.name: COLLECT.name,
    UPDATE_DENSE.name: RECEIVE_DENSE.name,
}


@dataclass(slots=True)
class Pass:
    """One batch's way through a step; ``made`` are the moves it has made."""

    made: set[str] = field(default_factory=set[str], init=False)


PassT = TypeVar("PassT", bound=Pass)


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
        if sorted(names) != sorted(move.name for move in (*_OF_A_BATCH, *_OF_A_STEP)):
            raise ValueError(f"a schedule makes every move once, not {', '.join(names)}")
        for move in moves:
            if replace(move, ahead=False) not in (*_OF_A_BATCH, *_OF_A_STEP):
                raise ValueError(f"{move} is none of this module's; use {move.name.upper()}")
        for place, move in enumerate(moves):
            within = place < len(self.each_batch)
            if move.ahead and move.name not in (BEGIN.name, ADVANCE.name):
                raise ValueError(f"{move.name} ahead: it would use rows that are yet to be updated")
            if move.ahead and not within:
                raise ValueError(f"{move.name} ahead: goes beside the moves of a batch")
            if move in _OF_A_STEP and within:
                raise ValueError(f"{move.name} is a move of a step, not of each batch")
            before = _AFTER.get(move.name)
            if before is None:
                continue
            earlier = names.index(before)
            made_before = earlier < place if moves[earlier].ahead == move.ahead else not move.ahead
            if not made_before:
                raise ValueError(f"{move.name} comes after {before}")

    def run(
        self,
        of_batch: Mapping[str, Callable[[PassT], None]],
        of_step: Mapping[str, Callable[[], None]],
        passes: Sequence[PassT],
        coming: PassT | None,
        world: World,
    ) -> None:
        """Make the moves of one step over ``passes``; ``coming`` is the first of the next step.

        The functions make the moves, by name. A batch that none went before makes its moves ahead
        now; a move made ahead is not made again.
        """
        world.wait_at_once = self.wait_at_once
        early = [move for move in self.each_batch if move.ahead]

        def make(move: Move, one: PassT | None) -> None:
            if one is not None and move.name not in one.made:
                of_batch[move.name](one)
                one.made.add(move.name)

        for this, following in zip(passes, [*passes[1:], coming], strict=True):
            for move in early:
                make(move, this)
            for move in self.each_batch:
                make(move, following if move.ahead else this)
        for move in self.each_step:
            if move.name in of_step:
                of_step[move.name]()
            else:
                for one in passes:
                    make(move, one)

    def beside(self) -> list[tuple[Move, tuple[str, ...]]]:
        """Every move of a step of one batch, and what is under way while it computes."""
        moves = (*self.each_batch, *self.each_step)
        under_way = [f"next {move.starts}" for move in moves if move.ahead and move.starts]
        for move in moves:  # of the batch before: what it left under way
            if move.ahead and move.waits:
                under_way.remove(f"next {move.waits}")
        under_way = [name.removeprefix("next ") for name in under_way]
        found: list[tuple[Move, tuple[str, ...]]] = []
        for move in moves:
            whose = "next " if move.ahead else ""
            if move.waits and not self.wait_at_once:
                under_way.remove(whose + move.waits)
            found.append((move, tuple(under_way)))
            if move.starts and not self.wait_at_once:
                under_way.append(whose + move.starts)
        return found

    def __str__(self) -> str:
        lines = [f"{'move':<14} {'batch':<6} {'what it does':<34} under way meanwhile"]
        for move, under_way in self.beside():
            whose = "next" if move.ahead else "this"
            beside = ", ".join(under_way) or "-"
            lines.append(f"{move.name:<14} {whose:<6} {move.says:<34} {beside}")
        return "\n".join(lines)


OVERLAPPED = StepSchedule(
    each_batch=(LOOK_UP, ahead(BEGIN), OUTPUTS, FORWARD, ahead(ADVANCE), BACKWARD, PUSH),
    each_step=(SEND_DENSE, COLLECT, UPDATE, RECEIVE_DENSE, UPDATE_DENSE),
)
SERIAL = StepSchedule(
    each_batch=(BEGIN, ADVANCE, LOOK_UP, OUTPUTS, FORWARD, BACKWARD, PUSH, COLLECT),
    each_step=(SEND_DENSE, RECEIVE_DENSE, UPDATE, UPDATE_DENSE),
    wait_at_once=True,
)
