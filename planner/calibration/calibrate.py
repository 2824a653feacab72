"""``sbpflow calibrate``: measure this machine and fit a profile.

Every rank runs ``run_calibration``. Until the time limit, the ranks measure random tasks,
alternating between the plans of each task. Every measurement is written to a journal, so an
interrupted calibration resumes where it stopped.
"""

import json
import logging
import math
import os
import time
from argparse import Namespace
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from tqdm import tqdm

from sbpflow.boxing.agreement import gather_values, run_on_all_ranks
from sbpflow.boxing.executor import Boxing
from sbpflow.config.parse import build
from sbpflow.costs.counts import FEATURES, NUM_FEATURES
from sbpflow.embedding.rules.registry import import_rule, rule_class
from sbpflow.errors import ConfigError
from sbpflow.planner.calibration.design import Sample, draw_plans, draw_sample, drawing
from sbpflow.planner.calibration.fit import LEAST_SAMPLES, Record, fit
from sbpflow.planner.calibration.measure import TURN_MS, measure_in_turns
from sbpflow.planner.costs.cost import count_work
from sbpflow.planner.costs.profile import Profile, default_path, write_profile
from sbpflow.planner.costs.run_corrections import facts_of
from sbpflow.planner.task import Plan
from sbpflow.runtime.compute.devices import device_name
from sbpflow.runtime.fields.ranges import Range
from sbpflow.runtime.files.file_lock import HeldError, hold
from sbpflow.runtime.files.json_file import JsonError, object_of, parse_json, read_text
from sbpflow.runtime.processes.environment import env_int
from sbpflow.runtime.ranks.world import World

LOG = logging.getLogger(__name__)
MOST_SAMPLES = 100_000
_EQUAL = ("seconds", "rounds", "optimizer", "seed", "quick")  # must be the same on all machines


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The optimizer, the seed, and the limits of a calibration.

    ``seconds`` limits the whole calibration. ``most_rows`` is the maximum number of rows in a
    table. Each plan is measured for up to ``steps`` steps in each of up to ``rounds`` rounds; no
    round of a task starts after ``round_seconds`` for each of these rounds, except the first.
    """

    seconds: float = 270.0
    optimizer: str = "rowwise_adagrad"
    seed: int = 0
    most_rows: int = 1_000_000
    plans_per_sample: int = 6
    rounds: int = 2
    steps: int = 5
    round_seconds: float = 7.5


QUICK = Settings(seconds=4.0, most_rows=5_000, steps=2)


def run_calibration(args: Namespace) -> str:
    """Calibrate as one of the launched ranks; return the text that rank 0 prints."""
    settings = _settings(args)
    if torch.get_num_threads() > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    facts = {f"--{key}": str(getattr(args, key)) for key in _EQUAL}
    with World.start(args.device, facts=facts) as world:
        path = args.output or default_path(world.device.type)
        boxing, journal = Boxing(world), path.with_suffix(".measured.jsonl")
        with run_on_all_ranks(boxing, lambda: _locked(journal, world.rank)):
            profile = calibrate(boxing, settings, journal)
            save_on_all_hosts(boxing, profile, path)
    return "" if profile is None else f"{describe(profile)}\nprofile: {path}"


def _locked(journal: Path, rank: int) -> AbstractContextManager[object]:
    """On rank 0, lock the journal: two calibrations at a time would distort each other's times."""
    if rank:
        return nullcontext()
    journal.parent.mkdir(parents=True, exist_ok=True)
    try:
        return hold(journal)
    except HeldError:
        raise ConfigError(
            f"planner: {journal} is in use by another calibration; wait until it ends"
        ) from None


def save_on_all_hosts(boxing: Boxing, profile: Profile | None, path: Path) -> None:
    """Write rank 0's profile, if there is one, to ``path`` on every host; the first rank of each
    host writes the file.

    Every host needs the same profile, because in later runs each host plans from its own file, and
    all hosts must compute the same plan.
    """
    text = gather_values(boxing, "" if profile is None else profile.as_json())[0]
    if text and boxing.world.rank in [host[0] for host in boxing.world.topology.hosts]:
        write_profile(path, text)


