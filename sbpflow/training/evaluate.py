"""Evaluates a whole split: every rank predicts its rows, and rank 0 gets the metrics.

If the split has at most ``exact_rows`` rows, rank 0 gathers all predictions first, so the metrics
do not depend on the number of ranks. For larger splits, the ranks' histograms and sums are added
up, and AUC is approximate. Metrics of groups and slices stay exact for larger splits, because
the ranks exchange rows by group.
"""

import difflib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from sbpflow.boxing.executor import Boxing
from sbpflow.boxing.plan import plan_boxing
from sbpflow.embedding.ids.batch_ids import BatchIds
from sbpflow.embedding.plan.embedding_plan import EmbeddingPlan
from sbpflow.errors import ConfigError, choices
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Broadcast, Split, balanced_sizes
from sbpflow.training.batch import Batch, Loader
from sbpflow.training.grouped_metrics import GroupSums
from sbpflow.training.histogram_auc import ScoreHistogram
from sbpflow.training.metrics import Evaluation, Slice, evaluate, slice_by
from sbpflow.training.trainer import Trainer

CHANNEL = "control"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreOptions:
    """Options of a scoring pass.

    * ``exact_rows``: the maximum number of rows that are gathered to compute exact metrics.
    * ``max_rows``: stop after the batch that reaches this number of rows.
    * ``slices``: the id columns ({name: column}) whose most frequent values are also scored
      separately.
    """

    exact_rows: int = 20_000_000
    max_rows: int | None = None
    slices: Mapping[str, int] = field(default_factory=dict[str, int])


@dataclass(slots=True)
class _Rows:
    """Collects this rank's rows and the number of rows of each rank.

    Beyond ``exact_rows`` rows, a histogram replaces the rows, but rows that groups or slices need
    are kept in host memory.
    """

    boxing: Boxing
    options: ScoreOptions
    scores: list[Tensor] = field(default_factory=list[Tensor])  # Logits and labels [rows, 2].
    keys: list[Tensor] = field(default_factory=list[Tensor])  # Group and slices, [rows, columns].
    # With a histogram: the rows that groups or slices need, in host memory.
    kept: list[Tensor] = field(default_factory=list[Tensor])
    sizes: list[int] = field(default_factory=list[int])
    total: int = 0
    grouped: bool = False
    histogram: ScoreHistogram | None = None

    def add(self, logits: Tensor, batch: Batch) -> None:
        self.total += batch.batch_size
        self.scores.append(torch.stack([logits, batch.labels.to(logits)], 1))
        if keys := self._keys_of(batch):
            self.keys.append(torch.stack(keys, 1))
        if self.histogram is None:
            own = balanced_sizes(batch.batch_size, self.boxing.world.size)
            self.sizes = [a + b for a, b in zip(self.sizes or [0] * len(own), own, strict=True)]
        if self.total > self.options.exact_rows:
            if self.histogram is None:
                self.histogram = ScoreHistogram(self.boxing.world.device)
                self.keys[:-1] = [part.cpu() for part in self.keys[:-1]]
            for part in self.scores:
                self.histogram.add(*part.unbind(1))
            if self.keys:
                self.kept += [part.cpu() for part in self.scores]
                self.keys[-1] = self.keys[-1].cpu()
            self.scores = []

    def _keys_of(self, batch: Batch) -> list[Tensor]:
        columns: Mapping[str, Tensor] = getattr(batch, "columns", {})
        self.grouped = "group" in columns
        keys = [columns["group"]] if self.grouped else []
        ids = batch.ids.matrix if isinstance(batch.ids, BatchIds) else batch.ids
        keys += [ids[:, column].to(torch.int64) for column in self.options.slices.values()]
        return [key.to(self.boxing.world.device) for key in keys]  # growing tables: from the host

    def evaluation(self) -> Evaluation | None:
        if self.histogram is not None:
            return self._from_histogram(self.histogram)
        sizes = tuple(self.sizes)
        rows = gather_rows(torch.cat(self.scores), sizes, self.boxing)
        keys = gather_rows(torch.cat(self.keys), sizes, self.boxing) if self.keys else None
        if rows is None:
            return None
        logits, labels = rows.cpu().unbind(1)
        columns = [] if keys is None else list(keys.cpu().unbind(1))
        group = columns.pop(0) if self.grouped else None
        slices: list[Slice] = []
        for name, values in zip(self.options.slices, columns, strict=True):
            slices += slice_by(logits, labels, values, name)
        return replace(evaluate(logits, labels, group), slices=tuple(slices))

    def _from_histogram(self, histogram: ScoreHistogram) -> Evaluation | None:
        histogram.over_ranks(self.boxing)
        metrics: dict[str, Any] = self._by_group() if self.kept and histogram.is_valid else {}
        return replace(histogram.evaluation(), **metrics) if self.boxing.world.rank == 0 else None

    def _by_group(self) -> dict[str, Any]:
        """Return the metrics of groups, and the slices; every rank must call this method."""
        rows, columns = torch.cat(self.kept), list(torch.cat(self.keys).unbind(1))
        metrics: dict[str, Any] = {}
        if self.grouped:
            metrics |= GroupSums(self.boxing, "group", columns.pop(0), rows).metrics()
        slices: list[Slice] = []
        for name, values in zip(self.options.slices, columns, strict=True):
            slices += GroupSums(self.boxing, name, values, rows).slices()
        return {**metrics, "slices": tuple(slices)}


