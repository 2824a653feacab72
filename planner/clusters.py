"""Builds profiles of machines that cannot be measured here, either from published figures or by
replacing the links of a calibration.

Every price in a profile of published figures is an assumption, such as bytes divided by a stated
share of a bandwidth. A calibration copied from another machine (``planner.costs.profile.load``)
uses measured prices for the computation; with ``with_link``, only the links are assumed.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from sbpflow.errors import ConfigError
from sbpflow.planner.costs.profile import (
    RANKS_HERE,
    WITHIN_HOST_GB_PER_S,
    Link,
    Profile,
    default_path,
    load,
)
from sbpflow.runtime.files.local_path import local_path


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Published figures of a device and its links, and assumed latencies of the links. Bandwidths
    are in GB/s per device and direction.
    """

    memory_gb_per_s: float
    dense_tflop_per_s: float
    link: Link
    device_bytes: int
    source: str


def _dgx_link(within_gb_per_s: float, between_gb_per_s: float) -> Link:
    return Link(
        ranks_per_node=8,
        within_gb_per_s=within_gb_per_s,
        between_gb_per_s=between_gb_per_s,
        within_call_ms=0.004,
        between_call_ms=0.006,
    )


MACHINES: Mapping[str, Machine] = {
    "h100-dgx": Machine(
        memory_gb_per_s=3350.0,
        dense_tflop_per_s=494.0,
        link=_dgx_link(450.0, 50.0),
        device_bytes=80 * 10**9,
        source="NVIDIA H100 SXM and DGX H100 data sheets: HBM3 3.35 TB/s, TF32 494 TFLOP/s dense, "
        "NVLink 900 GB/s both ways, eight 400 Gbit/s adapters per node; latencies assumed",
    ),
    "a100-dgx": Machine(
        memory_gb_per_s=2039.0,
        dense_tflop_per_s=156.0,
        link=_dgx_link(300.0, 25.0),
        device_bytes=80 * 10**9,
        source="NVIDIA A100 80GB SXM and DGX A100 data sheets: HBM2e 2039 GB/s, TF32 156 TFLOP/s, "
        "NVLink 600 GB/s both ways, eight 200 Gbit/s adapters per node; latencies assumed",
    ),
}

# Assumptions about Ethernet links between nodes, used by ``link_of``.
ETHERNET_SHARE = 0.94  # the payload's share of the line rate, after TCP and Ethernet headers
ETHERNET_CALL_MS = 0.2

# Assumptions about the devices of ``MACHINES``.
LAUNCH_MS = 0.006
ACHIEVED = 0.5  # share of the bandwidth and of the arithmetic rate that a step achieves

USABLE = 0.85  # share of a device's memory for tables; activations and the system use the rest
_FLOAT = 4.0  # bytes
# number of times that a radix sort, including run detection, reads and writes each 8-byte id
_SORT_PASSES = 8.0


def profile_name(text: str) -> str:
    """Parse the argument of ``--profile``: a key of ``MACHINES`` or a local path."""
    return text if text in MACHINES else str(local_path(text))


def profile_of(name: str | None) -> Profile:
    """Return the profile of ``--profile``: a machine, a file, or this machine's calibration."""
    if name is not None and name in MACHINES:
        return described(name)
    if name is not None and not Path(name).exists():
        raise ConfigError(
            f"--profile: {name} is neither a file nor a known machine; use one of "
            f"{', '.join(MACHINES)}, or a calibration file"
        )
    if name is None and not default_path().is_file():
        raise ConfigError(
            f"without --profile, this machine must be calibrated ({default_path()} does not "
            "exist); run sbpflow calibrate (under five minutes), or plan from a data sheet with "
            f"--profile {next(iter(MACHINES))}"
        )
    return load(default_path() if name is None else Path(name))


def memory_of(name: str | None) -> int | None:
    """Return the bytes that a rank of a machine may use for tables; None for other profiles."""
    machine = MACHINES.get(name or "")
    return None if machine is None else int(USABLE * machine.device_bytes)


