"""``sbpflow calibrate``: measure this machine and fit a profile.

Every rank runs ``calibrate``. It measures one task after another until the time is used up,
alternating between the plans of a task. It writes every plan to a journal, so an interrupted
calibration resumes where it stopped. It then fits a model, measures the plans that this model
predicts to be fastest, and fits the model again with them: a search tends to find the plans that
the model underestimates.
"""

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from sbpflow.boxing.executor import Boxing
from sbpflow.embedding.rules.registry import RULES
from sbpflow.embedding.storage.measure import cpu_name
from sbpflow.errors import ConfigError
from sbpflow.planner.calibration.candidates import candidates
from sbpflow.planner.calibration.design import (
    Sample,
    draw_batches,
    draw_plans,
    draw_sample,
    drawing,
)
from sbpflow.planner.calibration.fit import fit
from sbpflow.planner.calibration.measure import Measured, from_first_rank, measure_in_turns
from sbpflow.planner.calibration.optimizers import step_factors
from sbpflow.planner.calibration.records import (
    AGAIN,
    PICKED,
    Record,
    check_entry,
    plan_of_tree,
    plan_tree,
    record_of,
)
from sbpflow.planner.calibration.time_dense import DenseTime, dense_time_of, time_dense
from sbpflow.planner.calibration.time_kernels import measure_kernels
from sbpflow.planner.calibration.time_transfers import time_transfers
from sbpflow.planner.costs.cost import TaskCost
from sbpflow.planner.costs.profile import RANKS_HERE, KernelPrices, Profile
from sbpflow.planner.costs.transfers import Transfer, transfer_of
from sbpflow.planner.task import Plan, Task
from sbpflow.runtime.compute.devices import device_name
from sbpflow.runtime.compute.versions import summary as version_summary
from sbpflow.runtime.files.json_file import JsonError, list_of, object_of, parse_json, read_text

LOG = logging.getLogger(__name__)

TRANSFERS_SHARE = 0.06  # share of the time for measuring transfers alone
DENSE_SHARE = 0.03  # share of the time for measuring dense parts alone
DRAWN_SHARE = 0.6  # share of the time for random plans, before the first fit
MOST_SAMPLES = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Configures how long to calibrate and with which tasks.

    ``seconds`` limits the whole calibration. ``rounds`` is the number of times that the model's own
    candidates are added. ``most_rows`` limits the size of the tables. ``kernels`` enables the
    comparison of table kernels.
    """

    seconds: float = 270.0
    rounds: int = 2
    optimizer: str = "rowwise_adagrad"
    seed: int = 0
    most_rows: int = 1_000_000
    least_samples: int = 12
    plans_per_sample: int = 6
    picks_per_round: int = 3
    turns: int = 2
    serial: int = 2
    overlapped: int = 5
    kernels: bool = True


QUICK = Settings(
    seconds=4.0,
    rounds=1,
    most_rows=5_000,
    least_samples=3,
    turns=2,
    serial=1,
    overlapped=2,
    kernels=False,
)
Pick = Callable[[TaskCost, int], list[Plan]]
Group = tuple[int, list[tuple[str, Plan]]]  # a sample's number and its plans by name


class Journal:
    """Stores the measurements, one JSON object per line: one plan, all transfers, or all dense
    parts.

    Only rank 0 writes the file.
    """

    def __init__(self, path: Path, facts: Mapping[str, str]) -> None:
        self.path = path
        self._facts = dict(facts)
        self.entries: dict[tuple[int, str], dict[str, Any]] = {}
        self.transfers: list[Transfer] | None = None
        self.dense: list[DenseTime] | None = None
        try:
            text = read_text(path, keep_bad_bytes=True) if path.is_file() else ""
        except JsonError as error:
            raise ConfigError(f"planner: {error}; move the file away to measure again") from error
        *lines, cut_off = text.split("\n")
        damaged = 0
        for line in lines:
            try:
                self._take(object_of(parse_json(line), "line"))
            except (JsonError, ConfigError):
                damaged += 1
        if damaged or cut_off:
            LOG.warning(
                "%s: %d lines are damaged or incomplete; their content is measured again",
                path,
                damaged + bool(cut_off),
            )
        if cut_off:  # an earlier run was killed while writing: end its line first
            with path.open("a", encoding="ascii") as file:
                file.write("\n")

    def _take(self, entry: dict[str, Any]) -> None:
        if entry.get("facts") != self._facts:
            return
        if "transfers" in entry:
            self.transfers = [transfer_of(one) for one in list_of(entry["transfers"], "transfers")]
        elif "dense" in entry:
            self.dense = [dense_time_of(one) for one in list_of(entry["dense"], "dense")]
        else:
            check_entry(entry)
            self.entries[entry["sample"], entry["name"]] = entry

    def records(self, task_of: Callable[[int], Task]) -> list[Record]:
        """Return all plans that fit their samples' tasks, with counts; log a warning for each other
        plan.
        """
        records: list[Record] = []
        for (number, name), entry in sorted(self.entries.items()):
            try:
                records.append(record_of(entry, task_of(number)))
            except (ValueError, LookupError, TypeError) as error:
                LOG.warning(
                    "%s: plan %r does not fit the task of sample %d and is ignored (%s)",
                    self.path,
                    name,
                    number,
                    error,
                )
        return records

    def best_drawn(self, sample: int) -> tuple[str, dict[str, list[Any]]]:
        """Return the name and tree of a sample's fastest random plan, not one picked by a model."""
        drawn = [
            (entry["step_ms"], name, entry["plan"])
            for (number, name), entry in self.entries.items()
            if number == sample and not name.startswith((PICKED, AGAIN))
        ]
        _, name, tree = min(drawn, key=lambda plan: plan[:2])
        return name, tree

    def add(self, sample: int, name: str, plan: Plan, measured: Measured) -> None:
        """Store the measurement of one plan."""
        entry = {
            "sample": sample,
            "name": name,
            "plan": plan_tree(plan),
            **asdict(measured),
        }
        self.entries[sample, name] = entry
        self._write(entry)

    def add_transfers(self, transfers: Sequence[Transfer]) -> None:
        """Store the times of all transfers measured alone."""
        self.transfers = list(transfers)
        self._write({"transfers": [asdict(transfer) for transfer in transfers]})

    def add_dense(self, times: Sequence[DenseTime]) -> None:
        """Store the times of all dense parts measured alone."""
        self.dense = list(times)
        self._write({"dense": [asdict(time) for time in times]})

    def _write(self, entry: dict[str, Any]) -> None:
        entry |= {
            "taken": datetime.now(UTC).isoformat(timespec="seconds"),
            "facts": self._facts,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="ascii") as file:
            file.write(json.dumps(entry) + "\n")


