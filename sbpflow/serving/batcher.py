"""Scores the rows of concurrent requests together, on the thread of the event loop. Rows for the
same model that arrive during one pass of the event loop are scored in one call, up to a limit.
While a batch is being computed, new requests wait in the sockets and form the next batch. A single
request is scored immediately, without a timer or a thread switch, and a busy worker forms large
batches.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from sbpflow.serving.bodies import Scores
from sbpflow.serving.encoder import Encoded
from sbpflow.serving.scorer import Model

_Waiting = tuple[Model, Encoded, "asyncio.Future[Scores]"]


class Batcher:
    """Scores encoded rows in batches of at most ``max_rows``; a larger request is a batch of its
    own.
    """

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._waiting: deque[_Waiting] = deque()

    def score(self, model: Model, rows: Encoded) -> "asyncio.Future[Scores]":
        """Return a future for the scores that ``model`` gives to ``rows``."""
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        if not self._waiting:
            loop.call_soon(self._run, loop)
        self._waiting.append((model, rows, future))
        return future

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        """Score one batch; the event loop sends its responses before the next batch."""
        batch = [self._waiting.popleft()]
        model, rows, _ = batch[0]
        room = self._max_rows - len(rows.ids)
        # All rows in a batch are scored by the same version of a model.
        while self._waiting and self._waiting[0][0] is model:
            room -= len(self._waiting[0][1].ids)
            if room < 0:
                break
            batch.append(self._waiting.popleft())
        if self._waiting:
            loop.call_soon(self._run, loop)
        _answer(model, batch)


def _answer(model: Model, batch: Sequence[_Waiting]) -> None:
    parts = [rows for _, rows, _ in batch]
    try:
        scores = model.score_encoded(parts[0] if len(parts) == 1 else joined(parts))
    except Exception as error:  # noqa: BLE001  (raised again in each request)
        for _, _, future in batch:
            if not future.done():
                future.set_exception(error)
        return
    ends = np.cumsum([0, *(len(rows.ids) for rows in parts)]).tolist()
    for (start, end), (_, _, future) in zip(pairwise(ends), batch, strict=True):
        if not future.done():  # a client that disconnects cancels its request
            future.set_result(scores[start:end])


def joined(parts: Sequence[Encoded]) -> Encoded:
    """Concatenate encoded rows without their counts of missing and unknown values."""
    bags = {
        name: tuple(map(np.concatenate, zip(*(part.bags[name] for part in parts), strict=True)))
        for name in parts[0].bags
    }
    ids, dense = np.concatenate([p.ids for p in parts]), np.concatenate([p.dense for p in parts])
    keys = {column: np.concatenate([p.keys[column] for p in parts]) for column in parts[0].keys}
    return Encoded(ids, dense, bags, keys=keys)
