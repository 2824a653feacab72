"""Defines ranks of a training run that take long to get their files: rank 1 the rows of the set,
and rank 0 its vocabularies.
"""

import os
import sys
import time

from sbpflow.commands.train import main
from sbpflow.data.format import metadata
from sbpflow.data.read import loaders
from sbpflow.runtime.processes.launch import run_main

SECONDS = 12


def train() -> int:
    """Train as one rank, with the arguments of ``sbpflow train``."""
    rank, module, name = os.environ["RANK"], metadata, "copy_metadata"
    if rank == "1":
        module, name = loaders, "choose_backend"
    real = getattr(module, name)

    def late(*given: object) -> object:
        time.sleep(SECONDS)
        return real(*given)

    setattr(module, name, late)
    return main(sys.argv[1:])


if __name__ == "__main__":
    run_main(train)
