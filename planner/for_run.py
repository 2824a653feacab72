"""Implements ``parallel.plan: auto``: computes a rule for every table from a run's configuration
and statistics.

The task (tables, features, optimizers, dense part) is read from a draft plan of the run, so users
need not describe it a second time. Every rank calls ``plan_tables`` and obtains the same plan: one
process per machine searches, the search is deterministic, and the ranks compare their plans before
the run starts.
"""

import logging
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from sbpflow.boxing.executor import Boxing
from sbpflow.config.schema import Config
from sbpflow.config.table_rules import TableRule
from sbpflow.data.stats import FieldStats
from sbpflow.embedding.plan.tables import TableConfig
from sbpflow.errors import ConfigError
from sbpflow.planner.calibration.calibrate import save_on_all_hosts
from sbpflow.planner.clusters import USABLE, crowded
from sbpflow.planner.costs.cost import Prediction, TaskCost
from sbpflow.planner.costs.features import IdStats, from_histogram, from_ratios
from sbpflow.planner.costs.profile import MeasuredRun, Profile, default_path, load
from sbpflow.planner.costs.run_corrections import (
    LEAST_STEPS,
    belongs,
    facts_of,
    origin_of,
    with_run,
)
from sbpflow.planner.feasible import choose
from sbpflow.planner.plan_cache import chosen_once
from sbpflow.planner.planners import priced_plan
from sbpflow.planner.report import as_text, report_of
from sbpflow.planner.task import (
    Choice,
    DenseWork,
    Plan,
    Task,
    choice_of,
    plan_to_yaml,
    rules,
)
from sbpflow.run.model.spec import Fields
from sbpflow.run.planning.build_plan import plan_run
from sbpflow.run.planning.plan import RunPlan
from sbpflow.runtime.compute.devices import BACKENDS, device_name
from sbpflow.runtime.files.file_lock import hold
from sbpflow.runtime.ranks.topology import Topology

LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """A plan, its rules for ``plan_run``, and the predicted step time."""

    task: Task
    cost: TaskCost
    plan: Plan
    prediction: Prediction
    seconds: float
    topology: Topology
    path: Path  # the file of the calibration

    @property
    def facts(self) -> dict[str, str]:
        """Return the facts of this machine that make step times comparable."""
        device_type = self.task.device_type
        device = torch.device(device_type, 0) if device_type == "cuda" else torch.device("cpu")
        return facts_of(device_name(device), BACKENDS[device_type], self.topology)

    @property
    def origin(self) -> str:
        """Describe the calibration (see ``origin_of``)."""
        return origin_of(self.cost.profile, self.facts)

    @property
    def rules(self) -> dict[str, TableRule]:
        return rules(self.plan)

    def yaml(self) -> str:
        """Return the content of a file that ``parallel.plan`` accepts."""
        notes = {
            "predicted_step_ms": round(self.prediction.step_ms, 3),
            "memory_bytes": list(self.prediction.memory_bytes),
            "world_size": self.task.world_size,
            "batch_size": self.task.batch_size,
        }
        return plan_to_yaml(self.plan, notes)

    def summary(self) -> str:
        """Return the log line for the start of a run."""
        placed = len(self.plan) - len(self.task.pinned)
        return (
            f"{placed} of {len(self.plan)} tables planned in {self.seconds:.1f} s; "
            f"predicted step time {self.prediction.step_ms:.2f} ms; {self.origin}"
        )

    def report(self) -> str:
        """Return the predicted times of each rank, and the best alternative for each table, as
        text; "" if ``parallel.tables`` sets all layouts.
        """
        if len(self.plan) == len(self.task.pinned):
            return ""
        planned = priced_plan("parallel.plan: auto", self.plan, self.cost, seconds=self.seconds)
        return f"{as_text(report_of(planned, self.cost))}\n{self.origin}"

    def against(self, measured_ms: float) -> str:
        """Return a run's last log line; ``measured_ms`` is not finite if no step was timed."""
        predicted = self.prediction.step_ms
        error = self.prediction.error
        held_out = f" (9 of 10 held-out steps within {100 * error:.0f} %)"
        text = f"predicted {predicted:.2f} ms{held_out if math.isfinite(error) else ''}"
        if not math.isfinite(measured_ms):
            return f"{text}; not measured, because the first step of a run is not timed"
        return (
            f"{text}, measured {measured_ms:.2f} ms ({100 * (predicted / measured_ms - 1):+.0f} %)"
        )

    def finished(
        self, plan: RunPlan, measured_ms: float, timed_steps: int, boxing: Boxing
    ) -> dict[str, str]:
        """Add a run with this plan to the calibration, and return the log lines for the end of the
        run, by title. Every rank must call this method.

        Files that cannot be written are logged as warnings, because the run itself has succeeded.
        """
        try:
            # A resumed run keeps the layouts of its checkpoint.
            kept = {name: choice_of(each, plan.world_size) for name, each in plan.layouts.items()}
            ran = replace(self, plan=kept, prediction=self.cost.predict(kept))
        except ConfigError as error:
            LOG.warning("the step time was not predicted: %s", error)
            return {}
        lines = {"step time": ran.against(measured_ms)}
        profile = None
        with ExitStack() as opened:
            try:
                if boxing.world.rank == 0 and timed_steps >= LEAST_STEPS:
                    # Locked until the file is written, so that runs that end at the same time keep
                    # each other's corrections.
                    opened.enter_context(hold(self.path.with_suffix(".lock"), wait=True))
                    profile = ran._corrected(measured_ms)
            except (ConfigError, OSError) as error:
                LOG.warning("this run is not added to the calibration: %s", error)
            try:
                # This call raises errors only after the exchange between ranks, so no rank is left
                # waiting.
                save_on_all_hosts(boxing, profile, self.path)
            except OSError as error:
                LOG.warning("this run is not added to the calibration: %s", error)
        lines["costs"] = origin_of(profile or self.cost.profile, self.facts)
        return lines

    def _corrected(self, measured_ms: float) -> Profile | None:
        """Return the calibration corrected by this run, or None if it was replaced during the run
        or is for other ranks or devices.
        """
        facts, priced = self.facts, self.cost.profile
        profile = load(self.path)  # loaded again, because other runs may have corrected it
        if profile.about != priced.about or not belongs(profile, facts):
            return None
        run = MeasuredRun(
            taken=datetime.now(UTC).isoformat(timespec="seconds"),
            software=facts["software"],
            predicted_ms=self.prediction.step_ms / priced.run_factor,
            measured_ms=measured_ms,
        )
        return with_run(profile, run)


def plan_tables(
    config: Config,
    fields: Fields,
    stats: Sequence[FieldStats],
    num_rows: int,
    *,
    world_size: int,
    device_type: str,
    topology: Topology | None = None,
) -> PlannedRun:
    """Choose a plan for a run; ``num_rows`` is the number of rows that ``stats`` were computed
    from.

    Raises ConfigError if this machine has no calibration, or PlanError if no plan fits in memory.
    """
    start = time.perf_counter()
    path, profile = _calibration(device_type)
    # Early rows may be possible with the planned layouts even if they are not with the draft's.
    ahead = replace(config.train, early_rows="auto", late_gradients="auto")
    _, draft = plan_run(
        replace(config, train=ahead),
        fields,
        world_size=world_size,
        device_type=device_type,
        planned={"*": TableRule(sbp="S(0)")},
        topology=topology,
    )
    profile = crowded(profile, draft.topology.most_ranks_per_host)
    if (ranks_here := draft.topology.ranks_per_host) is not None:
        link = profile.link.on_nodes_of(ranks_here, shared=profile.backend == "gloo")
        profile = replace(profile, link=link)
    task = task_of(draft, stats, num_rows)
    task = replace(task, two_hops=config.parallel.row_buffer_fraction is None)
    cost = TaskCost(profile, task)
    plan, seed = dict(task.pinned), config.run.seed
    if len(plan) < len(task.tables):
        note = f"the limit of a rank is {USABLE:.0%} of its memory"
        plan = chosen_once(cost, seed, lambda: choose(cost, seed=seed, note=note))
    return PlannedRun(
        task=task,
        cost=cost,
        plan=plan,
        prediction=cost.predict(plan),
        seconds=time.perf_counter() - start,
        topology=draft.topology,
        path=path,
    )


