"""Train Wide & Deep: torchrun --nproc-per-node N train_wdl.py --config CONFIG key=value ...

The same as ``sbpflow train`` on a rank; any other ``model.name`` is trained as well.
"""

from collections.abc import Sequence

from sbpflow.commands import train
from sbpflow.runtime.processes.launch import run_main


def main(argv: Sequence[str] | None = None) -> int:
    """One rank's run."""
    return train.main(argv, prog="train_wdl.py")


if __name__ == "__main__":
    run_main(main)
