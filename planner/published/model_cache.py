"""Caches trained planners on disk, because training takes up to a minute.

The file's name is a digest of everything that affects training: the planner, the prices that
replace measurements, the number of ranks, the batch size, and the seed. Files contain weights and
numbers, but no code.
"""

import logging
from pathlib import Path
from pickle import UnpicklingError  # raised by `torch.load`; nothing is unpickled

import torch
from torch import nn

from sbpflow.planner.costs.cost import TaskCost
from sbpflow.runtime.files.atomic_file import replacing
from sbpflow.runtime.files.cache_dir import cache_dir, make_private
from sbpflow.runtime.files.json_file import json_digest

_LOG = logging.getLogger(__name__)
_DAMAGED = (
    *(ValueError, TypeError, LookupError, AttributeError, RuntimeError, EOFError, OSError),
    UnpicklingError,
)
VERSION = 6  # increment if the same arguments would train a different planner


def path_of(name: str, like: TaskCost, seed: int) -> Path:
    """Return the file of the planner that was trained on tasks similar to this one."""
    task = like.task
    facts = [name, VERSION, seed, task.world_size, task.batch_size]
    digest = json_digest([*facts, like.prices_digest])[:20]
    return cache_dir() / "planners" / f"{name}-{digest}.pt"


def save_model(model: nn.Module, path: Path) -> None:
    """Write the planner, replacing the file atomically. If that fails, log a warning, because the
    planner itself is usable.
    """
    try:
        make_private(path.parent)
        with replacing(path) as partial:
            torch.save(model.state_dict(), partial)
    except (OSError, RuntimeError) as error:  # torch raises RuntimeError if the disk is full
        _LOG.warning(
            "%s: the trained planner is not cached, so the next start trains it again (%s); set "
            "XDG_CACHE_HOME to a folder that you can write to",
            path,
            error,
        )


def load_model(model: nn.Module, path: Path) -> bool:
    """Fill an untrained model from the file; return False if the file is missing or damaged, or
    does not match.
    """
    if not path.is_file():
        return False
    try:
        model.load_state_dict(torch.load(path, weights_only=True))
    except _DAMAGED as error:
        _LOG.warning("%s: not a valid cached planner (%s); training it again", path, error)
        return False
    return True
