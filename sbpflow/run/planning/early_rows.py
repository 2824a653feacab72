"""Decides which groups send early rows and late gradients, and predicts the bytes sent."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from sbpflow.config.schema import Config
from sbpflow.embedding.plan.embedding_plan import EmbeddingPlan
from sbpflow.embedding.plan.group_plan import GroupPlan
from sbpflow.embedding.plan.id_statistics import IdFrequencies, curve_of_table, ids_per_sample
from sbpflow.embedding.plan.tables import FeatureConfig, TableConfig
from sbpflow.errors import ConfigError
from sbpflow.run.planning.plan import EarlyRows
from sbpflow.runtime.ranks.topology import Topology
from sbpflow.training.step_schedule import EARLY_LOOKAHEAD

KEY, LATE_KEY = "train.early_rows", "train.late_gradients"
# Costs of the flags and the second transfer, per exchange and per row, and the rate at which two
# ranks on one host exchange data. At that rate, ranks only copy, so early rows would hide nothing.
CALLS_MS, ROW_NS, COPY_GB_PER_S = 0.5, 150.0, 2.0


def with_early_rows(
    plan: EmbeddingPlan,
    config: Config,
    topology: Topology,
    frequencies: Mapping[str, IdFrequencies],
) -> tuple[EmbeddingPlan, tuple[EarlyRows, ...]]:
    """Return the plan with its groups' ``early_rows`` and ``late_gradients`` set, and the decision
    for each group with exchange ``unique``.

    Raises ConfigError if ``train.early_rows`` or ``train.late_gradients`` is true, but no group can
    send them.
    """
    why_not = _why_not(config, plan)
    choices = [
        _choice(group, plan.features, config, topology, frequencies, why_not)
        for group in plan.groups
        if group.kind.sends_early
    ]
    nothing = why_not or "no table uses the exchange unique"
    early, late = [each.reason for each in choices], [each.late_reason for each in choices]
    for key, wanted, reasons, what in (
        (KEY, config.train.early_rows, early, "early rows"),
        (LATE_KEY, config.train.late_gradients, late, "late gradients"),
    ):
        if wanted is True and all(reasons):
            raise ConfigError(
                f"{key}: true has no effect, because {[*reasons, nothing][0]}; use auto, which "
                f"sends {what} if it can"
            )
    by_name = {choice.group: choice for choice in choices}
    groups = [
        replace(group, early_rows=not choice.reason, late_gradients=not choice.late_reason)
        if (choice := by_name.get(group.name))
        else group
        for group in plan.groups
    ]
    return replace(plan, groups=tuple(groups)), tuple(choices)


def _choice(
    group: GroupPlan,
    features: Sequence[FeatureConfig],
    config: Config,
    topology: Topology,
    frequencies: Mapping[str, IdFrequencies],
    why_not: str,
) -> EarlyRows:
    """Decide whether a group sends early rows and late gradients."""

    def expected(num_batches: int) -> tuple[float, float]:
        return expected_bytes(group, features, config, frequencies, num_batches)

    def hides(num_bytes: float, num_sent: float) -> str:
        return _does_not_pay(group, num_bytes, num_sent, topology)

    accumulate = config.train.accumulate
    means = [expected(number) for number in range(1, accumulate + 1)]
    early, critical = (sum(column) / accumulate for column in zip(*means, strict=True))
    reason = why_not or _why_not_group(group, config.train.early_rows)
    if not reason and config.train.early_rows == "auto":
        reason = hides(early, early + critical)
    # A row's gradient is urgent if the next batch uses the row.
    scale = group.grad_comm_dtype.itemsize / group.comm_dtype.itemsize
    late, urgent = (scale * num_bytes for num_bytes in expected(1))
    later, more = expected(2)  # the rows of two batches have pending updates
    can_be_early = not why_not and not _why_not_group(group, True)
    hint = (
        f"; {KEY}: true enables them" if can_be_early and config.train.early_rows == "auto" else ""
    )
    no_early = f"late gradients need early rows, which are off ({reason}{hint})"
    late_reason = no_early if reason else _why_not_late(config, group)
    if not late_reason and config.train.late_gradients == "auto":
        late_reason = hides(late - (more - critical), late + urgent)
    if not late_reason:
        early, critical = later, more
    return EarlyRows(
        group=group.name,
        reason=reason,
        early_bytes=round(early),
        critical_bytes=round(critical),
        late_reason=late_reason,
        late_bytes=round(late),
        urgent_bytes=round(urgent),
    )


def _why_not(config: Config, plan: EmbeddingPlan) -> str:
    """Return the reason why no group of the run can send early rows, or "" if some might."""
    given = config.train.lookahead
    if plan.world.size == 1:
        return "a single rank sends no rows"
    if plan.world.device_type != "cpu":
        return f"early rows are implemented only on cpu, not on {plan.world.device_type}"
    if not config.parallel.overlap:
        return "parallel.overlap is false"
    if given != "auto" and given < EARLY_LOOKAHEAD:
        return (
            f"train.lookahead is {given}, but early rows need a lookahead of {EARLY_LOOKAHEAD} or "
            "more, or auto"
        )
    return ""


def _why_not_group(group: GroupPlan, wanted: bool | str) -> str:
    (stack,) = group.stacks
    table = stack.tables[0]
    if wanted is False:
        return f"{KEY} is false"
    if stack.grows:
        return (
            f"table {table.name} grows, so rows of new keys are initialized just before the lookup"
        )
    if table.storage is not None and wanted == "auto":
        return (
            f"the cache of table {table.name} would need slots for two batches ({KEY}: true "
            "allows this)"
        )
    return ""


def _why_not_late(config: Config, group: GroupPlan) -> str:
    """Return the reason why gradients of the group cannot be late, or "" if they can."""
    table = group.stacks[0].tables[0]
    accumulate, clip = config.train.accumulate, config.optimizer.clip
    if config.train.late_gradients is False:
        return f"{LATE_KEY} is false"
    if accumulate > 1:
        return f"train.accumulate is {accumulate}, but late gradients need a value of 1"
    if clip is not None and clip.rows:
        return "optimizer.clip.rows is true, so each step needs the norm of all its gradients"
    if table.storage is not None and config.train.late_gradients == "auto":
        return (
            f"the cache of table {table.name} would need slots for three batches ({LATE_KEY}: "
            "true allows this)"
        )
    return ""


def _does_not_pay(group: GroupPlan, hidden: float, sent: float, topology: Topology) -> str:
    """Return why hiding ``hidden`` of ``sent`` bytes would not save time, or "" if it would."""
    link, owners = topology.link(group.world.ranks), len(group.owners)
    hidden_ms = 1e-6 * hidden / owners * (1 / link.gb_per_s - 1 / COPY_GB_PER_S)
    rows = sent / (group.stacks[0].dim * group.comm_dtype.itemsize * owners)
    cost_ms = CALLS_MS + 1e-6 * ROW_NS * rows
    if hidden_ms > cost_ms:
        return ""
    return (
        f"the overlap would hide {max(0.0, hidden_ms):.2f} ms at {link.gb_per_s:g} GB/s "
        f"({link.source}), but cost {cost_ms:.2f} ms"
    )


def expected_bytes(
    group: GroupPlan,
    features: Sequence[FeatureConfig],
    config: Config,
    frequencies: Mapping[str, IdFrequencies],
    num_batches: int,
) -> tuple[float, float]:
    """Return the expected bytes of a batch's rows, sent by all ranks together: first for the rows
    that none of ``num_batches`` other batches uses, then for all other rows.
    """
    (stack,), size = group.stacks, group.world.size
    by_name = {feature.name: feature for feature in features}
    unused = used = 0.0
    batch = config.data.batch_size
    for table in stack.tables:
        per_sample = sum(ids_per_sample(by_name[name], frequencies) for name in table.features)
        own, both = _overlap(table, batch / size, num_batches * batch, per_sample, frequencies)
        unused += own - both
        used += both
    scale = (size - 1) * stack.dim * group.comm_dtype.itemsize
    return scale * unused, scale * used


def _overlap(
    table: TableConfig,
    first: float,
    second: float,
    per_sample: float,
    frequencies: Mapping[str, IdFrequencies],
) -> tuple[float, float]:
    """Return the number of rows used by ``first`` samples, and how many of these rows are also used
    by ``second`` other samples. Assumes independent samples: two sets of a and b samples share U(a)
    + U(b) - U(a + b) rows, where U(n) is the number of distinct rows that n samples use.
    """
    known = [frequencies[name] for name in table.features if name in frequencies]
    if known:
        most = max(known, key=lambda field: field.curve.distinct)
        return most.overlap(first, second, per_sample / max(most.per_sample, 1e-9))
    curve = curve_of_table(table, frequencies)
    a, b = first * per_sample, second * per_sample
    return curve.touched(a), curve.touched(a) + curve.touched(b) - curve.touched(a + b)
