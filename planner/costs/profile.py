"""Stores a machine's measured prices in one value: weights, corrections, links and provenance.

``sbpflow calibrate`` writes one per machine, next to the kernel profile in the user's cache.
``planner.clusters.described`` makes one from published figures for a machine that is not
available; its ``sources`` mark every term as assumed.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, cast

import numpy as np

from sbpflow.config.parse import brief, build
from sbpflow.costs.counts import FEATURES, INDEX, NUM_FEATURES
from sbpflow.costs.ids import Floats
from sbpflow.embedding.storage.measure import machine_key
from sbpflow.errors import ConfigError
from sbpflow.planner.costs.simulate import NUM_PHASES, PHASE, PHASES, TRANSFERS
from sbpflow.planner.costs.transfers import BYTES, CALLS, Transfer, check_transfer
from sbpflow.runtime.compute.devices import BACKENDS
from sbpflow.runtime.fields.ranges import Range
from sbpflow.runtime.files.cache_dir import cache_dir, make_private
from sbpflow.runtime.files.json_file import JsonError, list_of, object_of, read_json
from sbpflow.training.step_schedule import COUNTED_IDS, COUNTS, DENSE_GRADIENTS, current_name

FORMAT = 3
MOST_BYTES = 2**26  # of a file
Price = Annotated[float, Range(low=0, below=1e12)]  # ms per count, or a factor
Ranks = Annotated[int, Range(low=1, below=2**31)]
KernelPrices = Mapping[str, tuple[Price, Price, Price]]
"""{kernel: ms per batch, per id and per element of a storage's lookup and update}; the kernel that
calibration ran comes first.
"""
RANKS_HERE = "ranks on a machine"  # a key of ``about``
COUNTED = tuple(name for name in FEATURES if name.startswith("num_"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fusion:
    """Describes one member's correction of a phase: sum_k scale_k (totals . mix_k) ** power_k.

    All numbers are non-negative, so the correction increases with every count. ``low`` and
    ``high``, factors of the sum without correction, bound it to the measured range.
    """

    mix: tuple[tuple[Price, ...], ...]  # [K, F]
    scale: tuple[Price, ...]
    power: tuple[Annotated[float, Range(low=0, high=2)], ...]
    low: Price
    high: Price


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Describes the links between ranks; without a ``Link``, the weights include the measured link.

    Bandwidths are per rank, in GB/s; latencies are in ms per call and partner.
    """

    ranks_per_node: Annotated[int, Range(low=0, below=2**31)] = 0  # 0: all ranks on one node
    within_gb_per_s: Price = 0.0
    between_gb_per_s: Price = 0.0
    within_call_ms: Price = 0.0
    between_call_ms: Price = 0.0

    def per_byte_ms(self, world_size: int) -> float:
        """Return the ms per byte that a rank sends evenly to all others; both kinds of link work at
        once.
        """
        near, far = self._shares(world_size)
        times = [near / self.within_gb_per_s]
        if far:
            times.append(far / self.between_gb_per_s)
        return 1e-6 * max(times)

    def call_ms(self, world_size: int) -> float:
        """Return the ms of one collective over all ranks, without its bytes."""
        _, far = self._shares(world_size)
        rounds = max(world_size - 1, 0)
        each = self.between_call_ms if far else self.within_call_ms
        return each * (rounds if rounds < 8 else 8 + np.log2(rounds / 8))

    def _shares(self, world_size: int) -> tuple[float, float]:
        """Return the fractions of a rank's traffic that stay in its node and that leave it."""
        per_node = self.ranks_per_node or world_size
        if world_size <= per_node:
            return 1.0, 0.0
        far = (world_size - per_node) / (world_size - 1)
        return 1.0 - far, far


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stacked:
    """Stacks the corrections of M members and C phases: ``mix`` [F, M C K], ``low`` and ``high``
    [M, C].
    """

    phases: list[int]
    mix: Floats
    scale: Floats
    power: Floats
    low: Floats
    high: Floats


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Contains the prices of one machine and its links; stored as JSON.

    ``weights`` [F, P] are non-negative ms per count, for ``world_size`` ranks. ``members`` is the
    ensemble; each member has corrections by phase. ``hidden`` is the share of each transfer that
    overlap hides. ``transfers`` were timed alone. ``step_factors`` compare optimizers with the
    calibrated one, and ``kernels`` compare table kernels. ``sources`` states for each group of
    terms whether it is measured or assumed. ``about`` states when, where and on what hardware the
    profile was measured.
    """

    weights: tuple[tuple[Price, ...], ...]
    world_size: Ranks
    backend: str
    members: tuple[Mapping[str, Fusion], ...] = ()
    hidden: Mapping[str, Annotated[float, Range(low=0, high=1)]] = field(
        default_factory=dict[str, float]
    )
    step_factors: Mapping[str, Price] = field(default_factory=dict[str, float])
    kernels: Mapping[str, KernelPrices] = field(default_factory=dict[str, KernelPrices])
    buffer_factor: Price = 1.0
    link: Link | None = None
    transfers: tuple[Transfer, ...] = ()
    errors: Mapping[str, float] = field(default_factory=dict[str, float])
    sources: Mapping[str, str] = field(default_factory=dict[str, str])
    about: Mapping[str, str] = field(default_factory=dict[str, str])

    @cached_property
    def matrix(self) -> Floats:
        """Return the weights [F, P] as a matrix."""
        return np.array(self.weights, dtype=np.float64)

    @property
    def device_type(self) -> str:
        """Return the device type of the ranks, derived from their backend."""
        return next(device for device, backend in BACKENDS.items() if backend == self.backend)

    def step_factor(self, optimizer: str) -> float:
        """Return an optimizer's step relative to the calibrated one; raise ConfigError if not
        measured.
        """
        if not self.step_factors:
            return 1.0
        if optimizer not in self.step_factors:
            raise ConfigError(
                f"planner: the profile has no times of {optimizer}, only of "
                f"{', '.join(self.step_factors)}; run sbpflow calibrate --optimizer {optimizer}"
            )
        return self.step_factors[optimizer]

    def weights_for(self, world_size: int) -> Floats:
        """Return [F, P] weights for another world size: a transfer's calls grow with its partners.

        With a ``link``, its figures price bytes and calls. Raises ConfigError for several ranks if
        the profile was measured on one rank, because such a profile has no transfer times.
        """
        if self.world_size == 1 and world_size > 1 and self.link is None:
            raise ConfigError(
                f"planner: the profile is of one rank and has no transfer times for a world of "
                f"{world_size}; run sbpflow calibrate --ranks 2"
            )
        matrix = self.matrix.copy()
        for kind in TRANSFERS:
            column = matrix[:, PHASE[kind]]
            if self.link is not None:
                _price_link(column, kind, self.link, world_size)
            elif self.world_size > 1:
                for name in COUNTED:
                    column[INDEX[name]] *= (world_size - 1) / (self.world_size - 1)
        if world_size == 1:
            matrix[:, [PHASE[kind] for kind in TRANSFERS]] = 0.0
        return matrix

    def corrected(self, totals: Floats, linear: Floats, member: int | None = None) -> Floats:
        """Return [.., P] ms with the learned corrections of one member or the mean of all
        members.
        """
        stacked = self._stacked if member is None else self._alone[member]
        # Use one product for all members and phases: a search calls this thousands of times a
        # second.
        inside = np.maximum(totals @ stacked.mix, 0.0)
        terms = np.power(inside, stacked.power, out=inside)
        terms *= stacked.scale
        raised = terms.reshape(*totals.shape[:-1], *stacked.low.shape, -1).sum(axis=-1)
        plain = linear[..., None, stacked.phases]
        values = np.clip(raised, stacked.low * plain, stacked.high * plain)
        out = linear.copy()
        out[..., stacked.phases] = values.mean(axis=-2)
        return out

    @cached_property
    def _alone(self) -> "list[_Stacked]":
        """Return the corrections of each member separately."""
        return [_stack((member,)) for member in self.members]

    @cached_property
    def _stacked(self) -> "_Stacked":
        """Return the corrections of all members, stacked."""
        return _stack(self.members)

    def correction_bounds(self) -> tuple[Floats, Floats]:
        """Return [P] smallest and largest factors of the correction; 1 for a phase without one."""
        low, high = np.ones(NUM_PHASES), np.ones(NUM_PHASES)
        for member in self.members:
            for name, fusion in member.items():
                place = PHASE[name]
                low[place] = min(low[place], fusion.low)
                high[place] = max(high[place], fusion.high)
        return low, high

    def as_json(self) -> str:
        """Return the content of a file that ``load`` reads."""
        content = {"format": FORMAT, "features": FEATURES, "phases": PHASES, **asdict(self)}
        return json.dumps(content, indent=1)

    def save(self, path: Path) -> None:
        """Write the profile, replacing the file atomically."""
        write_profile(path, self.as_json())


def _stack(members: Sequence[Mapping[str, Fusion]]) -> _Stacked:
    """Stack corrections as arrays: all members have the same phases, and shorter mixes are
    padded.
    """
    names = list(members[0])
    longest = max(len(member[name].mix) for member in members for name in names)
    shape = (len(members), len(names), longest)
    mix = np.zeros((*shape, NUM_FEATURES))
    scale, power = np.zeros(shape), np.ones(shape)
    low, high = np.zeros(shape[:2]), np.zeros(shape[:2])
    for m, member in enumerate(members):
        for n, name in enumerate(names):
            fusion = member[name]
            count = len(fusion.mix)
            mix[m, n, :count] = fusion.mix
            scale[m, n, :count], power[m, n, :count] = fusion.scale, fusion.power
            low[m, n], high[m, n] = fusion.low, fusion.high
    return _Stacked(
        phases=[PHASE[name] for name in names],
        mix=np.ascontiguousarray(mix.reshape(-1, NUM_FEATURES).T),
        scale=scale.ravel(),
        power=power.ravel(),
        low=low,
        high=high,
    )


def _price_link(column: Floats, kind: str, link: Link, world_size: int) -> None:
    column[:] = 0.0
    for name in BYTES.get(kind, ())[:1]:
        column[INDEX[name]] = link.per_byte_ms(world_size)
    if kind == DENSE_GRADIENTS:
        column[INDEX["dense_parameters"]] = 2 * 4 * link.per_byte_ms(world_size)
    counted = COUNTED_IDS if kind == COUNTS else kind
    for name in CALLS[counted].values():
        column[INDEX[name]] = link.call_ms(world_size)


def write_profile(path: Path, text: str) -> None:
    """Write the result of ``as_json``, replacing the file atomically."""
    if path.parent == cache_dir():
        make_private(path.parent)
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(f".{os.getpid()}")
    fresh.write_text(text, encoding="ascii")
    fresh.replace(path)


def default_path() -> Path:
    """Return the path of this machine's calibration."""
    return cache_dir() / f"planner-{machine_key()}.json"


def load(path: Path | None = None) -> Profile:
    """Read a profile, by default this machine's; raise ConfigError if it is missing or invalid."""
    path = path or default_path()
    if not path.is_file():
        raise ConfigError(
            f"planner: no calibration at {path}; run sbpflow calibrate (under five minutes), or "
            "use parallel.scheme: auto, which needs no calibration"
        )
    try:
        return _from_tree(object_of(read_json(path, max_bytes=MOST_BYTES), str(path)))
    except (FileNotFoundError, JsonError, ConfigError) as error:
        reason = str(error).removeprefix(f"{path}: ")
        raise ConfigError(
            f"planner: {path} is not a profile of this version ({reason}); rerun sbpflow calibrate"
        ) from error


def _from_tree(tree: Mapping[str, Any]) -> Profile:
    """Build the profile from a tree; a ConfigError names an invalid key."""
    tree = _with_current_phases(tree)
    known = set(Profile.__dataclass_fields__) | {"format", "features", "phases"}
    if tree.get("format") != FORMAT:
        raise ConfigError(f"format is {brief(tree.get('format'))}; this version reads {FORMAT}")
    if missing := sorted(known - set(tree)):
        raise ConfigError(f"missing keys: {', '.join(missing)}")
    for key, mine in (("features", FEATURES), ("phases", PHASES)):
        given: object = tree[key]
        names = {str(name) for name in list_of(given, key)}
        if given != list(mine):
            others = ", ".join(sorted(names ^ set(mine))) or "their order"
            problem = {"features": "it prices other counts", "phases": "it has other phases"}[key]
            raise ConfigError(f"{problem}: {brief(others)[1:-1]}")
    own = {key: value for key, value in tree.items() if key not in ("format", "features", "phases")}
    profile = build(Profile, own)
    _check(profile)
    return profile


def _with_current_phases(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """Rename phases in the tree from the names that an earlier version may have written."""
    phases, members = tree.get("phases"), tree.get("members")
    renamed = dict(tree)
    if isinstance(phases, list):
        names = cast("list[object]", phases)
        renamed["phases"] = [current_name(n) if isinstance(n, str) else n for n in names]
    if isinstance(members, list):
        renamed["members"] = [_renamed(member) for member in cast("list[object]", members)]
    return renamed


def _renamed(member: object) -> object:
    if not isinstance(member, Mapping):
        return member
    items = cast("Mapping[object, object]", member).items()
    return {current_name(k) if isinstance(k, str) else k: item for k, item in items}


def _check(profile: Profile) -> None:
    """Check conditions between keys; raise ConfigError if one is violated."""
    if [len(row) for row in profile.weights] != [NUM_PHASES] * NUM_FEATURES:
        raise ConfigError(f"weights: not of shape [{NUM_FEATURES}, {NUM_PHASES}]")
    if profile.backend not in BACKENDS.values():
        raise ConfigError(
            f"backend: {brief(profile.backend)}; use {' or '.join(BACKENDS.values())}"
        )
    for key, names, known in (
        ("hidden", set(profile.hidden), set[str](TRANSFERS)),
        *((f"members[{m}]", set(one), set(PHASES)) for m, one in enumerate(profile.members)),
    ):
        if unknown := sorted(names - known):
            raise ConfigError(
                f"{key}: {brief(unknown[0])} is not one of {', '.join(sorted(known))}"
            )
    _check_members(profile)
    if profile.link is not None:
        needed = ["within", *(["between"] if profile.link.ranks_per_node else [])]
        for key in (f"{where}_gb_per_s" for where in needed):
            if not getattr(profile.link, key):
                raise ConfigError(f"link.{key}: 0 is not a bandwidth; use GB/s (for example, 12.5)")
    ranks_here = profile.about.get(RANKS_HERE, "1")
    if not ranks_here.isdecimal() or len(ranks_here) > 9:
        raise ConfigError(f"about.{RANKS_HERE}: {brief(ranks_here)} is not a number of ranks")
    for n, transfer in enumerate(profile.transfers):
        check_transfer(transfer, f"transfers[{n}]")


def _check_members(profile: Profile) -> None:
    for m, member in enumerate(profile.members):
        if list(member) != list(profile.members[0]):
            raise ConfigError(f"members[{m}]: phases differ from the phases of members[0]")
        for name, fusion in member.items():
            count = len(fusion.mix)
            sizes = {len(fusion.scale), len(fusion.power), *(count for _ in fusion.mix)}
            if sizes != {count} or any(len(row) != NUM_FEATURES for row in fusion.mix):
                raise ConfigError(
                    f"members[{m}].{name}: mix is not [K, {NUM_FEATURES}] with K scales and powers"
                )


def weights_from(terms: Mapping[str, Mapping[str, float]]) -> tuple[tuple[float, ...], ...]:
    """Return [F, P] weights from {phase: {feature: ms}}; missing features cost nothing."""
    matrix = np.zeros((NUM_FEATURES, NUM_PHASES))
    for phase, row in terms.items():
        for name, value in row.items():
            matrix[INDEX[name], PHASE[phase]] = value
    return tuple(tuple(row) for row in matrix.tolist())
