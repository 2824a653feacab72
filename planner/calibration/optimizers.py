"""Compares the optimizers: times one update of each on the same rows, with a run's default kernel.

Calibration measures whole steps with one optimizer. Another optimizer changes only the update rule,
so these ratios price its updates.
"""

import statistics
import time

import torch

from sbpflow.embedding.plan.embedding_plan import plan_embeddings
from sbpflow.embedding.plan.tables import FeatureConfig, OutputConfig, TableConfig, TableLayout
from sbpflow.embedding.rules.registry import RULES, sparse_optimizer
from sbpflow.embedding.storage.choose import choose_kernels, make_kernel, warm_up_kernels
from sbpflow.embedding.storage.lookup import Lookup
from sbpflow.runtime.compute.devices import backend_of_device
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Broadcast


def step_factors(
    base: str, device: torch.device, *, rows: int = 40_000, dim: int = 16, repeats: int = 9
) -> dict[str, float]:
    """Return {optimizer: its time relative to ``base``} for an update of a quarter of ``rows``.

    Updates alternate between the optimizers. The median time of each optimizer is used.
    """
    turns = {name: _Turn(name, device, rows, dim) for name in (*RULES, base)}
    times: dict[str, list[float]] = {name: [] for name in turns}
    for repeat in range(repeats + 2):
        for name, turn in turns.items():
            ms = turn.update_ms()
            if repeat >= 2:
                times[name].append(ms)
    median = {name: statistics.median(turns_ms) for name, turns_ms in times.items()}
    return {name: ms / median[base] for name, ms in median.items()}


class _Turn:
    """Stores one optimizer's storage and the rows to update."""

    def __init__(self, name: str, device: torch.device, rows: int, dim: int) -> None:
        rule = sparse_optimizer(name, lr=0.05)
        world = Placement.line(device.type, 1)
        table = TableConfig(name="t", features=("f",), num_rows=rows, dim=dim)
        plan = plan_embeddings(
            [OutputConfig(name="o", tables=(table,))],
            {"t": TableLayout(layout=Layout(world, (Broadcast(),)), exchange="local")},
            features=[FeatureConfig(name="f")],
            optimizer=rule,
            dtype=torch.float32,
            world=world,
            backend=backend_of_device(device.type),
            batch_size=rows // 4,
        )
        kernels = choose_kernels(plan, "auto")
        warm_up_kernels(plan, kernels)
        self._storage = make_kernel(
            kernels["t"], rows, dim, dim=dim, optimizer=rule, dtype=torch.float32, device=device
        )
        self._ids = torch.randperm(rows, generator=torch.Generator().manual_seed(1))[: rows // 4]
        self._ids = self._ids.to(device=device, dtype=torch.int32)
        self._grads = torch.full((len(self._ids), dim), 1e-3, device=device)
        self._device = device
        self._steps = 0

    def update_ms(self) -> float:
        """Return the ms of one update, without the lookup before it."""
        lookup = Lookup(self._ids)
        self._storage.lookup(lookup, 0.05)
        lookup.row_gradients(self._grads)  # sort and sum before the clock starts
        self._steps += 1
        start = self._now()
        self._storage.update(lookup, self._grads, 0.05, self._steps)
        return 1e3 * (self._now() - start)

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
            return time.perf_counter()
        return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()
