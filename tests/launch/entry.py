"""Defines a program for torchrun whose mode selects how its ranks end."""

import atexit
import json
import os
import signal
import sys
import time
from pathlib import Path

from sbpflow.errors import ConfigError, DataError, SbpError
from sbpflow.runtime.processes.launch import run_main


def fail(mode: str, rank: int) -> None:
    """Fail if the mode requires this rank to fail."""
    if mode == "mistake_on_one" and rank == 1:
        raise DataError("shard 3: row 7 is cut short")
    if mode == "mistakes_differ":
        time.sleep(0.5 * rank)  # so the rank that prints both messages must wait for the other rank
        raise DataError(f"shard {rank}: row 7 is cut short")
    if mode == "crash_on_all":
        raise SbpError("matmul: [2, 3] x [4, 5] has no common dim")
    if mode == "own_words_on_one" and rank == 1:
        raise RuntimeError("Timed out waiting for my own queue")
    if mode == "exit_on_one" and rank == 1:
        sys.exit(7)
    if mode == "killed" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> int | None:
    mode, ready = sys.argv[1], Path(sys.argv[2])
    rank = int(os.environ.get("RANK", "0"))
    if mode == "mistake_on_all":
        raise ConfigError("data.batch_size: 1 is too small; for example data.batch_size: 2")
    import torch
    import torch.distributed as dist

    from sbpflow.runtime.ranks.world import World

    facts = json.loads(os.environ.get("FACTS", "{}"))
    world = World.start("cpu", timeout_s=float(os.environ.get("TIMEOUT_S", "1200")), facts=facts)
    world.barrier()
    (ready / f"rank{rank}").write_text(str(os.getpid()))
    world.barrier()  # wait until both ranks have written their files
    if mode == "world":
        return None
    fail(mode, rank)
    if mode == "busy":
        while True:
            time.sleep(0.05)
    if mode == "stuck":  # both ranks are inside C++, and each waits for the other
        dist.recv(torch.ones(1), src=1 - rank)
    world.barrier()
    while mode == "train":  # each iteration needs all ranks
        world.barrier()
        time.sleep(0.02)
    if mode == "ok":
        atexit.register(lambda: print(f"group open: {dist.is_initialized()}"))  # noqa: T201
    return None


if __name__ == "__main__":
    run_main(main)
