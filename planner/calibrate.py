"""Measure this machine and keep what was found: ``python -m planner calibrate``.

Every rank runs ``calibrate``. Plans are measured one after another until the time is over; each is
written down at once, so that a calibration that ends early goes on where it stopped. Then a model
is fitted, asked for the plans that it thinks fastest, and these are measured and added: a model
that is searched is wrong where the search goes.
"""

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import numpy as np
from tqdm import tqdm

from planner.cost import CostModel, TaskCost
from planner.design import Sample, draw_batches, draw_plans, draw_sample, place, shapes_for
from planner.fit import Record, count_work, fit
from planner.measure import Measured, measure
from planner.optimizers import step_factors
from planner.profile import Profile
from planner.ranks import gather_texts
from planner.task import Choice, Plan, Shape
from sbpflow.boxing.executor import Boxing
from sbpflow.embedding.plan.optimizer import SparseName
from sbpflow.embedding.storage.measure import cpu_name
from sbpflow.runtime.versions import summary as version_summary
from sbpflow.runtime.world import device_name

LOG = logging.getLogger(__name__)

DRAWN_SHARE = 0.6  # of the time, for plans drawn before any model
MOST_SAMPLES = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How long and on what. ``rounds`` is how often the model's own picks are added.

    ``seconds`` covers all of it; ``most_rows`` bounds the tables, ``quick`` is for tests.
    """

    seconds: float = 240.0
    rounds: int = 2
    optimizer: str = "rowwise_adagrad"
    seed: int = 0
    most_rows: int = 1_000_000
    least_samples: int = 12
    plans_per_sample: int = 6
    picks_per_round: int = 3
    repeats: int = 5
    overlapped: int = 8


QUICK = Settings(seconds=4.0, rounds=1, most_rows=5_000, least_samples=3, repeats=2, overlapped=3)
Pick = Callable[[TaskCost, int], list[Plan]]


class Journal:
    """What was measured, one JSON object a line; rank 0 has the file."""

    def __init__(self, path: Path, facts: Mapping[str, str]) -> None:
        self.path = path
        self._facts = dict(facts)
        self.entries: dict[tuple[int, str], dict[str, Any]] = {}
        for line in path.read_text(encoding="ascii").splitlines() if path.is_file() else []:
            try:
                entry = json.loads(line)
            except ValueError:  # the last line of a run that was killed
                continue
            if entry.get("facts") == self._facts:
                self.entries[entry["sample"], entry["name"]] = entry

    def add(self, sample: int, name: str, plan: Plan, measured: Measured) -> None:
        """Keep one plan's figures."""
        entry = {
            "sample": sample,
            "name": name,
            "plan": plan_tree(plan),
            "phases": measured.phases,
            "step_ms": measured.step_ms,
            "noise": measured.noise,
            "peak_bytes": measured.peak_bytes,
            "taken": datetime.now(UTC).isoformat(timespec="seconds"),
            "facts": self._facts,
        }
        self.entries[sample, name] = entry
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="ascii") as file:
            file.write(json.dumps(entry) + "\n")


def plan_tree(plan: Plan) -> dict[str, list[Any]]:
    """JSON-ready."""
    return {
        name: [one.shape.sbp, one.shape.exchange, list(one.shape.parts), list(one.ranks)]
        for name, one in plan.items()
    }


def plan_of_tree(tree: Mapping[str, Sequence[Any]]) -> Plan:
    """The plan that ``plan_tree`` wrote."""
    return {
        name: Choice(Shape(sbp, exchange, (parts[0], parts[1])), tuple(ranks))
        for name, (sbp, exchange, parts, ranks) in tree.items()
    }


def calibrate(
    boxing: Boxing, settings: Settings, journal_path: Path, pick: Pick | None = None
) -> Profile | None:
    """Measure, fit, and measure the fit's picks; the profile on rank 0, ``None`` elsewhere.

    ``pick(cost, count)`` gives the plans that a search takes for best; by default a descent
    that moves one table at a time.
    """
    run = _Run(boxing, settings, journal_path, pick or descend)
    return run.all_rounds()


