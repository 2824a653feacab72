"""Which kernel serves a storage, and why: those that mean the same, plain torch everywhere.

FBGEMM facts behind the rules were measured with fbgemm-gpu-cpu 1.8.0: it refuses widths that are
not a multiple of 4, has no bf16 or float64 rows on CPU, and its rowwise state spans one storage.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal, get_args

import torch

from sbpflow.embedding.plan.embedding_plan import EmbeddingPlan
from sbpflow.embedding.plan.group_plan import GroupPlan
from sbpflow.embedding.plan.table_batch import TableBatch
from sbpflow.embedding.plan.tables import HALF_DTYPES, KernelRequest
from sbpflow.embedding.rules.base import CompiledKernel, SparseOptimizer, SumOverColumns
from sbpflow.embedding.storage.base import RowKernel
from sbpflow.embedding.storage.fbgemm_storage import FbgemmStorage
from sbpflow.embedding.storage.lookup import Lookup
from sbpflow.embedding.storage.rounding import RowNoise
from sbpflow.embedding.storage.torch_storage import TorchStorage
from sbpflow.errors import ConfigError, unknown_value
from sbpflow.runtime.compute.versions import import_fbgemm

LOG = logging.getLogger(__name__)
_SILENT_S = 2.0  # a user who waits longer is told what for

KernelName = Literal["torch", "fbgemm", "numba", "triton"]
KERNEL_NAMES: tuple[KernelName, ...] = ("torch", "fbgemm", "numba", "triton")


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """``reason`` is one clause for the start-up summary."""

    name: KernelName
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StackFacts:
    """What decides which kernels mean the same for a stack."""

    width: int  # of a rank's part; one that is no multiple of 4, if there is one
    optimizer: SparseOptimizer
    dtype: torch.dtype
    row_dtype: torch.dtype
    column_split: bool
    device_type: str

    @staticmethod
    def of(plan: EmbeddingPlan, group: GroupPlan, stack: TableBatch) -> "StackFacts":
        """Of a stack of a plan, the same on every rank."""
        widths = {stack.width(rank) for rank in stack.holders()}
        return StackFacts(
            width=next((w for w in sorted(widths) if w % 4), min(widths)),
            optimizer=stack.optimizer,
            dtype=plan.dtype,
            row_dtype=plan.row_dtype,
            column_split=stack.is_column_split,
            device_type=plan.world.device_type,
        )


def missing_kernels(request: KernelRequest) -> dict[KernelName, str]:
    """Kernels that are not installed here, or not asked for, and why.

    Raises ConfigError if FBGEMM is installed and does not fit the installed torch.
    """
    there: dict[KernelName, tuple[str, Callable[[], bool]]] = {
        "fbgemm": ("FBGEMM", lambda: import_fbgemm() is not None),
        "numba": ("numba", lambda: find_spec("numba") is not None),
        "triton": ("Triton", lambda: find_spec("triton") is not None),
    }
    missing: dict[KernelName, str] = {}
    for name, (word, is_there) in there.items():
        if request not in ("auto", name):
            missing[name] = f"parallel.kernel: {request}"
        elif not is_there():
            missing[name] = f"{word} is not installed"
    return missing


def _fbgemm_fault(stack: StackFacts) -> str | None:
    """Why FBGEMM would not mean the same for a stack, or ``None``."""
    if stack.dtype != torch.float32:
        return f"FBGEMM has no {str(stack.dtype).removeprefix('torch.')} rows here"
    if stack.row_dtype in HALF_DTYPES:
        # On CPU its bf16 is missing, its fp16 rounds to the nearest and is 5 times slower.
        return "FBGEMM does not round half-precision rows at random here"
    if stack.optimizer.decay:
        return "FBGEMM ignores weight decay in some modes"
    if stack.width % 4:
        return f"width {stack.width} is not a multiple of 4"
    if stack.column_split and stack.optimizer.shares_row_state:
        return "the state of a row spans the ranks that share it"
    return None


def _numba_fault(stack: StackFacts) -> str | None:
    return None if stack.device_type == "cpu" else "numba compiles for CPUs"


def _triton_fault(stack: StackFacts) -> str | None:
    """Why Triton's kernels cannot serve a stack, or ``None``."""
    if stack.device_type != "cuda":
        return "Triton compiles for GPUs"
    if stack.dtype != torch.float32:
        return f"Triton's kernels have no {str(stack.dtype).removeprefix('torch.')} arithmetic"
    return None


def kernel_faults(
    stack: StackFacts, missing: Mapping[KernelName, str]
) -> dict[KernelName, str | None]:
    """Every kernel, and why it cannot serve a stack; ``None`` for those that can."""
    faults: dict[KernelName, str | None] = {"torch": None}
    checks = {"fbgemm": _fbgemm_fault, "numba": _numba_fault, "triton": _triton_fault}
    for kernel in get_args(CompiledKernel):
        lacks = None
        if kernel not in stack.optimizer.kernels:
            lacks = f"kernel {kernel} has no rule {stack.optimizer.name}"
        faults[kernel] = missing.get(kernel) or lacks or checks[kernel](stack)
    return faults