def _settings(args: Namespace) -> Settings:
    settings = QUICK if args.quick else Settings()
    if ":" in args.optimizer:
        import_rule("--optimizer", args.optimizer)
    rule_class(args.optimizer)
    if args.seconds is not None and not 0 < args.seconds < math.inf:
        raise ConfigError(
            f"--seconds must be above 0 and finite, got {args.seconds}; for example, --seconds 270"
        )
    rounds = settings.rounds if args.rounds is None else args.rounds
    if rounds < 1:
        raise ConfigError(f"--rounds must be 1 or more, got {rounds}; for example, --rounds 2")
    size = env_int("WORLD_SIZE", 1)
    if args.ranks not in (None, size):
        raise ConfigError(
            f"--ranks is {args.ranks}, but another launcher has started {size} (WORLD_SIZE); omit "
            "--ranks, or start the command without that launcher"
        )
    if args.output is not None and (args.output.is_dir() or not args.output.name):
        raise ConfigError(
            f"--output: {args.output} is a folder; use a file, such as --output profile.json"
        )
    seconds = settings.seconds if args.seconds is None else args.seconds
    return replace(
        settings, optimizer=args.optimizer, seed=args.seed, seconds=seconds, rounds=rounds
    )


def default_ranks(device: str) -> int:
    """Return how many ranks to start by default: one per GPU, or two on CPU."""
    return (0 if device == "cpu" else torch.cuda.device_count()) or 2


def describe(profile: Profile) -> str:
    """Format a profile's origin and prediction errors as text."""
    lines = [f"{key:<22} {value}" for key, value in profile.about.items()]
    lines += [f"{'source of ' + key:<22} {value}" for key, value in profile.sources.items()]
    factor = profile.run_factor
    lines.append(f"{'training runs':<22} {len(profile.runs)}, all prices times {factor:.3g}")
    for key, value in profile.errors.items():
        lines.append(f"held out: {key:<28} {value:.3f}")
    if profile.world_size > 1:
        link = profile.link
        rate, ms = link.within_gb_per_s, link.within_call_ms
        if link.ranks_per_node:  # only the links between hosts were measured
            rate, ms = link.between_gb_per_s, link.between_call_ms
        lines.append(f"{'link':<22} {rate:.3g} GB/s per rank, {ms:.3g} ms per call")
    return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """A line of a journal: the measurement of one plan."""

    sample: Annotated[int, Range(low=0)]
    name: str
    totals: tuple[tuple[float, ...], ...]
    rounds_ms: tuple[Annotated[float, Range(above=0, below=1e12)], ...]


class Journal:
    """The file of measurements: each line is the JSON object of one plan. Only rank 0 writes it.
    Lines from other machines, software versions, or task designs have different ``facts`` and are
    ignored.
    """

    def __init__(self, path: Path, facts: Mapping[str, str]) -> None:
        self.path = path
        self._facts = dict(facts)
        self.records: dict[tuple[int, str], Record] = {}
        try:
            text = read_text(path, keep_bad_bytes=True) if path.is_file() else ""
        except JsonError as error:
            raise ConfigError(
                f"planner: {error}; to measure again, move or delete the file"
            ) from error
        *lines, cut_off = text.split("\n")
        damaged = 0
        for line in lines:
            try:
                self._take(object_of(parse_json(line), "line"))
            except (JsonError, ConfigError):
                damaged += 1
        if damaged or cut_off:
            LOG.warning(
                "%s: damaged or incomplete lines: %d; these measurements will be repeated",
                path,
                damaged + bool(cut_off),
            )
        if cut_off:  # an earlier run was killed while writing; end its line first
            with path.open("a", encoding="ascii") as file:
                file.write("\n")

    def _take(self, tree: dict[str, Any]) -> None:
        if tree.get("facts") != self._facts:
            return
        entry = build(_Entry, {k: tree[k] for k in _Entry.__dataclass_fields__ if k in tree})
        world, backend = self._facts["world"].split()
        ranks, hosts = int(world), int(self._facts["hosts"])
        if [len(row) for row in entry.totals] != [NUM_FEATURES] * ranks or not entry.rounds_ms:
            raise ConfigError(
                f"totals must have a list of {NUM_FEATURES} counts for each of {ranks} ranks, and "
                "rounds_ms must not be empty"
            )
        # With gloo, the ranks of a host share its link to other hosts; with NCCL, every GPU is
        # assumed to have its own network adapter.
        shares_link = backend == "gloo" and hosts > 1
        self.records[entry.sample, entry.name] = Record(
            sample=entry.sample,
            totals=np.array(entry.totals),
            rounds_ms=entry.rounds_ms,
            num_hosts=hosts,
            ranks_per_link=ranks // hosts if shares_link else 1,
        )

    def add(self, sample: Sample, number: int, name: str, plan: Plan, ms: list[float]) -> None:
        """Store the measurement of one plan."""
        totals = count_work(sample.task, plan)
        line: dict[str, Any] = {
            "sample": number,
            "name": name,
            "totals": [[float(f"{count:.6g}") for count in row] for row in totals.tolist()],
            "rounds_ms": ms,
            "taken": datetime.now(UTC).isoformat(timespec="seconds"),
            "facts": self._facts,
        }
        self._take(line)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="ascii") as file:
            file.write(json.dumps(line) + "\n")


