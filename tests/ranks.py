"""Provides persistent ranks: one pool of gloo processes per world size, which all tests share.

``ranks(world_size, fn, *args)`` runs the module-level function ``fn(world, *args)`` on every rank
and returns their return values in rank order. If a rank raises, dies or hangs, the pool is killed,
and the next call creates another. The failure contains each rank's traceback, or its stack if it
hung.
"""

import atexit
import ctypes
import faulthandler
import gc
import importlib
import multiprocessing
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.deadlines import Deadline

PRELOAD = [
    "torch",
    "torch.distributed.tensor",
    "torch._dynamo",
    "torch.fx.experimental.symbolic_shapes",
    "sbpflow.tensor.ops",
    "sbpflow.run.execution.job",
    "sbpflow.embedding.storage.numba_storage",
    "hypothesis",
    "pytest",
    "tests.ranks",
    "tests.training.wdl_case",
    "tests.preload",
]
"""Modules that the fork server imports once for all ranks, skipping missing packages"""
TIMEOUT_S = 1200.0  # wall-clock limit for a collective
TASK_TIMEOUT_S = 120.0  # limit for one call to ``fn``
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
GRACE_S = 3.0  # limit for the other ranks after a rank has failed


class RanksFailed(AssertionError):
    """Raised if at least one rank failed; ``errors`` contains the messages of these ranks."""

    def __init__(self, errors: dict[int, str]) -> None:
        self.errors = errors
        super().__init__("\n".join(f"--- rank {rank}:\n{text}" for rank, text in errors.items()))


@dataclass
class _Worker:
    process: Any
    pipe: Connection
    stderr: Path


