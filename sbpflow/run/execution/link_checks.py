"""Measures the links between ranks for ``doctor``, and names a slow link or host.

Every pair of hosts is measured in both directions. Pairs that share no host are measured at the
same time, because a training step uses their links at the same time. Within a host, links are
measured from each rank to the next.
"""

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from sbpflow.boxing.agreement import gather_values
from sbpflow.boxing.executor import Boxing
from sbpflow.boxing.plan import plan_boxing
from sbpflow.runtime.compute.doctor import Finding
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Split

Pair = tuple[int, int]  # Source and destination rank.
SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 24)  # Numbers of float32 values: 4 KiB to 64 MiB.
# If a message takes longer than this, larger sizes are not measured on that link.
_ENOUGH_S = 0.02
_REPEATS = 3
_SLOW = 0.5  # Share of the usual rate below which a link or host is slow.
# A host's latency is high if it exceeds ``_LATE`` times the usual latency, and also the usual
# latency plus ``_LATE_S``.
_LATE, _LATE_S = 3.0, 1e-3
_SENDS, _RECEIVES = 0, 1  # The place of a host in a pair.
_DIRECTIONS: Mapping[tuple[int, ...], str] = {
    (_SENDS,): "from",
    (_RECEIVES,): "to",
    (_SENDS, _RECEIVES): "to or from",
}
_MAX_LISTED = 8  # with more hosts, the report does not list all pairs


@dataclass(frozen=True, slots=True)
class Measured:
    """The rate and latency of one link."""

    gb_per_s: float
    latency_s: float

    def __str__(self) -> str:
        return f"{self.gb_per_s:.3f} GB/s, {1e3 * self.latency_s:.2f} ms for 4 KiB"


def rounds_between(leaders: Sequence[int]) -> Iterator[list[Pair]]:
    """Yield rounds in which each leader has at most one partner (the circle method for round-robin
    tournaments). Over all rounds, each pair occurs once in each direction.
    """
    players: list[int | None] = [*leaders, *([None] if len(leaders) % 2 else [])]
    for _ in range(len(players) - 1):
        half = len(players) // 2
        facing = zip(players[:half], reversed(players[half:]), strict=True)
        pairs = [(a, b) for a, b in facing if a is not None and b is not None]
        yield pairs
        yield [(b, a) for a, b in pairs]
        players = [players[0], players[-1], *players[1:-1]]


def rounds_within(hosts: Sequence[Sequence[int]]) -> Iterator[list[Pair]]:
    """Yield rounds that measure the link from each rank to the next on its host."""
    for place in range(max(len(ranks) for ranks in hosts)):
        pairs = [
            (ranks[place], ranks[(place + 1) % len(ranks)])
            for ranks in hosts
            if place < len(ranks) and len(ranks) > 1
        ]
        if pairs:
            yield pairs


def measure(
    boxing: Boxing, rounds: Iterator[list[Pair]], sizes: Sequence[int] = SIZES
) -> dict[Pair, Measured]:
    """Measure the links of all rounds, one round after another. Every rank must call this
    function.
    """
    links: dict[Pair, Measured] = {}
    for pairs in rounds:
        latencies: Mapping[Pair, float] = {}
        left = pairs
        for size in sizes:
            times = _seconds(boxing, left, size)
            latencies = latencies or times
            links |= {
                pair: Measured(4 * size / seconds / 1e9, latencies[pair])
                for pair, seconds in times.items()
            }
            left = [pair for pair in left if times[pair] < _ENOUGH_S]
            if not left:
                break
    return links


def _seconds(boxing: Boxing, pairs: Sequence[Pair], size: int) -> dict[Pair, float]:
    """Return, for each of ``pairs``, the shortest time to send ``size`` float32 values."""
    world = boxing.world
    sources, targets = ([pair[end] for pair in pairs] for end in (0, 1))
    src, dst = (
        Layout(Placement.of(world.device.type, ranks), (Split(0),)) for ranks in (sources, targets)
    )
    steps = plan_boxing(
        src,
        dst,
        (size * len(pairs),),
        torch.float32,
        id=f"doctor/link/{sources}/{targets}/{size}",
    )
    part = torch.ones(size, device=world.device) if world.rank in sources else None
    times: list[float] = []
    for _ in range(_REPEATS + 1):  # the first repeat is slower, because it opens the connection
        world.barrier()
        begin = time.perf_counter()
        boxing.run(steps, part, "control")
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    by_rank = gather_values(boxing, min(times[1:]))
    return {pair: by_rank[pair[1]] for pair in pairs}


