"""``sbpflow doctor``: what of this environment works, and what to do about the rest.

A check runs something of what it names (an operator, a collective): what is there need not load.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal

from sbpflow.errors import ConfigError, PeerLostError
from sbpflow.runtime.compute.versions import (
    FBGEMM_OF_TORCH,
    Installed,
    dist_version,
    import_fbgemm,
    minor,
)
from sbpflow.runtime.files.local_path import local_path
from sbpflow.runtime.processes.environment import rank_and_world_size

State = Literal["ok", "absent", "broken"]
_MARKS: dict[State, str] = {"ok": "ok    ", "absent": "absent", "broken": "BROKEN"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report; ``broken`` makes the exit code 1."""

    name: str
    state: State
    text: str


Moving = Callable[[Path], Sequence[Finding]]


def main(argv: Sequence[str] = (), moving: Moving | None = None) -> int:
    """Write the report to stdout, on rank 0; 0 if nothing is broken, else 1.

    ``moving`` are further checks, which every rank takes part in; they get ``--dir``.
    """
    parser = argparse.ArgumentParser(prog="sbpflow doctor", description=__doc__)
    where = "where runs are kept: its free space, and a checkpoint written and read there"
    parser.add_argument(
        "--dir", type=local_path, default=Path("runs"), help=f"{where} (default runs)"
    )
    args = parser.parse_args(argv)
    rank, _ = rank_and_world_size()
    findings = [_run(check) for check in CHECKS] if rank == 0 else []
    if moving is not None:
        findings += _run_moving(moving, args.dir)
    if rank != 0:
        return 0
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        sys.stdout.write(f"{_MARKS[finding.state]} {finding.name:<{width}}  {finding.text}\n")
    broken = [finding.name for finding in findings if finding.state == "broken"]
    sys.stdout.write(f"\nbroken: {', '.join(broken)}\n" if broken else "\nnothing is broken\n")
    return 1 if broken else 0


def _run_moving(moving: Moving, folder: Path) -> Sequence[Finding]:
    try:
        return moving(folder)
    except PeerLostError:  # told by all ranks together
        raise
    except Exception as error:  # noqa: BLE001  (what works has been found, and is reported)
        text = str(error).strip().split("\n", 1)[0]
        return [Finding("ranks", "broken", f"{type(error).__name__}: {text}")]


def _run(check: Callable[[], Finding]) -> Finding:
    """A check that raises has found something broken, whatever it is."""
    try:
        return check()
    except Exception as error:  # noqa: BLE001  (the report must go on with the next check)
        text = str(error).strip().split("\n", 1)[0]
        return Finding(check.__name__.strip("_"), "broken", f"{type(error).__name__}: {text}")


def _python() -> Finding:
    version = ".".join(str(part) for part in sys.version_info[:3])
    if (3, 11) <= sys.version_info[:2] <= (3, 14):
        return Finding("python", "ok", version)
    return Finding("python", "broken", f"{version}: use 3.11 to 3.14")


def _torch() -> Finding:
    import torch

    version = minor(torch.__version__)
    if version not in FBGEMM_OF_TORCH:
        return Finding(
            "torch", "broken", f"{torch.__version__}: not tried; use {', '.join(FBGEMM_OF_TORCH)}"
        )
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    return Finding("torch", "ok", f"{torch.__version__} ({build})")


def _fbgemm() -> Finding:
    """Runs one operator, so that its compiled library must have loaded."""
    try:
        module = import_fbgemm()
    except ConfigError as error:
        return Finding("fbgemm", "broken", str(error))
    if module is None:
        wanted = "pip install 'sbpflow[cpu]' or 'sbpflow[cuda]' brings it"
        return Finding("fbgemm", "absent", f"lookups run on the plain torch kernel; {wanted}")
    import torch

    rows = torch.ops.fbgemm.asynchronous_complete_cumsum(torch.tensor([1, 1]))
    if rows.tolist() != [0, 1, 2]:
        return Finding("fbgemm", "broken", f"a prefix sum of [1, 1] gave {rows.tolist()}")
    installed = Installed.find()
    return Finding("fbgemm", "ok", f"{installed.fbgemm_dist} {installed.fbgemm}, fits torch")


def _numba() -> Finding:
    """Compiles one function, so that its compiler must work here."""
    version = dist_version("numba")
    if version is None:
        wanted = "pip install 'sbpflow[numba]' brings faster ones"
        return Finding("numba", "absent", f"tables on CPUs run on the other kernels; {wanted}")
    import numba

    def one_more(number: int) -> int:
        return number + 1

    found = int(numba.njit(one_more)(1))
    return Finding("numba", "ok" if found == 2 else "broken", f"{version}, 1 + 1 is {found}")


def _triton() -> Finding:
    """Compiles for a GPU only, so it is not tried here."""
    version = dist_version("triton")
    if version is None:
        return Finding("triton", "absent", "tables on CUDA run on the other kernels")
    return Finding("triton", "ok", version)


def _dali() -> Finding:
    version = dist_version("nvidia-dali-cuda130")
    if version is None:
        return Finding("dali", "absent", "data.loader=auto reads without it")
    import nvidia.dali  # pyright: ignore[reportMissingImports]  (optional)

    return Finding("dali", "ok", str(nvidia.dali.__version__))


def _gloo() -> Finding:
    """One all-reduce in a group of one, over an in-memory store."""
    import torch
    from torch import distributed

    if not distributed.is_gloo_available():
        return Finding("gloo", "broken", "this torch was built without it; CPU ranks need it")
    group = distributed.ProcessGroupGloo(distributed.HashStore(), 0, 1, timedelta(seconds=20))
    value = torch.ones(1)
    group.allreduce([value]).wait()  # pyright: ignore[reportAttributeAccessIssue]  (stub lacks it)
    return Finding("gloo", "ok", "all-reduce ran")


def _cuda() -> Finding:
    import torch

    if not torch.cuda.is_available():
        why = "no device, or no driver" if torch.version.cuda else "this torch is a CPU build"
        return Finding("cuda", "absent", f"{why}; runs use gloo on the CPU")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    total = float(torch.ones(8, device="cuda").sum())
    if total != 8.0:
        return Finding("cuda", "broken", f"a sum of 8 ones gave {total}")
    return Finding("cuda", "ok", ", ".join(names))


def _nccl() -> Finding:
    import torch
    from torch import distributed
    from torch.cuda import nccl

    if not torch.cuda.is_available():
        return Finding("nccl", "absent", "needs CUDA")
    if not distributed.is_nccl_available():
        return Finding("nccl", "broken", "this torch was built without it; CUDA ranks need it")
    return Finding("nccl", "ok", ".".join(str(part) for part in nccl.version()))


def _tensorboard() -> Finding:
    version = dist_version("tensorboard")
    if version is None:
        return Finding("tensorboard", "absent", "metrics.jsonl is written all the same")
    return Finding("tensorboard", "ok", version)


CHECKS: tuple[Callable[[], Finding], ...] = (
    _python,
    _torch,
    _fbgemm,
    _numba,
    _triton,
    _dali,
    _gloo,
    _cuda,
    _nccl,
    _tensorboard,
)
