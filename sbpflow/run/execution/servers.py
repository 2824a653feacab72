"""Creates embedding servers, and connects the ranks of a run to them."""

import uuid

from sbpflow.boxing.agreement import gather_values, run_on_all_ranks
from sbpflow.boxing.executor import Boxing
from sbpflow.config.schema import Config
from sbpflow.config.storage_rules import NamedServers, named_servers
from sbpflow.embedding.cache.remote_records import Servers
from sbpflow.embedding.cache.server import EmbeddingServer
from sbpflow.embedding.cache.server_protocol import read_secret
from sbpflow.run.planning.cache_forecast import cached_stacks, record_bytes
from sbpflow.run.planning.plan import RunPlan
from sbpflow.runtime.processes.environment import machine_name

# Shorter than the ranks' own timeouts, so that a lost server is reported as such, not as a lost
# rank.
_SHARE_OF_TIMEOUT = 0.6


def make_server(named: NamedServers, memory_bytes: int) -> EmbeddingServer:
    """Return a server that accepts ranks with the same secret.

    Raises ConfigError if the secret file is missing or unsuitable.
    """
    return EmbeddingServer(read_secret(named.secret_file, named.key), memory_bytes)


def join_servers(config: Config, plan: RunPlan, boxing: Boxing) -> Servers | None:
    """Begin a session on the run's servers, if any. Every rank must call this function. The servers
    drop the rows of all earlier sessions. Raises ConfigError for a wrong secret or version, or for
    rows that do not fit, and ServerLostError if a server does not answer.
    """
    stacks = [stack for _, stack, stored in cached_stacks(plan) if stored.kind == "servers"]
    if not stacks:
        return None
    named, world = named_servers(config.parallel.storage), boxing.world
    secret = run_on_all_ranks(boxing, lambda: read_secret(named.secret_file, named.key))
    servers = Servers(
        key=named.key,
        addresses=named.addresses,
        secret=secret,
        session=bytes.fromhex(gather_values(boxing, uuid.uuid4().hex)[0]),
        rank=world.rank,
        machine=machine_name(),
        limit_s=_SHARE_OF_TIMEOUT * config.parallel.timeout_s,
    )
    stores = [
        (stack.num_rows(rank), record_bytes(plan, stack, rank))
        for stack in stacks
        for rank in stack.holders()
    ]
    run_on_all_ranks(boxing, lambda: servers.begin(stores) if world.rank == 0 else None)
    return servers
