"""Finds the embedding servers of a run in its storage rules (``embedding.plan.row_storage``)."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from sbpflow.embedding.plan.row_storage import StorageRule, split_address
from sbpflow.errors import ConfigError


def server_rule(rules: Mapping[str, StorageRule]) -> tuple[str, StorageRule] | None:
    """Return the key and the rule that name the embedding servers, or None without such a rule.

    All rules with ``kind: servers`` must name the same servers.
    """
    server_rules = [
        (f"parallel.storage.{p}", rule) for p, rule in rules.items() if rule.kind == "servers"
    ]
    for key, rule in server_rules[1:]:
        first_key, first = server_rules[0]
        for name in ("addresses", "secret_file"):
            if getattr(rule, name) != getattr(first, name):
                raise ConfigError(
                    f"{key}.{name} differs from {first_key}.{name}, but all tables use the same "
                    "servers; give both the same value"
                )
    return server_rules[0] if server_rules else None


class NamedServers(NamedTuple):
    """The embedding servers of a configuration; ``key`` is the key of their rule."""

    key: str
    addresses: tuple[tuple[str, int], ...]
    secret_file: Path


def named_servers(rules: Mapping[str, StorageRule]) -> NamedServers:
    """Return the servers of the rules; raise ConfigError if no rule lists servers."""
    keyed_rule = server_rule(rules)
    if keyed_rule is None:
        raise ConfigError(
            "parallel.storage: no rule has kind: servers; add, for example, "
            '"*.C1": {kind: servers, cache: 10%, addresses: [10.0.0.1:7070], secret_file: FILE}'
        )
    key, rule = keyed_rule
    if rule.addresses is None or rule.secret_file is None:
        raise ConfigError(
            f"{key}.addresses is not given, but kind: servers needs it; list the servers, such as "
            "[10.0.0.1:7070], or start servers with `sbpflow train -n 2 --servers 2`"
        )
    places = tuple(split_address(address, f"{key}.addresses") for address in rule.addresses)
    return NamedServers(key, places, rule.secret_file)