def slice_columns(names: Sequence[str], plan: EmbeddingPlan) -> dict[str, int]:
    """Return the id column of each field in ``names``, which ``train.slices`` lists.

    Raises ConfigError if a name is listed twice, or is not a field with one id per row.
    """
    if not names:
        return {}
    columns = {
        feature.name: column
        for feature, column in zip(plan.features, plan.ids.first, strict=True)
        if column is not None and feature.hotness == 1
    }
    for name in names:
        if name not in columns:
            near = difflib.get_close_matches(name, columns, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(
                f"train.slices: {name} is not a field with one id per row; valid fields are "
                f"{choices(name, columns) or 'none'}{hint}"
            )
    if repeated := [name for name, count in Counter(names).items() if count > 1]:
        raise ConfigError(f"train.slices: {repeated[0]} is listed twice; list each field once")
    return {name: columns[name] for name in names}


def score_split(
    trainer: Trainer, loader: Loader, boxing: Boxing, options: ScoreOptions | None = None
) -> Evaluation | None:
    """Score the split; return the result on rank 0, and ``None`` on other ranks.

    The result includes metrics of groups if batches contain ``columns["group"]`` (int64 [local
    batch]).
    """
    options = options or ScoreOptions()
    rows = _Rows(boxing, options)
    for batch, logits in trainer.predict_all(_first(loader.epoch(0), options.max_rows)):
        rows.add(logits, batch)
    return rows.evaluation()


def _first(batches: Iterable[Batch], max_rows: int | None) -> Iterator[Batch]:
    """Yield batches until their total number of rows reaches ``max_rows``."""
    total = 0
    for batch in batches:
        yield batch
        total += batch.batch_size
        if max_rows is not None and total >= max_rows:
            return


def gather_rows(part: Tensor, sizes: tuple[int, ...], boxing: Boxing) -> Tensor | None:
    """Gather the rows of all ranks, [sizes[rank], columns] each, on rank 0."""
    world = boxing.world
    device_type = world.device.type
    steps = plan_boxing(
        Layout(Placement.line(device_type, world.size), (Split(0, sizes),)),
        Layout(Placement.of(device_type, [0]), (Broadcast(),)),
        (sum(sizes), part.shape[1]),
        part.dtype,
        id="evaluate/fwd/rows",
    )
    return boxing.run(steps, part, CHANNEL)