class _Run:
    def __init__(self, boxing: Boxing, settings: Settings, path: Path, pick: Pick) -> None:
        self._boxing, self._settings, self._pick = boxing, settings, pick
        world = boxing.world
        self._facts = {
            "world": f"{world.size} {world.backend}",
            "device": device_name(world.device).partition(" on ")[0],
            "cpu": cpu_name(),
            "software": ", ".join(f"{key} {value}" for key, value in version_summary().items()),
            "optimizer": settings.optimizer,
            "seed": str(settings.seed),
            "most_rows": str(settings.most_rows),
        }
        self._journal = Journal(path, self._facts) if world.rank == 0 else None
        self._samples: dict[int, Sample] = {}
        self._factors: dict[str, float] = {}
        if world.rank == 0:
            base = cast("SparseName", settings.optimizer)
            self._factors = step_factors(base, world.device, repeats=settings.repeats)
        self._start = time.monotonic()
        self._bar = tqdm(
            total=round(settings.seconds), unit="s", disable=world.rank != 0, desc="calibrating"
        )

    def all_rounds(self) -> Profile | None:
        """Half of the time for drawn plans, the rest in equal parts for the rounds of picks."""
        settings = self._settings
        for number in range(settings.rounds + 1):
            share = DRAWN_SHARE + (1 - DRAWN_SHARE) * number / max(settings.rounds, 1)
            deadline = settings.seconds * (share if settings.rounds else 1.0)
            self._measure_all(self._drawn() if number == 0 else self._picked(number), deadline)
        self._bar.close()
        return self._fitted()

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

    def _drawn(self) -> Iterator[tuple[int, str, Plan]]:
        for number in range(MOST_SAMPLES):
            for name, plan in draw_plans(
                self.sample(number), number, self._settings.plans_per_sample
            ):
                yield number, name, plan

    def _picked(self, round_number: int) -> Iterator[tuple[int, str, Plan]]:
        """The model's favourites for tasks that were measured; rank 0 has the model."""
        world = self._boxing.world
        model = None
        if world.rank == 0:
            profile = self._fitted()
            model = CostModel(profile) if profile is not None else None
        for number in self._known_samples():
            text = "[]"
            if model is not None:
                plans = self._pick(
                    model.of(self.sample(number).task), self._settings.picks_per_round
                )
                text = json.dumps([plan_tree(plan) for plan in plans])
            chosen = json.loads(gather_texts(self._boxing, text)[0])
            for place_in, tree in enumerate(chosen):
                yield number, f"pick {round_number}.{place_in}", plan_of_tree(tree)

    def _known_samples(self) -> list[int]:
        known: list[int] = []
        if self._journal is not None:
            known = sorted({sample for sample, _ in self._journal.entries})
        return json.loads(gather_texts(self._boxing, json.dumps(known))[0])

    def _measure_all(self, plans: Iterator[tuple[int, str, Plan]], deadline: float) -> None:
        """Until the plans or the time are at an end; rank 0 says so."""
        settings, seen = self._settings, set[int]()
        for number, name, plan in plans:
            seen.add(number)
            elapsed = time.monotonic() - self._start
            over = elapsed > deadline and len(seen) > settings.least_samples
            known = self._journal is not None and (number, name) in self._journal.entries
            if self._journal is not None:
                self._bar.update(round(min(elapsed, settings.seconds)) - self._bar.n)
            word = gather_texts(self._boxing, "stop" if over else "skip" if known else "go")[0]
            if word == "stop":
                return
            if word == "skip":
                continue
            measured = self._measure(number, plan)
            if self._journal is not None:
                self._journal.add(number, name, plan, measured)

    def _measure(self, number: int, plan: Plan) -> Measured:
        sample, world = self.sample(number), self._boxing.world
        return measure(
            self._boxing,
            sample.task,
            plan,
            draw_batches(sample, world.rank, 2, world.device),
            repeats=self._settings.repeats,
            overlapped=self._settings.overlapped,
        )

    def _fitted(self) -> Profile | None:
        if self._journal is None:
            return None
        records = [
            Record(
                sample=number,
                name=name,
                totals=count_work(self.sample(number).task, plan_of_tree(entry["plan"])),
                phases=np.array(entry["phases"]),
                step_ms=entry["step_ms"],
                noise=entry["noise"],
            )
            for (number, name), entry in sorted(self._journal.entries.items())
        ]
        about = {
            **self._facts,
            "taken": datetime.now(UTC).isoformat(timespec="seconds"),
            "plans": str(len(records)),
            "picked by the model": str(sum(record.name.startswith("pick") for record in records)),
            "samples": str(len({record.sample for record in records})),
        }
        return fit(
            records,
            backend=self._boxing.world.backend,
            seed=self._settings.seed,
            about=about,
            step_factors=self._factors,
        )


def descend(cost: TaskCost, count: int) -> list[Plan]:
    """Local optima from several starts, the cheapest first: each moves one table at a time."""
    task = cost.task
    random = np.random.default_rng(task.batch_size)
    movable = [table for table in task.tables if table.name not in task.pinned]
    found: list[tuple[float, Plan]] = []
    for start in range(2 * count):
        shapes = {table.name: shapes_for(table, task.world_size) for table in task.tables}
        plan = {
            name: place(own[min(start, len(own) - 1)], task, random) for name, own in shapes.items()
        } | dict(task.pinned)
        best = float(cost.cost([plan])[0])
        for _ in range(2):
            for table in movable:
                others = [
                    {**plan, table.name: place(shape, task, random)} for shape in shapes[table.name]
                ]
                prices = cost.cost(others)
                if prices.min() < best:
                    best, plan = float(prices.min()), others[int(prices.argmin())]
        found.append((best, plan))
    distinct: list[Plan] = []
    for _, plan in sorted(found, key=lambda one: one[0]):
        if plan not in distinct:
            distinct.append(plan)
    return distinct[:count]
