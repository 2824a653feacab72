"""Scores a split with a trained job.

Either rank 0 gets all scores, or each range of rows is scored on one rank, which gets the scores of
that range.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from itertools import chain
from typing import Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sbpflow.boxing.agreement import gather_values
from sbpflow.boxing.executor import Boxing
from sbpflow.errors import MESSAGE_ERRORS, ConfigError
from sbpflow.runtime.processes.background import in_background
from sbpflow.sbp.sbp import balanced_sizes
from sbpflow.training.batch import Batch, Loader
from sbpflow.training.evaluate import gather_rows
from sbpflow.training.trainer import Trainer

Floats = NDArray[np.float32]
Result = TypeVar("Result")
Block = TypeVar("Block")
logger = logging.getLogger(__name__)


def predictions(
    trainer: Trainer, loader: Loader, boxing: Boxing
) -> Iterator[tuple[Floats, Floats]]:
    """Yield (probabilities, labels) of each batch on rank 0, in the order of the split.

    Every rank must iterate; other ranks yield nothing. The logits are the same as in an evaluation.
    """
    world = boxing.world
    for batch, logits in trainer.predict_all(loader.epoch(0)):
        part = torch.stack([logits, batch.labels.to(logits)], 1)
        rows = gather_rows(part, balanced_sizes(batch.batch_size, world.size), boxing)
        if rows is not None:
            logits, labels = rows.cpu().unbind(1)
            yield probabilities(logits.numpy()), labels.float().numpy()


class Range(Protocol):
    """A range of the split's rows, [start, stop)."""

    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...


class WindowLoader(Protocol):
    """The interface of a loader with random access, such as ``data.read.loader.RowLoader``."""

    def windows(self, windows: Sequence[tuple[int, int]], batch_size: int) -> Iterator[Batch]:
        """Yield a batch of this rank's rows for each of ``windows``; ``batch_size`` is the total
        number of rows on all ranks.
        """
        ...


def predict_ranges(
    trainer: Trainer,
    loader: WindowLoader,
    boxing: Boxing,
    todo: Sequence[Range],
    batch_size: int,
    num_rows: int,
) -> Iterator[tuple[int, Floats, Floats]]:
    """Score each range of rows on one rank; yield this rank's (index, probabilities, labels).

    Every rank must iterate and pass the same ``todo``. In each step, each rank scores an
    equal part of ``batch_size`` rows, but at most ``num_rows`` (the rows of the split). If a rank's
    part would extend beyond the end of its range, the part is shifted back, and the repeated rows
    are dropped.
    Matrix shapes, and therefore the exact bits of the scores, do not depend on which ranges remain.
    """
    size, rank = boxing.world.size, boxing.world.rank
    part = min(batch_size // size, num_rows)
    for first in range(0, len(todo), size):
        together = todo[first : first + size]
        mine = together[min(rank, len(together) - 1)]
        num_steps = max(-(-(each.stop - each.start) // part) for each in together)
        wanted = [mine.start + step * part for step in range(num_steps)]
        starts = [max(0, min(start, mine.stop - part)) for start in wanted]
        batches = loader.windows([(start, start + part) for start in starts], part * size)
        logits, labels = list[Tensor](), list[Tensor]()
        for start, moved, batch in zip(wanted, starts, batches, strict=True):
            values = trainer.predict(batch)
            if rank < len(together):
                own = slice(start - moved, max(start - moved, mine.stop - moved))
                logits.append(values[own].cpu())
                labels.append(batch.labels[own].cpu())
        if rank < len(together):
            yield (
                first + rank,
                probabilities(torch.cat(logits).numpy()),
                torch.cat(labels).float().numpy(),
            )


def unfinished(
    boxing: Boxing, every: Sequence[Block], is_finished: Callable[[Block], bool]
) -> list[Block]:
    """On every rank, return all unfinished blocks; each rank checks only some of the blocks."""
    numbers = range(boxing.world.rank, len(every), boxing.world.size)
    left = together(boxing, lambda: [n for n in numbers if not is_finished(every[n])])
    numbers_left = sorted(chain(*gather_values(boxing, left)))
    if len(numbers_left) < len(every):
        done = len(every) - len(numbers_left)
        logger.info("%d of %d blocks are already finished", done, len(every))
    return [every[number] for number in numbers_left]


def answer_of_rank_0(boxing: Boxing, question: Callable[[], bool]) -> bool:
    """Call ``question`` on rank 0; return its result on every rank."""
    return bool(gather_values(boxing, on_rank_0(boxing, question))[0])


def probabilities(logits: NDArray[np.floating]) -> Floats:
    """Return sigmoids, computed in float64 so that the values do not depend on the batch size.

    torch's float32 sigmoid rounds differently in the vectorized part of an array and in its
    remainder.
    """
    # For a large negative logit, exp overflows to inf, and 1 / inf is 0.
    with np.errstate(over="ignore"):
        return (1.0 / (1.0 + np.exp(-logits.astype(np.float64)))).astype(np.float32)


def on_rank_0(boxing: Boxing, work: Callable[[], Result], *, ask_s: float = 2.0) -> Result | None:
    """Run ``work`` on rank 0 only, with the guarantees of ``together``.

    Returns the result on rank 0 and None elsewhere.
    """
    return together(boxing, work if boxing.world.rank == 0 else lambda: None, ask_s=ask_s)


def together(boxing: Boxing, work: Callable[[], Result], *, ask_s: float = 2.0) -> Result:
    """Run ``work`` on every rank and return its result.

    Every rank must call this function. The ranks exchange a message every ``ask_s`` seconds, so
    that collectives do not time out during long work. If ``work`` fails on a rank because of a user
    error, the other ranks raise a ConfigError with its message.
    """
    if boxing.world.size == 1:
        return work()
    attempt = in_background(work, "work")
    while True:
        wait([attempt], ask_s)
        is_done = attempt.done()
        error = ""
        if is_done and isinstance(attempt.exception(), MESSAGE_ERRORS):
            error = str(attempt.exception())
        reports = gather_values(boxing, (is_done, error))
        if is_done and attempt.exception() is not None:
            return attempt.result()  # raises the error of ``work``
        if errors := [error for _, error in reports if error]:
            raise ConfigError(errors[0])
        if all(done for done, _ in reports):
            return attempt.result()