def _calibration(device_type: str) -> tuple[Path, Profile]:
    """Return the file of this machine's calibration, and its content."""
    if device_type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "parallel.plan: auto uses the calibration of this machine's GPUs, but parallel.device "
            "is cuda, and this machine has no usable GPU; use parallel.device: cpu, or "
            "parallel.scheme: auto, which needs no calibration"
        )
    path = default_path(device_type)
    return path, load(path)


def task_of(plan: RunPlan, stats: Sequence[FieldStats], num_rows: int) -> Task:
    """Return the task of a run from any of its plans, with ``parallel.tables`` pinned."""
    tables, memory = plan.embeddings, plan.topology.memory_bytes
    known = {field.name: field for field in stats}
    features = {feature.name: feature for feature in tables.features}
    per_sample = {
        name: known[name].lookups / max(num_rows, 1) if name in known else float(feature.hotness)
        for name, feature in features.items()
    }
    pinned: dict[str, Choice] = {
        name: choice_of(layout, plan.world_size)
        for name, layout in plan.layouts.items()
        if layout.key.startswith("parallel.tables.")
    }
    free = [layout for name, layout in plan.layouts.items() if name not in pinned]
    dtypes = {layout.comm_dtype for layout in free or plan.layouts.values()}
    return Task(
        outputs=tables.outputs,
        features=tables.features,
        stats={table.name: _stats_of(table, known, per_sample) for table in tables.tables},
        world_size=plan.world_size,
        batch_size=plan.batch_size,
        optimizer=tables.optimizer,
        ids_per_sample={name: max(count, 1e-6) for name, count in per_sample.items()},
        dtype=tables.dtype,
        row_dtype=tables.row_dtype,
        comm_dtype=next(iter(dtypes)) if len(dtypes) == 1 else None,
        device_type=tables.world.device_type,
        device_bytes=None if memory is None else tuple(int(USABLE * held) for held in memory),
        speeds=plan.topology.speeds,
        dense=_dense_work(plan),
        accumulate=plan.accumulate,
        lookahead=plan.lookahead,
        num_hosts=plan.topology.num_equal_hosts,
        pinned=pinned,
    )


def _dense_work(plan: RunPlan) -> DenseWork:
    """Estimate the work of rank 0's dense part: one multiply-add per sample and parameter, with one
    layer per matrix.
    """
    shapes = [parameter.layout.part_shape(parameter.shape, 0) for parameter in plan.dense]
    parameters = sum(parameter.num_elements(0) for parameter in plan.dense)
    return DenseWork(
        macs_per_sample=float(parameters),
        elements_per_sample=float(sum(sum(shape) for shape in shapes if shape and len(shape) == 2)),
        parameters=parameters,
    )


def _stats_of(
    table: TableConfig, known: Mapping[str, FieldStats], per_sample: Mapping[str, float]
) -> IdStats:
    """Return the statistics of the field that uses the table; if several fields use it, return
    those of the field with the most distinct ids.
    """
    fields = [known[name] for name in table.features if name in known]
    if not fields:
        LOG.warning(
            "no statistics for %s, which the model computes; the planner assumes that all rows of "
            "%s are equally frequent",
            ", ".join(table.features),
            table.name,
        )
        return from_histogram([float(table.num_rows)], [1.0], 1.0)
    largest = max(fields, key=lambda field: field.distinct)
    if not largest.unique_ratio:
        raise ConfigError(
            "parallel.plan: auto needs at least 1,024 training rows to measure how many distinct "
            f"ids of field {largest.name} a batch has, but the data set has fewer; use more rows, "
            "or parallel.scheme: auto"
        )
    return from_ratios(
        {int(size): ratio for size, ratio in largest.unique_ratio.items()},
        max(per_sample[largest.name], 1e-6),
        distinct=float(max(min(largest.distinct, table.num_rows), 1)),
        bin_rows=largest.bins_rows,
        bin_lookups=largest.bins_lookups,
    )
