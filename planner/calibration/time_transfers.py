"""Times each transfer of the engine alone, for several sizes, skews and numbers of ranks, as steps
are timed.

Boxing converts layouts; single rows use the exchanges ``unique`` and ``local``. Every rank calls
``time_transfers`` and gets the same result.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from sbpflow.boxing.executor import Boxing
from sbpflow.boxing.plan import BoxingStep, plan_boxing
from sbpflow.embedding.exchange.all_to_all import RowTransfer
from sbpflow.embedding.exchange.base import VECTORS as CHANNEL
from sbpflow.embedding.plan.group_plan import ExchangeStep
from sbpflow.planner.calibration.measure import (
    MoveTimer,
    from_all_ranks,
    from_first_rank,
    lower_quartile,
    through_ms,
)
from sbpflow.planner.costs.transfers import (
    EVEN,
    ONE_RECEIVES,
    ROWS,
    ROWS_TO_ALL,
    SKEWS,
    Transfer,
)
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Broadcast, NdSbp, Partial, Split, balanced_sizes
from sbpflow.training.step_schedule import VECTORS

# The bytes that the busiest rank sends or receives range from 4 KiB to 8 MiB.
SIZES = tuple(round(4096 * 2 ** (11 * n / 5)) for n in range(6))
TURNS = 7
MOST_SHARE = 0.8  # share of the columns or rows that one rank of a skewed transfer has
_COLUMNS, _DIM = 64, 16  # columns of a converted tensor; width of exchanged rows
_SIMPLE: dict[str, NdSbp] = {
    "S(0)": (Split(0),),
    "S(1)": (Split(1),),
    "B": (Broadcast(),),
    "P": (Partial(),),
}


class _Case(NamedTuple):
    """Describes a timed transfer; ``make`` returns a function that starts it and waits for it."""

    transfer: Transfer  # its ``ms`` is filled in after timing
    make: Callable[[], Callable[[], object]]


def time_transfers(
    boxing: Boxing, *, seconds: float, sizes: Sequence[int] = SIZES, turns: int = TURNS
) -> list[Transfer]:
    """Return the lower quartile of up to ``turns`` timings of each transfer, in a new order each
    turn.

    The timing takes about ``seconds``: for a slow link, first the turns and then the sizes are
    reduced. The first size is measured at least once. The result is empty for a world of one rank.
    """
    if boxing.world.size == 1:
        return []
    start = time.monotonic()
    cases: list[_Case] = []
    times: list[list[tuple[float, float]]] = []
    for place, size in enumerate(sizes):
        before = time.monotonic()
        fresh = _cases(boxing, size)
        if not place:  # connects the ranks
            for case in fresh:
                _timed(boxing, case)
        cases += fresh
        times += [[_timed(boxing, case)] for case in fresh]
        last = time.monotonic() - before
        # Assume that the time grows in proportion to the size.
        growth = sizes[place + 1] / size if place + 1 < len(sizes) else 1.0
        if not from_first_rank(boxing, time.monotonic() - start + growth * last < 0.5 * seconds):
            break
    turn_s = time.monotonic() - start
    for turn in range(1, turns):
        before = time.monotonic()
        if not from_first_rank(boxing, before - start + turn_s < seconds):
            break
        for place in random.Random(turn).sample(range(len(cases)), len(cases)):
            times[place].append(_timed(boxing, cases[place]))
        turn_s = time.monotonic() - before
    ranks = from_all_ranks(boxing, times)
    return [
        _joined(case, [of_rank[place] for of_rank in ranks]) for place, case in enumerate(cases)
    ]


def _timed(boxing: Boxing, case: _Case) -> tuple[float, float]:
    """Return this rank's ms of work and the ms of waiting after it; all ranks start together."""
    run = case.make()
    with MoveTimer(boxing) as timer:
        with timer.move("lookup"):  # any move that waits for vectors
            run()
    return round(timer.times["lookup"], 4), round(timer.times[VECTORS], 4)


def _joined(case: _Case, ranks: Sequence[Sequence[tuple[float, float]]]) -> Transfer:
    """Return the lower quartile over the turns, each from the last rank's start to the last rank's
    end.

    Ranks outside the transfer are ignored.
    """
    turns = zip(*(ranks[rank] for rank in case.transfer.ranks), strict=True)
    return replace(case.transfer, ms=lower_quartile([through_ms(turn) for turn in turns]))


