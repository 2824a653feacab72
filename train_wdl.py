"""Train Wide & Deep: torchrun --nproc-per-node N train_wdl.py --config CONFIG key=value ...

The same as ``sbpflow train`` on a rank; any other ``model.name`` is trained as well.
"""

from sbpflow.commands.train import main
from sbpflow.runtime.launch import run_main

if __name__ == "__main__":
    run_main(main)
