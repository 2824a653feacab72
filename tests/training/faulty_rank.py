"""Trains as one rank; rank 1 fails in a move of a step: faulty_rank.py FAULT MOVE ARGUMENTS.

FAULT is kill, stop, or memory. TRANSPORT is "shared memory" or "gloo".
"""

import os
import signal
import sys
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import train_wdl
from sbpflow.runtime.processes.launch import run_main
from sbpflow.runtime.ranks.world import World
from sbpflow.training.move_times import MoveTimes

STEP = 4  # the step in which rank 1 fails
TRANSPORTS = {"shared memory": True, "gloo": False}
FAULT, MOVE, *WORDS = sys.argv[1:]
begun: Counter[str] = Counter()
measure, start = MoveTimes.move, World.start


@contextmanager
def move(self: MoveTimes, name: str) -> Generator[None]:
    begun[name] += 1
    if os.environ["RANK"] == "1" and name == MOVE and begun[name] == STEP:
        if FAULT == "memory":
            raise MemoryError("no memory for this buffer")
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[FAULT])
    with measure(self, name):
        yield


def start_world(*words: Any, **options: Any) -> World:
    shared = TRANSPORTS[os.environ["TRANSPORT"]]
    world = start(*words, **{**options, "shared_memory": shared})
    assert (world._shared is not None) == shared
    return world


def main() -> int:
    MoveTimes.move = move
    World.start = start_world
    return train_wdl.main(WORDS)


if __name__ == "__main__":
    run_main(main)
