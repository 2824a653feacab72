"""Implements random placement and the four greedy heuristics that planner papers use as baselines.

Source: daochenzha/dreamshard 73128ed, ``sharders.py``. Tables are placed in descending order of
score, each on the device with the smallest sum of scores among the devices with enough memory; in
case of a tie, the device with the fewest bytes is used. Differences: A table's size is the memory
that this engine needs (float32 rows, optimizer state, buffers), not that of fp16 rows. If no device
has enough memory, the table goes to the device that lacks the fewest bytes.
"""

import numpy as np

from sbpflow.planner.published.setting import Setting
from sbpflow.planner.search.problem import Assignment, Floats, Ints


def size_greedy(setting: Setting) -> Assignment:
    """Balance bytes over the devices."""
    return _balanced(setting, setting.held_bytes)


def dim_greedy(setting: Setting) -> Assignment:
    """Balance columns, which determine the size of the exchange."""
    return _balanced(setting, setting.dims)


def lookup_greedy(setting: Setting) -> Assignment:
    """Balance columns times ids per sample, which determines how much a lookup reads."""
    return _balanced(setting, setting.dims * setting.pooling)


def size_lookup_greedy(setting: Setting) -> Assignment:
    """Balance columns times ids per sample times log10 of the number of rows."""
    rows = np.log10(np.maximum(setting.table_rows, 10.0))
    return _balanced(setting, setting.dims * setting.pooling * rows)


def random_placement(setting: Setting) -> Assignment:
    """Place tables in random order on random devices with enough memory."""
    return setting.whole(random_devices(setting, np.random.default_rng(setting.seed)))


def random_devices(setting: Setting, random: np.random.Generator) -> list[int]:
    """Sample a device for every table among the devices with enough memory."""
    order = random.permutation(len(setting.tables))
    return _place(setting, order, np.zeros(len(order)), random)


def _balanced(setting: Setting, scores: Floats) -> Assignment:
    order = np.argsort(-scores, kind="stable")
    return setting.whole(_place(setting, order, scores))


def _place(
    setting: Setting, order: Ints, scores: Floats, random: np.random.Generator | None = None
) -> list[int]:
    """Choose a device with enough memory for every table: the least loaded one or, with
    ``random``, any.
    """
    loads, held = np.zeros(setting.num_ranks), np.zeros(setting.num_ranks)
    devices = [0] * len(order)
    for table in order:
        room = setting.room_bytes - held - setting.held_bytes[table]
        fits = np.flatnonzero(room >= 0)
        if not len(fits):
            device = int(room.argmax())
        elif random is None:
            device = int(fits[np.lexsort((held[fits], loads[fits]))[0]])
        else:
            device = int(random.choice(fits))
        loads[device] += scores[table]
        held[device] += setting.held_bytes[table]
        devices[int(table)] = device
    return devices
