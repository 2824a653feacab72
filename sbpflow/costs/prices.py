"""Defines the built-in prices of work counts, for use without a calibration.

Prices are in nanoseconds on one core, or in milliseconds per call. The prices of indexing, reading,
summing, and stepping are rounded measurements: compiled kernels, rowwise Adagrad, 60,000 ids on 1M
rows of 8 to 64 columns, Intel Xeon (AMX), 2026-11. All other prices except ``HOP_NS_PER_BYTE`` were
chosen to reproduce the measured ranking of plans for eight tasks on loopback
(``benchmarks.schemes``). The ranking depends only on the ratios of the prices to each other and to
the link's speed.
"""

import numpy as np

from sbpflow.costs.counts import vector_of
from sbpflow.costs.ids import Floats

INDEX_NS = 4.0  # price of finding an id among the unique ids
READ_NS, READ_NS_PER_COLUMN = 4.0, 0.2
SUM_NS, SUM_NS_PER_COLUMN = 4.0, 0.35
COPY_NS_PER_BYTE = 0.06
# Price of the work of a hop within the host, in addition to the transfer at the rate of the links
# within the host, which is also 0.5 ns at the assumed 2 GB/s. The time that two hops should save on
# the link but do not was 1.4 ns per byte at 100 Mbit/s and 0.2 ns, within the noise, at 1 Gbit/s
# (``benchmarks.two_level``, 2 cores for 4 ranks, AMD EPYC, 2026-11); 1 ns is between them.
HOP_NS_PER_BYTE = 0.5
GROUP_MS, STACK_MS = 2.5, 0.5

PHASES = ("ids", "vectors", "gradients")
"""The phases of a step in which ranks wait for each other's bytes."""
_VECTORS = vector_of(dict.fromkeys(("vector_bytes", "host_bytes", "network_bytes"), 1.0))
_GRADIENTS = vector_of(dict.fromkeys(("gradient_bytes", "reduced_bytes", "dense_parameters"), 1.0))
# Bytes sent evenly to all other ranks, in rings, and in the two hops of an exchange.
SPREAD = vector_of(
    dict.fromkeys(("ids_bytes", "counted_bytes", "vector_bytes", "gradient_bytes"), 1.0)
)
REDUCED = vector_of({"reduced_bytes": 1.0})
_HOST, NETWORK = vector_of({"host_bytes": 1.0}), vector_of({"network_bytes": 1.0})
SENT = SPREAD + REDUCED + _HOST + NETWORK
"""The bytes that a rank sends per unit of each count ([F])."""
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
        "host_bytes": HOP_NS_PER_BYTE,
    }
)
CALLS = {  # calls per unit of each feature
    "num_dense_groups": 2,
    "num_summed_groups": 2,
    "num_whole_groups": 1,
    "num_row_transfers": 4,
    "num_row_gathers": 3,
    "num_squares": 1,
    "num_id_calls": 1,
}
# Ids are exchanged ahead. All other calls also have a price of work, and the same one: the sums of
# squares are small, but every rank waits for them between its backward pass and its update.
_AWAITED = [name for name in CALLS if name != "num_id_calls"]
WORK_MS = 1e-6 * WORK_NS + vector_of({**dict.fromkeys(_AWAITED, GROUP_MS), "num_stacks": STACK_MS})
"""The milliseconds of work (excluding transfers) on a rank per unit of each count ([F])."""


def by_phase(transfers: Floats) -> Floats:
    """Divide the milliseconds of transfers per unit of each count ([F]) by phase ([phases, F]).

    Every phase lasts until the slowest rank is ready. What takes equally long on all ranks may
    count in any phase: calls count as ids, and both hops of an exchange as vectors.
    """
    return transfers * np.stack([1.0 - _VECTORS - _GRADIENTS, _VECTORS, _GRADIENTS])


def shared(loads: Floats, ranks_per_link: int) -> Floats:
    """Return loads [.., ranks, k] in which each rank has the mean transfers of the ranks that share
    its link: ``ranks_per_link`` consecutive ranks. The first of the k numbers is the work, and the
    next are the phases.
    """
    if ranks_per_link == 1:
        return loads
    end = 1 + len(PHASES)
    hosts = loads.reshape(*loads.shape[:-2], -1, ranks_per_link, loads.shape[-1])
    means = hosts[..., 1:end].mean(axis=-2, keepdims=True)
    result = hosts.copy()
    result[..., 1:end] = means
    return result.reshape(loads.shape)


def transfer_ms(
    byte_ms: float, call_ms: float, hop_byte_ms: tuple[float, float], reduced_byte_ms: float
) -> Floats:
    """Return the milliseconds of transfers on a rank per unit of each count ([F]).

    ``byte_ms`` is the price of a byte sent evenly to all other ranks. ``hop_byte_ms`` contains the
    prices of a byte in the two hops of an exchange (within a host, between hosts), and
    ``reduced_byte_ms`` is the price of a byte in an all-reduce.
    """
    near, far = hop_byte_ms
    spread = byte_ms * SPREAD + reduced_byte_ms * REDUCED
    return spread + near * _HOST + far * NETWORK + call_ms * vector_of(CALLS)
