"""Chooses the kernels of a run: rank 0 measures them, and all ranks use the same kernels.

``explain`` uses the times that earlier runs measured on this machine, and measures nothing itself.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from sbpflow.boxing.agreement import gather_values
from sbpflow.boxing.executor import Boxing
from sbpflow.embedding.plan.table_batch import TableBatch
from sbpflow.embedding.rules.kernels import KernelName, KernelRequest
from sbpflow.embedding.storage.choose import facts_of, kernel_faults, missing_kernels, request_of
from sbpflow.embedding.storage.measure import Profile, StackShape, choose_by_times, measure
from sbpflow.run.planning.plan import RunPlan

LOG = logging.getLogger(__name__)
_Measurable = tuple[TableBatch, StackShape, list[KernelName]]


def with_known_kernels(plan: RunPlan, request: KernelRequest) -> RunPlan:
    """Return the plan with the fastest kernels according to this machine's profile."""
    profile, stacks = Profile(), list(_measurable(plan, request))
    return _with_times(plan, stacks, [profile.find(shape, names) for _, shape, names in stacks])


def with_measured_kernels(plan: RunPlan, request: KernelRequest, boxing: Boxing) -> RunPlan:
    """Return the plan with the fastest kernel of each stack; every rank must call this function.

    While the other ranks wait, rank 0 measures each kind of stack that its machine's profile lacks,
    which takes a few hundred milliseconds per kind.
    """
    stacks = list(_measurable(plan, request))
    if not stacks:
        return plan
    measured: list[dict[KernelName, float]] = []
    if boxing.world.rank == 0:
        profile = Profile()
        for stack, shape, names in stacks:
            times = profile.find(shape, names)
            if times is None:
                times = measure(shape, names)
                profile.keep(shape, times)
                text = ", ".join(f"{name} {ms:.2f} ms" for name, ms in times.items())
                LOG.info("kernels of tables like %s: %s", stack.tables[0].name, text)
            measured.append(times)
    return _with_times(plan, stacks, gather_values(boxing, measured)[0])


def _with_times(
    plan: RunPlan, stacks: Sequence[_Measurable], times: Sequence[dict[KernelName, float] | None]
) -> RunPlan:
    """Return the plan with the fastest kernel of each stack whose times are known."""
    kernels = dict(plan.kernels)
    for (stack, _, _), known in zip(stacks, times, strict=True):
        if known is not None:
            choice = choose_by_times(kernels[stack.tables[0].name], known)
            kernels |= {table.name: choice for table in stack.tables}
    return replace(plan, kernels=kernels)


def _measurable(run: RunPlan, request: KernelRequest) -> Iterator[_Measurable]:
    """Yield, in plan order, each stack that more than one kernel supports and for which no kernel
    was requested. Yields nothing for a CUDA plan on a machine without CUDA.
    """
    plan, missing = run.embeddings, missing_kernels("auto")
    device = "cpu"
    if plan.world.device_type == "cuda":
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    for group in plan.groups if device else ():
        for stack in group.stacks:
            if request_of(stack, request) != "auto":
                continue
            faults = kernel_faults(facts_of(plan, stack), missing)
            names: list[KernelName] = [name for name, fault in faults.items() if fault is None]
            shape = StackShape.of(group, stack, run.batch_size, plan.row_dtype, run.skew, device)
            if len(names) > 1 and shape is not None:
                yield stack, shape, names