def link_findings(
    boxing: Boxing, names: Sequence[str], *, sizes: Sequence[int] = SIZES
) -> list[Finding]:
    """Measure the links within and between hosts; return the findings.

    Every rank must call this function. ``names`` contains the name of each rank's machine.
    """
    world = boxing.world
    if world.size == 1:
        hint = "torchrun --nproc-per-node N -m sbpflow doctor measures the links"
        return [Finding("link", "absent", f"one rank; {hint}")]
    hosts = world.topology.hosts
    links = measure(boxing, rounds_within(hosts), sizes)
    findings: list[Finding] = []
    if len(hosts) > 1:
        between = measure(boxing, rounds_between([ranks[0] for ranks in hosts]), sizes)
        named = {(names[a], names[b]): link for (a, b), link in between.items()}
        findings += [*_pairs(named), *slow_findings(named)]
        links |= between
    ordered = sorted(links.items(), key=lambda item: item[1].gb_per_s)
    text = _named(*ordered[0], names)
    if ordered[-1][1].gb_per_s > 1.2 * ordered[0][1].gb_per_s and len(links) > 2:
        text = f"slowest {text}; fastest {_named(*ordered[-1], names)}"
    machines = f"{len(hosts)} machines" if len(hosts) > 1 else "1 machine"
    text = f"{world.size} ranks on {machines}: {text}"
    return [Finding("link", "ok", text), *findings]


def _named(pair: Pair, link: Measured, names: Sequence[str]) -> str:
    source, target = (names[rank] for rank in pair)
    where = "" if source == target else f" ({source} to {target})"
    return f"{link}, rank {pair[0]} to {pair[1]}{where}"


def _pairs(links: Mapping[tuple[str, str], Measured]) -> list[Finding]:
    """Return one finding per pair of hosts, or [] if there are too many hosts to list."""
    if len({host for pair in links for host in pair}) > _MAX_LISTED:
        return []
    return [
        Finding("pair", "ok", f"{a} to {b}: {link}; back: {links[b, a]}")
        for (a, b), link in links.items()
        if a < b
    ]


def _best_rates(links: Mapping[tuple[str, str], Measured]) -> dict[tuple[str, int], float]:
    """Return the rate of each host's fastest link as a sender and as a receiver."""
    best: dict[tuple[str, int], float] = {}
    for pair, link in links.items():
        for key in ((pair[_SENDS], _SENDS), (pair[_RECEIVES], _RECEIVES)):
            best[key] = max(best.get(key, 0.0), link.gb_per_s)
    return best


def slow_findings(links: Mapping[tuple[str, str], Measured]) -> list[Finding]:
    """Return a finding for each slow host, each host with a high latency, and each slow link that
    no slow host explains.

    A host is slow as a sender or a receiver if its fastest link in this direction is slow; this
    test needs at least three hosts. With two hosts, only the two directions can be compared.
    """
    hosts = sorted({host for pair in links for host in pair})
    findings: list[Finding] = []
    slow: set[tuple[str, int]] = set()
    if len(hosts) > 2:
        best = _best_rates(links)
        rate = statistics.median(best.values())
        slow = {key for key, gb_per_s in best.items() if gb_per_s < _SLOW * rate}
        for host in hosts:
            if ends := tuple(end for end in (_SENDS, _RECEIVES) if (host, end) in slow):
                most = max(best[host, end] for end in ends)
                text = (
                    f"{host} is slow: at most {most:.3f} GB/s {_DIRECTIONS[ends]} it, but usually "
                    f"{rate:.3f} GB/s between other machines; check its cable, switch "
                    "port, rate limit, and other traffic"
                )
                findings.append(Finding("link", "odd", text))
        quickest = {
            host: min(link.latency_s for pair, link in links.items() if host in pair)
            for host in hosts
        }
        latency = statistics.median(quickest.values())
        findings += [
            Finding(
                "link",
                "odd",
                f"{host} has a high latency: at least {1e3 * quickest[host]:.2f} ms for 4 KiB, "
                f"but usually {1e3 * latency:.2f} ms between other machines; check its "
                "location and load",
            )
            for host in hosts
            if quickest[host] > _LATE * latency and quickest[host] - latency > _LATE_S
        ]
    rest = {
        pair: link
        for pair, link in links.items()
        if (pair[0], _SENDS) not in slow and (pair[1], _RECEIVES) not in slow
    }
    usual = max((link.gb_per_s for link in rest.values()), default=0.0)
    if len(hosts) > 2 and rest:
        usual = statistics.median(link.gb_per_s for link in rest.values())
    findings += [
        Finding(
            "link",
            "odd",
            f"the link from {source} to {target} is slow: it has {link.gb_per_s:.3f} GB/s, while "
            f"other links have {usual:.3f} GB/s; check the route, the rate limit of the sender, "
            "and other traffic",
        )
        for (source, target), link in rest.items()
        if link.gb_per_s < _SLOW * usual
    ]
    return findings
