"""Compares the machines of a job for ``doctor``: versions, names, MTU, clocks, and compute speed.

The ``*_finding`` functions are pure functions of the facts gathered from all ranks, so tests can
call them without several machines.
"""

import os
import platform
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from sbpflow.boxing.agreement import gather_values
from sbpflow.boxing.executor import Boxing
from sbpflow.runtime.compute.doctor import Finding
from sbpflow.runtime.compute.versions import summary
from sbpflow.runtime.processes.environment import machine_name
from sbpflow.runtime.ranks.interfaces import (
    interface_of,
    is_loopback,
    mtu_of,
    own_addresses,
    resolve,
    source_address,
)

_MAX_CLOCK_S = 1.0
_SLOW_COMPUTE = 0.6  # a rank is slow below this share of the usual rate
_MATRIX, _COMPUTE_S = 512, 0.5
_CLOCK_READS = 5

Facts = Mapping[str, str]


def node_findings(boxing: Boxing) -> list[Finding]:
    """Gather facts from all ranks and return the findings. Every rank must call this function."""
    world = boxing.world
    if world.size == 1:
        return []
    by_rank = gather_values(boxing, {**_facts(), "rate": repr(_matmul_gflop_per_s(boxing))})
    findings = [versions_finding(by_rank), compute_finding(by_rank)]
    if len(world.topology.hosts) > 1:
        main = os.environ.get("MASTER_ADDR", "")
        findings += [names_finding(by_rank, main), mtu_finding(by_rank)]
        findings.append(clocks_finding(by_rank, _clock_offsets(boxing)))
    return findings


def _facts() -> dict[str, str]:
    main = os.environ.get("MASTER_ADDR", "")
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    interface = interface or interface_of(source_address(main))
    versions = {name: text for name, text in summary().items() if name != "cores"}
    return {
        "host": machine_name(),
        "versions": "; ".join(f"{name} {text}" for name, text in versions.items()),
        "own name": platform.node(),
        "own addresses": " ".join(own_addresses()),
        "main addresses": " ".join(resolve(main)) if main else "",
        "interface": interface,
        "mtu": str(mtu_of(interface) or ""),
    }


def versions_finding(by_rank: Sequence[Facts]) -> Finding:
    """Compare the package versions of all machines.

    Versions that affect results are already equal here, because ranks refuse to connect if they
    differ.
    """
    usual, odd = _unusual(by_rank, "versions")
    if not odd:
        return Finding("versions", "ok", "equal on all machines")
    common = set(usual.split("; "))
    texts, differing = list[str](), set[str]()
    for host, text in odd.items():
        own = text.split("; ")
        texts.append(f"{host} has {', '.join(each for each in own if each not in common)}")
        differing |= common - set(own)
    others = ", ".join(sorted(differing))
    return Finding("versions", "odd", f"{'; '.join(texts)}; other machines have {others}")


def names_finding(by_rank: Sequence[Facts], main: str) -> Finding:
    """Report host names that resolve to a loopback address or to different addresses."""
    problems: list[str] = []
    for facts in _by_host(by_rank).values():
        own = facts["own addresses"].split()
        if not own or is_loopback(own[0]):
            problems.append(
                f"{facts['host']} resolves its own name {facts['own name']} to "
                f"{own[0] if own else 'nothing'}, so sbpflow uses the interface "
                f"{facts['interface'] or '(none)'}; other programs may not use it: correct "
                "/etc/hosts"
            )
    addresses = {
        host: [text for text in facts["main addresses"].split() if not is_loopback(text)]
        for host, facts in _by_host(by_rank).items()
    }
    known = {host: texts for host, texts in addresses.items() if texts}
    if len({tuple(sorted(texts)) for texts in known.values()}) > 1:
        seen = ", ".join(f"{' '.join(texts)} on {host}" for host, texts in known.items())
        problems.append(
            f"MASTER_ADDR {main} is {seen}; use a name or an address that leads all machines to "
            "rank 0's machine"
        )
    text = (
        "every machine's own name resolves to a non-loopback address, and "
        f"MASTER_ADDR {main} resolves consistently"
    )
    return Finding("names", "odd" if problems else "ok", "; ".join(problems) or text)


