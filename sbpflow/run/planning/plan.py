"""Defines ``RunPlan``, which contains all static properties of a run."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from sbpflow.boxing.plan import Conversion
from sbpflow.boxing.step import BoxingStep
from sbpflow.embedding.plan.embedding_plan import EmbeddingPlan
from sbpflow.embedding.plan.group_plan import ExchangeStep, Step
from sbpflow.embedding.plan.tables import TableLayout
from sbpflow.embedding.storage.choose import KernelChoice
from sbpflow.runtime.ranks.topology import Topology
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.sbp import balanced_sizes
from sbpflow.tensor.gradient_sync import GradientPlan
from sbpflow.training.step_schedule import (
    CLIP,
    COUNTED_IDS,
    COUNTS,
    DENSE_GRADIENTS,
    EARLY_VECTORS,
    FLAGS,
    IDS,
    LATE_GRADIENTS,
    ROW_GRADIENTS,
    VECTORS,
    StepSchedule,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseParameter:
    """A dense parameter; ``state_per_element`` is the number of optimizer values per element."""

    name: str
    shape: tuple[int, ...]
    layout: Layout
    dtype: torch.dtype
    state_per_element: int

    def num_elements(self, rank: int) -> int:
        shape = self.layout.part_shape(self.shape, rank)
        return 0 if shape is None else torch.Size(shape).numel()


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedPlan:
    """A plan that ``scheme: auto`` considered, with its price in milliseconds."""

    name: str
    ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyRows:
    """The early rows and late gradients of a group.

    ``reason`` says why the group sends no early rows, and ``late_reason`` says why it sends no late
    gradients; each is "" if the group does send them. The byte counts are expected values for a
    batch, summed over all ranks: rows sent early, rows sent in the step, gradients sent late, and
    gradients sent in the step. With late gradients, fewer rows can be sent early.
    """

    group: str
    reason: str
    early_bytes: int
    critical_bytes: int
    late_reason: str
    late_bytes: int
    urgent_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """All static properties of a run.

    ``dense_conversions`` are the conversions of the dense part for a batch of ``batch_size`` rows;
    ``dense_forward`` and ``dense_backward`` list the steps of these conversions that communicate,
    in order. ``clip`` lists the steps, if any, that sum the gradient norm over ranks.
    """

    embeddings: EmbeddingPlan
    layouts: Mapping[str, TableLayout]
    kernels: Mapping[str, KernelChoice]
    dense: tuple[DenseParameter, ...]
    dense_forward: tuple[BoxingStep, ...]
    dense_backward: tuple[BoxingStep, ...]
    dense_conversions: tuple[Conversion, ...]
    dense_gradients: GradientPlan
    clip: tuple[BoxingStep, ...]
    schedule: StepSchedule
    topology: Topology
    batch_size: int
    accumulate: int
    lookahead: int = 1  # Number of batches whose ids are exchanged ahead of training.
    early_rows: tuple[EarlyRows, ...] = ()  # One entry per group that could send early rows.
    # Set if ``parallel.scheme`` is auto; the first entry is this plan.
    priced: tuple[PricedPlan, ...] = ()
    # Exponents for ``costs.ids.click_curve`` by table, for tables with known id statistics.
    skew: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def world_size(self) -> int:
        return self.embeddings.world.size

    def steps(self) -> tuple[tuple[str, Step], ...]:
        """Return (phase, step) for one iteration of ``batch_size`` rows, in issue order.

        With overlap, ranks exchange a batch's ids during earlier iterations. The early rows
        that an iteration sends, and the flags that select them, belong to the next batch; the late
        gradients belong to the previous batch.
        """
        tables, rows = self.embeddings, self.batch_size
        update: tuple[tuple[str, Sequence[Step]], ...] = (
            ("clip", self.clip),
            ("update", tables.update_steps(self.accumulate * rows)),
        )
        if self.schedule.clips is CLIP:  # row updates do not wait for the gradient norm
            update = update[::-1]
        phases: tuple[tuple[str, Sequence[Step]], ...] = (
            ("ids", tables.ahead_steps(rows)),
            ("forward", (*tables.forward_steps(rows), *self.dense_forward)),
            ("backward", (*self.dense_backward, *tables.steps(rows, "gradients"))),
            ("backward", self.dense_gradients.steps),
            *update,
        )
        return tuple((phase, step) for phase, steps in phases for step in steps)

    def window_bytes(self) -> list[int]:
        """Return each rank's memory for the ids of the batches in the lookahead window.

        The result includes the ids of the rank's own samples and an upper bound on the received
        ids.
        """
        tables, rows = self.embeddings, self.batch_size
        steps = tables.ahead_steps(rows)
        bounds = sum(step.bound_bytes for step in steps if isinstance(step, ExchangeStep))
        sample = tables.ids.num_columns * tables.ids_dtype.itemsize
        by_rank: list[int] = []
        for rank, num_samples in enumerate(balanced_sizes(rows, self.world_size)):
            total = num_samples * sample + bounds
            for step in steps:
                if not isinstance(step, ExchangeStep):
                    part = step.dst.part_shape(step.shape, rank)
                    total += 0 if part is None else math.prod(part) * step.dtype.itemsize
            by_rank.append((1 + self.lookahead) * total)
        return by_rank

    def transfers(self) -> frozenset[str]:
        """Return the subset of ``step_schedule.TRANSFERS`` that a step of this run performs."""
        tables, rows = self.embeddings, self.batch_size
        counted = (*tables.steps(rows, "counts"), *tables.steps(rows, "ids"))
        by_kind: dict[str, Sequence[Step]] = {
            IDS: tables.id_steps(rows),
            COUNTS: (*tables.length_steps(rows), *counted),
            COUNTED_IDS: (*tables.list_steps(rows), *counted),
            FLAGS: tables.steps(rows, "flags"),
            EARLY_VECTORS: tables.steps(rows, "early vectors"),
            VECTORS: tables.forward_steps(rows),
            ROW_GRADIENTS: tables.steps(rows, "gradients"),
            LATE_GRADIENTS: tables.steps(rows, "late gradients"),
            DENSE_GRADIENTS: self.dense_gradients.steps,
        }
        return frozenset(
            kind
            for kind, steps in by_kind.items()
            if any(isinstance(step, ExchangeStep) or step.groups for step in steps)
        )
