"""Plans the CTR model of the training benchmarks with ``parallel.plan: auto``, from a calibration.

The ids follow a known distribution, so the statistics are computed from it instead of a prepared
set.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.click_model import Shape
from sbpflow.config.schema import Config
from sbpflow.config.table_rules import TableRule
from sbpflow.planner.costs.cost import TaskCost
from sbpflow.planner.costs.features import BIN_SAMPLES, zipf_mandelbrot
from sbpflow.planner.costs.profile import default_path, load
from sbpflow.planner.feasible import choose
from sbpflow.planner.for_run import task_of
from sbpflow.planner.task import rules
from sbpflow.run.model.spec import Fields
from sbpflow.run.planning.build_plan import plan_run


@dataclass(frozen=True, slots=True, kw_only=True)
class LawStats:
    """The statistics that ``sbpflow stats`` would measure for a given id distribution."""

    name: str
    lookups: int
    distinct: int
    bins_rows: list[int]
    bins_lookups: list[int]
    unique_ratio: dict[str, float]


def planned_rules(
    shape: Shape, config: Config, fields: Fields, world_size: int, profile: str | None
) -> tuple[dict[str, TableRule], float]:
    """Return the rules for all tables and the predicted step time in ms; all ranks get the same
    result.
    """
    device = config.parallel.device
    whole = {"*": TableRule(sbp="S(0)")}
    _, draft = plan_run(config, fields, world_size=world_size, device_type=device, planned=whole)
    stats = [
        _stats(name.removeprefix("deep."), shape, hotness)
        for name, hotness in zip(shape.names, shape.hotness, strict=True)
    ]
    cost = TaskCost(
        load(Path(profile) if profile else default_path()),
        replace(task_of(draft, stats, BIN_SAMPLES), device_bytes=None),
    )
    plan = choose(cost)
    return rules(plan), cost.predict(plan).step_ms


def _stats(name: str, shape: Shape, hotness: int) -> LawStats:
    law = zipf_mandelbrot(shape.table_rows, shape.zipf, 0.0, hotness)
    touched = law.touched(float(BIN_SAMPLES * hotness))
    samples = [2**n for n in range(8, 18)]
    return LawStats(
        name=name,
        lookups=BIN_SAMPLES * hotness,
        distinct=shape.table_rows,
        bins_rows=[round(share * touched) for share in law.bin_rows],
        bins_lookups=[round(share * BIN_SAMPLES * hotness) for share in law.bin_lookups],
        unique_ratio={
            str(size): law.touched(float(size * hotness)) / (size * hotness) for size in samples
        },
    )
