"""What a step of an embedding plan costs, from its groups, its bytes and how often ids repeat.

Meant to rank whole plans before anything runs; no calibration is needed. How often ids repeat is
told by the statistics of the data; without any they repeat as click data do (``costs.ids``).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from sbpflow.costs.ids import IdFrequencies, click_curve
from sbpflow.embedding.plan.embedding_plan import EmbeddingPlan
from sbpflow.embedding.plan.exchanges import Exchange
from sbpflow.embedding.plan.group_plan import ExchangeStep, GroupPlan, Step
from sbpflow.embedding.plan.stack import Stack, Use
from sbpflow.errors import unknown_value

# Nanoseconds on one core, and milliseconds per call. The first five lines are rounded readings:
# compiled kernels, rowwise Adagrad, 60,000 ids on 1M rows of 8 to 64 columns, Intel Xeon (AMX),
# 2026-11. The others and the passes below were set so that the plans of eight tasks rank as they
# ran on loopback (``benchmarks.schemes``; docs/decisions/engine.md has the tasks held out). What
# ranks plans is how these numbers stand to one another and to the link.
INDEX_NS = 4.0  # find the place of an id among the unique ones
READ_NS, READ_NS_PER_COLUMN = 4.0, 0.2
SUM_NS, SUM_NS_PER_COLUMN = 4.0, 0.35
STEP_NS, STEP_NS_PER_COLUMN = 8.0, 0.6  # read, rule, write of a row
COPY_NS_PER_BYTE = 0.06
GROUP_MS, STACK_MS, TRANSFER_MS = 2.5, 0.5, 0.25
LOOPBACK_GB_PER_S = 2.0
# How often memory is gone through, beside what is counted by rows: of a row on its way, of the
# gradient of a whole table (made of zeros, filled, joined, added up, looked through), and of an
# output that several groups have parts of (joined and put in order, its gradient taken apart).
ROW_PASSES, WHOLE_PASSES, JOIN_PASSES = 1, 25, 5


@dataclass(slots=True)
class Price:
    """Milliseconds of the busiest rank's work, and of its transfers; the bytes it sends."""

    work_ms: float = 0.0
    transfer_ms: float = 0.0
    sent_bytes: int = 0

    @property
    def ms(self) -> float:
        return self.work_ms + self.transfer_ms


@dataclass(slots=True)
class _Rank:
    work_ns: float = 0.0
    sent_bytes: float = 0.0

    def add(self, other: "_Rank") -> None:
        self.work_ns += other.work_ns
        self.sent_bytes += other.sent_bytes

    def read(self, rows: float, width: float) -> None:
        self.work_ns += rows * (READ_NS + READ_NS_PER_COLUMN * width)

    def index_and_sum(self, ids: float, width: float) -> None:
        self.work_ns += ids * (INDEX_NS + SUM_NS + SUM_NS_PER_COLUMN * width)

    def step(self, rows: float, width: float, states: int) -> None:
        self.work_ns += rows * (STEP_NS + STEP_NS_PER_COLUMN * width * max(1, states))

    def copy(self, num_bytes: float) -> None:
        self.work_ns += COPY_NS_PER_BYTE * num_bytes


def price_plan(
    plan: EmbeddingPlan,
    batch_size: int,
    link_gb_per_s: float = LOOPBACK_GB_PER_S,
    frequencies: Mapping[str, IdFrequencies] | None = None,
) -> Price:
    """The price of a step over a global batch of ``batch_size``; ``frequencies`` are by feature."""
    known = frequencies or {}
    of_use = {n: known[one.name] for n, one in enumerate(plan.features) if one.name in known}
    ranks = {rank: _Rank() for rank in plan.world.ranks}
    calls = 0
    for group in plan.groups:
        for index, stack in enumerate(group.stacks):
            shared = index in group.shared_state
            for use in stack.uses:
                _add_use(ranks, group, stack, use, batch_size, of_use, shared=shared)
        _add_vectors(ranks, group, batch_size)
    for output in plan.outputs:
        if sum(group.output.name == output.name for group in plan.groups) > 1:
            num_bytes = batch_size / plan.world.size * output.width * plan.dtype.itemsize
            for cost in ranks.values():
                cost.copy(JOIN_PASSES * num_bytes)
    steps = (
        *plan.ahead_steps(batch_size),
        *plan.forward_steps(batch_size),
        *plan.push_steps(batch_size),
        *plan.update_steps(batch_size),
    )
    for step in steps:
        calls += _add_step(ranks, step)
    stacks = sum(len(group.stacks) for group in plan.groups)
    busiest = max(ranks.values(), key=lambda cost: cost.work_ns)
    sent = max(cost.sent_bytes for cost in ranks.values())
    return Price(
        work_ms=1e-6 * busiest.work_ns + GROUP_MS * len(plan.groups) + STACK_MS * stacks,
        transfer_ms=1e-6 * sent / link_gb_per_s + TRANSFER_MS * calls,
        sent_bytes=int(sent),
    )


