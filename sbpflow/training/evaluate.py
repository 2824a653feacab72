"""Metrics over a whole split: every rank predicts its rows, rank 0 sees them all.

Up to a stated number of rows they are brought together before anything is computed, so the figures
do not depend on the number of ranks. Of more rows, counts and sums are added up over the ranks.
"""

import difflib
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from sbpflow.boxing.executor import Boxing
from sbpflow.boxing.plan import plan_boxing
from sbpflow.embedding.ids.batch_ids import BatchIds
from sbpflow.embedding.plan.embedding_plan import EmbeddingPlan
from sbpflow.errors import ConfigError
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Broadcast, Split, balanced_sizes
from sbpflow.training.batch import Batch, Loader
from sbpflow.training.histogram_auc import ScoreHistogram
from sbpflow.training.metrics import Evaluation, Slice, evaluate, slice_by
from sbpflow.training.trainer import Trainer

CHANNEL = "control"
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreOptions:
    """How a split is scored: exactly up to ``exact_rows``, at most ``max_rows`` of it (whole
    batches, the first that reach it), and by the values of ``slices``, {name: column of ids}.
    """

    exact_rows: int = 20_000_000
    max_rows: int | None = None
    slices: Mapping[str, int] = field(default_factory=dict[str, int])


@dataclass(slots=True)
class _Rows:
    """This rank's rows, all ranks' sizes; counts in their place once there are too many."""

    boxing: Boxing
    options: ScoreOptions
    scores: list[Tensor] = field(default_factory=list[Tensor])  # [rows, 2]: logits, labels
    beside: list[Tensor] = field(default_factory=list[Tensor])  # [rows, groups and slices] int64
    sizes: list[int] = field(default_factory=list[int])
    total: int = 0
    grouped: bool = False
    counted: ScoreHistogram | None = None

    def add(self, logits: Tensor, batch: Batch) -> None:
        self.total += batch.batch_size
        self.scores.append(torch.stack([logits, batch.labels.to(logits)], 1))
        if self.counted is None:
            if beside := self._beside(batch):
                self.beside.append(torch.stack(beside, 1))
            own = balanced_sizes(batch.batch_size, self.boxing.world.size)
            self.sizes = [a + b for a, b in zip(self.sizes or [0] * len(own), own, strict=True)]
        if self.total > self.options.exact_rows:
            self._count()

    def _beside(self, batch: Batch) -> list[Tensor]:
        columns: Mapping[str, Tensor] = getattr(batch, "columns", {})
        self.grouped = "group" in columns
        found = [columns["group"]] if self.grouped else []
        ids = batch.ids.matrix if isinstance(batch.ids, BatchIds) else batch.ids
        found += [ids[:, column].to(torch.int64) for column in self.options.slices.values()]
        return found

    def _count(self) -> None:
        if self.counted is None:
            self.counted = ScoreHistogram(self.boxing.world.device)
            self.beside = []
        for part in self.scores:
            self.counted.add(*part.unbind(1))
        self.scores = []

    def evaluation(self) -> Evaluation | None:
        if self.counted is not None:
            return self._of_counts(self.counted)
        sizes = tuple(self.sizes)
        rows = gather_rows(torch.cat(self.scores), sizes, self.boxing)
        beside = gather_rows(torch.cat(self.beside), sizes, self.boxing) if self.beside else None
        if rows is None:
            return None
        logits, labels = rows.cpu().unbind(1)
        columns = [] if beside is None else list(beside.cpu().unbind(1))
        group = columns.pop(0) if self.grouped else None
        slices: list[Slice] = []
        for name, values in zip(self.options.slices, columns, strict=True):
            slices += slice_by(logits, labels, values, name)
        return replace(evaluate(logits, labels, group), slices=tuple(slices))

    def _of_counts(self, counted: ScoreHistogram) -> Evaluation | None:
        counted.over_ranks(self.boxing)
        if self.boxing.world.rank != 0:
            return None
        if self.grouped or self.options.slices:
            logger.warning(
                "%d rows are more than train.exact_auc_rows %d: no GAUC and no slices, which are "
                "of gathered rows",
                self.total,
                self.options.exact_rows,
            )
        return counted.evaluation()


def slice_columns(names: Sequence[str], plan: EmbeddingPlan) -> dict[str, int]:
    """The column of a batch's ids that each of ``train.slices`` is.

    ConfigError for what is no field of one id per row, naming those there are.
    """
    if not names:
        return {}
    first = {
        feature.name: column
        for feature, column in zip(plan.features, plan.ids.first, strict=True)
        if column is not None and feature.hotness == 1
    }
    for name in names:
        if name not in first:
            near = difflib.get_close_matches(name, first, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(
                f"train.slices: {name} is no field of one id per row; the data has "
                f"{', '.join(first) or 'none'}{hint}"
            )
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise ConfigError(f"train.slices: {twice[0]} is there twice; remove one of them")
    return {name: first[name] for name in names}


def score_split(
    trainer: Trainer, loader: Loader, boxing: Boxing, options: ScoreOptions | None = None
) -> Evaluation | None:
    """Score the split; the result is on rank 0, ``None`` elsewhere.

    GAUC is part of it where batches have ``columns["group"]`` [local batch] int64.
    """
    options = options or ScoreOptions()
    rows = _Rows(boxing, options)
    for batch in loader.epoch(0):
        rows.add(trainer.predict(batch), batch)
        if options.max_rows is not None and rows.total >= options.max_rows:
            break
    return rows.evaluation()


def gather_rows(part: Tensor, sizes: tuple[int, ...], boxing: Boxing) -> Tensor | None:
    """[sum(sizes), columns] on rank 0 from every rank's [sizes[rank], columns]."""
    world = boxing.world
    device_type = world.device.type
    steps = plan_boxing(
        Layout(Placement.line(device_type, world.size), (Split(0, sizes),)),
        Layout(Placement.of(device_type, [0]), (Broadcast(),)),
        (sum(sizes), part.shape[1]),
        part.dtype,
        id="evaluate/fwd/rows",
        backend=world.backend,
    )
    return boxing.run(steps, part, CHANNEL)
