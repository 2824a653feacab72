"""Machines that are not at hand: profiles from published figures, and what grows with the nodes.

Every term of such a profile is assumed: bytes over a bandwidth, at a stated share of it. A
calibration brought from there (``planner.costs.profile.load``) prices the work; only the links of
more nodes are assumed then (``with_link``).
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from sbpflow.errors import ConfigError
from sbpflow.planner.costs.profile import (
    RANKS_HERE,
    Link,
    Profile,
    default_path,
    load,
    weights_from,
)
from sbpflow.runtime.files.local_path import local_path


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Published figures of a device and its links; GB/s are one direction of one device."""

    memory_gb_per_s: float
    dense_tflop_per_s: float
    launch_ms: float
    link: Link
    device_bytes: int
    source: str
    share: float = 0.5  # of a bandwidth that scattered rows reach: assumed


MACHINES: Mapping[str, Machine] = {
    "h100-dgx": Machine(
        memory_gb_per_s=3350.0,
        dense_tflop_per_s=494.0,
        launch_ms=0.006,
        link=Link(
            ranks_per_node=8,
            within_gb_per_s=450.0,
            between_gb_per_s=50.0,
            within_call_ms=0.004,
            between_call_ms=0.006,
        ),
        device_bytes=80 * 10**9,
        source="NVIDIA H100 SXM and DGX H100 data sheets: HBM3 3.35 TB/s, TF32 494 TFLOP/s dense, "
        "NVLink 900 GB/s both ways, eight 400 Gbit/s adapters a node; latencies assumed",
    ),
    "a100-dgx": Machine(
        memory_gb_per_s=2039.0,
        dense_tflop_per_s=156.0,
        launch_ms=0.006,
        link=Link(
            ranks_per_node=8,
            within_gb_per_s=300.0,
            between_gb_per_s=25.0,
            within_call_ms=0.004,
            between_call_ms=0.006,
        ),
        device_bytes=80 * 10**9,
        source="NVIDIA A100 80GB SXM and DGX A100 data sheets: HBM2e 2039 GB/s, TF32 156 TFLOP/s, "
        "NVLink 600 GB/s both ways, eight 200 Gbit/s adapters a node; latencies assumed",
    ),
}

# Of Ethernet between the nodes of a calibration that is brought elsewhere: assumed.
ETHERNET_SHARE = 0.94  # of a rate that payload reaches, by the headers of TCP and Ethernet
ETHERNET_CALL_MS = 0.2
WITHIN_HOST_GB_PER_S = 2.0

USABLE = 0.85  # of a device's memory: the rest is for activations and what the system takes
_FLOAT = 4.0  # bytes
_SORT_PASSES = 8.0  # times an id of 8 bytes is read and written: a radix sort and its runs


def machine(name: str) -> Machine:
    """By name; ConfigError for another."""
    if name not in MACHINES:
        raise ConfigError(
            f"planner: no machine {name!r}; use {', '.join(MACHINES)}, or --profile FILE"
        )
    return MACHINES[name]


def profile_name(text: str) -> str:
    """``--profile`` as it is given: a machine of these, or a local path."""
    return text if text in MACHINES else str(local_path(text))


def profile_of(name: str | None) -> Profile:
    """Of ``--profile``: a machine of these, a file, or this machine's calibration."""
    if name is not None and name in MACHINES:
        return described(name)
    machines = ", ".join(MACHINES)
    if name is not None and not Path(name).exists():
        raise ConfigError(
            f"--profile: {name} is no file, and no machine that is known; use {machines}, or the "
            "file of a calibration"
        )
    if name is None and not default_path().is_file():
        raise ConfigError(
            f"--profile: not given, and there is no calibration at {default_path()}; run sbpflow "
            "calibrate (under five minutes), or plan by data sheets, for example --profile "
            f"{next(iter(MACHINES))}"
        )
    return load(None if name is None else Path(name))


def memory_of(name: str | None) -> int | None:
    """Bytes that a rank of ``--profile`` may fill, where a data sheet says what it has."""
    if name is None or name not in MACHINES:
        return None
    return int(USABLE * MACHINES[name].device_bytes)