def choose_kernel(
    request: KernelRequest, stack: StackFacts, missing: Mapping[KernelName, str]
) -> KernelChoice:
    """Pick a kernel for a stack, without measuring; ``missing`` is ``missing_kernels(request)``.

    Raises ConfigError if one is demanded and not installed. Where it is demanded and cannot serve a
    stack, torch serves it and the reason says so.
    """
    if request in ("fbgemm", "numba", "triton") and request in missing:
        raise ConfigError(
            f"parallel.kernel: {request}, but {missing[request]}; `sbpflow doctor` names "
            "the version that fits, or use parallel.kernel: torch"
        )
    faults = kernel_faults(stack, missing)
    if request == "torch":
        return KernelChoice("torch", "parallel.kernel: torch")
    if request != "auto":
        fault = faults[request]
        return KernelChoice(request, "asked for") if fault is None else KernelChoice("torch", fault)
    if faults["numba"] is None:
        return KernelChoice("numba", "compiled for this CPU")
    if faults["fbgemm"] is None:
        return KernelChoice("fbgemm", "same meaning, fused update")
    if faults["triton"] is None:
        return KernelChoice("triton", "sort, sum and rule in launches of fixed size")
    return KernelChoice("torch", faults["fbgemm"])


def request_of(stack: TableBatch, request: KernelRequest) -> KernelRequest:
    """What is asked for a stack: by its tables, or by the run."""
    return stack.tables[0].kernel or request


def choose_kernels(plan: EmbeddingPlan, request: KernelRequest) -> dict[str, KernelChoice]:
    """The kernel of every table by name; the same on every rank."""
    choices: dict[str, KernelChoice] = {}
    for group in plan.groups:
        for stack in group.stacks:
            asked = request_of(stack, request)
            facts = StackFacts.of(plan, group, stack)
            choice = choose_kernel(asked, facts, missing_kernels(asked))
            choices |= {table.name: choice for table in stack.tables}
    if request == "fbgemm" and all(choice.name != "fbgemm" for choice in choices.values()):
        reasons = " and ".join(sorted({choice.reason for choice in choices.values()}))
        raise ConfigError(
            f"parallel.kernel: fbgemm serves none of the tables: {reasons}; use auto or torch"
        )
    return choices


def warm_up_kernels(plan: EmbeddingPlan, kernels: Mapping[str, KernelChoice]) -> None:
    """Compile what a plan needs, or load it from the user's cache, before the first step."""
    rules = {
        stack.optimizer
        for group in plan.groups
        for stack in group.stacks
        if kernels[stack.tables[0].name].name == "numba"
    }
    if not rules:
        return
    from sbpflow.embedding.storage.numba_storage import log_warm_up, warm_up

    notice = threading.Timer(_SILENT_S, LOG.info, ["numba compiles kernels, once per machine ..."])
    notice.start()
    try:
        seconds = [warm_up(rule, dtype=plan.dtype, row_dtype=plan.row_dtype) for rule in rules]
    finally:
        notice.cancel()
    log_warm_up(sum(seconds))


def deduplicator(kernel: str, num_addresses: int | None) -> Callable[[Lookup], Lookup]:
    """How a kernel deduplicates ids at home, whose addresses are below ``num_addresses``; ``None``
    for addresses of keys, which may be negative: compiled loops sort none of those.
    """
    if kernel != "numba" or num_addresses is None:
        return lambda lookup: lookup
    from sbpflow.embedding.storage.numba_storage import CompiledLookup, Indexer

    indexer = Indexer(num_addresses)
    return lambda lookup: CompiledLookup(
        lookup.addresses, lookup.offsets, lookup.weights, indexer=indexer
    )


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
    """Allocate a kernel's block, for ``slots`` of the ``rows`` at a time, by default all; without
    any the kernel is always torch's (FBGEMM cannot hold none).
    """
    slots = rows if slots is None else slots
    if choice.name == "fbgemm" and slots > 0:
        return FbgemmStorage(slots, width, optimizer=optimizer, device=device)
    return _class_of(choice.name)(
        rows,
        width,
        dim=dim,
        optimizer=optimizer,
        dtype=dtype,
        device=device,
        row_dtype=row_dtype,
        sum_over_columns=sum_over_columns,
        noise=noise,
        slots=slots,
    )


def _class_of(name: KernelName) -> type[TorchStorage]:
    """The class of a kernel whose storages are made alike; those that compile load on demand."""
    if name == "numba":
        from sbpflow.embedding.storage.numba_storage import NumbaStorage

        return NumbaStorage
    if name == "triton":
        from sbpflow.embedding.storage.triton_storage import TritonStorage

        return TritonStorage
    if name in ("torch", "fbgemm"):  # FBGEMM's without rows
        return TorchStorage
    raise unknown_value("kernel", name, KernelName)
