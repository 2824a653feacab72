"""What a learned planner has learned, on disk: training takes most of a minute, and a benchmark or
a command asks for the same planner again and again.

A file is named by everything that training depends on: the planner, the prices that stand for
measurements, the number of ranks, the batch, and the seed. Weights and numbers only, no code.
"""

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from pickle import UnpicklingError  # torch's; nothing is unpickled here
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import nn

from sbpflow.planner.costs.cost import TaskCost
from sbpflow.planner.published.nets import Scaling
from sbpflow.planner.published.setting import Setting
from sbpflow.planner.search.problem import Assignment
from sbpflow.runtime.files.cache_dir import cache_dir, make_private

_LOG = logging.getLogger(__name__)
_DAMAGED = (
    *(ValueError, TypeError, LookupError, AttributeError, RuntimeError, EOFError, OSError),
    UnpicklingError,
)
VERSION = 1  # of how planners learn: raised when the same arguments would learn something else


class Learned(Protocol):
    """A planner with networks: a dataclass of modules, a ``Scaling`` and numbers."""

    @classmethod
    def blank(cls, num_ranks: int) -> Self:
        """With networks of the right sizes that have learned nothing."""
        ...

    @staticmethod
    def train(settings: Sequence[Setting], seed: int) -> "Learned":
        """From tasks to train on."""
        ...

    def plan(self, setting: Setting) -> Assignment: ...


def path_of(name: str, like: Sequence[TaskCost], seed: int) -> Path:
    """Where the planner that learned from tasks like these is kept."""
    facts = [name, VERSION, seed]
    for one in like:
        task = one.task
        facts += [task.world_size, task.batch_size, task.overlap, one.prices_digest]
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:20]
    return cache_dir() / "planners" / f"{name}-{digest}.pt"


def keep(model: Learned, path: Path) -> None:
    """The file is replaced as a whole."""
    make_private(path.parent)
    fresh = path.with_suffix(f".{os.getpid()}")
    torch.save(_state(model), fresh)
    fresh.replace(path)


def recall(model: Learned, path: Path) -> bool:
    """Fill a blank model from the file; False if there is none, or it is damaged or of another
    shape.
    """
    if not path.is_file():
        return False
    try:
        state = torch.load(path, weights_only=True)
        _fill(model, state)
    except _DAMAGED as error:
        _LOG.warning("%s: is not a kept planner (%s); it is trained again", path, error)
        return False
    return True


def _fill(model: Learned, state: dict[str, Any]) -> None:
    if set(state) != set(_state(model)):
        raise ValueError(f"it has {sorted(state)}")
    for name, value in state.items():
        mine = getattr(model, name)
        if isinstance(mine, nn.Module):
            mine.load_state_dict(value)
        elif isinstance(mine, Scaling):
            setattr(model, name, Scaling(value[0].numpy(), value[1].numpy()))
        else:
            setattr(model, name, value)


def _state(model: Learned) -> dict[str, Any]:
    if not is_dataclass(model):
        raise TypeError(f"{type(model).__name__} is no dataclass")
    state: dict[str, Any] = {}
    for field in fields(model):
        value = getattr(model, field.name)
        if isinstance(value, nn.Module):
            state[field.name] = value.state_dict()
        elif isinstance(value, Scaling):
            pair = (np.asarray(value.mean), np.asarray(value.deviation))
            state[field.name] = [torch.from_numpy(one.copy()) for one in pair]
        elif isinstance(value, float):
            state[field.name] = value
    return state
