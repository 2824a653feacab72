"""What each transfer of a step takes when it is made alone, and what a fit learns from that.

Plans that are drawn carry few kinds of sizes, several transfers at once, and the dense part of one
model. A transfer made alone tells what a call costs and what a byte costs, far beyond those sizes.
Pure values; ``time_transfers`` measures them.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from sbpflow.config.parse import brief, build
from sbpflow.costs.counts import INDEX, NUM_FEATURES
from sbpflow.costs.ids import Floats
from sbpflow.errors import ConfigError
from sbpflow.runtime.fields.ranges import Range
from sbpflow.training.step_schedule import (
    COUNTED_IDS,
    DENSE_GRADIENTS,
    IDS,
    ROW_GRADIENTS,
    VECTORS,
)

EVEN, ONE_SENDS, ONE_RECEIVES = "even", "one sends most", "one receives most"
ROWS, ROWS_TO_ALL = "rows", "rows to all"
# Every transfer that the engine makes, and the parts that it may have there.
SKEWS: Mapping[str, tuple[str, ...]] = {
    "S(1) -> S(0)": (EVEN, ONE_SENDS),
    "S(0) -> S(1)": (EVEN, ONE_RECEIVES),
    "S(0) -> B": (EVEN,),
    "P -> S(0)": (EVEN,),
    "P -> B": (EVEN,),
    ROWS: (EVEN, ONE_SENDS, ONE_RECEIVES),
    ROWS_TO_ALL: (EVEN, ONE_SENDS),
}
# {phase: {transfer: what a plan counts as one}}; a phase's bytes are in ``BYTES``.
CALLS: Mapping[str, Mapping[str, str]] = {
    IDS: {"S(0) -> B": "num_id_calls"},
    COUNTED_IDS: {ROWS: "num_row_transfers", ROWS_TO_ALL: "num_row_gathers"},
    VECTORS: {
        "S(1) -> S(0)": "num_dense_groups",
        "P -> S(0)": "num_summed_groups",
        ROWS: "num_row_transfers",
    },
    ROW_GRADIENTS: {
        "S(0) -> S(1)": "num_dense_groups",
        "S(0) -> B": "num_summed_groups",
        "P -> B": "num_whole_groups",
        ROWS: "num_row_transfers",
        ROWS_TO_ALL: "num_row_gathers",
    },
    DENSE_GRADIENTS: {"P -> B": "always"},
}
BYTES: Mapping[str, tuple[str, ...]] = {
    IDS: ("ids_bytes",),
    COUNTED_IDS: ("counted_bytes",),
    VECTORS: ("vector_bytes", "vector_in_bytes"),
    ROW_GRADIENTS: ("gradient_bytes", "gradient_in_bytes"),
}
# Rows leave their owners as vectors and come back as gradients: what one rank's rows skew.
_NOT_IN = {VECTORS: ONE_RECEIVES, ROW_GRADIENTS: ONE_SENDS}
_FLOAT = 4  # bytes
Count = Annotated[int, Range(low=0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One transfer alone: ``name`` and ``skew`` of ``SKEWS``, bytes to and from others, and ms.

    ``sent_bytes`` and ``received_bytes`` are of each of ``ranks``; ``ms`` is from the last
    rank's start to the last one's end.
    """

    name: str
    skew: str
    ranks: tuple[Count, ...]
    sent_bytes: tuple[Count, ...]
    received_bytes: tuple[Count, ...]
    ms: Annotated[float, Range(low=0, below=1e12)]

    @property
    def most_bytes(self) -> int:
        """What the busiest rank sends or receives."""
        return max(*self.sent_bytes, *self.received_bytes)


def transfer_of(tree: Mapping[str, Any], key: str = "transfer") -> Transfer:
    """From JSON; ConfigError, which begins with ``key``, for anything else."""
    found = build(Transfer, tree)
    check_transfer(found, key)
    return found


def check_transfer(one: Transfer, key: str) -> None:
    """ConfigError unless it is a transfer that the engine makes, of as many ranks throughout."""
    if one.skew not in SKEWS.get(one.name, ()):
        raise ConfigError(f"{key}: no transfer {brief(one.name)} with parts {brief(one.skew)}")
    if {len(one.sent_bytes), len(one.received_bytes)} != {len(one.ranks)} or not one.ranks:
        raise ConfigError(f"{key}: ranks, sent_bytes and received_bytes are not of one length")


def examples(transfers: Sequence[Transfer], phase: str, world_size: int) -> tuple[Floats, Floats]:
    """([n, F] counts, [n] ms) of a plan that made one transfer in ``phase``, as a fit takes them.

    Those of all ranks only, for the transfers of a step are of all ranks.
    """
    calls = CALLS.get(phase, {})
    rows: list[Floats] = []
    times: list[float] = []
    for one in transfers:
        wrong = one.skew == _NOT_IN.get(phase) and one.name in (ROWS, ROWS_TO_ALL)
        if one.name not in calls or len(one.ranks) != world_size or wrong:
            continue
        row = np.zeros(NUM_FEATURES)
        row[INDEX[calls[one.name]]] = 1.0
        sent = max(one.sent_bytes)
        for name, count in zip(BYTES.get(phase, ()), (sent, max(one.received_bytes)), strict=False):
            row[INDEX[name]] = count
        if phase == DENSE_GRADIENTS:
            # A ring passes every number on to all but one rank, to add and again to spread.
            row[INDEX["dense_parameters"]] = sent / (2 * (world_size - 1) / world_size * _FLOAT)
        rows.append(row)
        times.append(one.ms)
    return np.array(rows).reshape(len(rows), NUM_FEATURES), np.array(times)


def ms_per_byte(transfers: Sequence[Transfer]) -> float:
    """The median over the transfers of all ranks, each by its largest size; 0 where none was timed.

    By the bytes of the busiest rank.
    """
    most = max((len(one.ranks) for one in transfers), default=0)
    largest: dict[tuple[str, str], Transfer] = {}
    for one in transfers:
        if len(one.ranks) == most and one.most_bytes:
            known = largest.setdefault((one.name, one.skew), one)
            if one.most_bytes > known.most_bytes:
                largest[one.name, one.skew] = one
    each = [one.ms / one.most_bytes for one in largest.values()]
    return statistics.median(each) if each else 0.0


def as_lines(transfers: Sequence[Transfer]) -> list[str]:
    """A table: each transfer's smallest and largest size, ms, and GB/s of its busiest rank."""
    if not transfers:
        return []
    head = f"{'transfer alone':<15}{'parts':<18}{'ranks':>5}{'bytes':>8}{'ms':>9}"
    lines = [f"{head}   {'bytes':>8}{'ms':>9}{'GB/s':>8}"]
    groups: dict[tuple[str, str, int], list[Transfer]] = {}
    for one in transfers:
        groups.setdefault((one.name, one.skew, len(one.ranks)), []).append(one)
    for (name, skew, ranks), mine in groups.items():
        ends = [min(mine, key=_size), max(mine, key=_size)]
        small, large = (f"{_short(one.most_bytes):>8}{one.ms:>9.3f}" for one in ends)
        speed = 1e-6 * ends[1].most_bytes / max(ends[1].ms, 1e-6)
        lines.append(f"{name:<15}{skew:<18}{ranks:>5}{small}   {large}{speed:>8.3f}")
    return lines


def _size(one: Transfer) -> int:
    return one.most_bytes


def _short(count: int) -> str:
    return f"{count / 2**20:.1f}Mi" if count >= 2**20 else f"{count / 2**10:.1f}Ki"