def _add_step(ranks: dict[int, _Rank], step: Step) -> int:
    """Bytes that a step sends; where the batch decides, ``_price_use`` has counted them."""
    if isinstance(step, ExchangeStep):
        return 1
    for rank, cost in ranks.items():
        cost.sent_bytes += step.bytes_sent(rank)
    return 1 if step.groups else 0


def _touched(use: Use, draws: float, known: Mapping[int, IdFrequencies]) -> float:
    found = known.get(use.feature)
    if found is None:
        return click_curve(use.table.num_rows).touched(draws)
    return min(found.curve.touched(draws), float(use.table.num_rows))


def _add_use(
    ranks: Mapping[int, _Rank],
    group: GroupPlan,
    stack: Stack,
    use: Use,
    batch_size: int,
    known: Mapping[int, IdFrequencies],
    *,
    shared: bool,
) -> None:
    """What each rank does for a use, priced once for all that hold as much of its table."""
    size, found = group.world.size, known.get(use.feature)
    lookups = batch_size * (use.hotness if found is None else found.per_sample)
    everywhere, mine = (_touched(use, draws, known) for draws in (lookups, lookups / size))
    held = stack.held(use.table)
    priced: dict[tuple[int, int], _Rank] = {}
    for rank, cost in ranks.items():
        part = held.get(rank, (0, stack.dim))
        if part not in priced:
            load = _Load(lookups, everywhere, mine, part[0] / use.table.num_rows, part[1])
            priced[part] = _price_use(group, stack, use, load, shared=shared)
        cost.add(priced[part])


@dataclass(frozen=True, slots=True)
class _Load:
    """Ids of a use in a batch, the rows of its table that they name and that one rank's name, and
    what a rank holds: a share of the rows, and columns.
    """

    lookups: float
    touched: float
    mine: float
    held: float
    width: int


def _price_use(group: GroupPlan, stack: Stack, use: Use, load: _Load, *, shared: bool) -> _Rank:
    """What a rank does for a use: its own samples' ids, and the rows that it holds, whose squares
    are added up over the ranks if their state is ``shared``.
    """
    cost = _Rank()
    size = group.world.size
    table, lookups, mine, width = use.table, load.lookups, load.mine, load.width
    all_touched = load.touched * load.held
    if size > 1 and group.exchange in ("local", "unique") and not group.whole_gradients:
        item = group.grad_comm_dtype.itemsize
        cost.index_and_sum(lookups / size, stack.dim)
        cost.read(lookups / size, stack.dim)  # expanding them
        if group.unique_columns:
            received = mine * size
            cost.sent_bytes += mine * (size - 1) * (4 + 2 * width * item)
            cost.copy(2 * (1 + ROW_PASSES) * mine * stack.dim * item)  # into columns and out
        elif group.exchange == "unique":
            received = mine * size * load.held
            cost.sent_bytes += mine * (size - 1) / size * (4 + stack.dim * 2 * item)
            cost.copy(2 * ROW_PASSES * mine * stack.dim * item)
        elif group.exchange == "local":
            received = mine * size
            cost.sent_bytes += mine * (size - 1) * (4 + stack.dim * item)
            cost.copy(mine * size * stack.dim * item)
        else:
            raise unknown_value("exchange", group.exchange, Exchange)
        cost.read(received if group.exchange == "unique" else mine, width)
        cost.index_and_sum(received, width)
    else:
        here = lookups / size if group.exchange == "local" and size > 1 else lookups * load.held
        cost.read(here, width)
        cost.index_and_sum(here, width)
        if group.exchange == "reduce" and size > 1:
            cost.work_ns += lookups * INDEX_NS  # which of them are here
    if group.whole_gradients and size > 1:
        num_bytes = table.num_rows * (table.dim + 1) * group.grad_comm_dtype.itemsize
        cost.copy(WHOLE_PASSES * num_bytes)
    cost.step(all_touched, width, len(stack.optimizer.state))
    if shared:
        cost.sent_bytes += 2 * (size - 1) / size * all_touched * group.dtype.itemsize
    return cost


def _add_vectors(ranks: Mapping[int, _Rank], group: GroupPlan, batch_size: int) -> None:
    """Copies of vectors and gradients into and out of the buffers of boxed exchanges."""
    size = group.world.size
    if size == 1 or group.exchange not in ("columns", "reduce"):
        return
    owners = frozenset(group.owners)
    home = batch_size / size * group.width
    terms = len(owners) if group.exchange == "reduce" else 1
    both_ways = group.comm_dtype.itemsize + group.grad_comm_dtype.itemsize
    for rank, cost in ranks.items():
        there = batch_size * group.rank_width(rank) if rank in owners else 0
        cost.copy(both_ways * (2 * there + (1 + terms) * home))
