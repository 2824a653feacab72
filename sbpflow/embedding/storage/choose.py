"""Chooses a kernel for each stack, among kernels whose results are equal up to rounding.

Plain torch supports everything; ``rules.kernels`` has the limits of the other kernels.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pkgutil import resolve_name

import torch

from sbpflow.embedding.plan.embedding_plan import EmbeddingPlan
from sbpflow.embedding.plan.table_batch import TableBatch
from sbpflow.embedding.rules.base import SparseOptimizer, SumOverColumns
from sbpflow.embedding.rules.kernels import COMPILED, KernelName, KernelRequest, StackFacts
from sbpflow.embedding.rules.registry import function_path
from sbpflow.embedding.storage.base import RowKernel
from sbpflow.embedding.storage.lookup import Lookup
from sbpflow.embedding.storage.rounding import RowNoise
from sbpflow.embedding.storage.torch_storage import TorchStorage
from sbpflow.errors import ConfigError


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """A kernel and the ``reason`` for choosing it, which the start-up summary shows."""

    name: KernelName
    reason: str


def facts_of(plan: EmbeddingPlan, stack: TableBatch) -> StackFacts:
    """Return the facts of a stack in a plan, which are the same on every rank."""
    widths = {stack.width(rank) for rank in stack.holders()}
    return StackFacts(
        width=next((w for w in sorted(widths) if w % 4), min(widths)),
        optimizer=stack.optimizer,
        dtype=plan.dtype,
        row_dtype=plan.row_dtype,
        column_split=stack.is_column_split,
        device_type=plan.world.device_type,
        grows=stack.grows,
    )


def missing_kernels(request: KernelRequest) -> dict[KernelName, str]:
    """Return the kernels that cannot be chosen, with the reason: not installed, or not requested.

    Raise ConfigError if the version of FBGEMM does not match that of torch.
    """
    missing: dict[KernelName, str] = {}
    for name, kernel in COMPILED.items():
        if request not in ("auto", name):
            missing[name] = f"parallel.kernel: {request}"
        elif not kernel.is_installed():
            missing[name] = f"{kernel.label} is not installed"
    return missing


def kernel_faults(
    stack: StackFacts, missing: Mapping[KernelName, str]
) -> dict[KernelName, str | None]:
    """Return why each kernel cannot run a stack, or ``None`` for kernels that can."""
    faults: dict[KernelName, str | None] = {"torch": None}
    for name, kernel in COMPILED.items():
        lacks = None
        if function_path(stack.optimizer, name) is None:
            lacks = f"kernel {name} does not support {stack.optimizer.name}"
        faults[name] = missing.get(name) or lacks or kernel.fault(stack)
    return faults


def choose_kernel(
    request: KernelRequest, stack: StackFacts, missing: Mapping[KernelName, str]
) -> KernelChoice:
    """Choose a kernel without measuring; ``missing`` is the result of ``missing_kernels(request)``.

    Raise ConfigError if the requested kernel is not installed. If the requested kernel is installed
    but does not support the stack, choose torch and state the reason.
    """
    if request not in ("auto", "torch") and request in missing:
        raise ConfigError(
            f"parallel.kernel or parallel.kernels: {request} is not available, because "
            f"{missing[request]}; `sbpflow doctor` shows the version to install, or use torch"
        )
    faults = kernel_faults(stack, missing)
    if request == "torch":
        return KernelChoice("torch", "parallel.kernel: torch")
    if request != "auto":
        fault = faults[request]
        return KernelChoice(request, "requested") if fault is None else KernelChoice("torch", fault)
    for name, kernel in COMPILED.items():
        if faults[name] is None:
            return KernelChoice(name, kernel.reason)
    return KernelChoice("torch", str(faults["fbgemm"]))


def request_of(stack: TableBatch, request: KernelRequest) -> KernelRequest:
    """Return the kernel requested for the stack's tables, or by default ``request``, the kernel
    requested for the run.
    """
    return stack.tables[0].kernel or request


def choose_kernels(plan: EmbeddingPlan, request: KernelRequest) -> dict[str, KernelChoice]:
    """Choose a kernel for every table; return the choices by table name. All ranks make the same
    choices.
    """
    choices: dict[str, KernelChoice] = {}
    for group in plan.groups:
        for stack in group.stacks:
            stack_request = request_of(stack, request)
            facts = facts_of(plan, stack)
            choice = choose_kernel(stack_request, facts, missing_kernels(stack_request))
            choices |= {table.name: choice for table in stack.tables}
    if request == "fbgemm" and all(choice.name != "fbgemm" for choice in choices.values()):
        reasons = " and ".join(sorted({choice.reason for choice in choices.values()}))
        raise ConfigError(
            f"parallel.kernel: fbgemm supports none of the tables ({reasons}); use auto or torch"
        )
    return choices


def warm_up_kernels(plan: EmbeddingPlan, kernels: Mapping[str, KernelChoice]) -> None:
    """Before the first step, compile the kernels of a plan, or load them from the cache."""
    rules: dict[str, set[SparseOptimizer]] = {}
    for group in plan.groups:
        for stack in group.stacks:
            name = kernels[stack.tables[0].name].name
            rules.setdefault(name, set()).add(stack.optimizer)
    for name, kernel in COMPILED.items():
        if name in rules and kernel.warm_up is not None:
            resolve_name(kernel.warm_up)(rules[name], plan.dtype, plan.row_dtype)


def deduplicator(kernel: str, num_addresses: int) -> Callable[[Lookup], Lookup]:
    """Return a function that converts a lookup to one that deduplicates as ``kernel`` does.

    Addresses must be below ``num_addresses``.
    """
    indexer = next((known.indexer for name, known in COMPILED.items() if name == kernel), None)
    if indexer is None:
        return lambda lookup: lookup
    return resolve_name(indexer)(num_addresses).wrap


def make_kernel(
    choice: KernelChoice,
    rows: int,
    width: int,
    *,
    dim: int,
    optimizer: SparseOptimizer,
    dtype: torch.dtype,
    device: torch.device,
    row_dtype: torch.dtype | None = None,
    sum_over_columns: SumOverColumns | None = None,
    noise: RowNoise | None = None,
    slots: int | None = None,
) -> RowKernel:
    """Allocate a kernel's block with ``slots`` slots; by default, one for each of ``rows``."""
    make: Callable[..., RowKernel] = TorchStorage
    if choice.name != "torch":
        make = resolve_name(COMPILED[choice.name].storage)
    return make(
        rows,
        width,
        dim=dim,
        optimizer=optimizer,
        dtype=dtype,
        device=device,
        row_dtype=row_dtype,
        sum_over_columns=sum_over_columns,
        noise=noise,
        slots=rows if slots is None else slots,
    )
