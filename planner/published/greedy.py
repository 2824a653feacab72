"""Random placement and the four greedy heuristics that planner papers compare with.

Source: daochenzha/dreamshard 73128ed, ``sharders.py``. Tables by falling score, each to the device
with the smallest sum so far that has room; equal sums go to the device that holds least.
Differences: bytes are those of this engine (float32 rows, optimizer state, buffers) in place of
fp16 rows; where no device has room, the one that lacks least is taken, and the plan says so.
"""

import numpy as np

from sbpflow.planner.published.setting import Setting
from sbpflow.planner.search.problem import Assignment, Floats


def size_greedy(setting: Setting) -> Assignment:
    """By bytes."""
    return _balanced(setting, setting.held_bytes)


def dim_greedy(setting: Setting) -> Assignment:
    """By columns: what the exchange carries."""
    return _balanced(setting, setting.dims)


def lookup_greedy(setting: Setting) -> Assignment:
    """By columns times ids per sample: what a lookup reads."""
    return _balanced(setting, setting.dims * setting.pooling)


def size_lookup_greedy(setting: Setting) -> Assignment:
    """By what a lookup reads times log10 of the rows."""
    rows = np.log10(np.maximum(setting.table_rows, 10.0))
    return _balanced(setting, setting.dims * setting.pooling * rows)


def random_placement(setting: Setting) -> Assignment:
    """Tables in random order to random devices with room."""
    random = np.random.default_rng(setting.seed)
    return setting.whole(random_devices(setting, random))


def random_devices(setting: Setting, random: np.random.Generator) -> list[int]:
    """A device for every table, drawn among those that have room."""
    held = np.zeros(setting.num_ranks)
    devices = [0] * len(setting.tables)
    for table in random.permutation(len(setting.tables)):
        room = setting.room_bytes - held - setting.held_bytes[table]
        fits = np.flatnonzero(room >= 0)
        device = int(random.choice(fits)) if len(fits) else int(room.argmax())
        held[device] += setting.held_bytes[table]
        devices[int(table)] = device
    return devices


def _balanced(setting: Setting, scores: Floats) -> Assignment:
    loads, held = np.zeros(setting.num_ranks), np.zeros(setting.num_ranks)
    devices = [0] * len(scores)
    for table in np.argsort(-scores, kind="stable"):
        room = setting.room_bytes - held - setting.held_bytes[table]
        fits = np.flatnonzero(room >= 0)
        order = np.lexsort((held[fits], loads[fits]))
        device = int(fits[order[0]]) if len(fits) else int(room.argmax())
        loads[device] += scores[table]
        held[device] += setting.held_bytes[table]
        devices[int(table)] = device
    return setting.whole(devices)
