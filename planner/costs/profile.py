"""What a machine was measured to take, as one value: weights, corrections, links, provenance.

``sbpflow calibrate`` writes one per machine beside the kernel profile in the user's
cache; ``planner.clusters.described`` makes one from published figures for machines that are not at
hand, and says of each term that it is assumed.
"""

import json
import os
from collections.abc import Mapping
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
Price = Annotated[float, Range(low=0, below=1e12)]  # of any count, in ms, or a factor
Ranks = Annotated[int, Range(low=1, below=2**31)]
KernelPrices = Mapping[str, tuple[Price, Price, Price]]
"""{kernel: ms of a batch, of an id and of an element of a storage's lookup and update}; the kernel
that calibration ran is the first.
"""
RANKS_HERE = "ranks on a machine"  # in ``about``
COUNTED = tuple(name for name in FEATURES if name.startswith("num_"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fusion:
    """One member's correction of one phase: sum_k scale_k (totals . mix_k) ** power_k.

    All numbers are non-negative, so it rises with every count. ``low`` and ``high`` bound it to
    what was measured, as factors of the sum without correction.
    """

    mix: tuple[tuple[Price, ...], ...]  # [K, F]
    scale: tuple[Price, ...]
    power: tuple[Annotated[float, Range(low=0, high=2)], ...]
    low: Price
    high: Price

    def apply(self, totals: Floats, linear: Floats) -> Floats:
        """[..] ms from counts [.., F] and their plain sum [..]."""
        inside = np.maximum(totals @ np.asarray(self.mix).T, 0.0)
        raised = (inside ** np.asarray(self.power)) @ np.asarray(self.scale)
        return np.clip(raised, self.low * linear, self.high * linear)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What joins the ranks. ``measured`` links are inside the weights; others scale them.

    Bandwidths are of one rank, in GB/s, latencies per call and partner in ms.
    """

    ranks_per_node: Annotated[int, Range(low=0, below=2**31)] = 0  # 0: one node
    within_gb_per_s: Price = 0.0
    between_gb_per_s: Price = 0.0
    within_call_ms: Price = 0.0
    between_call_ms: Price = 0.0

    def per_byte_ms(self, world_size: int) -> float:
        """Of a byte that a rank sends evenly to all others; both kinds of links work at once."""
        near, far = self._shares(world_size)
        times = [near / self.within_gb_per_s]
        if far:
            times.append(far / self.between_gb_per_s)
        return 1e-6 * max(times)

    def call_ms(self, world_size: int) -> float:
        """Of one collective over all ranks, whatever it carries."""
        _, far = self._shares(world_size)
        rounds = max(world_size - 1, 0)
        each = self.between_call_ms if far else self.within_call_ms
        return each * (rounds if rounds < 8 else 8 + np.log2(rounds / 8))

    def _shares(self, world_size: int) -> tuple[float, float]:
        """Fractions of what a rank sends that stay in its node, and that do not."""
        per_node = self.ranks_per_node or world_size
        if world_size <= per_node:
            return 1.0, 0.0
        far = (world_size - per_node) / (world_size - 1)
        return 1.0 - far, far


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stacked:
    """Corrections of M members and C phases: ``mix`` [F, M C K], ``low`` and ``high`` [M, C]."""

    phases: list[int]
    mix: Floats
    scale: Floats
    power: Floats
    low: Floats
    high: Floats


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Prices of one machine and link; JSON on disk.

    ``weights`` [F, P] are ms per count, non-negative, for ``world_size`` ranks. ``members`` are the
    ensemble: for each, corrections by phase. ``hidden`` is the share of each transfer that overlap
    hides. ``transfers`` were timed alone. ``step_factors`` compare optimizers with the one
    calibrated, ``kernels`` their kernels. ``sources`` says of each group of terms whether it is
    measured or assumed, and ``about`` when, where and on what.
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
        """[F, P]"""
        return np.array(self.weights, dtype=np.float64)

    @property
    def num_members(self) -> int:
        return len(self.members)

    @property
    def fusion(self) -> tuple[Mapping[str, Fusion], ...]:
        return self.members

    def step_factor(self, optimizer: str) -> float:
        """How an optimizer's step compares; ConfigError if it was not measured."""
        if not self.step_factors:
            return 1.0
        if optimizer not in self.step_factors:
            raise ConfigError(
                f"planner: the profile has no times of {optimizer}, only of "
                f"{', '.join(self.step_factors)}; run sbpflow calibrate --optimizer "
                f"{optimizer}"
            )
        return self.step_factors[optimizer]

    def weights_for(self, world_size: int) -> Floats:
        """[F, P] for a world of another size: the calls of a transfer grow with its partners.

        With a described link, bytes and calls cost what that link says. ConfigError for several
        ranks by what was measured on one, which sends nothing.
        """
        if self.world_size == 1 and world_size > 1 and self.link is None:
            raise ConfigError(
                f"planner: the profile is of one rank and has no times of transfers, for a world "
                f"of {world_size}; run sbpflow calibrate --ranks 2"
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
        """[.., P] with the learned corrections, of one member or on average."""
        stacked = self._stacked if member is None else self._alone[member]
        # All members and phases in one product: a search calls this thousands of times a second.
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
        """The corrections of one member each."""
        all_of_them = self._stacked
        found: list[_Stacked] = []
        width = all_of_them.scale.size // self.num_members
        for member in range(self.num_members):
            part = slice(member * width, (member + 1) * width)
            found.append(
                _Stacked(
                    phases=all_of_them.phases,
                    mix=np.ascontiguousarray(all_of_them.mix[:, part]),
                    scale=all_of_them.scale[part],
                    power=all_of_them.power[part],
                    low=all_of_them.low[member : member + 1],
                    high=all_of_them.high[member : member + 1],
                )
            )
        return found

    @cached_property
    def _stacked(self) -> "_Stacked":
        """All corrections as arrays; members have the same phases, shorter mixes are padded."""
        names = list(self.members[0])
        longest = max(len(one[name].mix) for one in self.members for name in names)
        shape = (self.num_members, len(names), longest)
        mix = np.zeros((*shape, NUM_FEATURES))
        scale, power = np.zeros(shape), np.ones(shape)
        low, high = np.zeros(shape[:2]), np.zeros(shape[:2])
        for m, one in enumerate(self.members):
            for n, name in enumerate(names):
                fusion = one[name]
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

    def correction_bounds(self) -> tuple[Floats, Floats]:
        """[P] least and most factors of the correction; 1 where there is none."""
        low, high = np.ones(NUM_PHASES), np.ones(NUM_PHASES)
        for member in self.members:
            for name, fusion in member.items():
                place = PHASE[name]
                low[place] = min(low[place], fusion.low)
                high[place] = max(high[place], fusion.high)
        return low, high

    def as_json(self) -> str:
        """What ``load`` reads from a file."""
        content = {"format": FORMAT, "features": FEATURES, "phases": PHASES, **asdict(self)}
        return json.dumps(content, indent=1)

    def save(self, path: Path) -> None:
        """The file is replaced as a whole."""
        write_profile(path, self.as_json())


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
    """What ``as_json`` gave; the file is replaced as a whole."""
    if path.parent == cache_dir():
        make_private(path.parent)
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(f".{os.getpid()}")
    fresh.write_text(text, encoding="ascii")
    fresh.replace(path)


def default_path() -> Path:
    """Where this machine's calibration is kept."""
    return cache_dir() / f"planner-{machine_key()}.json"


def load(path: Path | None = None) -> Profile:
    """A profile from a file, by default this machine's; ConfigError if there is none or no such."""
    path = path or default_path()
    if not path.is_file():
        raise ConfigError(
            f"planner: no calibration at {path}; run sbpflow calibrate (under five "
            "minutes), or use parallel.scheme: auto, which needs none"
        )
    try:
        return _from_tree(object_of(read_json(path, max_bytes=MOST_BYTES), str(path)))
    except (FileNotFoundError, JsonError, ConfigError) as error:
        why = str(error).removeprefix(f"{path}: ")
        raise ConfigError(
            f"planner: {path} is no profile of this version ({why}); run sbpflow calibrate again"
        ) from error


def _from_tree(tree: Mapping[str, Any]) -> Profile:
    """ConfigError naming the key that is wrong."""
    tree = _with_current_phases(tree)
    known = set(Profile.__dataclass_fields__) | {"format", "features", "phases"}
    if tree.get("format") != FORMAT:
        raise ConfigError(f"format is {brief(tree.get('format'))}, this version has {FORMAT}")
    if missing := sorted(known - set(tree)):
        raise ConfigError(f"it has no {', '.join(missing)}")
    for key, mine in (("features", FEATURES), ("phases", PHASES)):
        given: object = tree[key]
        names = {str(name) for name in list_of(given, key)}
        if given != list(mine):
            others = ", ".join(sorted(names ^ set(mine))) or "their order"
            what = {"features": "it prices other counts", "phases": "it has other phases"}[key]
            raise ConfigError(f"{what}: {brief(others)[1:-1]}")
    own = {key: value for key, value in tree.items() if key not in ("format", "features", "phases")}
    found = build(Profile, own)
    _check(found)
    return found


def _with_current_phases(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """The tree of a profile whose phases may have the names of an earlier version."""
    phases, members = tree.get("phases"), tree.get("members")
    renamed = dict(tree)
    if isinstance(phases, list):
        names = cast("list[object]", phases)
        renamed["phases"] = [current_name(n) if isinstance(n, str) else n for n in names]
    if isinstance(members, list):
        renamed["members"] = [_renamed(one) for one in cast("list[object]", members)]
    return renamed


def _renamed(member: object) -> object:
    if not isinstance(member, Mapping):
        return member
    items = cast("Mapping[object, object]", member).items()
    return {current_name(k) if isinstance(k, str) else k: item for k, item in items}


def _check(profile: Profile) -> None:
    """What the keys must be to each other; ConfigError."""
    if [len(row) for row in profile.weights] != [NUM_PHASES] * NUM_FEATURES:
        raise ConfigError(f"weights: not [{NUM_FEATURES}, {NUM_PHASES}]")
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
                raise ConfigError(f"link.{key}: 0 is not a bandwidth; give GB/s, for example 12.5")
    ranks_here = profile.about.get(RANKS_HERE, "1")
    if not ranks_here.isdecimal() or len(ranks_here) > 9:
        raise ConfigError(f"about.{RANKS_HERE}: {brief(ranks_here)} is not a number of ranks")
    for n, one in enumerate(profile.transfers):
        check_transfer(one, f"transfers[{n}]")


def _check_members(profile: Profile) -> None:
    for m, member in enumerate(profile.members):
        if list(member) != list(profile.members[0]):
            raise ConfigError(f"members[{m}]: has other phases than members[0]")
        for name, one in member.items():
            count = len(one.mix)
            sizes = {len(one.scale), len(one.power), *(count for _ in one.mix)}
            if sizes != {count} or any(len(row) != NUM_FEATURES for row in one.mix):
                raise ConfigError(
                    f"members[{m}].{name}: mix is not [K, {NUM_FEATURES}] with K scales and powers"
                )


def weights_from(terms: Mapping[str, Mapping[str, float]]) -> tuple[tuple[float, ...], ...]:
    """[F, P] from {phase: {feature: ms}}; what is not named costs nothing."""
    matrix = np.zeros((NUM_FEATURES, NUM_PHASES))
    for phase, row in terms.items():
        for name, value in row.items():
            matrix[INDEX[name], PHASE[phase]] = value
    return tuple(tuple(row) for row in matrix.tolist())