def _cases(boxing: Boxing, size: int) -> list[_Case]:
    """List every transfer with every skew, on all ranks and, with 4 or more ranks, on half of them.

    Single rows are exchanged between all ranks, as in the engine.
    """
    everyone = tuple(range(boxing.world.size))
    groups = [everyone, everyone[: len(everyone) // 2]] if len(everyone) >= 4 else [everyone]
    cases: list[_Case] = []
    for name, skews in SKEWS.items():
        for skew in skews:
            if name in (ROWS, ROWS_TO_ALL):
                cases.append(_rows(boxing, name, skew, size))
            else:
                cases += [_conversion(boxing, name, skew, ranks, size) for ranks in groups]
    return cases


def _untimed(
    name: str, skew: str, ranks: tuple[int, ...], sent: tuple[int, ...], received: tuple[int, ...]
) -> Transfer:
    return Transfer(
        name=name, skew=skew, ranks=ranks, sent_bytes=sent, received_bytes=received, ms=0.0
    )


# Conversions


def _conversion(boxing: Boxing, name: str, skew: str, ranks: tuple[int, ...], size: int) -> _Case:
    world = boxing.world
    placement = Placement(world.device.type, ranks, (len(ranks),))
    src, dst = (_SIMPLE[text] for text in name.split(" -> "))
    columns = (Split(1, _shares(skew, _COLUMNS, len(ranks))),)
    src, dst = (Layout(placement, columns if sbp == _SIMPLE["S(1)"] else sbp) for sbp in (src, dst))

    def planned(rows: int) -> BoxingStep:
        (step,) = plan_boxing(
            src,
            dst,
            (rows, _COLUMNS),
            torch.float32,
            id=f"planner/{name}",
            backend=world.backend,
        )
        return step

    # Bytes are proportional to rows: find the number of rows for which the busiest rank has
    # ``size`` bytes.
    probe = planned(64 * len(ranks))
    per_row = max(*_sent(probe), *_received(probe)) / 64
    step = planned(len(ranks) * max(1, round(size / per_row)))
    boxing.prepare([step], CHANNEL)  # creates process groups, so all ranks call it
    shape = src.part_shape(step.shape, world.rank)

    def make() -> Callable[[], object]:
        if shape is None:
            return lambda: None
        part = torch.ones(shape, device=world.device)
        return lambda: boxing.start([step], part, CHANNEL).wait()

    sent, received = _sent(step), _received(step)
    return _Case(_untimed(name, skew, ranks, sent, received), make)


def _shares(skew: str, count: int, parts: int) -> tuple[int, ...]:
    """Split ``count`` into parts; with skew, most of it goes to the first part."""
    if skew == EVEN:
        return balanced_sizes(count, parts)
    most = round(MOST_SHARE * count)
    return (most, *balanced_sizes(count - most, parts - 1))


def _sent(step: BoxingStep) -> tuple[int, ...]:
    return tuple(step.bytes_sent(rank) for rank in step.src.placement.ranks)


def _received(step: BoxingStep) -> tuple[int, ...]:
    """Return the bytes that each rank receives; in a ring, as many as it sends."""
    if step.collective != "all_to_all":
        return _sent(step)
    ranks = step.dst.placement.ranks
    received = dict.fromkeys(ranks, 0)
    for move in step.moves:
        if move.src != move.dst:
            received[move.dst] += move.numel * step.dtype.itemsize
    return tuple(received[rank] for rank in ranks)


# Rows


def _rows(boxing: Boxing, name: str, skew: str, size: int) -> _Case:
    world, ranks = boxing.world, tuple(range(boxing.world.size))
    per_row = _DIM * torch.float32.itemsize
    counts = _counts(skew, len(ranks), size // per_row)
    others = [
        [count if src != dst else 0 for dst, count in enumerate(row)]
        for src, row in enumerate(counts)
    ]
    sent = tuple(per_row * sum(row) for row in others)
    step = ExchangeStep(
        id=f"planner/{name}",
        collective="all_to_all" if name == ROWS else "all_gather",
        groups=(ranks,),
        dtype=torch.float32,
        bound_bytes=max(sent),
        total_bound_bytes=sum(sent),
        what="rows",
    )
    exchange, out = RowTransfer(world, CHANNEL), counts[world.rank]
    into = [row[world.rank] for row in counts]

    def make() -> Callable[[], object]:
        if name == ROWS:
            rows = torch.ones(sum(out), _DIM, device=world.device)
            return lambda: exchange.start(step, rows, out, into).wait()
        rows = torch.ones(out[0], _DIM, device=world.device)
        return lambda: exchange.start_for_all(step, rows, into).wait()

    received = tuple(per_row * sum(column) for column in zip(*others, strict=True))
    return _Case(_untimed(name, skew, ranks, sent, received), make)


def _counts(skew: str, num_ranks: int, busiest: int) -> list[list[int]]:
    """Return [src][dst] rows; the busiest rank exchanges about ``busiest`` rows with the other
    ranks.
    """
    most = max(1, round(busiest / (num_ranks - 1)))
    less = most * (1 - MOST_SHARE) / MOST_SHARE / (num_ranks - 1)
    least = most if skew == EVEN else max(1, round(less))
    rows = [[most if src == 0 else least] * num_ranks for src in range(num_ranks)]
    return [list(column) for column in zip(*rows, strict=True)] if skew == ONE_RECEIVES else rows
