"""What the launcher's environment says of this process: its rank, its world, its machine."""

import os
import platform

from sbpflow.errors import ConfigError


def rank_and_world_size() -> tuple[int, int]:
    """This process's rank and the number of ranks, (0, 1) without a launcher; else ConfigError."""
    rank, world_size = env_int("RANK", 0), env_int("WORLD_SIZE", 1)
    if world_size < 1:
        raise ConfigError(
            f"WORLD_SIZE={world_size}: a run has 1 rank or more; for example WORLD_SIZE=1, or "
            "unset RANK and WORLD_SIZE for one process"
        )
    if world_size > 1 and "RANK" not in os.environ:
        raise ConfigError(
            f"RANK is not set but WORLD_SIZE={world_size} is; give each process its own of "
            f"0..{world_size - 1}, for example RANK=0, or start with torchrun"
        )
    if not 0 <= rank < world_size:
        near = min(max(rank, 0), world_size - 1)
        raise ConfigError(
            f"RANK={rank}: ranks count from 0, so with WORLD_SIZE={world_size} RANK is one of "
            f"0..{world_size - 1}, each once; for example RANK={near}"
        )
    return rank, world_size


def env_int(name: str, default: int) -> int:
    """A whole number of the environment; ConfigError if it is none."""
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError as error:
        raise ConfigError(
            f"{name}={text!r} in the environment is not a whole number; start with torchrun"
        ) from error


def machine_name() -> str:
    """This machine, for messages: its host name and, from torchrun, its number among the nodes."""
    node = os.environ.get("GROUP_RANK")
    return f"{platform.node()} (node {node})" if node else platform.node()
