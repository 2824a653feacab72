"""The world of a run: ranks that agree on everything that they are about to do."""

from sbpflow.config.load import config_facts
from sbpflow.config.schema import Config
from sbpflow.run.explain import plan_digest
from sbpflow.run.plan import RunPlan
from sbpflow.runtime.world import World


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
    )
