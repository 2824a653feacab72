"""Which ranks share a host, what each rank has, and what joins them: one value for a run.

Pure: ``hosts`` finds it when ranks start, ``config.topology_file`` reads one of machines that are
not at hand. Plans, prices and ``explain`` take it from ``RunPlan.topology``, collectives from
``World.topology``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from sbpflow.errors import ConfigError

Source = Literal["measured", "given", "assumed"]
HostsSource = Literal["handshake", "given", "assumed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What joins ranks: the GB/s that one of them sends, and the ms of a call.

    With the defaults plans rank as they ran on loopback (``embedding/plan/price.py``).
    """

    gb_per_s: float = 2.0
    latency_ms: float = 0.25
    source: Source = "assumed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Hosts as tuples of ascending ranks, in the order of their first ranks.

    ``memory_bytes`` and ``speeds`` are by rank; ``None`` is unknown memory, and equal speeds.
    Speeds are relative: a rank of speed 2 takes half the time. Raises ConfigError unless the hosts
    hold each of 0..size-1 once and all figures are above 0.
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
                f"topology: hosts: {_short(self.hosts)}; each host has a rank or more, and each of "
                "the ranks 0, 1, .. is on one host, for example [[0, 1], [2, 3]]"
            )
        ordered = tuple(sorted(tuple(sorted(host)) for host in self.hosts))
        object.__setattr__(self, "hosts", ordered)
        for name, values in (("memory", self.memory_bytes), ("speed", self.speeds)):
            if values is not None and (len(values) != self.size or min(values) <= 0):
                raise ConfigError(
                    f"topology: {name}: {_short(values)}; give one number above 0 for each of the "
                    f"{self.size} ranks, for example {[1] * min(self.size, 4)}"
                )
        for name, link in (("host_link", self.host_link), ("network_link", self.network_link)):
            if link.gb_per_s <= 0 or link.latency_ms < 0:
                raise ConfigError(
                    f"topology: {name}: {link.gb_per_s} GB/s, {link.latency_ms} ms; gb_per_s is "
                    "above 0 and latency_ms 0 or more, for example 0.125 and 0.25"
                )

    @staticmethod
    def one_host(size: int) -> "Topology":
        """All ranks on one host, assumed to be."""
        return Topology(hosts=(tuple(range(size)),))

    @property
    def size(self) -> int:
        """The number of ranks."""
        return sum(map(len, self.hosts))

    @property
    def ranks_per_host(self) -> int | None:
        """The number of ranks on each host; ``None`` where it is not the same."""
        counts = set(map(len, self.hosts))
        return counts.pop() if len(counts) == 1 else None

    @property
    def most_ranks_per_host(self) -> int:
        """The number of ranks on the host that has most."""
        return max(map(len, self.hosts))

    def host_of(self, rank: int) -> int:
        """The index of a rank's host in ``hosts``."""
        return next(index for index, host in enumerate(self.hosts) if rank in host)

    def same_host(self, *ranks: int) -> bool:
        """Whether all of ``ranks`` are on one host."""
        return len(self.hosts) == 1 or set(ranks) <= set(self.hosts[self.host_of(ranks[0])])

    def first_on_host(self, rank: int) -> bool:
        """Whether no lower rank is on the host of ``rank``."""
        return any(rank == host[0] for host in self.hosts)

    def link(self, ranks: Sequence[int]) -> Link:
        """What a transfer among ``ranks`` is limited by: across hosts the slower of the links."""
        if self.same_host(*ranks):
            return self.host_link
        return min(self.network_link, self.host_link, key=lambda link: link.gb_per_s)

    def with_link(self, gb_per_s: float) -> "Topology":
        """The same with a bandwidth that was given: between hosts or, of one host, inside it."""
        if len(self.hosts) == 1:
            return replace(self, host_link=_given(self.host_link, gb_per_s))
        return replace(self, network_link=_given(self.network_link, gb_per_s))


def _given(link: Link, gb_per_s: float) -> Link:
    return replace(link, gb_per_s=gb_per_s, source="given")


def _short(values: Sequence[object]) -> str:
    """A few of the values, as a list."""
    text = str(list(values)).replace("(", "[").replace(")", "]").replace(",]", "]")
    return text if len(text) <= 100 else f"{text[:100]}.."
