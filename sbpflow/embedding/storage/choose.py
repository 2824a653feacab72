"""Which kernel serves a storage, and why: FBGEMM where it means the same, plain torch elsewhere.

FBGEMM facts behind the rules were measured with fbgemm-gpu-cpu 1.8.0: it refuses widths that are
not a multiple of 4, has no bf16 or float64 rows on CPU, and its rowwise state spans one storage.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from sbpflow.embedding.plan.embedding_plan import EmbeddingPlan
from sbpflow.embedding.plan.optimizer import SparseOptimizer
from sbpflow.embedding.storage.base import Storage
from sbpflow.embedding.storage.fbgemm_storage import FbgemmStorage
from sbpflow.embedding.storage.optimizer_rules import SumOverColumns
from sbpflow.embedding.storage.rounding import HALF_DTYPES, RowNoise
from sbpflow.embedding.storage.torch_storage import TorchStorage
from sbpflow.errors import ConfigError
from sbpflow.runtime.versions import import_fbgemm

_NOT_IN_FBGEMM = {"lazy_adam": "lazy Adam", "ftrl": "FTRL"}
KernelRequest = Literal["auto", "fbgemm", "torch"]


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """``name`` is "fbgemm" or "torch"; ``reason`` is one clause for the start-up summary."""

    name: str
    reason: str


def fbgemm_fault(request: KernelRequest) -> str | None:
    """Why FBGEMM cannot serve here, or ``None``; not looked for if only torch is asked for.

    Raises ConfigError if FBGEMM is installed and does not fit the installed torch.
    """
    if request == "torch":
        return "parallel.kernel: torch"
    return None if import_fbgemm() is not None else "FBGEMM is not installed"


def choose_kernel(
    request: KernelRequest,
    *,
    width: int,
    optimizer: SparseOptimizer,
    dtype: torch.dtype,
    column_split: bool,
    fault: str | None,
    row_dtype: torch.dtype | None = None,
) -> KernelChoice:
    """Pick a kernel for a storage of ``width`` columns; ``fault`` is ``fbgemm_fault(request)``.

    Raises ConfigError if FBGEMM is demanded and not installed. Where it is demanded and cannot
    serve a table, torch serves it and the reason says so.
    """
    if fault is not None:
        if request == "fbgemm":
            raise ConfigError(
                f"parallel.kernel: fbgemm, but {fault}; `python -m sbpflow doctor` names the "
                "version that fits, or use parallel.kernel: torch"
            )
        return KernelChoice("torch", fault)
    if dtype != torch.float32:
        return KernelChoice("torch", f"FBGEMM has no {str(dtype).removeprefix('torch.')} rows here")
    if row_dtype in HALF_DTYPES:
        # On CPU its bf16 is missing, its fp16 rounds to the nearest and is 5 times slower.
        return KernelChoice("torch", "FBGEMM does not round half-precision rows at random here")
    if optimizer.name in _NOT_IN_FBGEMM:
        return KernelChoice("torch", f"FBGEMM has no {_NOT_IN_FBGEMM[optimizer.name]}")
    if optimizer.weight_decay:
        return KernelChoice("torch", "FBGEMM ignores weight decay in some modes")
    if width % 4:
        return KernelChoice("torch", f"width {width} is not a multiple of 4")
    if column_split and optimizer.shares_row_state:
        return KernelChoice("torch", "the row's Adagrad state spans the ranks that share it")
    return KernelChoice("fbgemm", "same meaning, fused update")


def choose_kernels(plan: EmbeddingPlan, request: KernelRequest) -> dict[str, KernelChoice]:
    """The kernel of every table by name; the same on every rank."""
    fault = fbgemm_fault(request)
    choices: dict[str, KernelChoice] = {}
    for group in plan.groups:
        for stack in group.stacks:
            widths = {stack.width(rank) for rank in stack.holders()}
            choice = choose_kernel(
                request,
                width=next((w for w in sorted(widths) if w % 4), min(widths)),
                optimizer=group.optimizer,
                dtype=plan.dtype,
                row_dtype=plan.row_dtype,
                column_split=stack.is_column_split(),
                fault=fault,
            )
            choices |= {table.name: choice for table in stack.tables}
    if request == "fbgemm" and all(choice.name != "fbgemm" for choice in choices.values()):
        reasons = " and ".join(sorted({choice.reason for choice in choices.values()}))
        raise ConfigError(
            f"parallel.kernel: fbgemm serves none of the tables: {reasons}; use auto or torch"
        )
    return choices


def make_storage(
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
) -> Storage:
    """Allocate a storage; one without rows is always torch's (FBGEMM cannot hold none)."""
    if choice.name == "fbgemm" and rows > 0:
        return FbgemmStorage(rows, width, optimizer=optimizer, device=device)
    return TorchStorage(
        rows,
        width,
        dim=dim,
        optimizer=optimizer,
        dtype=dtype,
        device=device,
        row_dtype=row_dtype,
        sum_over_columns=sum_over_columns,
        noise=noise,
    )