def described(name: str) -> Profile:
    """Return a profile of a machine in ``MACHINES``, computed only from published figures."""
    machine = MACHINES[name]
    byte = 1e-6 / (machine.memory_gb_per_s * ACHIEVED)  # ms
    element = _FLOAT * byte
    ids = 16.0 * _SORT_PASSES * byte
    mac = 2e-9 / machine.dense_tflop_per_s / ACHIEVED
    work_ms = {
        "always": 32 * LAUNCH_MS,
        "dense_macs": 3 * mac,
        "dense_parameters": 6 * element,
        "batch_ids": 8 * byte,
        "home_sort": ids,
        "home_unique": 8 * byte,
        "seen_ids": 8 * byte,
        "read_rows": 8 * byte,
        "read_elements": element,
        "out_elements": element,
        "home_elements": 4 * element,
        "expand_elements": 4 * element,
        "repeat_elements": element,
        "whole_elements": 4 * element,
        "update_ids": ids,
        "update_elements": element,
        "step_elements": 3 * element,
        "reduced_bytes": byte,
        "num_dense_groups": 2 * LAUNCH_MS,
        "num_summed_groups": 2 * LAUNCH_MS,
        "num_row_transfers": 7 * LAUNCH_MS,
        "num_row_gathers": 3 * LAUNCH_MS,
        "num_stacks": 10 * LAUNCH_MS,
    }
    return Profile(
        work_ms=work_ms,
        link=machine.link,
        world_size=machine.link.ranks_per_node,
        backend="nccl",
        sources={"work": "assumed, nothing measured", "transfers": "assumed, nothing measured"},
        about={"machine": name, "from": machine.source},
    )


def link_of(name: str, ranks_per_node: int = 1) -> tuple[Link, str]:
    """Return (link, description) of a machine in ``MACHINES``, or of Ethernet such as ``25gbit`` or
    ``500mbit``.

    The ranks of a node share the rate of the node's adapter. Raises ConfigError for any other name.
    """
    rate = re.fullmatch(r"(\d+)([gm])bit", name)
    if rate is None and name in MACHINES:
        link = MACHINES[name].link
        if ranks_per_node not in (1, link.ranks_per_node):
            raise ConfigError(
                f"--ranks-per-node is {ranks_per_node}, but a node of {name} has "
                f"{link.ranks_per_node} ranks; remove --ranks-per-node"
            )
        return link, f"links of {name}"
    if rate is None or not int(rate[1]):
        raise ConfigError(
            f"--link must be one of {', '.join(MACHINES)}, or the rate of a node's adapter, such "
            f"as 25gbit, got {name!r}"
        )
    gbit = int(rate[1]) * (1.0 if rate[2] == "g" else 1e-3)
    link = Link(
        ranks_per_node=ranks_per_node,
        within_gb_per_s=WITHIN_HOST_GB_PER_S,
        between_gb_per_s=gbit * ETHERNET_SHARE / 8 / ranks_per_node,
        ranks_per_link=ranks_per_node,
        within_call_ms=ETHERNET_CALL_MS,
        between_call_ms=ETHERNET_CALL_MS,
    )
    return link, f"{ETHERNET_SHARE:.0%} of {name} per node, {ETHERNET_CALL_MS} ms per call"


def crowded(profile: Profile, ranks_here: int) -> Profile:
    """Return the profile with prices for ``ranks_here`` ranks on the machine where it was measured.
    Each rank runs one thread, so if there are more ranks than cores, all prices grow in proportion.
    Ranks on GPUs do not share cores, so their prices do not change.
    """
    cores = os.cpu_count() or 1
    measured = int(profile.about.get(RANKS_HERE, profile.world_size))
    factor = max(ranks_here, cores) / max(measured, cores)
    if profile.backend == "nccl" or factor == 1.0:
        return profile
    link = profile.link
    return replace(
        profile,
        work_ms={name: factor * ms for name, ms in profile.work_ms.items()},
        link=replace(
            link,
            within_gb_per_s=link.within_gb_per_s / factor,
            between_gb_per_s=link.between_gb_per_s / factor,
            within_call_ms=link.within_call_ms * factor,
            between_call_ms=link.between_call_ms * factor,
        ),
    )


def with_link(profile: Profile, link: Link, source: str) -> Profile:
    """Return the profile with transfers priced for a different link."""
    return replace(
        profile, link=link, sources={**profile.sources, "transfers": f"assumed: {source}"}
    )
