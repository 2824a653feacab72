"""Reads the environment variables that a launcher sets so that its ranks find each other."""

import os
from dataclasses import dataclass

import torch

from sbpflow.errors import ConfigError
from sbpflow.runtime.compute.devices import choose_device
from sbpflow.runtime.processes.environment import env_int, existing_group, rank_and_world_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """How the ranks find each other, as arguments of torch's ``init_process_group``.

    ``init_method`` is None if no address is needed: for a world of one rank, and for an existing
    process group.
    """

    init_method: str | None
    rank: int
    size: int
    local_rank: int = 0


def meeting_from_environment() -> Rendezvous:
    """Return the rendezvous of the existing process group, of the launcher, or of a world of one
    rank. Raises ConfigError if the environment is invalid."""
    rank, size = rank_and_world_size()
    if existing_group() is not None:  # the ranks are already connected
        return Rendezvous(init_method=None, rank=rank, size=size, local_rank=local_rank())
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return Rendezvous(init_method=None, rank=0, size=1)
    if size == 1:  # a single rank does not need MASTER_ADDR
        return Rendezvous(init_method=None, rank=0, size=1, local_rank=local_rank())
    missing = [key for key in ("MASTER_ADDR", "MASTER_PORT") if key not in os.environ]
    if missing:
        raise ConfigError(
            f"RANK is set but {', '.join(missing)} is not; start ranks with "
            "torchrun --nproc-per-node N, or unset RANK and WORLD_SIZE for one process"
        )
    return Rendezvous(init_method="env://", rank=rank, size=size, local_rank=local_rank())


def local_rank() -> int:
    """Return this rank's number on its host, or 0 without a launcher. Raises ConfigError for an
    invalid LOCAL_RANK. If a program created the process group itself and did not set LOCAL_RANK,
    the result is the number of the device that the program has chosen.
    """
    if "LOCAL_RANK" not in os.environ and existing_group() and torch.cuda.is_initialized():
        return torch.cuda.current_device()
    given = env_int("LOCAL_RANK", 0)
    if given < 0:
        raise ConfigError(
            f"LOCAL_RANK in the environment must be 0 or more, as torchrun sets it, got {given}"
        )
    return given


def world_size_of_environment() -> int:
    """Return the number of ranks that the launcher started, or 1 without a launcher."""
    return meeting_from_environment().size


def device_type_of(device: str) -> str:
    """Resolve "auto", "cpu", or "cuda" to "cpu" or "cuda"; raise ConfigError if the device is
    unavailable.
    """
    return choose_device(device, local_rank()).type
