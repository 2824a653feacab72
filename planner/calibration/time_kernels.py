"""Times the table kernels on this machine, by optimizer: a lookup and an update in three sizes.

Calibration measures whole steps with the default kernel. ``planner/costs/kernels.py`` uses these
times to price the other kernels.
"""

from collections.abc import Sequence

import numpy as np
import torch

from sbpflow.embedding.rules.base import KernelName, SparseOptimizer
from sbpflow.embedding.rules.registry import RULES, sparse_optimizer
from sbpflow.embedding.storage.choose import (
    KERNEL_NAMES,
    StackFacts,
    choose_kernel,
    kernel_faults,
    missing_kernels,
)
from sbpflow.embedding.storage.measure import StackShape, measure
from sbpflow.planner.calibration.least_squares import nonnegative_least_squares
from sbpflow.planner.costs.profile import KernelPrices

ROWS = 100_000
SHAPES = ((2_000, 16), (30_000, 16), (30_000, 64))  # ids of a batch, width


def measure_kernels(
    device: torch.device,
    optimizers: Sequence[str] = tuple(RULES),
    shapes: Sequence[tuple[int, int]] = SHAPES,
    rows: int = ROWS,
) -> dict[str, KernelPrices]:
    """Return {optimizer: {kernel: (ms, ms per id, ms per element)}} of a lookup and an update.

    Each optimizer's default kernel comes first. ``shapes`` contains pairs (ids, width).
    """
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    missing = missing_kernels("auto")
    kernels: dict[str, KernelPrices] = {}
    for optimizer in optimizers:
        rule = sparse_optimizer(optimizer, lr=0.05)
        facts = StackFacts(
            width=4,
            optimizer=rule,
            dtype=torch.float32,
            row_dtype=torch.float32,
            column_split=False,
            device_type=device.type,
        )
        faults = kernel_faults(facts, missing)
        default = choose_kernel("auto", facts, missing).name
        names: list[KernelName] = [name for name in KERNEL_NAMES if faults[name] is None]
        names.sort(key=lambda name: name != default)
        times = [measure(_shape(shape, rule, rows, device_name), names) for shape in shapes]
        kernels[optimizer] = {name: _line(shapes, [ms[name] for ms in times]) for name in names}
    return kernels


def _shape(shape: tuple[int, int], rule: SparseOptimizer, rows: int, device: str) -> StackShape:
    ids, width = shape
    return StackShape(
        rows=rows,
        width=width,
        dim=width,
        ids=ids,
        per_bag=1,
        lists=0,
        home_ids=0,
        optimizer=rule,
        dtype=torch.float32,
        row_dtype=torch.float32,
        device=device,
    )


def _line(shapes: Sequence[tuple[int, int]], ms: Sequence[float]) -> tuple[float, float, float]:
    """Fit non-negative prices to relative errors."""
    counts = np.array([[1.0, ids, ids * width] for ids, width in shapes])
    most, times = counts.max(0), np.array(ms)
    weights = nonnegative_least_squares(counts / most / times[:, None], np.ones(len(ms)), 5000)
    always, per_id, per_element = (weights / most).tolist()
    return always, per_id, per_element
