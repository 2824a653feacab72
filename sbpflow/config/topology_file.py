"""Reads descriptions of hosts and links from the files that ``parallel.topology: FILE`` names.

A description is needed to plan for other machines, or if ranks cannot detect which of them share a
host.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from sbpflow.config.load import read_yaml
from sbpflow.config.parse import brief, build
from sbpflow.errors import ConfigError
from sbpflow.runtime.fields.keys import Example
from sbpflow.runtime.fields.ranges import Range
from sbpflow.runtime.ranks.topology import Link, Source, Topology

_Memory = Annotated[float, Range(above=0, high=1e6)]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Link:
    gb_per_s: Annotated[float, Range(above=0), Example(0.125)]
    latency_ms: Annotated[float, Range(low=0)] = Link().latency_ms
    source: Source = "given"

    def link(self) -> Link:
        return Link(gb_per_s=self.gb_per_s, latency_ms=self.latency_ms, source=self.source)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Description:
    """Describes hosts and links.

    ``hosts`` is a list of lists of ranks, or a number of hosts with ``ranks_per_host`` ranks each.
    Memory and speed are given per rank, as one number for all ranks or as a list with one number
    per rank.
    """

    hosts: Annotated[int | tuple[tuple[int, ...], ...], Example([[0, 1], [2, 3]])]
    ranks_per_host: Annotated[int | None, Range(low=1), Example(8)] = None
    memory_gb: Annotated[_Memory | tuple[_Memory, ...] | None, Example(64.0)] = None
    speed: Annotated[float | tuple[float, ...] | None, Example(1.0)] = None
    host_link: Annotated[_Link | None, Example({"gb_per_s": 2.0})] = None
    network_link: Annotated[_Link | None, Example({"gb_per_s": 0.125})] = None

    @property
    def size(self) -> int:
        """Return the number of ranks; raise ConfigError if the keys do not determine the hosts."""
        each = self.ranks_per_host
        if isinstance(self.hosts, int) and self.hosts > 0 and each is not None:
            return self.hosts * each
        if isinstance(self.hosts, tuple) and each is None:
            return sum(map(len, self.hosts))
        raise ConfigError(
            "hosts and ranks_per_host: give either lists of ranks, such as hosts: [[0, 1], [2, "
            "3]], or two numbers above 0, such as hosts: 2 and ranks_per_host: 2"
        )

    def topology(self) -> Topology:
        size, each, hosts = self.size, self.ranks_per_host or 1, self.hosts
        memory = _by_rank(self.memory_gb, size)
        if memory is not None and len(memory) != size:
            raise ConfigError(
                f"memory_gb must be one number, or a list with a number for each of the {size} "
                f"ranks (for example, {[64] * min(size, 4)}), got {brief(list(memory))}"
            )
        if isinstance(hosts, int):
            hosts = tuple(tuple(range(n, n + each)) for n in range(0, size, each))
        return Topology(
            hosts=hosts,
            hosts_source="given",
            memory_bytes=None if memory is None else tuple(int(1e9 * gb) for gb in memory),
            memory_source="given",
            speeds=_by_rank(self.speed, size),
            host_link=self.host_link.link() if self.host_link else Link(),
            network_link=self.network_link.link() if self.network_link else Link(),
        )


def _by_rank(given: float | tuple[float, ...] | None, size: int) -> tuple[float, ...] | None:
    return (given,) * size if isinstance(given, float | int) else given


def read_topology(path: Path, *, world_size: int) -> Topology:
    """Return the topology that a file describes, which must have ``world_size`` ranks. Raises
    ConfigError.
    """
    tree = read_yaml(path, "parallel.topology")
    try:
        described = build(_Description, tree)
        if described.size != world_size:
            raise ConfigError(
                f"hosts: the file describes {described.size} ranks, but this run has "
                f"{world_size}; describe {world_size} ranks, or start {described.size} ranks"
            )
        return described.topology()
    except ConfigError as error:
        raise ConfigError(f"parallel.topology: {path}: {error}") from error
