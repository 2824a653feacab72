"""The world of a run: ranks that agree on everything that they are about to do."""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from sbpflow.boxing.agreement import run_on_all_ranks
from sbpflow.boxing.executor import Boxing
from sbpflow.config.checks import run_dir
from sbpflow.config.load import config_facts
from sbpflow.config.schema import Config
from sbpflow.run.planning.build_plan import given_topology
from sbpflow.run.planning.explain import plan_digest
from sbpflow.run.planning.plan import RunPlan
from sbpflow.runtime.files.run_folder import RunLock
from sbpflow.runtime.processes.exit_messages import Meeting
from sbpflow.runtime.ranks.hosts import assumed_topology, find_topology
from sbpflow.runtime.ranks.topology import Topology
from sbpflow.runtime.ranks.world import World, world_size_of_environment

T = TypeVar("T")


def plan_for_ranks(
    config: Config, device_type: str, make: Callable[[Topology], tuple[RunPlan, T]]
) -> tuple[RunPlan, T]:
    """What ``make`` plans for ``parallel.topology``, or for the hosts that the ranks find together.

    Ranks meet to find their hosts, and may wait minutes for one that is missing. A mistake in the
    configuration should not wait for that, so a plan for one host is made first; it stays if all
    ranks turn out to be on one host. ``run_main`` keeps the ranks' store open.
    """
    world_size = world_size_of_environment()
    if given := given_topology(config, world_size):
        return make(given)
    assumed = assumed_topology(world_size, device_type)
    plan, others = make(assumed)
    ranks = Meeting.connect()
    found = find_topology(
        ranks.store, ranks.rank, world_size, device_type, config.parallel.timeout_s
    )
    if found == replace(assumed, hosts_source=found.hosts_source):
        topology = replace(plan.topology, hosts_source=found.hosts_source)
        return replace(plan, topology=topology), others
    return make(found)


def join_ranks(config: Config, plan: RunPlan, *, data_set: str) -> Boxing:
    """Join the other ranks, if they have this configuration, this plan and this data set; the
    transfers of the run go through what is returned.

    ``data_set`` names it, with its fingerprint and where this rank found it. Raises what
    ``World.start`` raises: ConfigError with what differs.
    """
    return Boxing(
        World.start(
            config.parallel.device,
            timeout_s=config.parallel.timeout_s,
            checked=config.parallel.checked,
            facts={**config_facts(config), "data set": data_set, "plan": plan_digest(plan)},
            topology=None if plan.topology.hosts_source == "assumed" else plan.topology,
        )
    )


def lock_run_folder(config: Config, boxing: Boxing) -> RunLock:
    """``run.dir`` for this run alone until it is closed; ConfigError on all ranks if taken."""
    return run_on_all_ranks(boxing, lambda: RunLock(run_dir(config), rank=boxing.world.rank))
