"""Runs one rank of ``sbpflow.fit``, and writes its error to a file for the calling process.

``python -m sbpflow.commands.fit_rank FOLDER`` trains with the configuration FOLDER/config.yaml.
"""

import logging
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from sbpflow.runtime.processes.environment import rank_and_world_size
from sbpflow.runtime.processes.garbage import collecting_later
from sbpflow.runtime.processes.launch import run_main
from sbpflow.runtime.ranks.rank_errors import save_error

CONFIG_FILE = "config.yaml"


def main() -> None:
    """Train as one rank."""
    folder = Path(sys.argv[1])
    rank, _ = rank_and_world_size()
    try:
        with collecting_later() as collect:
            from sbpflow.commands.train import train_config
            from sbpflow.config.load import load_config
            from sbpflow.models.registry import MODELS
            from sbpflow.runtime.compute.malloc import keep_freed_memory
            from sbpflow.training.report import setup_logging

            keep_freed_memory()
            config = load_config(folder / CONFIG_FILE, models=MODELS)
            # The calling process shows the progress.
            config = replace(config, train=replace(config.train, progress=False))
            joined = partial(setup_logging, level=logging.WARNING)
            train_config(config, joined=joined, ready=collect)
    except Exception as error:
        save_error(folder, rank, error)
        raise


if __name__ == "__main__":
    run_main(main)
