"""Stores the prices of one machine: ms per count of a rank's work, and the links.

``sbpflow calibrate`` writes a profile per machine and kind of ranks. ``planner.clusters.described``
creates a profile from published figures for a machine that is not available. ``sources`` says which
prices are measured and which are assumed.
"""

import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch

from sbpflow.config.parse import brief, build
from sbpflow.costs.counts import INDEX, vector_of
from sbpflow.costs.ids import Floats
from sbpflow.costs.prices import by_phase, transfer_ms
from sbpflow.errors import ConfigError
from sbpflow.runtime.compute.cpu import machine_key
from sbpflow.runtime.compute.devices import BACKENDS
from sbpflow.runtime.fields.ranges import Range
from sbpflow.runtime.files.atomic_file import replacing
from sbpflow.runtime.files.cache_dir import cache_dir, make_private
from sbpflow.runtime.files.json_file import JsonError, object_of, read_json

FORMAT = 6  # version of the file format
MOST_BYTES = 2**26  # file size limit
Price = Annotated[float, Range(low=0, below=1e12)]  # ms per counted unit, or a factor
Ranks = Annotated[int, Range(low=1, below=2**31)]
RANKS_HERE = "ranks on a machine"  # a key of ``about``
ERROR = "nine of ten steps are within this"  # a key of ``errors``
WITHIN_HOST_GB_PER_S = 2.0  # assumed rate of a link that was not measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The links between ranks. Bandwidths are in GB/s per rank, and latencies in ms per call and
    partner. ``ranks_per_link`` ranks of a node share one link to other nodes, each with an equal
    part of its bandwidth.
    """

    ranks_per_node: Annotated[int, Range(low=0, below=2**31)] = 0  # 0: all ranks on one node
    within_gb_per_s: Price = 0.0
    between_gb_per_s: Price = 0.0
    within_call_ms: Price = 0.0
    between_call_ms: Price = 0.0
    ranks_per_link: Ranks = 1

    def byte_ms(self, world_size: int) -> float:
        """Return the ms per byte sent evenly to all others, over both kinds of links at once."""
        far = self._far_share(world_size)
        within, between = self.hop_byte_ms(world_size)
        return max((1.0 - far) * within, far * between)

    def hop_byte_ms(self, world_size: int) -> tuple[float, float]:
        """Return the ms per byte within a node and between nodes."""
        within = 1e-6 / self.within_gb_per_s
        return within, 1e-6 / self.between_gb_per_s if self._far_share(world_size) else within

    def reduced_byte_ms(self, world_size: int) -> float:
        """Return the ms per byte that a rank sends in an all-reduce. Ranks send in rings, so each
        node sends as much as a single rank, over the links of all its ranks.
        """
        within, between = self.hop_byte_ms(world_size)
        return max(within, between / max(self.ranks_per_node, 1))

    def sharing(self, world_size: int) -> int:
        """Return how many ranks share a link to other nodes; without other nodes, return 1."""
        return self.ranks_per_link if self.num_hosts(world_size) > 1 else 1

    def call_ms(self, world_size: int) -> float:
        """Return the latency of a collective over all ranks, in ms, without the bytes' time."""
        each = self.between_call_ms if self._far_share(world_size) else self.within_call_ms
        return each * partners(world_size)

    def on_nodes_of(self, num_ranks: int, *, shared: bool = False) -> "Link":
        """Return the links between nodes with ``num_ranks`` ranks each. If ranks share a link to
        other nodes, the present ones divide its bandwidth; ``shared`` says so for links that were
        measured with one rank per node. Return the same links if all measured ranks were on one
        node, because then the links between nodes are not known.
        """
        if not self.ranks_per_node or num_ranks == self.ranks_per_node:
            return self
        shared = shared if self.ranks_per_node == 1 else self.ranks_per_link > 1
        sharing = num_ranks if shared else 1
        return replace(
            self,
            ranks_per_node=num_ranks,
            ranks_per_link=sharing,
            between_gb_per_s=self.between_gb_per_s * self.ranks_per_link / sharing,
        )

    def num_hosts(self, world_size: int) -> int:
        """Return the number of nodes, or 1 if the ranks do not fill all nodes."""
        hosts, rest = divmod(world_size, self.ranks_per_node or world_size)
        return 1 if rest else hosts

    def _far_share(self, world_size: int) -> float:
        return far_share(world_size, self.ranks_per_node or world_size)


def far_share(world_size: int, ranks_per_node: int) -> float:
    """Return the share of evenly sent bytes that leaves the node."""
    return max(world_size - ranks_per_node, 0) / max(world_size - 1, 1)


def parameter_bytes(world_size: int) -> float:
    """Return the bytes that each rank sends in a ring all-reduce of one parameter's 4-byte
    gradient: first sums of parts of the ranks, and then the total.
    """
    return 8.0 * (world_size - 1) / world_size


