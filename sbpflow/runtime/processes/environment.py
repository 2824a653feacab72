"""Finds this process's rank, world size, and machine.

The rank and the world size come from the launcher's environment, or from torch's default process
group if the program has already created that group.
"""

import os
import platform
import sys
from typing import Any

from sbpflow.errors import ConfigError


def rank_and_world_size() -> tuple[int, int]:
    """Return the rank and the number of ranks, or (0, 1) without a launcher."""
    if existing := existing_group():
        return existing
    rank, world_size = env_int("RANK", 0), env_int("WORLD_SIZE", 1)
    if world_size < 1:
        raise ConfigError(
            f"WORLD_SIZE={world_size}: a run needs at least 1 rank; use, for example, "
            "WORLD_SIZE=1, or unset RANK and WORLD_SIZE for one process"
        )
    if world_size > 1 and "RANK" not in os.environ:
        raise ConfigError(
            f"RANK is not set, but WORLD_SIZE={world_size} is; set RANK to a unique value from "
            f"0 to {world_size - 1} in each process (for example, RANK=0), or start with torchrun"
        )
    if not 0 <= rank < world_size:
        near = min(max(rank, 0), world_size - 1)
        raise ConfigError(
            f"RANK={rank} is not possible with WORLD_SIZE={world_size}: each process needs a "
            f"unique RANK from 0 to {world_size - 1}; use, for example, RANK={near}"
        )
    return rank, world_size


def existing_group() -> tuple[int, int] | None:
    """Return the rank and size of torch's default process group, or None if there is none.

    Programs such as Ray's workers create this group before they call sbpflow.
    """
    torch_group: Any = sys.modules.get("torch.distributed")  # loading torch takes seconds
    if torch_group is None or not torch_group.is_available() or not torch_group.is_initialized():
        return None
    return torch_group.get_rank(), torch_group.get_world_size()


def env_int(name: str, default: int) -> int:
    """Return an integer environment variable; raise ConfigError if its value is not an integer."""
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError as error:
        raise ConfigError(
            f"{name} in the environment must be a whole number, got {text!r}; start with torchrun"
        ) from error


def machine_name() -> str:
    """Return the host name and, under torchrun and Ray, the node number, for use in messages."""
    node = os.environ.get("GROUP_RANK") or os.environ.get("NODE_RANK")  # torchrun or Ray
    return f"{platform.node()} (node {node})" if node else platform.node()
