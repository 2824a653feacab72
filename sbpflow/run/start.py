"""The world of a run: ranks that agree on everything that they are about to do."""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from sbpflow.config.load import config_facts
from sbpflow.config.schema import Config
from sbpflow.run.build_plan import given_topology
from sbpflow.run.explain import plan_digest
from sbpflow.run.plan import RunPlan
from sbpflow.runtime.exit_messages import Meeting
from sbpflow.runtime.hosts import assumed_topology, find_topology
from sbpflow.runtime.topology import Topology
from sbpflow.runtime.world import World, world_size_of_environment

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


def start_world(config: Config, plan: RunPlan, *, data_set: str) -> World:
    """Join the other ranks, if they have this configuration, this plan and this data set.

    ``data_set`` names it, with its fingerprint and where this rank found it. Raises what
    ``World.start`` raises: ConfigError with what differs.
    """
    return World.start(
        config.parallel.device,
        timeout_s=config.parallel.timeout_s,
        checked=config.parallel.checked,
        facts={**config_facts(config), "data set": data_set, "plan": plan_digest(plan)},
        topology=None if plan.topology.hosts_source == "assumed" else plan.topology,
    )
