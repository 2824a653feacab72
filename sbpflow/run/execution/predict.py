"""Predictions of a trained job over a split, batch by batch, brought together on rank 0."""

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
    """(probabilities, labels) of each batch in the order of the split, on rank 0; every rank calls
    it, and the others get nothing. The logits are those that an evaluation sees.
    """
    world = boxing.world
    for batch in loader.epoch(0):
        logits = trainer.predict(batch)
        part = torch.stack([logits, batch.labels.to(logits)], 1)
        rows = gather_rows(part, balanced_sizes(batch.batch_size, world.size), boxing)
        if rows is not None:
            found, labels = rows.cpu().unbind(1)
            yield probabilities(found.numpy()), labels.float().numpy()


def probabilities(logits: NDArray[np.floating]) -> Floats:
    """Sigmoids by way of float64: torch's float32 ones differ in the last bit by their place."""
    with np.errstate(over="ignore"):  # exp of a large negative logit's opposite: 1 / inf is 0
        return (1.0 / (1.0 + np.exp(-logits.astype(np.float64)))).astype(np.float32)


def on_rank_0(boxing: Boxing, work: Callable[[], Result], *, ask_s: float = 2.0) -> Result | None:
    """What ``work`` returns, on rank 0, which alone does it, however long; None elsewhere.

    Every rank calls it. The others hear every ``ask_s`` that it goes on, so that no timeout of a
    collective counts its time; a mistake of the user that it raises is raised on all.
    """
    if boxing.world.size == 1:
        return work()
    attempt = in_background(work, "rank 0's work") if boxing.world.rank == 0 else None
    while True:
        said = {"state": "done", "error": ""}
        if attempt is not None:
            wait([attempt], ask_s)
            said["state"] = "done" if attempt.done() else "busy"
            if attempt.done() and isinstance(attempt.exception(), MESSAGE_ERRORS):
                said["error"] = str(attempt.exception())
        heard = gather_facts(boxing, said)[0]
        if attempt is not None and heard["state"] == "done":
            return attempt.result()
        if heard["error"]:
            raise ConfigError(heard["error"])
        if heard["state"] == "done":
            return None
