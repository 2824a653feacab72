"""Runs the checks of ``doctor`` that need all ranks: machines, links, and the disk for run folders.

Under torchrun every rank takes part and rank 0 reports. The rates of links are the best of a
few repeats, so they show peak performance; the disk is measured once, and the compute speed is a
mean.
"""

import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from sbpflow.boxing.agreement import gather_values
from sbpflow.boxing.executor import Boxing
from sbpflow.checkpoint.format import Index
from sbpflow.checkpoint.read import open_checkpoint
from sbpflow.checkpoint.rewrite import given, write_full
from sbpflow.errors import CheckpointError
from sbpflow.run.execution.link_checks import link_findings
from sbpflow.run.execution.node_checks import node_findings
from sbpflow.runtime.compute.doctor import Finding
from sbpflow.runtime.processes.environment import machine_name

_SAVED_BYTES = 32 << 20


def disk(folder: Path) -> Finding:
    """Report the free disk space for run folders, and whether the folder is writable."""
    parent = _nearest_folder(folder)
    usage = shutil.disk_usage(parent)
    text = f"{usage.free / 1e9:.1f} GB of {usage.total / 1e9:.1f} GB free in {parent}"
    try:
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        reason = (error.strerror or "cannot be used").lower()
        text = f"{parent} cannot be written to ({reason}); use --dir with a writable folder"
        return Finding("disk", "broken", text)
    return Finding("disk", "ok", text)


def _nearest_folder(folder: Path) -> Path:
    return next(path for path in (folder, *folder.absolute().parents) if path.is_dir())


def checkpoint(folder: Path, boxing: Boxing) -> Finding:
    """Write a small checkpoint on rank 0, then read and verify it on every rank."""
    parent = _nearest_folder(folder)
    values = torch.arange(_SAVED_BYTES // 4, dtype=torch.int32).view(-1, 16)
    work: tempfile.TemporaryDirectory[str] | None = None
    write_s, saved, error = 0.0, "", ""
    if boxing.world.rank == 0:
        try:
            work = tempfile.TemporaryDirectory(dir=parent, prefix=".sbpflow-doctor-")
            begin = time.perf_counter()
            index = Index(step=1, run="doctor", tensors={}, files={})
            write_full(Path(work.name), index, {"tables/t": given(values)})
            saved = str(Path(work.name).absolute() / "step-1")
            write_s = time.perf_counter() - begin
        except (OSError, CheckpointError) as fault:
            error = str(fault)
    saved = gather_values(boxing, saved)[0]
    begin = time.perf_counter()
    if saved:
        error = _read_back(Path(saved), values)
    read_s = time.perf_counter() - begin
    by_rank = gather_values(boxing, (machine_name(), error))
    if work is not None:
        work.cleanup()
    for rank, (host, error) in enumerate(by_rank):
        if error:
            hint = "use --dir with a writable folder on a disk that all ranks share"
            return Finding("checkpoint", "broken", f"rank {rank} on {host}: {error}; {hint}")
    rates = [_SAVED_BYTES / seconds / 1e9 for seconds in (write_s or read_s, read_s)]
    size = f"{_SAVED_BYTES >> 20} MiB"
    text = f"{size} written at {rates[0]:.2f} GB/s, read and compared at {rates[1]:.2f} GB/s"
    return Finding("checkpoint", "ok", f"{text} in {parent}")


def _read_back(path: Path, values: torch.Tensor) -> str:
    """Read the checkpoint; return "" if it is correct, else a description of the problem."""
    try:
        read = open_checkpoint(path).tensor("tables/t")
    except CheckpointError as error:
        return str(error)
    return "" if torch.equal(read, values) else "the values read differ from those written"


def checks(folder: Path) -> Sequence[Finding]:
    """Run all checks and return their findings; every rank must call this function."""
    from sbpflow.runtime.ranks.world import World

    with World.start("cpu" if not torch.cuda.is_available() else "auto") as world:
        boxing = Boxing(world)
        names = gather_values(boxing, machine_name())
        findings = [*node_findings(boxing), *link_findings(boxing, names)]
        return [*findings, disk(folder), checkpoint(folder, boxing)]
