"""A stand-in entry point: one way for a rank to end per mode. Started by torchrun in the tests."""

import atexit
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

from sbpflow.errors import ConfigError, DataError
from sbpflow.runtime.launch import run_main


def main() -> int | None:
    mode, ready = sys.argv[1], Path(sys.argv[2])
    rank = int(os.environ.get("RANK", "0"))
    if mode == "mistake_on_all":
        raise ConfigError("data.batch_size: 1 is too small; for example data.batch_size: 2")
    import torch
    import torch.distributed as dist

    if mode == "world":
        from sbpflow.runtime.world import World

        World.start("cpu", timeout_s=float(os.environ["TIMEOUT_S"]))
        (ready / f"rank{rank}").write_text(str(os.getpid()))
        return None

    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    (ready / f"rank{rank}").write_text(str(os.getpid()))
    if mode == "mistake_on_one" and rank == 1:
        raise DataError("shard 3: row 7 is cut short")
    if mode == "mistakes_differ":
        time.sleep(0.5 * rank)  # the one who prints must wait for the other
        raise DataError(f"shard {rank}: row 7 is cut short")
    if mode == "crash_on_one" and rank == 1:
        raise ZeroDivisionError("a bug on one rank")
    if mode == "killed" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "busy":
        while True:
            time.sleep(0.05)
    if mode == "stuck":  # both inside C++, each waiting for the other
        dist.recv(torch.ones(1), src=1 - rank)
    dist.all_reduce(torch.ones(1))
    if mode == "ok":
        atexit.register(lambda: print(f"group open: {dist.is_initialized()}"))  # noqa: T201
    return None


if __name__ == "__main__":
    run_main(main)
