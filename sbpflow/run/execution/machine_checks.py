"""Runs the checks of ``doctor`` that move data: links between ranks, and the disk for runs.

Under torchrun every rank takes part and rank 0 reports. Each reported number is the best of a few
repeats, so it shows peak, not average, performance.
"""

import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from sbpflow.boxing.agreement import gather_facts
from sbpflow.boxing.executor import Boxing
from sbpflow.boxing.plan import plan_boxing
from sbpflow.checkpoint.folder import partial_folder, publish
from sbpflow.checkpoint.format import Index, SavedTensor, whole_of
from sbpflow.checkpoint.read import open_checkpoint
from sbpflow.checkpoint.write import Part, write_parts
from sbpflow.errors import CheckpointError
from sbpflow.runtime.compute.doctor import Finding
from sbpflow.runtime.processes.environment import machine_name
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Broadcast

_SMALL, _LARGE = 1 << 10, 1 << 24  # numbers of elements in a message: 4 KiB and 64 MiB
# If a tenth of the large message takes longer than this, the rest is not sent.
_LARGE_WITHIN_S = 0.25
_REPEATS = 3
_SAVED_BYTES = 32 << 20


def link(boxing: Boxing, *, large: int = _LARGE) -> Finding:
    """Measure the link from each rank to the next, in a ring; every rank must call this.

    The finding reports the slowest link and, if the difference is large, the fastest link.
    """
    world = boxing.world
    if world.size == 1:
        hint = "torchrun --nproc-per-node N -m sbpflow doctor measures the links"
        return Finding("link", "absent", f"one rank; {hint}")
    hosts = [facts["host"] for facts in gather_facts(boxing, {"host": machine_name()})]
    links: list[tuple[float, str]] = []
    for src in range(world.size):
        dst = (src + 1) % world.size
        latency = _seconds(boxing, src, dst, _SMALL)
        size = large // 10
        if _seconds(boxing, src, dst, size) < _LARGE_WITHIN_S:
            size = large
        rate = 4 * size / _seconds(boxing, src, dst, size) / 1e9
        names = "" if hosts[src] == hosts[dst] else f" ({hosts[src]} to {hosts[dst]})"
        text = f"{rate:.3f} GB/s, {1e3 * latency:.2f} ms for 4 KiB, rank {src} to {dst}{names}"
        links.append((rate, text))
    slowest, fastest = min(links), max(links)
    text = slowest[1]
    if len(links) > 2 and fastest[0] > 1.2 * slowest[0]:
        text = f"slowest {text}; fastest {fastest[1]}"
    return Finding("link", "ok", f"{world.size} ranks on {len(set(hosts))} machines: {text}")


def _seconds(boxing: Boxing, src: int, dst: int, size: int) -> float:
    """Return the shortest time to send ``size`` float32 values from one rank to another.

    Every rank must call this function and gets the same result.
    """
    world = boxing.world
    steps = plan_boxing(
        Layout(Placement.of(world.device.type, [src]), (Broadcast(),)),
        Layout(Placement.of(world.device.type, [dst]), (Broadcast(),)),
        (size,),
        torch.float32,
        id=f"doctor/link/{src}/{dst}/{size}",
        backend=world.backend,
    )
    part = torch.ones(size, device=world.device) if world.rank == src else None
    times: list[float] = []
    for _ in range(_REPEATS + 1):  # the first repeat is slower, because it opens the connection
        world.barrier()
        begin = time.perf_counter()
        boxing.run(steps, part, "control")
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    shortest = {"s": repr(min(times[1:]) if world.rank in (src, dst) else 0.0)}
    return max(float(facts["s"]) for facts in gather_facts(boxing, shortest))


def disk(folder: Path) -> Finding:
    """Report the free space of the disk for runs, and whether the disk is writable."""
    parent = _nearest_folder(folder)
    usage = shutil.disk_usage(parent)
    text = f"{usage.free / 1e9:.1f} GB of {usage.total / 1e9:.1f} GB free in {parent}"
    try:
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        reason = (error.strerror or "cannot be used").lower()
        text = f"{parent}: cannot be written to ({reason}); use --dir DIR"
        return Finding("disk", "broken", text)
    return Finding("disk", "ok", text)


def _nearest_folder(folder: Path) -> Path:
    return next(path for path in (folder, *folder.absolute().parents) if path.is_dir())


def checkpoint(folder: Path, boxing: Boxing) -> Finding:
    """Write a small checkpoint on rank 0; read and compare the checkpoint on every rank."""
    parent = _nearest_folder(folder)
    values = torch.arange(_SAVED_BYTES // 4, dtype=torch.int32).view(-1, 16)
    work: tempfile.TemporaryDirectory[str] | None = None
    write_s, saved, error = 0.0, "", ""
    if boxing.world.rank == 0:
        try:
            work = tempfile.TemporaryDirectory(dir=parent, prefix=".sbpflow-doctor-")
            begin = time.perf_counter()
            saved = str(_save(Path(work.name), values).absolute())
            write_s = time.perf_counter() - begin
        except (OSError, CheckpointError) as fault:
            error = str(fault)
    saved = gather_facts(boxing, {"saved": saved})[0]["saved"]
    begin = time.perf_counter()
    if saved:
        error = _read_back(Path(saved), values)
    read_s = time.perf_counter() - begin
    by_rank = gather_facts(boxing, {"error": error, "host": machine_name()})
    if work is not None:
        work.cleanup()
    for rank, facts in enumerate(by_rank):
        if facts["error"]:
            text = f"rank {rank} on {facts['host']}: {facts['error']}"
            hint = "use --dir DIR on a disk that all ranks share"
            return Finding("checkpoint", "broken", f"{text}; {hint}")
    rates = [_SAVED_BYTES / seconds / 1e9 for seconds in (write_s or read_s, read_s)]
    size = f"{_SAVED_BYTES >> 20} MiB"
    text = f"{size} written at {rates[0]:.2f} GB/s, read and compared at {rates[1]:.2f} GB/s"
    return Finding("checkpoint", "ok", f"{text} in {parent}")


def _save(folder: Path, values: torch.Tensor) -> Path:
    partial = partial_folder(folder, 1, "d0")
    partial.mkdir()
    part = Part(name="tables/t", place=whole_of(tuple(values.shape)), values=values)
    pieces = [piece for _, piece in write_parts(partial / "rank-0.bin", [part])]
    saved = SavedTensor(shape=tuple(values.shape), dtype=values.dtype, pieces=tuple(pieces))
    files = {"rank-0.bin": (partial / "rank-0.bin").stat().st_size}
    index = Index(step=1, run="doctor", tensors={"tables/t": saved}, files=files)
    publish(folder, partial, index)
    return folder / "step-1"


def _read_back(path: Path, values: torch.Tensor) -> str:
    """Return what is wrong with the checkpoint, or "" if it is correct."""
    try:
        read = open_checkpoint(path).tensor("tables/t")
    except CheckpointError as error:
        return str(error)
    return "" if torch.equal(read, values) else "the values read differ from the written values"


def checks(folder: Path) -> Sequence[Finding]:
    """Run all checks; every rank must call this function and gets the same list."""
    from sbpflow.runtime.ranks.world import World

    with World.start("cpu" if not torch.cuda.is_available() else "auto") as world:
        boxing = Boxing(world)
        return [link(boxing), disk(folder), checkpoint(folder, boxing)]