class RankPool:
    """A pool of ``world_size`` processes that stay alive between calls."""

    def __init__(self, world_size: int, folder: Path, device: str = "cpu") -> None:
        self.world_size = world_size
        self.device = device
        self._folder = folder
        self._generation = 0
        self._workers: list[_Worker] = []
        # Without this, an interpreter that exits would wait for stopped ranks forever.
        atexit.register(self.stop)

    def run(self, fn: Callable[..., Any], *args: Any, checked: bool = False) -> list[Any]:
        """Return the values of ``fn(world, *args)`` in rank order; raise RanksFailed if one failed.

        ``checked`` enables the world's checked mode. This mode synchronizes all ranks before each
        transfer, which hides races.
        """
        if not self._workers:
            self._start()
        self._signal(signal.SIGCONT)
        for worker in self._workers:
            worker.pipe.send((fn.__module__, fn.__qualname__, args, checked))
        results, errors = self._collect()
        if errors:
            self.stop(limit_s=0.0)  # ranks that wait for a failed rank would not end
            raise RanksFailed(errors)
        # Each process group has a thread that wakes up 100 times per second even if nothing is
        # sent. Between tests, this took an eighth of the machine's time.
        self._signal(signal.SIGSTOP)
        return [results[rank] for rank in range(self.world_size)]

    def stop(self, limit_s: float = 2.0) -> None:
        """Ask the processes to end, and kill those that do not end within the time limit."""
        self._signal(signal.SIGCONT)
        for worker in self._workers:
            try:
                worker.pipe.send(None)
            except OSError:
                pass
        deadline = time.monotonic() + limit_s
        for worker in self._workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            worker.pipe.close()
        self._workers = []

    def _signal(self, number: int) -> None:
        for worker in self._workers:
            with suppress(ProcessLookupError):
                os.kill(worker.process.pid, number)

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._generation += 1
        name = f"{self.world_size}-{self._generation}"
        store = self._folder / f"store-{name}"
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            stderr = self._folder / f"stderr-{name}-{rank}"
            process = context.Process(
                target=_serve,
                args=(
                    rank,
                    self.world_size,
                    str(store),
                    theirs,
                    str(stderr),
                    self.device,
                    sys.path,
                ),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._workers.append(_Worker(process, ours, stderr))

    def _collect(self) -> tuple[dict[int, Any], dict[int, str]]:
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        waiting = dict(enumerate(self._workers))
        deadline = Deadline(TASK_TIMEOUT_S)
        while waiting and not deadline.over():
            handles = {worker.pipe: rank for rank, worker in waiting.items()}
            handles |= {worker.process.sentinel: rank for rank, worker in waiting.items()}
            for handle in wait(list(handles), timeout=0.5):
                rank = handles[handle]
                if rank not in waiting:
                    continue
                kind, value = _receive(waiting.pop(rank))
                (results if kind == "ok" else errors)[rank] = value
                if kind != "ok" and len(errors) == 1:
                    deadline = Deadline(GRACE_S)
        for rank, worker in waiting.items():
            errors[rank] = "hung, with this stack:\n" + _stack_of(worker)
        return results, errors


def _receive(worker: _Worker) -> tuple[str, Any]:
    try:
        return worker.pipe.recv()
    except (EOFError, OSError):
        worker.process.join(1.0)
        tail = worker.stderr.read_text()[-2000:] if worker.stderr.exists() else ""
        return "error", f"died with exit code {worker.process.exitcode}\n{tail}"


def _stack_of(worker: _Worker) -> str:
    try:
        os.kill(worker.process.pid, signal.SIGUSR1)
    except ProcessLookupError:
        return "already gone"
    time.sleep(0.2)
    return worker.stderr.read_text()[-3000:]


def end_with_parent() -> None:
    """Have this process killed when its parent ends, even if this process is stopped."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _serve(
    rank: int,
    world_size: int,
    store: str,
    pipe: Connection,
    stderr: str,
    device: str,
    path: list[str],
) -> None:
    sys.path[:] = path
    end_with_parent()
    # The fork server ends when no process can write to this pipe. If ranks kept it open, the server
    # and stopped ranks would remain after pytest was killed.
    os.close(forkserver._forkserver._forkserver_alive_fd)
    gc.freeze()
    sink = open(stderr, "w", buffering=1)
    os.dup2(sink.fileno(), 2)
    faulthandler.register(signal.SIGUSR1, file=sink, all_threads=True)
    # NCCL ranks can share a GPU only if each claims to be on a host of its own.
    os.environ["NCCL_HOSTID"] = f"sbpflow-test-{rank}"
    import torch

    torch.set_num_threads(1)
    if device == "rehearsed":  # use tensors that claim to be on CUDA; see tests/rehearsal
        from tests.rehearsal.install import install

        install()
        device = "cuda"
    from sbpflow.runtime.ranks.rendezvous import Rendezvous
    from sbpflow.runtime.ranks.world import World

    # Ranks share devices if there are fewer devices than ranks.
    local_rank = rank % torch.cuda.device_count() if device == "cuda" else rank
    meeting = Rendezvous(
        init_method=f"file://{store}", rank=rank, size=world_size, local_rank=local_rank
    )
    shared = os.environ.get("SBPFLOW_TEST_SHARED_MEMORY", "1") == "1"
    world = World.start(device, timeout_s=TIMEOUT_S, rendezvous=meeting, shared_memory=shared)
    while (task := pipe.recv()) is not None:
        pipe.send(_perform(world, *task))
    world.close()
    os._exit(0)


def _perform(
    world: Any, module: str, name: str, args: tuple[Any, ...], checked: bool
) -> tuple[str, Any]:
    """Run one task; any failure is reported to the parent, which rebuilds the pool."""
    import numpy as np
    import torch

    try:
        fn: Any = importlib.import_module(module)
        for attribute in name.split("."):
            fn = getattr(fn, attribute)
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002 -- tests may use code that draws from the global state
        torch.manual_seed(0)
        world.checked = checked
        world.log.enabled = True
        world.log.records.clear()
        value = fn(world, *args)
        world.barrier()
        return "ok", value
    except BaseException:  # noqa: BLE001 -- reported to the parent, whatever it is
        return "error", traceback.format_exc()