def described(name: str) -> Profile:
    """A profile of published figures; nothing of it is measured."""
    one = machine(name)
    byte = 1e-6 / (one.memory_gb_per_s * one.share)  # ms
    element, launch = _FLOAT * byte, one.launch_ms
    ids = 16.0 * _SORT_PASSES * byte
    calls = {
        "num_dense_groups": launch,
        "num_summed_groups": launch,
        "num_row_transfers": launch,
        "num_row_gathers": launch,
    }
    mac = 2e-9 / one.dense_tflop_per_s / one.share
    terms = {
        "start_id_exchange": {
            "batch_ids": 8 * byte,
            "home_sort": ids,
            "num_row_transfers": launch * 4,
        },
        "exchange_ids": {
            "home_unique": 8 * byte,
            "num_row_transfers": launch,
            "num_row_gathers": launch,
        },
        "lookup": {
            "seen_ids": 8 * byte,
            "read_rows": 8 * byte,
            "read_elements": element,
            "out_elements": element,
            "num_stacks": 4 * launch,
        },
        "gather_outputs": {"home_elements": 2 * element, "expand_elements": 2 * element, **calls},
        "forward": {"dense_macs": mac, "always": 10 * launch},
        "backward": {"dense_macs": 2 * mac, "always": 20 * launch},
        "send_grads": {
            "home_elements": 2 * element,
            "expand_elements": 2 * element,
            "repeat_elements": element,
            "whole_elements": 2 * element,
            **calls,
        },
        "receive_grads": {"whole_elements": element},
        "update": {
            "update_ids": ids,
            "update_elements": element,
            "step_elements": 3 * element,
            "whole_elements": element,
            "num_stacks": 6 * launch,
            "square_bytes": byte,
        },
        "update_dense": {"dense_parameters": 6 * element, "always": 2 * launch},
    }
    return Profile(
        weights=weights_from(terms),
        world_size=one.link.ranks_per_node,
        backend="nccl",
        hidden={"ids": 1.0, "counts": 1.0, "counted ids": 1.0, "dense gradients": 1.0},
        link=one.link,
        sources={"work": "assumed", "transfers": "assumed", "fusion": "none", "overlap": "assumed"},
        about={"machine": name, "from": one.source},
    )


def link_of(name: str, ranks_per_node: int = 1) -> tuple[Link, str]:
    """The links of a machine by its name, or Ethernet such as ``25gbit``, and what they rest on.

    An adapter's rate is shared by the ranks of its node. ConfigError for another name.
    """
    rate = re.fullmatch(r"(\d+)gbit", name)
    if (rate is None or not int(rate[1])) and name not in MACHINES:
        raise ConfigError(
            f"--link: {name!r}; use {', '.join(MACHINES)}, or the rate of a node's adapter such as "
            "25gbit"
        )
    if rate is None:
        link = machine(name).link
        if ranks_per_node not in (1, link.ranks_per_node):
            raise ConfigError(
                f"--ranks-per-node: {ranks_per_node}; a node of {name} has {link.ranks_per_node} "
                "ranks, leave it out"
            )
        return link, f"links of {name}"
    link = Link(
        ranks_per_node=ranks_per_node,
        within_gb_per_s=WITHIN_HOST_GB_PER_S,
        between_gb_per_s=int(rate[1]) * ETHERNET_SHARE / 8 / ranks_per_node,
        within_call_ms=ETHERNET_CALL_MS,
        between_call_ms=ETHERNET_CALL_MS,
    )
    return link, f"{name} a node at {ETHERNET_SHARE:.0%}, {ETHERNET_CALL_MS} ms a call"


def crowded(profile: Profile, ranks_here: int) -> Profile:
    """The profile where ``ranks_here`` share the cores of this machine, on which it was measured.

    Ranks of one thread each that are more than the cores take turns; on CUDA they do not.
    """
    cores = os.cpu_count() or 1
    measured = int(profile.about.get(RANKS_HERE, profile.world_size))
    factor = max(ranks_here, cores) / max(measured, cores)
    if profile.backend == "nccl" or factor == 1.0:
        return profile
    return replace(
        profile,
        weights=tuple(tuple(factor * value for value in row) for row in profile.weights),
        members=tuple(
            {
                name: replace(one, scale=tuple(factor * scale for scale in one.scale))
                for name, one in member.items()
            }
            for member in profile.members
        ),
    )


def with_link(profile: Profile, link: Link, source: str) -> Profile:
    """A calibration whose transfers go over another link than the one it was measured on."""
    return replace(
        profile, link=link, sources={**profile.sources, "transfers": f"assumed: {source}"}
    )
