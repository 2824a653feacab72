"""Train Wide & Deep: torchrun --nproc-per-node N train_wdl.py --config CONFIG key=value ...

Each process runs one rank, as ``torchrun -m sbpflow train`` does. ``model.name`` selects other
models.
"""

from collections.abc import Sequence

from sbpflow.commands import train
from sbpflow.runtime.processes.launch import run_main


def main(argv: Sequence[str] | None = None) -> int:
    """Train as one rank."""
    return train.main(argv, prog="train_wdl.py")


if __name__ == "__main__":
    run_main(main)