def partners(world_size: int) -> float:
    """Return the latency of a collective as a multiple of its latency with one partner; above 8
    partners, the latency grows slowly.
    """
    rounds = max(world_size - 1, 0)
    return rounds if rounds < 8 else 8 + math.log2(rounds / 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """The step time of a training run: as measured, and as predicted by the calibration before
    corrections. ``taken`` is the time (UTC) of the run's end.
    """

    taken: str
    software: str
    predicted_ms: Annotated[float, Range(above=0, below=1e12)]
    measured_ms: Annotated[float, Range(above=0, below=1e12)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The prices of one machine and its links, stored as JSON.

    ``work_ms`` contains the ms per count of a rank's work, by feature of ``costs.counts``.
    ``errors`` contains the errors on held-out tasks that ``calibration.fit`` computes. ``about``
    says when, where, and on which hardware the profile was measured.
    """

    work_ms: Mapping[str, Price]
    link: Link
    world_size: Ranks
    backend: str
    errors: Mapping[str, float] = field(default_factory=dict[str, float])
    sources: Mapping[str, str] = field(default_factory=dict[str, str])
    about: Mapping[str, str] = field(default_factory=dict[str, str])
    runs: tuple[MeasuredRun, ...] = ()

    @property
    def device_type(self) -> str:
        """Return the device type of the ranks, derived from their backend."""
        return next(device for device, backend in BACKENDS.items() if backend == self.backend)

    @property
    def run_factor(self) -> float:
        """Return the factor by which ``runs`` correct all prices: the median of measured /
        predicted. The calibration itself counts as a run with the ratio 1, and the median limits
        the effect of runs on a busy machine.
        """
        ratios = [math.log(run.measured_ms / run.predicted_ms) for run in self.runs]
        return math.exp(statistics.median([0.0, *ratios]))

    def prices(self, world_size: int) -> Floats:
        """Return the ms per count of a rank's work and of its transfers by phase, [F, 1 + phases].

        Raises ConfigError for several ranks if the profile was measured on one rank, because such a
        profile has no transfer times.
        """
        if world_size > 1 and not self.link.within_gb_per_s:
            raise ConfigError(
                "planner: the profile was measured on one rank, so it has no transfer times for "
                f"{world_size} ranks; run sbpflow calibrate --ranks 2"
            )
        factor = self.run_factor
        work = factor * vector_of(self.work_ms)
        if world_size == 1:
            return np.stack([work, *by_phase(np.zeros_like(work))], axis=1)
        byte, call = self.link.byte_ms(world_size), self.link.call_ms(world_size)
        hops = self.link.hop_byte_ms(world_size)
        reduced = self.link.reduced_byte_ms(world_size)
        parameter = parameter_bytes(world_size) * reduced
        dense = vector_of({"dense_parameters": parameter, "always": call})
        transfers = factor * (transfer_ms(byte, call, hops, reduced) + dense)
        return np.stack([work, *by_phase(transfers)], axis=1)

    def as_json(self) -> str:
        """Return the content of a file that ``load`` reads."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1)

    def save(self, path: Path) -> None:
        """Write the profile, replacing the file atomically."""
        write_profile(path, self.as_json())


def write_profile(path: Path, text: str) -> None:
    """Write the result of ``as_json``, replacing the file atomically."""
    if path.parent == cache_dir():
        make_private(path.parent)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial:
        partial.write_text(text, encoding="ascii")


def default_path(device_type: str | None = None) -> Path:
    """Return the path of this machine's calibration for the device type of the ranks.

    Machines with the same CPU can have different GPUs, so the path contains the GPU's name.
    """
    if device_type is None:
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    words = [machine_key(), BACKENDS[device_type]]
    if device_type == "cuda":
        words += torch.cuda.get_device_name().lower().split()
    return cache_dir() / f"planner-{'-'.join(words)}.json"


def load(path: Path) -> Profile:
    """Read a profile; raise ConfigError if it is missing or invalid."""
    if not path.is_file():
        raise ConfigError(
            f"planner: this machine has not been calibrated ({path} is not a file); run sbpflow "
            "calibrate (under five minutes; for several machines, under torchrun on all of them), "
            "or use parallel.scheme: auto, which needs no calibration"
        )
    try:
        return _from_tree(object_of(read_json(path, max_bytes=MOST_BYTES), str(path)))
    except (FileNotFoundError, JsonError, ConfigError) as error:
        reason = str(error).removeprefix(f"{path}: ")
        raise ConfigError(
            f"planner: {path} is not a profile of this version ({reason}); rerun sbpflow calibrate"
        ) from error


def _from_tree(tree: Mapping[str, Any]) -> Profile:
    """Build a profile from a JSON tree; raise ConfigError that names the key if it is invalid."""
    if tree.get("format") != FORMAT:
        raise ConfigError(
            f"its format is {brief(tree.get('format'))}, but this version reads {FORMAT}"
        )
    if missing := sorted(set(Profile.__dataclass_fields__) - set(tree) - {"runs"}):
        raise ConfigError(f"missing keys: {', '.join(missing)}")
    profile = build(Profile, {key: value for key, value in tree.items() if key != "format"})
    if unknown := sorted(set(profile.work_ms) - set(INDEX)):
        raise ConfigError(f"work_ms: {brief(unknown[0])} is not one of this version's counts")
    if profile.backend not in BACKENDS.values():
        raise ConfigError(
            f"backend must be {' or '.join(sorted(set(BACKENDS.values())))}, got "
            f"{brief(profile.backend)}"
        )
    link = profile.link
    for key, needed, rate in (
        ("within_gb_per_s", profile.world_size > 1, link.within_gb_per_s),
        ("between_gb_per_s", link.ranks_per_node, link.between_gb_per_s),
    ):
        if needed and not rate:
            raise ConfigError(f"link.{key} must be above 0 GB/s, got 0; for example, 12.5")
    if link.ranks_per_node % link.ranks_per_link:
        raise ConfigError(
            f"link.ranks_per_link must divide link.ranks_per_node, {link.ranks_per_node}, got "
            f"{link.ranks_per_link}; for example, {link.ranks_per_node}"
        )
    ranks_here = profile.about.get(RANKS_HERE, "1")
    if not ranks_here.isdecimal() or len(ranks_here) > 9:
        raise ConfigError(f"about.{RANKS_HERE}: {brief(ranks_here)} is not a number of ranks")
    return profile
