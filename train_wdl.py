"""Train Wide & Deep: torchrun --nproc-per-node N train_wdl.py --config CONFIG key=value ...

``train.py`` with the default model; any other ``model.name`` is trained as well.
"""

from sbpflow.runtime.launch import run_main
from train import main

if __name__ == "__main__":
    run_main(lambda: main(prog="train_wdl.py"))
