"""Caches trained planners on disk, because training takes up to a minute.

The file's name is a digest of everything that affects training: the planner, the prices that
replace measurements, the number of ranks, the batch size, and the seed. Files contain weights and
numbers, but no code.
"""

import hashlib
import json
import logging
from dataclasses import fields
from pathlib import Path
from pickle import UnpicklingError  # raised by `torch.load`; nothing is unpickled
from typing import Any

import numpy as np
import torch
from torch import nn

from sbpflow.planner.costs.cost import TaskCost
from sbpflow.planner.published.autoshard import AutoShard
from sbpflow.planner.published.dreamshard import DreamShard
from sbpflow.planner.published.nets import Scaling
from sbpflow.planner.published.neuroshard import NeuroShard
from sbpflow.runtime.files.atomic_file import replacing
from sbpflow.runtime.files.cache_dir import cache_dir, make_private

_LOG = logging.getLogger(__name__)
_DAMAGED = (
    *(ValueError, TypeError, LookupError, AttributeError, RuntimeError, EOFError, OSError),
    UnpicklingError,
)
VERSION = 4  # increment if the same arguments would train a different planner


Learned = AutoShard | DreamShard | NeuroShard


def path_of(name: str, like: TaskCost, seed: int) -> Path:
    """Return the file of the planner that was trained on tasks similar to this one."""
    task = like.task
    facts = [name, VERSION, seed, task.world_size, task.batch_size]
    digest = hashlib.sha256(json.dumps([*facts, like.prices_digest]).encode()).hexdigest()[:20]
    return cache_dir() / "planners" / f"{name}-{digest}.pt"


def save_model(model: Learned, path: Path) -> None:
    """Write the planner, replacing the file atomically. If that fails, log a warning, because the
    planner itself is usable.
    """
    try:
        make_private(path.parent)
        with replacing(path) as partial:
            torch.save(_state(model), partial)
    except (OSError, RuntimeError) as error:  # torch raises RuntimeError if the disk is full
        _LOG.warning(
            "%s: the trained planner is not cached, so the next start trains it again (%s); set "
            "XDG_CACHE_HOME to a folder that you can write to",
            path,
            error,
        )


def load_model(model: Learned, path: Path) -> bool:
    """Fill an untrained model from the file; return False if the file is missing or damaged, or
    does not match.
    """
    if not path.is_file():
        return False
    try:
        _fill(model, torch.load(path, weights_only=True))
    except _DAMAGED as error:
        _LOG.warning("%s: not a valid cached planner (%s); training it again", path, error)
        return False
    return True


def _fill(model: Learned, state: dict[str, Any]) -> None:
    if set(state) != set(_state(model)):
        raise ValueError(f"it has the entries {sorted(state)}")
    for name, value in state.items():
        current = getattr(model, name)
        if isinstance(current, nn.Module):
            current.load_state_dict(value)
        elif isinstance(current, Scaling):
            setattr(model, name, Scaling(value[0].numpy(), value[1].numpy()))
        else:
            setattr(model, name, value)


def _state(model: Learned) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for field in fields(model):
        value = getattr(model, field.name)
        if isinstance(value, nn.Module):
            state[field.name] = value.state_dict()
        elif isinstance(value, Scaling):
            pair = (np.asarray(value.mean), np.asarray(value.deviation))
            state[field.name] = [torch.from_numpy(array.copy()) for array in pair]
        elif isinstance(value, float):
            state[field.name] = value
    return state
