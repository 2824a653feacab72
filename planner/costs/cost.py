"""Computes the cost of a plan: counts of work times the prices measured on this machine.

A rank's work and transfers are sums of counts (``work.py``) with non-negative weights. The ms of
work are divided by the speed of the rank. Transfers have phases (``PHASES``): every rank waits
until all ids have arrived, then all vectors, and then all gradients. The step time is the maximum
work of any rank plus the maximum transfer time of any rank in each phase. Memory is also a sum of
counts, so a load of five numbers describes a rank: ms of work, ms of each phase, and bytes.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from sbpflow.costs.counts import BUFFERS, INDEX, MEMORY, NUM_FEATURES, Key
from sbpflow.costs.ids import Floats
from sbpflow.costs.prices import SENT, shared
from sbpflow.planner.costs.profile import ERROR, Profile
from sbpflow.planner.costs.work import base_work, keys_work, shape_work
from sbpflow.planner.task import Choice, Task

_ONCE_PER_STEP = [INDEX[name] for name in ("always", "dense_parameters", "num_squares")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A plan's predicted step time in ms, the bytes that each rank stores, and the bytes that it
    sends for the tables in a step (without dense gradients). On held-out tasks, nine of ten
    measured steps were within ``error`` (a fraction) of the prediction; ``error`` is NaN if nothing
    was measured.
    """

    step_ms: float
    error: float
    memory_bytes: tuple[int, ...]
    sent_bytes: tuple[int, ...]


class TaskCost:
    """Uses a profile to price the plans of a task. ``prices`` [F, 5] contains, per count, the ms of
    work, the ms of each phase of transfers, and the bytes. ``slowness`` [D, 5] contains the factors
    of a rank's load. If all ranks are equally fast, the factors are 1, and ``prices`` include the
    speed. ``ranks_per_link`` consecutive ranks share a link to other hosts.
    """

    def __init__(self, profile: Profile, task: Task) -> None:
        self.profile = profile
        self.task = task
        held = np.zeros((NUM_FEATURES, 1))
        held[[MEMORY, BUFFERS]] = 1.0
        self.prices = np.concatenate([profile.prices(task.world_size), held], axis=1)
        # The dense part is updated, and squared gradients are summed, once per step. All other work
        # runs once for each batch of the step, or is divided by the number of batches.
        times = np.full(NUM_FEATURES, float(task.accumulate))
        times[_ONCE_PER_STEP] = 1.0
        self.prices[:, :-1] *= times[:, None]
        speeds = np.array(task.speeds or (1.0,))
        common = speeds[0] if (speeds == speeds[0]).all() else 1.0
        self.prices[:, 0] /= common
        self.slowness = np.ones((task.world_size, self.prices.shape[1]))
        self.slowness[:, 0] = common / speeds
        known = profile.link.num_hosts(task.world_size) == task.num_hosts
        self.ranks_per_link = profile.link.sharing(task.world_size) if known else 1

    @property
    def prices_digest(self) -> str:
        """Return a digest of the profile, independent of the task, for the names of cache files.
        The training runs that correct the prices are left out, because a factor that scales all
        prices does not change which plan is best.
        """
        profile = replace(self.profile, runs=())
        return hashlib.sha256(profile.as_json().encode()).hexdigest()

    def predict(self, plan: Mapping[str, Choice]) -> Prediction:
        """Predict the step time, memory, and traffic of one plan."""
        totals = count_work(self.task, plan)
        loads = shared(totals @ self.prices * self.slowness, self.ranks_per_link)
        return Prediction(
            step_ms=float(loads[:, :-1].max(axis=0).sum()),
            error=self.profile.errors.get(ERROR, float("nan")),
            memory_bytes=tuple(loads[:, -1].astype(int).tolist()),
            sent_bytes=tuple((self.task.accumulate * totals @ SENT).astype(int).tolist()),
        )


def count_work(task: Task, plan: Mapping[str, Choice]) -> Floats:
    """Return the counts [D, F] of a plan: base, shards, homes, and distinct keys."""
    total = np.tile(base_work(task), (task.world_size, 1))
    keys: set[Key] = set()
    for table in task.tables:
        choice = plan[table.name]
        option = shape_work(task, table, choice.shape)
        total += option.home
        if option.num_shards:
            total[list(choice.ranks)] += option.shards
        keys.update(option.keys(choice.ranks))
    return total + keys_work(task, keys)
