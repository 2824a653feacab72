"""The kernels of a run, measured on the machine at hand: rank 0 does, and all ranks take the same.

``explain`` finds what a run on this machine has measured; it measures nothing itself.
"""

import logging
from collections.abc import Iterator
from dataclasses import replace

import torch

from sbpflow.boxing.executor import Boxing
from sbpflow.boxing.plan import plan_boxing
from sbpflow.embedding.plan.table_batch import TableBatch
from sbpflow.embedding.plan.tables import KernelRequest
from sbpflow.embedding.storage.choose import (
    KERNEL_NAMES,
    KernelChoice,
    KernelName,
    StackFacts,
    kernel_faults,
    missing_kernels,
    request_of,
)
from sbpflow.embedding.storage.measure import Profile, StackShape, choose_by_times, measure
from sbpflow.run.planning.plan import RunPlan
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Broadcast

LOG = logging.getLogger(__name__)


def with_known_kernels(plan: RunPlan, request: KernelRequest) -> RunPlan:
    """The plan with the kernels that the profile of this machine has times for."""
    profile = Profile()
    kernels = dict(plan.kernels)
    for stack, shape, names in _measurable(plan, request):
        times = profile.find(shape)
        if times is not None and set(times) == set(names):
            _take(kernels, stack, times)
    return replace(plan, kernels=kernels)


def with_measured_kernels(plan: RunPlan, request: KernelRequest, boxing: Boxing) -> RunPlan:
    """The plan with the fastest kernel of each stack; every rank calls it, and gets the same.

    Rank 0 measures what the profile of its machine does not have, a few hundred milliseconds per
    kind of stack, while the others wait.
    """
    stacks = list(_measurable(plan, request))
    if not stacks:
        return plan
    found = torch.full((len(stacks), len(KERNEL_NAMES)), float("inf"), dtype=torch.float64)
    if boxing.world.rank == 0:
        profile = Profile()
        for row, (stack, shape, names) in enumerate(stacks):
            times = profile.find(shape)
            if times is None or set(times) != set(names):
                times = measure(shape, names)
                profile.keep(shape, times)
                said = ", ".join(f"{name} {ms:.2f} ms" for name, ms in times.items())
                LOG.info("measured kernels of %s and alike: %s", stack.tables[0].name, said)
            for name, ms in times.items():
                found[row, KERNEL_NAMES.index(name)] = ms
    agreed = _of_rank_0(found, boxing)
    kernels = dict(plan.kernels)
    for (stack, _, names), row in zip(stacks, agreed.tolist(), strict=True):
        _take(kernels, stack, {name: row[KERNEL_NAMES.index(name)] for name in names})
    return replace(plan, kernels=kernels)


def _of_rank_0(value: torch.Tensor, boxing: Boxing) -> torch.Tensor:
    size = boxing.world.size
    if size == 1:
        return value
    src = Layout(Placement.of("cpu", (0,)), (Broadcast(),))
    dst = Layout(Placement.line("cpu", size), (Broadcast(),))
    shape = tuple(value.shape)
    steps = plan_boxing(src, dst, shape, value.dtype, id="run/kernels", backend="gloo")
    out = boxing.run(steps, value if boxing.world.rank == 0 else None, "control")
    if out is None:
        raise RuntimeError("run/kernels: the times of rank 0 did not come")
    return out


def _take(kernels: dict[str, KernelChoice], stack: TableBatch, times: dict[str, float]) -> None:
    choice = choose_by_times(kernels[stack.tables[0].name], times)
    for table in stack.tables:
        kernels[table.name] = choice


def _measurable(
    run: RunPlan, request: KernelRequest
) -> Iterator[tuple[TableBatch, StackShape, list[KernelName]]]:
    """Stacks whose kernel is for the run to choose, in the plan's order, and which can serve them;
    those that several can, where the device of the run is at hand.
    """
    plan, missing = run.embeddings, missing_kernels("auto")
    device = "cpu"
    if plan.world.device_type == "cuda":
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    for group in plan.groups if device else ():
        for stack in group.stacks:
            if request_of(stack, request) != "auto":
                continue
            faults = kernel_faults(StackFacts.of(plan, stack), missing)
            names: list[KernelName] = [name for name in KERNEL_NAMES if faults.get(name) is None]
            shape = StackShape.of(group, stack, run.batch_size, plan.row_dtype, run.skew, device)
            if len(names) > 1 and shape is not None:
                yield stack, shape, names
