"""Chooses a kernel for each stack, among kernels whose results are equal up to rounding.

Plain torch supports everything. The limits of FBGEMM were determined with fbgemm-gpu-cpu 1.8.0: it
rejects widths that are not a multiple of 4, does not support bf16 or float64 rows on CPU, and keeps
rowwise state per store.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pkgutil import resolve_name

import torch

from sbpflow.embedding.plan.embedding_plan import EmbeddingPlan
from sbpflow.embedding.plan.table_batch import TableBatch
from sbpflow.embedding.plan.tables import HALF_DTYPES
from sbpflow.embedding.rules.base import (
    CompiledKernel,
    KernelName,
    KernelRequest,
    SparseOptimizer,
    SumOverColumns,
)
from sbpflow.embedding.rules.registry import function_path
from sbpflow.embedding.storage.base import RowKernel
from sbpflow.embedding.storage.fbgemm_storage import FbgemmStorage
from sbpflow.embedding.storage.lookup import Lookup
from sbpflow.embedding.storage.rounding import RowNoise
from sbpflow.embedding.storage.torch_storage import TorchStorage
from sbpflow.errors import ConfigError
from sbpflow.runtime.compute.versions import has_fbgemm

LOG = logging.getLogger(__name__)
_NOTICE_AFTER_S = 2.0  # compilations that take longer are logged


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """A kernel and the ``reason`` for choosing it, which the start-up summary shows."""

    name: KernelName
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StackFacts:
    """The properties of a stack that decide which kernels support it."""

    width: int  # smallest width that is not a multiple of 4, or else the smallest width
    optimizer: SparseOptimizer
    dtype: torch.dtype
    row_dtype: torch.dtype
    column_split: bool
    device_type: str
    grows: bool = False

    @staticmethod
    def of(plan: EmbeddingPlan, stack: TableBatch) -> "StackFacts":
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


def _fbgemm_fault(stack: StackFacts) -> str | None:
    """Return why FBGEMM cannot give equal results for a stack, or ``None`` if it can."""
    if stack.dtype != torch.float32:
        return f"FBGEMM does not support {str(stack.dtype).removeprefix('torch.')} rows"
    if stack.row_dtype in HALF_DTYPES:
        # On CPU, FBGEMM does not support bf16 rows. It rounds fp16 rows to nearest, and is 5 times
        # slower with them than with float32 rows.
        return "FBGEMM does not round half-precision rows stochastically"
    if stack.optimizer.decay:
        return "FBGEMM ignores weight decay in some modes"
    if stack.width % 4:
        return f"width {stack.width} is not a multiple of 4"
    if stack.column_split and stack.optimizer.shares_row_state:
        return "FBGEMM cannot share a row's state among ranks"
    return None


def _numba_fault(stack: StackFacts) -> str | None:
    return None if stack.device_type == "cpu" else "numba compiles only for CPUs"


def _triton_fault(stack: StackFacts) -> str | None:
    """Return why Triton cannot run a stack, or ``None`` if it can."""
    if stack.device_type != "cuda":
        return "Triton compiles only for GPUs"
    if stack.dtype != torch.float32:
        return f"Triton does not support {str(stack.dtype).removeprefix('torch.')} arithmetic"
    if stack.grows and stack.row_dtype in HALF_DTYPES:
        return "Triton rounds by row number, but 16-bit growing tables are rounded by key"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Compiled:
    """How to choose and allocate a compiled kernel.

    ``fault`` returns why the kernel cannot run a stack. ``storage`` names the kernel's class, which
    is imported late, because some classes need a compiler. The speed of the kernel depends on the
    versions of ``packages``.
    """

    label: str
    packages: tuple[str, ...]
    is_installed: Callable[[], bool]
    fault: Callable[[StackFacts], str | None]
    reason: str
    storage: str


COMPILED: dict[CompiledKernel, _Compiled] = {
    "numba": _Compiled(
        label="numba",
        packages=("numba",),
        is_installed=lambda: find_spec("numba") is not None,
        fault=_numba_fault,
        reason="compiled for this CPU",
        storage="sbpflow.embedding.storage.numba_storage:NumbaStorage",
    ),
    "fbgemm": _Compiled(
        label="FBGEMM",
        packages=("fbgemm-gpu-cpu", "fbgemm-gpu"),
        is_installed=lambda: has_fbgemm(),
        fault=_fbgemm_fault,
        reason="equal results, fused update",
        # used only for an empty block, because a TBE cannot be empty
        storage="sbpflow.embedding.storage.torch_storage:TorchStorage",
    ),
    "triton": _Compiled(
        label="Triton",
        packages=("triton",),
        is_installed=lambda: find_spec("triton") is not None,
        fault=_triton_fault,
        reason="sorts, sums, and updates rows in launches of fixed size",
        storage="sbpflow.embedding.storage.triton_storage:TritonStorage",
    ),
}
"""The compiled kernels, in the order in which ``auto`` tries them."""

KERNEL_NAMES: tuple[KernelName, ...] = ("torch", *COMPILED)


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
            facts = StackFacts.of(plan, stack)
            choice = choose_kernel(stack_request, facts, missing_kernels(stack_request))
            choices |= {table.name: choice for table in stack.tables}
    if request == "fbgemm" and all(choice.name != "fbgemm" for choice in choices.values()):
        reasons = " and ".join(sorted({choice.reason for choice in choices.values()}))
        raise ConfigError(
            f"parallel.kernel: fbgemm supports none of the tables ({reasons}); use auto or torch"
        )
    return choices


def warm_up_kernels(plan: EmbeddingPlan, kernels: Mapping[str, KernelChoice]) -> None:
    """Before the first step, compile the numba kernels of a plan, or load them from the cache."""
    rules = {
        stack.optimizer
        for group in plan.groups
        for stack in group.stacks
        if kernels[stack.tables[0].name].name == "numba"
    }
    if not rules:
        return
    from sbpflow.embedding.storage.numba_storage import warm_up
    from sbpflow.runtime.compute.compiled import numba_cache

    message = "loading numba kernels; the first start on a machine compiles them ..."
    notice = threading.Timer(_NOTICE_AFTER_S, LOG.info, [message])
    notice.start()
    try:
        seconds = [warm_up(rule, dtype=plan.dtype, row_dtype=plan.row_dtype) for rule in rules]
    finally:
        notice.cancel()
    place = numba_cache() or "memory"
    LOG.info("numba kernels ready in %.1f s, cached in %s", sum(seconds), place)


def deduplicator(kernel: str, num_addresses: int) -> Callable[[Lookup], Lookup]:
    """Return a function that converts a lookup to one that deduplicates as ``kernel`` does.

    Addresses must be below ``num_addresses``.
    """
    if kernel != "numba":
        return lambda lookup: lookup
    from sbpflow.embedding.storage.numba_storage import Indexer

    return Indexer(num_addresses).wrap


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
    """Allocate a kernel's block with ``slots`` slots; by default, one for each of ``rows``.

    An empty FBGEMM block uses torch, because FBGEMM's table cannot be empty. Like FBGEMM, it has no
    ``absent`` address, because groups send rows in the same way on all ranks.
    """
    slots = rows if slots is None else slots
    if choice.name == "fbgemm" and slots > 0:
        return FbgemmStorage(slots, width, optimizer=optimizer, device=device)
    kind: type[TorchStorage] = TorchStorage
    if choice.name != "torch":
        kind = resolve_name(COMPILED[choice.name].storage)
    return kind(
        rows,
        width,
        dim=dim,
        optimizer=optimizer,
        dtype=dtype,
        device=device,
        row_dtype=row_dtype,
        sum_over_columns=sum_over_columns,
        noise=noise,
        fixed_size=False if choice.name == "fbgemm" else None,
        slots=slots,
    )
