"""Reports metrics of this rank's caches for each log interval."""

from sbpflow.embedding.cache.mover import CacheCounts
from sbpflow.training.trainer import Trainer


class CacheWatch:
    """Averages cache metrics over the steps since the last call; has none if this rank has no
    cached tables.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._step = trainer, trainer.num_steps
        self._last = trainer.cache_counts() or CacheCounts()

    def figures(self, step: int) -> dict[str, float]:
        """Return the numbers of fetched, new (never written) and written rows, and the waiting
        time."""
        counts = self._trainer.cache_counts()
        steps, self._step = step - self._step, step
        if counts is None or not steps:
            return {}
        last, self._last = self._last, counts
        return {
            "cache_fetched": (counts.fetched - last.fetched) / steps,
            "cache_new": (counts.new - last.new) / steps,
            "cache_written": (counts.written - last.written) / steps,
            "cache_wait_ms": 1e3 * (counts.wait_s - last.wait_s) / steps,
        }
