"""Chooses the number of threads of a rank's loops on the host."""

import os

import torch

from sbpflow.runtime.ranks.world import World

MOST_THREADS = 8


def host_threads(world: World) -> int:
    """Return the number of torch's threads or, with a GPU, of this rank's share of the cores, but
    at most ``MOST_THREADS``.
    """
    if world.device.type != "cuda":
        return min(MOST_THREADS, torch.get_num_threads())
    topology = world.topology
    num_ranks = len(topology.hosts[topology.host_of(world.rank)])
    return max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)) // num_ranks))
