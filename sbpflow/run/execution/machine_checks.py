"""What ``doctor`` finds by moving data: links between the ranks it runs on, and the disk of runs.

Under torchrun every rank takes part and rank 0 reports. Each figure is the best of a few repeats:
what the machines can do, not what they do on average.
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

_SMALL, _LARGE = 1 << 10, 1 << 24  # elements of a message: 4 KiB, and 64 MiB
_LARGE_WITHIN_S = 0.25  # of a tenth of it, or that tenth is all that is sent
_REPEATS = 3
_SAVED_BYTES = 32 << 20


def link(boxing: Boxing, *, large: int = _LARGE) -> Finding:
    """From each rank to the next, around: the slowest and the fastest way; all ranks call it."""
    world = boxing.world
    if world.size == 1:
        wanted = "torchrun --nproc-per-node N -m sbpflow doctor measures the links"
        return Finding("link", "absent", f"one rank; {wanted}")
    hosts = [facts["host"] for facts in gather_facts(boxing, {"host": machine_name()})]
    found: list[tuple[float, str]] = []
    for src in range(world.size):
        dst = (src + 1) % world.size
        latency = _seconds(boxing, src, dst, _SMALL)
        size = large // 10
        if _seconds(boxing, src, dst, size) < _LARGE_WITHIN_S:
            size = large
        rate = 4 * size / _seconds(boxing, src, dst, size) / 1e9
        apart = "" if hosts[src] == hosts[dst] else f" ({hosts[src]} to {hosts[dst]})"
        said = f"{rate:.3f} GB/s, {1e3 * latency:.2f} ms for 4 KiB, rank {src} to {dst}{apart}"
        found.append((rate, said))
    slowest, fastest = min(found), max(found)
    text = slowest[1]
    if len(found) > 2 and fastest[0] > 1.2 * slowest[0]:
        text = f"slowest {text}; fastest {fastest[1]}"
    return Finding("link", "ok", f"{world.size} ranks on {len(set(hosts))} machines: {text}")


def _seconds(boxing: Boxing, src: int, dst: int, size: int) -> float:
    """The least time of a transfer of ``size`` float32 from one rank to another, on all ranks."""
    world = boxing.world
    kind = world.device.type
    steps = plan_boxing(
        Layout(Placement.of(kind, [src]), (Broadcast(),)),
        Layout(Placement.of(kind, [dst]), (Broadcast(),)),
        (size,),
        torch.float32,
        id=f"doctor/link/{src}/{dst}/{size}",
        backend=world.backend,
    )
    part = torch.ones(size, device=world.device) if world.rank == src else None
    times: list[float] = []
    for _ in range(_REPEATS + 1):  # the first one connects
        world.barrier()
        begin = time.perf_counter()
        boxing.run(steps, part, "control")
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    mine = {"s": repr(min(times[1:]) if world.rank in (src, dst) else 0.0)}
    return max(float(facts["s"]) for facts in gather_facts(boxing, mine))


def disk(folder: Path) -> Finding:
    """Free bytes where runs are kept, by default."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    usage = shutil.disk_usage(there)
    text = f"{usage.free / 1e9:.1f} GB of {usage.total / 1e9:.1f} GB free in {there}"
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        reason = (error.strerror or "cannot be used").lower()
        return Finding("disk", "broken", f"{there}: cannot be written to ({reason}); --dir DIR")
    return Finding("disk", "ok", text)


def checkpoint(folder: Path, boxing: Boxing) -> Finding:
    """A small checkpoint written by rank 0, read and compared by every rank; all ranks call it."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    values = torch.arange(_SAVED_BYTES // 4, dtype=torch.int32).view(-1, 16)
    made: tempfile.TemporaryDirectory[str] | None = None
    written_s, place, error = 0.0, "", ""
    if boxing.world.rank == 0:
        try:
            made = tempfile.TemporaryDirectory(dir=there, prefix=".sbpflow-doctor-")
            begin = time.perf_counter()
            place = str(_save(Path(made.name), values).absolute())
            written_s = time.perf_counter() - begin
        except (OSError, CheckpointError) as fault:
            error = str(fault)
    place = gather_facts(boxing, {"place": place})[0]["place"]
    begin = time.perf_counter()
    if place:
        error = _read_back(Path(place), values)
    read_s = time.perf_counter() - begin
    facts = gather_facts(boxing, {"error": error, "host": machine_name()})
    if made is not None:
        made.cleanup()
    wrong = [(rank, one) for rank, one in enumerate(facts) if one["error"]]
    if wrong:
        rank, one = wrong[0]
        text = f"rank {rank} on {one['host']}: {one['error']}"
        return Finding("checkpoint", "broken", f"{text}; --dir DIR of a disk that all ranks see")
    rates = [_SAVED_BYTES / seconds / 1e9 for seconds in (written_s or read_s, read_s)]
    size = f"{_SAVED_BYTES >> 20} MiB"
    text = f"{size} written at {rates[0]:.2f} GB/s, read and compared at {rates[1]:.2f} GB/s"
    return Finding("checkpoint", "ok", f"{text} in {there}")


def _save(folder: Path, values: torch.Tensor) -> Path:
    partial = partial_folder(folder, 1, "d0")
    partial.mkdir()
    part = Part(name="tables/t", place=whole_of(tuple(values.shape)), values=values)
    pieces = [piece for _, piece in write_parts(partial / "rank-0.bin", [part])]
    saved = SavedTensor(shape=tuple(values.shape), dtype=values.dtype, pieces=tuple(pieces))
    files = {"rank-0.bin": (partial / "rank-0.bin").stat().st_size}
    index = Index(step=1, run="doctor", tensors={"tables/t": saved}, files=files)
    return publish(folder, partial, index)


def _read_back(place: Path, values: torch.Tensor) -> str:
    """What is wrong with what was read; "" if it is what was written."""
    try:
        found = open_checkpoint(place).tensor("tables/t")
    except CheckpointError as error:
        return str(error)
    return "" if torch.equal(found, values) else "what was read is not what was written"


def checks(folder: Path) -> Sequence[Finding]:
    """All of these, on every rank; the same list everywhere."""
    from sbpflow.runtime.ranks.world import World

    with World.start("cpu" if not torch.cuda.is_available() else "auto") as world:
        boxing = Boxing(world)
        return [link(boxing), disk(folder), checkpoint(folder, boxing)]
