"""Reads this process's rank, world size and machine from the launcher's environment."""

import os
import platform

from sbpflow.errors import ConfigError


def rank_and_world_size() -> tuple[int, int]:
    """Return this rank and the number of ranks, or (0, 1) without a launcher."""
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
            f"RANK={rank}: with WORLD_SIZE={world_size}, each process needs a unique RANK from "
            f"0 to {world_size - 1}; use, for example, RANK={near}"
        )
    return rank, world_size


def env_int(name: str, default: int) -> int:
    """Return an integer from the environment; raise ConfigError for any other text."""
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError as error:
        raise ConfigError(
            f"{name}={text!r} in the environment is not a whole number; start with torchrun"
        ) from error


def machine_name() -> str:
    """Return the host name and, under torchrun, the node number, for use in messages."""
    node = os.environ.get("GROUP_RANK")
    return f"{platform.node()} (node {node})" if node else platform.node()