def mtu_finding(by_rank: Sequence[Facts]) -> Finding:
    """Compare the MTU of the interfaces that connect the machines."""
    usual, odd = _unusual(by_rank, "mtu")
    interfaces = _by_host(by_rank)
    if not odd:
        return Finding("mtu", "ok", f"{usual or 'unknown'} on all machines")
    texts = [
        f"{host} has {text or 'unknown'} on {interfaces[host]['interface']}"
        for host, text in odd.items()
    ]
    hint = "packets between machines with different MTUs may be lost; use one MTU"
    return Finding("mtu", "odd", f"{', '.join(texts)}, but other machines have {usual}; {hint}")


def clocks_finding(by_rank: Sequence[Facts], offsets_s: Sequence[float]) -> Finding:
    """Compare the machines' clocks, which affect only recorded times."""
    by_host = {facts["host"]: s for facts, s in zip(by_rank, offsets_s, strict=True)}
    middle = statistics.median_low(by_host.values())
    odd = {host: s - middle for host, s in by_host.items() if abs(s - middle) > _MAX_CLOCK_S}
    if not odd:
        spread = max(by_host.values()) - min(by_host.values())
        return Finding("clocks", "ok", f"within {1e3 * spread:.1f} ms of each other")
    texts = [
        f"{host} is {abs(s):.1f} s {'ahead' if s > 0 else 'behind'}" for host, s in odd.items()
    ]
    return Finding("clocks", "odd", f"{', '.join(texts)}; run a time service, such as chrony")


def compute_finding(by_rank: Sequence[Facts]) -> Finding:
    """Compare the speed of a matrix product, which all ranks compute at the same time."""
    rates = [float(facts["rate"]) for facts in by_rank]
    # With two machines, the usual rate is that of the faster one.
    usual = statistics.median_high(rates)
    slow = [rank for rank, rate in enumerate(rates) if rate < _SLOW_COMPUTE * usual]
    if not slow:
        return Finding("compute", "ok", f"{min(rates):.1f} to {max(rates):.1f} GFLOP/s per rank")
    texts = [f"rank {rank} on {by_rank[rank]['host']} ({rates[rank]:.1f} GFLOP/s)" for rank in slow]
    hint = "check other processes, CPU limits, the temperature, and the number of cores"
    text = f"{', '.join(texts)}, usual rate {usual:.1f} GFLOP/s; {hint}"
    return Finding("compute", "odd", text)


def _by_host(by_rank: Sequence[Facts]) -> dict[str, Facts]:
    """Return the facts of each machine's first rank."""
    hosts: dict[str, Facts] = {}
    for facts in by_rank:
        hosts.setdefault(facts["host"], facts)
    return hosts


def _unusual(by_rank: Sequence[Facts], key: str) -> tuple[str, dict[str, str]]:
    """Return the most frequent value, and the values of the machines that differ from it."""
    values = {host: facts[key] for host, facts in sorted(_by_host(by_rank).items())}
    usual = Counter(values.values()).most_common(1)[0][0]
    return usual, {host: text for host, text in values.items() if text != usual}


def _matmul_gflop_per_s(boxing: Boxing) -> float:
    """Return the mean rate of float32 matrix products on this rank's device.

    The fastest product would not reveal a CPU limit or a competing process, because each of these
    stops a rank for only a few milliseconds at a time.
    """
    device = boxing.world.device
    matrix = torch.ones(_MATRIX, _MATRIX, device=device)
    torch.mm(matrix, matrix)  # the first product is slower
    boxing.world.barrier()
    products, seconds = 0, 0.0
    begin = time.perf_counter()
    while seconds < _COMPUTE_S:
        torch.mm(matrix, matrix)
        if device.type == "cuda":
            torch.cuda.synchronize()
        products += 1
        seconds = time.perf_counter() - begin
    return 2 * _MATRIX**3 * products / seconds / 1e9


def _clock_offsets(boxing: Boxing) -> list[float]:
    """Return each rank's clock minus rank 0's clock, in seconds, read just after a barrier."""
    reads: list[float] = []
    for _ in range(_CLOCK_READS):
        boxing.world.barrier()
        reads.append(time.time())
    by_rank = gather_values(boxing, reads)
    return [
        statistics.median(a - b for a, b in zip(mine, by_rank[0], strict=True)) for mine in by_rank
    ]
