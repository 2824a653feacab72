"""The world of a run: ranks that agree on everything that they are about to do."""

from sbpflow.config.load import config_facts
from sbpflow.config.schema import Config
from sbpflow.run.build_plan import given_topology
from sbpflow.run.explain import plan_digest
from sbpflow.run.plan import RunPlan
from sbpflow.runtime.exit_messages import Meeting
from sbpflow.runtime.hosts import find_topology
from sbpflow.runtime.topology import Topology
from sbpflow.runtime.world import World


def start_topology(config: Config, device_type: str) -> Topology:
    """Of the ranks that the launcher started: ``parallel.topology``, or what they find together.

    Plans need it, so it comes before ``start_world``. ``run_main`` keeps the ranks' store open.
    """
    ranks = Meeting.connect()
    timeout_s = config.parallel.timeout_s
    return given_topology(config, ranks.world_size) or find_topology(
        ranks.store, ranks.rank, ranks.world_size, device_type, timeout_s
    )


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
