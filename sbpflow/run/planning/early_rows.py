"""Decides which groups send early rows (``train.early_rows``), and predicts the bytes."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from sbpflow.config.schema import Config
from sbpflow.costs.ids import IdFrequencies, click_curve
from sbpflow.embedding.plan.embedding_plan import EmbeddingPlan
from sbpflow.embedding.plan.group_plan import GroupPlan
from sbpflow.embedding.plan.price import ids_per_sample
from sbpflow.embedding.plan.tables import FeatureConfig, TableConfig
from sbpflow.errors import ConfigError
from sbpflow.run.planning.plan import EarlyRows
from sbpflow.runtime.ranks.topology import Topology
from sbpflow.training.step_schedule import EARLY_LOOKAHEAD

KEY = "train.early_rows"
# Prices of the flags and of the second transfer. Early rows can only hide the time that a link
# takes beyond a rank's own copies; two ranks on one host exchange 2 GB/s.
CALLS_MS, ROW_NS, COPY_GB_PER_S = 0.5, 40.0, 2.0


def with_early_rows(
    plan: EmbeddingPlan,
    config: Config,
    topology: Topology,
    frequencies: Mapping[str, IdFrequencies],
) -> tuple[EmbeddingPlan, tuple[EarlyRows, ...]]:
    """Return the plan with ``GroupPlan.early_rows`` set, and the choice for each ``unique`` group.
    Raises ConfigError if ``train.early_rows`` is true, but no group can send early rows.
    """
    wanted, choices = config.train.early_rows, list[EarlyRows]()
    why_not = _why_not(config, plan)
    for group in plan.groups:
        if not group.kind.sends_early:
            continue
        early, critical = expected_bytes(group, plan.features, config, frequencies)
        reason = why_not or _why_not_group(group, wanted == "auto")
        if wanted is False:
            reason = f"{KEY} is false"
        elif not reason and wanted == "auto":
            reason = _does_not_pay(group, early, critical, topology)
        choices.append(
            EarlyRows(
                group=group.name,
                reason=reason,
                early_bytes=round(early),
                critical_bytes=round(critical),
            )
        )
    if wanted is True and all(choice.reason for choice in choices):
        reason = choices[0].reason if choices else why_not or "no table uses the exchange unique"
        raise ConfigError(f"{KEY}: true, but {reason}; use auto, which sends early rows if it can")
    chosen = {choice.group for choice in choices if not choice.reason}
    groups = (replace(group, early_rows=group.name in chosen, late_gradients=config.train.late_gradients is True and group.name in chosen) for group in plan.groups)
    return replace(plan, groups=tuple(groups)), tuple(choices)


def _why_not(config: Config, plan: EmbeddingPlan) -> str:
    """Return the reason why no group of the run can send early rows, or "" if some can."""
    given = config.train.lookahead
    if plan.world.size == 1:
        return "a single rank sends no rows"
    if plan.world.device_type != "cpu":
        return f"early rows are implemented for cpu, not for {plan.world.device_type}"
    if not config.parallel.overlap:
        return "parallel.overlap is false"
    if given != "auto" and given < EARLY_LOOKAHEAD:
        return f"train.lookahead is {given}; early rows need {EARLY_LOOKAHEAD} or more, or auto"
    return ""


def _why_not_group(group: GroupPlan, is_auto: bool) -> str:
    (stack,) = group.stacks
    table = stack.tables[0]
    if stack.grows:
        return f"table {table.name} grows, and the rows of new keys are set just before the lookup"
    if table.storage is not None and is_auto:
        return f"the cache of table {table.name} would need slots for two batches; use true"
    return ""


def _does_not_pay(group: GroupPlan, early: float, critical: float, topology: Topology) -> str:
    """Return the reason why early rows would not save time, or "" if they would."""
    link, owners = topology.link(group.world.ranks), len(group.owners)
    hidden_ms = 1e-6 * early / owners * (1 / link.gb_per_s - 1 / COPY_GB_PER_S)
    rows = (early + critical) / (group.stacks[0].dim * group.comm_dtype.itemsize * owners)
    cost_ms = CALLS_MS + 1e-6 * ROW_NS * rows
    if hidden_ms > cost_ms:
        return ""
    return (
        f"they would hide {max(0.0, hidden_ms):.2f} ms at {link.gb_per_s:g} GB/s "
        f"({link.source}) and cost {cost_ms:.2f} ms"
    )


def expected_bytes(
    group: GroupPlan,
    features: Sequence[FeatureConfig],
    config: Config,
    frequencies: Mapping[str, IdFrequencies],
) -> tuple[float, float]:
    """Return the expected (early, critical) bytes of a batch, sent by all ranks together.

    A row is critical if this rank's samples and the batches to be updated both use it.
    """
    (stack,), size = group.stacks, group.world.size
    by_name = {feature.name: feature for feature in features}
    early = critical = 0.0
    batch, steps = config.data.batch_size, range(1, config.train.accumulate + 1)
    for table in stack.tables:
        per_sample = sum(ids_per_sample(by_name[name], frequencies) for name in table.features)
        for batches in steps:
            own, both = _overlap(table, batch / size, batches * batch, per_sample, frequencies)
            early += (own - both) / len(steps)
            critical += both / len(steps)
    scale = (size - 1) * stack.dim * group.comm_dtype.itemsize
    return scale * early, scale * critical


def _overlap(
    table: TableConfig,
    first: float,
    second: float,
    per_sample: float,
    frequencies: Mapping[str, IdFrequencies],
) -> tuple[float, float]:
    """Return the number of rows that ``first`` samples use, and how many of these ``second`` other
    samples also use. Assumes independent samples: U(a) + U(b) - U(a + b) rows are in both, where
    U(n) is the number of distinct rows of n samples.
    """
    known = [frequencies[name] for name in table.features if name in frequencies]
    if known:
        most = max(known, key=lambda field: field.curve.distinct)
        return most.overlap(first, second, per_sample / max(most.per_sample, 1e-9))
    curve = click_curve(table.num_rows)
    a, b = first * per_sample, second * per_sample
    return curve.touched(a), curve.touched(a) + curve.touched(b) - curve.touched(a + b)
