"""One rank of ``sbpflow.fit``: trains, and leaves its error where the calling process reads it.

``python -m sbpflow.commands.fit_rank FOLDER`` trains with ``config.yaml`` of the folder.
"""

import json
import logging
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

from sbpflow.runtime.processes.environment import rank_and_world_size
from sbpflow.runtime.processes.launch import classify, run_main

CONFIG_FILE = "config.yaml"


def error_file(folder: Path, rank: int) -> Path:
    """The file for the error of a rank."""
    return folder / f"error-{rank}.json"


def main() -> None:
    """Train as one rank."""
    folder = Path(sys.argv[1])
    rank, _ = rank_and_world_size()
    try:
        from sbpflow.commands.train import train_config
        from sbpflow.config.load import load_config
        from sbpflow.models.registry import MODELS
        from sbpflow.runtime.compute.malloc import keep_freed_memory
        from sbpflow.training.report import setup_logging

        keep_freed_memory()
        config = load_config(folder / CONFIG_FILE, models=MODELS)
        train_config(config, joined=partial(setup_logging, level=logging.WARNING))
    except Exception as error:
        entry = {**asdict(classify(error)[0]), "name": type(error).__name__}
        error_file(folder, rank).write_text(json.dumps(entry), encoding="utf-8")
        raise


if __name__ == "__main__":
    run_main(main)
