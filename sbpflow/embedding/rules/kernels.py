"""Lists the kernels that look up and update rows, with all that is known of them before they run.

This module imports neither torch nor a compiler: ``sbpflow doctor`` uses it when torch is broken,
and a kernel's own modules are imported only if the kernel is used. The limits of FBGEMM were
determined with fbgemm-gpu-cpu 1.8.0: it rejects widths that are not a multiple of 4, does not
support bf16 or float64 rows on CPU, and keeps rowwise state per store.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

from sbpflow.errors import ConfigError
from sbpflow.runtime.compute.doctor import Finding, optional
from sbpflow.runtime.compute.versions import Installed, has_fbgemm, import_fbgemm

if TYPE_CHECKING:
    import torch

    from sbpflow.embedding.rules.base import SparseOptimizer

CompiledKernel = Literal["numba", "fbgemm", "triton"]
KernelName = Literal["torch", CompiledKernel]
KernelRequest = Literal["auto", KernelName]


@dataclass(frozen=True, slots=True, kw_only=True)
class StackFacts:
    """The properties of a stack that decide which kernels support it."""

    width: int  # smallest width that is not a multiple of 4, or else the smallest width
    optimizer: "SparseOptimizer"
    dtype: "torch.dtype"
    row_dtype: "torch.dtype"
    column_split: bool
    device_type: str
    grows: bool = False

    @property
    def dtype_name(self) -> str:
        """Return the name of the compute dtype, such as ``float32``."""
        return str(self.dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A compiled kernel.

    * ``packages``: the speed of the kernel depends on the versions of these packages.
    * ``fault``: returns why the kernel cannot run a stack, or ``None`` if it can.
    * ``check``: tests the packages for ``sbpflow doctor``.
    * ``storage``: "package.module:name" of a function or class with the arguments of
      ``TorchStorage``, which returns a ``RowKernel``.
    * ``warm_up``: "package.module:name" of a function that compiles the kernel before the first
      step; see ``numba_storage.warm_up``.
    * ``indexer``: "package.module:name" of a class that deduplicates addresses; see
      ``numba_storage.Indexer``.
    """

    label: str
    packages: tuple[str, ...]
    is_installed: Callable[[], bool]
    fault: Callable[[StackFacts], str | None]
    reason: str
    check: Callable[[], Finding]
    storage: str
    warm_up: str | None = None
    indexer: str | None = None


def _numba_fault(stack: StackFacts) -> str | None:
    return None if stack.device_type == "cpu" else "numba compiles only for CPUs"


def _check_numba() -> Finding:
    """Compile one function with numba."""
    hint = "for faster kernels, run pip install 'sbpflow[numba]'"
    finding = optional("numba", "numba", f"tables on CPUs use other kernels; {hint}")
    if finding.state == "absent":
        return finding
    import numba

    def one_more(number: int) -> int:
        return number + 1

    result = int(numba.njit(one_more)(1))
    state = "ok" if result == 2 else "broken"
    return Finding("numba", state, f"{finding.text}, 1 + 1 is {result}")


def _fbgemm_fault(stack: StackFacts) -> str | None:
    """Return why FBGEMM cannot give equal results for a stack, or ``None`` if it can."""
    if stack.dtype_name != "float32":
        return f"FBGEMM does not support {stack.dtype_name} rows"
    if stack.row_dtype.itemsize == 2:
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


def _check_fbgemm() -> Finding:
    """Run an FBGEMM operator, which needs the compiled library."""
    try:
        module = import_fbgemm()
    except ConfigError as error:
        return Finding("fbgemm", "broken", str(error))
    if module is None:
        hint = "to install FBGEMM, run pip install 'sbpflow[cpu]' or 'sbpflow[cuda]'"
        return Finding("fbgemm", "absent", f"lookups use other kernels; {hint}")
    import torch

    rows = torch.ops.fbgemm.asynchronous_complete_cumsum(torch.tensor([1, 1]))
    if rows.tolist() != [0, 1, 2]:
        return Finding("fbgemm", "broken", f"a prefix sum of [1, 1] gave {rows.tolist()}")
    installed = Installed.find()
    return Finding("fbgemm", "ok", f"{installed.fbgemm_dist} {installed.fbgemm}, matches torch")


def _triton_fault(stack: StackFacts) -> str | None:
    """Return why Triton cannot run a stack, or ``None`` if it can."""
    if stack.device_type != "cuda":
        return "Triton compiles only for GPUs"
    if stack.dtype_name != "float32":
        return f"Triton does not support {stack.dtype_name} arithmetic"
    if stack.grows and stack.row_dtype.itemsize == 2:
        return "Triton rounds by row number, but 16-bit growing tables are rounded by key"
    return None


COMPILED: dict[CompiledKernel, Kernel] = {
    "numba": Kernel(
        label="numba",
        packages=("numba",),
        is_installed=lambda: find_spec("numba") is not None,
        fault=_numba_fault,
        reason="compiled for this CPU",
        check=_check_numba,
        storage="sbpflow.embedding.storage.numba_storage:NumbaStorage",
        warm_up="sbpflow.embedding.storage.numba_storage:warm_up",
        indexer="sbpflow.embedding.storage.numba_storage:Indexer",
    ),
    "fbgemm": Kernel(
        label="FBGEMM",
        packages=("fbgemm-gpu-cpu", "fbgemm-gpu"),
        is_installed=lambda: has_fbgemm(),
        fault=_fbgemm_fault,
        reason="equal results, fused update",
        check=_check_fbgemm,
        storage="sbpflow.embedding.storage.fbgemm_storage:fbgemm_storage",
    ),
    "triton": Kernel(
        label="Triton",
        packages=("triton",),
        is_installed=lambda: find_spec("triton") is not None,
        fault=_triton_fault,
        reason="sorts, sums, and updates rows in launches of fixed size",
        # triton compiles only for GPUs, so check only whether the package is installed
        check=lambda: optional("triton", "triton", "tables on CUDA use other kernels"),
        storage="sbpflow.embedding.storage.triton_storage:TritonStorage",
    ),
}
"""The compiled kernels, in the order in which ``auto`` tries them."""