def calibrate(
    boxing: Boxing, settings: Settings, journal_path: Path, pick: Pick | None = None
) -> Profile | None:
    """Measure, fit a profile, and measure its candidates; return the profile on rank 0, else None.

    ``pick(cost, count)`` returns the best plans that a search finds.
    """
    run = _Run(boxing, settings, journal_path, pick or candidates)
    return run.all_rounds()


class _Run:
    def __init__(self, boxing: Boxing, settings: Settings, path: Path, pick: Pick) -> None:
        self._boxing, self._settings, self._pick = boxing, settings, pick
        world = boxing.world
        self._facts = {
            "world": f"{world.size} {world.backend}",
            RANKS_HERE: str(world.topology.most_ranks_per_host),
            "device": device_name(world.device).partition(" on ")[0],
            "cpu": cpu_name(),
            "software": ", ".join(f"{key} {value}" for key, value in version_summary().items()),
            "optimizer": settings.optimizer,
            "seed": str(settings.seed),
            "most_rows": str(settings.most_rows),
            "tasks": drawing(),
            "waits": "from the last rank's start to the last one's end",
            "turns": f"{settings.turns} of {settings.serial} + {settings.overlapped} steps",
        }
        self._journal = Journal(path, self._facts) if world.rank == 0 else None
        self._samples: dict[int, Sample] = {}
        self._factors: dict[str, float] = {}
        self._kernels: dict[str, KernelPrices] = {}
        if world.rank == 0:
            base = settings.optimizer
            self._factors = step_factors(base, world.device, repeats=3 * settings.turns)
            if settings.kernels:
                self._kernels = measure_kernels(world.device, tuple(dict.fromkeys([*RULES, base])))
        self._start = time.monotonic()
        self._bar = tqdm(
            total=round(settings.seconds), unit="s", disable=world.rank != 0, desc="calibrating"
        )

    def all_rounds(self) -> Profile | None:
        """Measure random plans, then divide the remaining time equally among the rounds of
        candidates.
        """
        settings = self._settings
        self._measure_alone()
        for number in range(settings.rounds + 1):
            share = DRAWN_SHARE + (1 - DRAWN_SHARE) * number / max(settings.rounds, 1)
            deadline = settings.seconds * (share if settings.rounds else 1.0)
            self._measure_all(self._drawn() if number == 0 else self._picked(number), deadline)
        self._bar.close()
        return self._fitted()

    def _measure_alone(self) -> None:
        """Measure transfers and dense parts before any plan, unless the journal has them."""
        journal, seconds = self._journal, self._settings.seconds
        if from_first_rank(self._boxing, journal is not None and journal.transfers is None):
            transfers = time_transfers(self._boxing, seconds=TRANSFERS_SHARE * seconds)
            if journal is not None:
                journal.add_transfers(transfers)
        if from_first_rank(self._boxing, journal is not None and journal.dense is None):
            times = time_dense(self._boxing, seconds=DENSE_SHARE * seconds)
            if journal is not None:
                journal.add_dense(times)

    def sample(self, number: int) -> Sample:
        if number not in self._samples:
            world, settings = self._boxing.world, self._settings
            self._samples[number] = draw_sample(
                number + 1000 * settings.seed,
                world.size,
                world.device.type,
                settings.optimizer,
                most_rows=settings.most_rows,
            )
        return self._samples[number]

    def _drawn(self) -> Iterator[Group]:
        for number in range(MOST_SAMPLES):
            count = self._settings.plans_per_sample
            yield number, list(draw_plans(self.sample(number), number, count))

    def _picked(self, round_number: int) -> Iterator[Group]:
        """Return the model's best plans for measured tasks, and the best random plan a second time.

        The two measurements of the random plan show the drift between sessions. Only rank 0 has the
        model.
        """
        profile = self._fitted(judged=False)
        known = {sample for sample, _ in self._journal.entries} if self._journal else ()
        samples = from_first_rank(self._boxing, sorted(known))
        order = np.random.default_rng([round_number, 16]).permutation(len(samples))
        for number in (samples[int(place)] for place in order):
            chosen: list[tuple[str, dict[str, list[Any]]]] = []
            if profile is not None and self._journal is not None:
                cost = TaskCost(profile, self.sample(number).task)
                plans = self._pick(cost, self._settings.picks_per_round)
                chosen = [
                    (f"{PICKED} {round_number}.{n}", plan_tree(plan))
                    for n, plan in enumerate(plans)
                ]
                name, tree = self._journal.best_drawn(number)
                chosen.append((f"{AGAIN} {round_number} {name}", tree))
            agreed = from_first_rank(self._boxing, chosen)
            yield number, [(name, plan_of_tree(tree)) for name, tree in agreed]

    def _measure_all(self, groups: Iterator[Group], deadline: float) -> None:
        """Measure until no plans or no time remain, as rank 0 decides; alternate between a task's
        plans.
        """
        settings = self._settings
        for seen, (number, plans) in enumerate(groups):
            elapsed = time.monotonic() - self._start
            over = elapsed > deadline and seen >= settings.least_samples
            wanted: list[str] | None = None if over else []
            if self._journal is not None:
                self._bar.update(round(min(elapsed, settings.seconds)) - self._bar.n)
                if not over:
                    known = self._journal.entries
                    wanted = [name for name, _ in plans if (number, name) not in known]
            wanted = from_first_rank(self._boxing, wanted)
            if wanted is None:
                return
            missing = {name: plan for name, plan in plans if name in wanted}
            for name, measured in zip(missing, self._measure(number, missing), strict=True):
                if self._journal is not None:
                    self._journal.add(number, name, missing[name], measured)

    def _measure(self, number: int, plans: Mapping[str, Plan]) -> list[Measured]:
        if not plans:
            return []
        sample, world, settings = self.sample(number), self._boxing.world, self._settings
        return measure_in_turns(
            self._boxing,
            sample.task,
            list(plans.values()),
            draw_batches(sample, world.rank, 2, world.device),
            rounds=settings.turns,
            serial=settings.serial,
            overlapped=settings.overlapped,
        )

    def _fitted(self, judged: bool = True) -> Profile | None:
        if self._journal is None:
            return None
        records = self._journal.records(lambda number: self.sample(number).task)
        about = {
            **self._facts,
            "taken": datetime.now(UTC).isoformat(timespec="seconds"),
            "plans": str(len(records)),
            "picked by the model": str(sum(record.name.startswith(PICKED) for record in records)),
            "samples": str(len({record.sample for record in records})),
        }
        return fit(
            records,
            backend=self._boxing.world.backend,
            transfers=self._journal.transfers or (),
            dense=self._journal.dense or (),
            seed=self._settings.seed,
            about=about,
            step_factors=self._factors,
            kernels=self._kernels,
            judged=judged,
        )