def calibrate(boxing: Boxing, settings: Settings, journal_path: Path) -> Profile | None:
    """Measure plans of random tasks; return a fitted profile on rank 0, and None on other ranks."""
    world, start = boxing.world, time.monotonic()
    facts = _facts(boxing, settings)
    journal = Journal(journal_path, facts) if world.rank == 0 else None
    with tqdm(
        total=round(settings.seconds), unit="s", disable=world.rank != 0, desc="calibrating"
    ) as bar:
        for number in range(MOST_SAMPLES):
            elapsed = time.monotonic() - start
            bar.update(round(min(elapsed, settings.seconds)) - bar.n)
            over = elapsed > settings.seconds and number >= LEAST_SAMPLES
            if gather_values(boxing, over)[0]:
                break
            _measure(boxing, settings, journal, number)
    if journal is None:
        return None
    records = list(journal.records.values())
    about = {
        **facts,
        "taken": datetime.now(UTC).isoformat(timespec="seconds"),
        "plans": str(len(records)),
        "samples": str(len({record.sample for record in records})),
    }
    return fit(records, backend=world.backend, about=about)


def _measure(boxing: Boxing, settings: Settings, journal: Journal | None, number: int) -> None:
    """Measure those plans of a sample that are not yet in rank 0's journal."""
    world = boxing.world
    sample = draw_sample(
        number + 1000 * settings.seed,
        world.size,
        world.device.type,
        settings.optimizer,
        most_rows=settings.most_rows,
        num_hosts=world.topology.num_equal_hosts,
    )
    plans = dict(draw_plans(sample, number, settings.plans_per_sample))
    known = [name for name in plans if journal is not None and (number, name) in journal.records]
    for name in gather_values(boxing, known)[0]:
        del plans[name]
    if not plans:
        return
    measured = measure_in_turns(
        boxing,
        sample,
        list(plans.values()),
        rounds=settings.rounds,
        steps=settings.steps,
        seconds=settings.rounds * settings.round_seconds,
    )
    for (name, plan), ms in zip(plans.items(), measured, strict=True):
        if journal is not None:
            journal.add(sample, number, name, plan, ms)


def _facts(boxing: Boxing, settings: Settings) -> dict[str, str]:
    world = boxing.world
    return {
        **facts_of(device_name(world.device), world.backend, world.topology),
        "optimizer": settings.optimizer,
        "seed": str(settings.seed),
        "most_rows": str(settings.most_rows),
        "tasks": drawing(),
        "counts": " ".join(FEATURES),
        "turns": f"{settings.rounds} of {settings.steps} steps, {TURN_MS} ms, "
        f"{settings.rounds * settings.round_seconds} s",
    }
