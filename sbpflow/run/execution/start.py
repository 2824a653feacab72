"""Starts a run (plans for the hosts, joins the ranks, locks the run folder) and closes it at the
end.
"""

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TypeVar

from sbpflow.boxing.agreement import run_on_all_ranks
from sbpflow.boxing.executor import Boxing
from sbpflow.config.checks import run_dir
from sbpflow.config.load import config_facts
from sbpflow.config.schema import Config
from sbpflow.errors import PlanError
from sbpflow.run.planning.build_plan import given_topology
from sbpflow.run.planning.explain import plan_digest
from sbpflow.run.planning.plan import RunPlan
from sbpflow.runtime.files.run_folder import RunLock
from sbpflow.runtime.processes.exit_messages import Meeting
from sbpflow.runtime.processes.store import all_ranks_here
from sbpflow.runtime.ranks.hosts import assumed_topology, find_topology
from sbpflow.runtime.ranks.rendezvous import world_size_of_environment
from sbpflow.runtime.ranks.topology import Topology
from sbpflow.runtime.ranks.world import World

T = TypeVar("T")


def plan_for_ranks(
    config: Config, device_type: str, make: Callable[[Topology], tuple[RunPlan, T]]
) -> tuple[RunPlan, T]:
    """Call ``make`` to plan the run for ``parallel.topology``, or for the hosts that the ranks
    discover.

    To discover their hosts, all ranks must join; if a rank is missing, waiting for it takes
    minutes. Therefore, a plan for one host is made first, so that configuration errors are reported
    immediately. That plan is used if all ranks turn out to share a host. Only if no plan fits in
    the memory of one host, the error waits for the hosts, which may have enough together.
    """
    world_size = world_size_of_environment()
    if given := given_topology(config, world_size):
        return make(given)
    assumed = assumed_topology(world_size, device_type)
    try:
        made = make(assumed)
    except PlanError as error:
        if all_ranks_here():
            raise
        made = error
    ranks = Meeting.connect()
    discovered = find_topology(
        ranks.store, ranks.rank, world_size, device_type, config.parallel.timeout_s
    )
    if discovered != replace(assumed, hosts_source=discovered.hosts_source):
        return make(discovered)
    if isinstance(made, PlanError):
        raise made
    plan, rest = made
    topology = replace(plan.topology, hosts_source=discovered.hosts_source)
    return replace(plan, topology=topology), rest


def join_ranks(config: Config, plan: RunPlan, *, data_set: str) -> Boxing:
    """Join the other ranks, which must have the same configuration, plan, and data set.

    ``data_set`` consists of the set's fingerprint and this rank's path to the set. All transfers of
    the run go through the returned ``Boxing``. Raises ConfigError with the differences between
    ranks, and all errors of ``World.start``.
    """
    return Boxing(
        World.start(
            config.parallel.device,
            timeout_s=config.parallel.timeout_s,
            checked=config.parallel.checked,
            shared_memory=config.parallel.shared_memory,
            facts={**config_facts(config), "data set": data_set, "plan": plan_digest(plan)},
            topology=None if plan.topology.hosts_source == "assumed" else plan.topology,
        )
    )


@contextmanager
def closing() -> Generator[ExitStack]:
    """Close everything that a run opened, on success or, in a single-process run, on failure. With
    several ranks, a failure ends the processes without closing, because closing could block on a
    dead peer.
    """
    opened = ExitStack()
    try:
        yield opened
    except BaseException:
        if world_size_of_environment() == 1:
            opened.close()
        raise
    opened.close()


def lock_run_folder(config: Config, boxing: Boxing) -> RunLock:
    """Lock ``run.dir``; raise ConfigError on all ranks if another run has locked it."""
    return run_on_all_ranks(boxing, lambda: RunLock(run_dir(config), rank=boxing.world.rank))
