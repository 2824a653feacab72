"""Reports metrics of this rank's caches for each log interval."""

from sbpflow.embedding.cache.mover import CacheCounts
from sbpflow.training.trainer import Trainer


class CacheWatch:
    """Averages this rank's cache metrics over the steps of each log interval."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._step = trainer, trainer.num_steps
        self._last = trainer.embeddings.cache_counts() or CacheCounts()

    def figures(self, step: int) -> dict[str, float]:
        """Return the mean numbers of fetched, new (never written), and written rows, and the mean
        ms of waiting, per step since the last call. Return an empty dict if this rank has no cached
        tables.
        """
        counts = self._trainer.embeddings.cache_counts()
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
