"""Defines ``Topology``: the hosts, memory, speeds, and links of a run's ranks.

``hosts`` discovers the topology when ranks start. ``config.topology_file`` reads a file that
describes other machines. Plans, prices and ``explain`` use ``RunPlan.topology``; collectives use
``World.topology``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from sbpflow.errors import ConfigError

Source = Literal["measured", "given", "assumed"]
SPEEDS = 0.001, 1000  # smallest and largest relative speed of a rank
HostsSource = Literal["handshake", "given", "assumed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A link: the send rate of one rank in GB/s, and the latency of a call in ms. With the
    defaults, the order of plans by predicted time is the same as their order in measurements on
    loopback (``costs/prices.py``).
    """

    gb_per_s: float = 2.0
    latency_ms: float = 0.25
    source: Source = "assumed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The hosts of a run, as tuples of ascending ranks, ordered by first rank. ``memory_bytes`` and
    ``speeds`` have one value per rank; ``None`` means unknown memory or equal speeds. Speeds are
    relative: a rank with speed 2 computes twice as fast as one with speed 1. Raises ConfigError
    unless each rank 0..size-1 is on exactly one host and all values are above 0 (latencies may be
    0).
    """

    hosts: tuple[tuple[int, ...], ...]
    hosts_source: HostsSource = "assumed"
    memory_bytes: tuple[int, ...] | None = None
    memory_source: Source = "measured"
    speeds: tuple[float, ...] | None = None
    host_link: Link = Link()
    network_link: Link = Link()

    def __post_init__(self) -> None:
        ranks = [rank for host in self.hosts for rank in host]
        if not all(self.hosts) or sorted(ranks) != list(range(len(ranks))) or not ranks:
            raise ConfigError(
                "topology: in hosts, each host needs at least one rank, and each rank (0, 1, ..) "
                "must be on exactly one host (for example, [[0, 1], [2, 3]]), got "
                f"{_short(self.hosts)}"
            )
        ordered = tuple(sorted(tuple(sorted(host)) for host in self.hosts))
        object.__setattr__(self, "hosts", ordered)
        memory = self.memory_bytes
        if memory is not None and (len(memory) != self.size or min(memory) <= 0):
            raise ConfigError(
                f"topology: memory must have a number above 0 for each of the {self.size} ranks "
                f"(for example, {[1] * min(self.size, 4)}), got {_short(memory)}"
            )
        if self.speeds is not None:
            check_speeds("topology", self.speeds, self.size)
        for name, link in (("host_link", self.host_link), ("network_link", self.network_link)):
            if link.gb_per_s <= 0 or link.latency_ms < 0:
                raise ConfigError(
                    f"topology: {name}.gb_per_s must be above 0 and {name}.latency_ms 0 or more "
                    f"(for example, 0.125 and 0.25), got {link.gb_per_s} and {link.latency_ms}"
                )

    @staticmethod
    def one_host(size: int) -> "Topology":
        """Return the topology of ``size`` ranks that are all on one host."""
        return Topology(hosts=(tuple(range(size)),))

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return sum(map(len, self.hosts))

    @property
    def ranks_per_host(self) -> int | None:
        """Return the number of ranks on each host, or ``None`` if hosts differ."""
        counts = set(map(len, self.hosts))
        return counts.pop() if len(counts) == 1 else None

    @property
    def most_ranks_per_host(self) -> int:
        """Return the largest number of ranks on a host."""
        return max(map(len, self.hosts))

    @property
    def num_equal_hosts(self) -> int:
        """Return the number of hosts, or 1 if they differ in size or have non-consecutive ranks."""
        ranks = [rank for host in self.hosts for rank in host]
        even = self.ranks_per_host is not None and ranks == sorted(ranks)
        return len(self.hosts) if even else 1

    @property
    def far_share(self) -> float:
        """Return the share of a rank's peers that are on other hosts, for the rank with the largest
        share.
        """
        return (self.size - min(map(len, self.hosts))) / max(1, self.size - 1)

    @property
    def far_ring_share(self) -> float:
        """Return the share of the bytes sent in a ring of all ranks that goes to other hosts: only
        one rank of a host sends to another host. If hosts differ in size, return the share of the
        smallest.
        """
        return 1.0 / min(map(len, self.hosts)) if len(self.hosts) > 1 else 0.0

    def host_of(self, rank: int) -> int:
        """Return the index of a rank's host in ``hosts``."""
        return next(index for index, host in enumerate(self.hosts) if rank in host)

    def same_host(self, *ranks: int) -> bool:
        """Return whether all of ``ranks`` are on one host."""
        return len(self.hosts) == 1 or set(ranks) <= set(self.hosts[self.host_of(ranks[0])])

    def link(self, ranks: Sequence[int]) -> Link:
        """Return the link that limits a transfer among ``ranks``: across hosts, the slower of the
        two links.
        """
        if self.same_host(*ranks):
            return self.host_link
        return min(self.network_link, self.host_link, key=lambda link: link.gb_per_s)

    def with_link(self, gb_per_s: float) -> "Topology":
        """Return a copy with a given bandwidth between hosts or, with only one host, inside that
        host."""
        name = "host_link" if len(self.hosts) == 1 else "network_link"
        link = replace(getattr(self, name), gb_per_s=gb_per_s, source="given")
        return replace(self, **{name: link})


def check_speeds(where: str, speeds: Sequence[float], size: int) -> None:
    """Raise ConfigError unless there is a valid relative speed for each of ``size`` ranks."""
    least, most = SPEEDS
    if len(speeds) != size or not all(least <= speed <= most for speed in speeds):
        raise ConfigError(
            f"{where}: speed must have a number from {least} to {most} for each of the {size} "
            f"ranks (for example, {[1] * min(size, 4)}), got {_short(speeds)}"
        )


def _short(values: Sequence[object]) -> str:
    """Format the values as a list of at most 100 characters."""
    text = str(list(values)).replace("(", "[").replace(")", "]").replace(",]", "]")
    return text if len(text) <= 100 else f"{text[:100]}.."
