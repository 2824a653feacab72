"""Predicts a split with a trained job, batch by batch, and gathers the results on rank 0."""

from collections.abc import Callable, Iterator
from concurrent.futures import wait
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from sbpflow.boxing.agreement import gather_facts
from sbpflow.boxing.executor import Boxing
from sbpflow.errors import MESSAGE_ERRORS, ConfigError
from sbpflow.runtime.processes.background import in_background
from sbpflow.sbp.sbp import balanced_sizes
from sbpflow.training.batch import Loader
from sbpflow.training.evaluate import gather_rows
from sbpflow.training.trainer import Trainer

Floats = NDArray[np.float32]
Result = TypeVar("Result")


def predictions(
    trainer: Trainer, loader: Loader, boxing: Boxing
) -> Iterator[tuple[Floats, Floats]]:
    """Yield (probabilities, labels) of each batch on rank 0, in the order of the split.

    Every rank must iterate; other ranks yield nothing. An evaluation computes the same logits.
    """
    world = boxing.world
    for batch, logits in trainer.predict_all(loader.epoch(0)):
        part = torch.stack([logits, batch.labels.to(logits)], 1)
        rows = gather_rows(part, balanced_sizes(batch.batch_size, world.size), boxing)
        if rows is not None:
            logits, labels = rows.cpu().unbind(1)
            yield probabilities(logits.numpy()), labels.float().numpy()


def probabilities(logits: NDArray[np.floating]) -> Floats:
    """Return the sigmoids, computed in float64 so that they do not depend on the batch size.

    torch's float32 sigmoid rounds an array's vectorized part and its remainder differently.
    """
    with np.errstate(over="ignore"):  # a large negative logit overflows exp; 1 / inf is 0
        return (1.0 / (1.0 + np.exp(-logits.astype(np.float64)))).astype(np.float32)


def on_rank_0(boxing: Boxing, work: Callable[[], Result], *, ask_s: float = 2.0) -> Result | None:
    """Run ``work`` on rank 0 and return its result there; None on the other ranks.

    Every rank must call this function. Rank 0 reports to the others every ``ask_s`` seconds, so
    that collectives do not time out during long work. All ranks raise the errors of
    ``work`` that are a user's mistakes.
    """
    if boxing.world.size == 1:
        return work()
    attempt = in_background(work, "rank 0's work") if boxing.world.rank == 0 else None
    while True:
        report = {"state": "done", "error": ""}
        if attempt is not None:
            wait([attempt], ask_s)
            report["state"] = "done" if attempt.done() else "busy"
            if attempt.done() and isinstance(attempt.exception(), MESSAGE_ERRORS):
                report["error"] = str(attempt.exception())
        report = gather_facts(boxing, report)[0]
        if attempt is not None and report["state"] == "done":
            return attempt.result()
        if report["error"]:
            raise ConfigError(report["error"])
        if report["state"] == "done":
            return None
