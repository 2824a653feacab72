"""Checks which parts of this environment work, and reports how to fix the others (``sbpflow
doctor``).

Some checks run an operator or a collective, because an installed package may still fail to load.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from sbpflow.errors import ConfigError, PeerLostError
from sbpflow.runtime.compute.versions import FBGEMM_OF_TORCH, dist_version, minor
from sbpflow.runtime.files.local_path import local_path
from sbpflow.runtime.processes.environment import rank_and_world_size
from sbpflow.runtime.processes.launch import ArgumentParser

State = Literal["ok", "absent", "odd", "broken"]
_MARKS: dict[State, str] = {"ok": "ok    ", "absent": "absent", "odd": "ODD   ", "broken": "BROKEN"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. If any finding is ``broken``, the exit code is 1. ``odd`` means that
    a machine or link differs from the others, which can slow a run down.
    """

    name: str
    state: State
    text: str


Check = Callable[[], Finding]
DataChecks = Callable[[Path], Sequence[Finding]]


def main(
    argv: Sequence[str] = (),
    data_checks: DataChecks | None = None,
    kernel_checks: Mapping[str, Check] = MappingProxyType({}),
) -> int:
    """Write the report to stdout on rank 0; return 0 if nothing is broken, else 1.

    All ranks run ``data_checks``, with the value of ``--dir``.
    """
    parser = ArgumentParser(
        prog="sbpflow doctor",
        description="Check which features work on this machine. Under torchrun, also compare the "
        "machines, and measure the links between them.",
    )
    text = (
        "folder for runs; doctor checks its free space and writes a test checkpoint (default: runs)"
    )
    parser.add_argument("--dir", type=local_path, default=Path("runs"), help=text)
    args = parser.parse_args(argv)
    if args.dir.is_file():
        raise ConfigError(f"--dir: {args.dir} is a file; use a folder (for example, --dir runs)")
    rank, _ = rank_and_world_size()
    checks = {**CHECKS, **kernel_checks} if rank == 0 else {}
    findings = [_run(name, check) for name, check in checks.items()]
    if data_checks is not None:
        findings += _run_data_checks(data_checks, args.dir)
    if rank != 0:
        return 0
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        sys.stdout.write(f"{_MARKS[finding.state]} {finding.name:<{width}}  {finding.text}\n")
    if odd := list(dict.fromkeys(finding.name for finding in findings if finding.state == "odd")):
        sys.stdout.write(f"\nodd: {', '.join(odd)}\n")
    broken = [finding.name for finding in findings if finding.state == "broken"]
    sys.stdout.write(f"\nbroken: {', '.join(broken)}\n" if broken else "\nnothing is broken\n")
    return 1 if broken else 0


def _run_data_checks(data_checks: DataChecks, folder: Path) -> Sequence[Finding]:
    try:
        return data_checks(folder)
    except PeerLostError:  # the ranks report this error once, jointly
        raise
    except Exception as error:  # noqa: BLE001  (the other findings must still be reported)
        return [_broken("ranks", error)]


def _run(name: str, check: Check) -> Finding:
    """Run a check; report any exception as a broken finding."""
    try:
        return check()
    except Exception as error:  # noqa: BLE001  (the other checks must still run)
        return _broken(name, error)


def _broken(name: str, error: Exception) -> Finding:
    text = str(error).strip().split("\n", 1)[0]
    return Finding(name, "broken", f"{type(error).__name__}: {text}")


def optional(name: str, dist: str, without: str) -> Finding:
    """Report an optional package's version or, if it is missing, the fallback ``without``."""
    version = dist_version(dist)
    return Finding(name, "absent", without) if version is None else Finding(name, "ok", version)


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
            "torch",
            "broken",
            f"{torch.__version__}: untested; use one of {', '.join(FBGEMM_OF_TORCH)}",
        )
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    return Finding("torch", "ok", f"{torch.__version__} ({build})")


def _dali() -> Finding:
    finding = optional("dali", "nvidia-dali-cuda130", "data.loader=auto works without it")
    if finding.state == "ok":
        import_module("nvidia.dali")
    return finding


def _gloo() -> Finding:
    """Run one all-reduce in a group of one rank, over an in-memory store."""
    import torch
    from torch import distributed

    if not distributed.is_gloo_available():
        return Finding("gloo", "broken", "this torch build lacks gloo, which CPU ranks need")
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
        return Finding("nccl", "broken", "this torch build lacks NCCL, which CUDA ranks need")
    return Finding("nccl", "ok", ".".join(str(part) for part in nccl.version()))


def _trackers() -> Finding:
    names = ("tensorboard", "mlflow", "wandb")
    installed = [f"{name} {version}" for name in names if (version := dist_version(name))]
    if not installed:
        return Finding("trackers", "absent", f"train.trackers needs {', '.join(names)}")
    return Finding("trackers", "ok", ", ".join(installed))


CHECKS: Mapping[str, Check] = {
    "python": _python,
    "torch": _torch,
    "dali": _dali,
    "gloo": _gloo,
    "cuda": _cuda,
    "nccl": _nccl,
    "trackers": _trackers,
}
