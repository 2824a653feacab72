"""Metrics over a whole split: every rank predicts its rows, rank 0 sees them all.

The rows of all ranks are brought together before anything is computed, so the figures do not
depend on the number of ranks.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from sbpflow.boxing.executor import Boxing
from sbpflow.boxing.plan import plan_boxing
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Broadcast, Split, balanced_sizes
from sbpflow.training.metrics import Evaluation, evaluate
from sbpflow.training.trainer import Loader, Trainer

CHANNEL = "control"


def score_split(trainer: Trainer, loader: Loader, boxing: Boxing) -> Evaluation | None:
    """Score the whole split; the result is on rank 0, ``None`` elsewhere.

    GAUC is part of it where batches have ``columns["group"]`` [local batch] int64.
    """
    world = boxing.world
    parts: list[Tensor] = []
    groups: list[Tensor] = []
    sizes = [0] * world.size
    for batch in loader.epoch(0):
        logits = trainer.predict(batch)
        parts.append(torch.stack([logits, batch.labels.to(logits)], 1))
        columns: Mapping[str, Tensor] = getattr(batch, "columns", {})
        if "group" in columns:
            groups.append(columns["group"].unsqueeze(1))
        for rank, size in enumerate(balanced_sizes(batch.num_rows, world.size)):
            sizes[rank] += size
    rows = gather_rows(torch.cat(parts), tuple(sizes), boxing)
    group = gather_rows(torch.cat(groups), tuple(sizes), boxing) if groups else None
    if rows is None:
        return None
    logits, labels = rows.cpu().unbind(1)
    return evaluate(logits, labels, group)


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
