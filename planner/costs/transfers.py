"""Stores the time of each transfer measured alone and converts these times to examples for a fit.

The plans of a calibration have few sizes, several simultaneous transfers, and one dense part.
Transfers measured alone show the cost of a call and of a byte, far beyond those sizes. This module
contains pure values; ``time_transfers`` measures them.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
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
# These are all transfers of the engine, with the skews of their parts.
SKEWS: Mapping[str, tuple[str, ...]] = {
    "S(1) -> S(0)": (EVEN, ONE_SENDS),
    "S(0) -> S(1)": (EVEN, ONE_RECEIVES),
    "S(0) -> B": (EVEN,),
    "P -> S(0)": (EVEN,),
    "P -> B": (EVEN,),
    ROWS: (EVEN, ONE_SENDS, ONE_RECEIVES),
    ROWS_TO_ALL: (EVEN, ONE_SENDS),
}
# {phase: {transfer: the feature that counts it}}; ``BYTES`` contains a phase's bytes.
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
# Rows leave their owners as vectors and return as gradients, so each direction has one skew.
_NOT_IN = {VECTORS: ONE_RECEIVES, ROW_GRADIENTS: ONE_SENDS}
_FLOAT = 4  # bytes
Count = Annotated[int, Range(low=0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Describes the time of one transfer alone: its ``name`` and a ``skew`` of ``SKEWS``.

    ``sent_bytes`` and ``received_bytes`` are exchanged with other ranks, for each of ``ranks``.
    ``ms`` lasts from the last rank's start to the last rank's end.
    """

    name: str
    skew: str
    ranks: tuple[Count, ...]
    sent_bytes: tuple[Count, ...]
    received_bytes: tuple[Count, ...]
    ms: Annotated[float, Range(low=0, below=1e12)]

    @property
    def most_bytes(self) -> int:
        """Return the bytes that the busiest rank sends or receives."""
        return max(*self.sent_bytes, *self.received_bytes)


def transfer_of(tree: Mapping[str, Any], key: str = "transfer") -> Transfer:
    """Return a transfer from JSON; raise ConfigError, starting with ``key``, otherwise."""
    transfer = build(Transfer, tree)
    check_transfer(transfer, key)
    return transfer


def check_transfer(transfer: Transfer, key: str) -> None:
    """Raise ConfigError unless the engine has this transfer and all lists have one entry per
    rank.
    """
    if transfer.skew not in SKEWS.get(transfer.name, ()):
        raise ConfigError(
            f"{key}: no transfer {brief(transfer.name)} with parts {brief(transfer.skew)}"
        )
    lengths = {len(transfer.sent_bytes), len(transfer.received_bytes)}
    if lengths != {len(transfer.ranks)} or not transfer.ranks:
        raise ConfigError(
            f"{key}: ranks, sent_bytes and received_bytes must have the same length, at least 1"
        )


def examples(transfers: Sequence[Transfer], phase: str, world_size: int) -> tuple[Floats, Floats]:
    """Return ([n, F] counts, [n] ms) of plans with one transfer in ``phase``, in the form for a
    fit.

    Only transfers between all ranks are used, because the transfers of a step are between all
    ranks.
    """
    calls = CALLS.get(phase, {})
    rows: list[Floats] = []
    times: list[float] = []
    for transfer in transfers:
        skewed = transfer.skew == _NOT_IN.get(phase) and transfer.name in (ROWS, ROWS_TO_ALL)
        if transfer.name not in calls or len(transfer.ranks) != world_size or skewed:
            continue
        row = np.zeros(NUM_FEATURES)
        row[INDEX[calls[transfer.name]]] = 1.0
        sent, received = max(transfer.sent_bytes), max(transfer.received_bytes)
        for name, count in zip(BYTES.get(phase, ()), (sent, received), strict=False):
            row[INDEX[name]] = count
        if phase == DENSE_GRADIENTS:
            # In a ring of N, a rank sends (N - 1) / N of the numbers to add, and again to
            # distribute sums.
            row[INDEX["dense_parameters"]] = sent / (2 * (world_size - 1) / world_size * _FLOAT)
        rows.append(row)
        times.append(transfer.ms)
    return np.array(rows).reshape(len(rows), NUM_FEATURES), np.array(times)


def ms_per_byte(transfers: Sequence[Transfer]) -> float:
    """Return the median ms per byte of the busiest rank, over the transfers between all ranks.

    Only the largest size of each transfer is used. The result is 0 if no transfer was timed.
    """
    most = max((len(transfer.ranks) for transfer in transfers), default=0)
    largest: dict[tuple[str, str], Transfer] = {}
    for transfer in sorted(transfers, key=lambda transfer: -transfer.most_bytes):
        if len(transfer.ranks) == most and transfer.most_bytes:
            largest.setdefault((transfer.name, transfer.skew), transfer)
    each = [transfer.ms / transfer.most_bytes for transfer in largest.values()]
    return statistics.median(each) if each else 0.0


def as_lines(transfers: Sequence[Transfer]) -> list[str]:
    """Format a table: the ms of each transfer's smallest and largest size, and its GB/s."""
    if not transfers:
        return []
    head = f"{'transfer alone':<15}{'parts':<18}{'ranks':>5}{'bytes':>8}{'ms':>9}"
    lines = [f"{head}   {'bytes':>8}{'ms':>9}{'GB/s':>8}"]
    groups: dict[tuple[str, str, int], list[Transfer]] = {}
    for transfer in transfers:
        key = (transfer.name, transfer.skew, len(transfer.ranks))
        groups.setdefault(key, []).append(transfer)
    for (name, skew, ranks), group in groups.items():
        size = attrgetter("most_bytes")
        ends = min(group, key=size), max(group, key=size)
        small, large = (f"{_short(end.most_bytes):>8}{end.ms:>9.3f}" for end in ends)
        speed = 1e-6 * ends[1].most_bytes / max(ends[1].ms, 1e-6)
        lines.append(f"{name:<15}{skew:<18}{ranks:>5}{small}   {large}{speed:>8.3f}")
    return lines


def _short(count: int) -> str:
    return f"{count / 2**20:.1f}Mi" if count >= 2**20 else f"{count / 2**10:.1f}Ki"
