"""Defines built-in weights of work counts, for use without a calibration.

The units of the weights are nanoseconds on one core and milliseconds per call. The weights of
indexing, reading, summing, and stepping are rounded measurements: compiled kernels, rowwise
Adagrad, 60,000 ids on 1M rows of 8 to 64 columns, Intel Xeon (AMX), 2026-11. The other weights were
chosen so that they rank plans of eight tasks as measured on loopback (``benchmarks.schemes``;
docs/decisions/engine.md has the held-out tasks). Only the ratios of the weights to each other and
to the link's speed affect the ranking.
"""

from dataclasses import dataclass

from sbpflow.costs.counts import INDEX, SENT, vector_of
from sbpflow.costs.ids import Floats

INDEX_NS = 4.0  # price of finding an id among the unique ids
READ_NS, READ_NS_PER_COLUMN = 4.0, 0.2
SUM_NS, SUM_NS_PER_COLUMN = 4.0, 0.35
COPY_NS_PER_BYTE = 0.06
GROUP_MS, STACK_MS = 2.5, 0.5

WORK_NS = vector_of(
    {
        "home_sort": INDEX_NS + SUM_NS,
        "expand_rows": READ_NS,
        "expand_elements": READ_NS_PER_COLUMN + SUM_NS_PER_COLUMN,
        "searched_ids": INDEX_NS,
        "read_rows": READ_NS,
        "read_elements": READ_NS_PER_COLUMN,
        "update_ids": INDEX_NS + SUM_NS,
        "update_elements": SUM_NS_PER_COLUMN,
        "step_rows": 8.0,  # price of reading, updating, and writing a row
        "step_passes": 0.6,
        "copied_bytes": COPY_NS_PER_BYTE,
    }
)
# ``_CALLS`` are the numbers of transfers per group, round of rows, or stack.
_CALLS = {
    "num_dense_groups": 2,
    "num_summed_groups": 2,
    "num_whole_groups": 1,
    "num_row_transfers": 4,
    "num_row_gathers": 3,
    "num_squares": 1,
    "num_id_calls": 1,
}
_GROUPS = [INDEX[name] for name in _CALLS if name not in ("num_squares", "num_id_calls")]


@dataclass(frozen=True, slots=True)
class Price:
    """The milliseconds of transfers and the busiest rank's work, and the bytes a rank sends."""

    work_ms: float
    transfer_ms: float
    sent_bytes: int

    @property
    def ms(self) -> float:
        return self.work_ms + self.transfer_ms


def price_of(totals: Floats, gb_per_s: float, latency_ms: float) -> Price:
    """Return the price of a step with the counts ``totals`` [ranks, F] of its ranks.

    The link has ``gb_per_s`` of bandwidth and costs ``latency_ms`` per call.
    """
    sent = float((totals[:, SENT].sum(1) + totals[:, INDEX["square_bytes"]]).max())
    groups, stacks = totals[0, _GROUPS].sum(), totals[0, INDEX["num_stacks"]]
    calls = sum(count * totals[0, INDEX[name]] for name, count in _CALLS.items())
    work_ns = float((totals @ WORK_NS).max())
    return Price(
        work_ms=1e-6 * work_ns + GROUP_MS * groups + STACK_MS * stacks,
        transfer_ms=1e-6 * sent / gb_per_s + latency_ms * calls,
        sent_bytes=int(sent),
    )
