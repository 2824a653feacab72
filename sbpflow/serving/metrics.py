"""Counts events of all worker processes in shared memory, and writes them in Prometheus' format.
Each worker writes to its own part of the memory, so no lock is needed. To answer a scrape, any
worker can add up the counts in all parts. A replacement worker continues the counts of its
predecessor, so counters never decrease.
"""

import mmap
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from sbpflow.runtime.files.prometheus import head, line
from sbpflow.serving.scores import count_values

STATUSES = (200, 400, 404, 405, 413, 415, 500, 503)
LATENCIES = (0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
SCORES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)
DIFFERENCES = (1e-6, 1e-4, 1e-3, 0.003, 0.01, 0.03, 0.1, 0.3)
_VERSION_BYTES = 80

Array = NDArray[np.float64]
# The name, help text, and type of each metric.
COUNTERS = {
    "rows": "Scored rows.",
    "deltas_applied": "Deltas applied by a worker.",
    "delta_errors": "Deltas and bundles that a worker rejected, such as damaged ones.",
    "reloads": "Bundles that a worker loaded while serving.",
    "shadow_rows": "Rows that were also scored by the shadow model.",
    "shadow_dropped": "Requests that the shadow model skipped because it had fallen behind.",
    "shadow_errors": "Requests for which the shadow model failed.",
}
HISTOGRAMS: dict[str, tuple[Sequence[float], str]] = {
    "request_seconds": (
        LATENCIES,
        "Seconds from receiving a request's headers to sending the response.",
    ),
    "score": (SCORES, "Scores."),
    "shadow_difference": (
        DIFFERENCES,
        "Absolute difference between the shadow model's scores and the served scores.",
    ),
}
_BOUNDS = {name: np.array(bounds) for name, (bounds, _) in HISTOGRAMS.items()}


class ModelCounts:
    """The counts of one worker for one model, and the version that the worker serves."""

    def __init__(self, columns: Sequence[str], cells: Array, version: NDArray[np.bytes_]) -> None:
        self.columns, self.cells, self._version = tuple(columns), cells, version
        place = 0

        def take(size: int) -> Array:
            nonlocal place
            place += size
            return cells[place - size : place]

        self.trained = take(1)  # seconds since 1970
        self.requests = take(len(STATUSES))
        self.counters = dict(
            zip(COUNTERS, np.split(take(len(COUNTERS)), len(COUNTERS)), strict=True)
        )
        self.histograms = {key: take(len(at) + 2) for key, (at, _) in HISTOGRAMS.items()}
        self._values = take(2 * len(columns)).reshape(2, len(columns))
        self.missing, self.unknown = self._values

    @staticmethod
    def size(num_columns: int) -> int:
        """Return the number of cells for the counts of a model with ``num_columns`` columns."""
        histograms = sum(len(bounds) + 2 for bounds, _ in HISTOGRAMS.values())
        return 1 + len(STATUSES) + len(COUNTERS) + histograms + 2 * num_columns

    def serve(self, version: str, trained: float) -> None:
        """Record the version that is now served, and the time of its values in seconds since
        1970.
        """
        self._version[0] = version.encode()[:_VERSION_BYTES]
        self.trained[0] = trained

    @property
    def version(self) -> str:
        """Return the version that the worker serves."""
        return bytes(self._version[0]).decode()

    def count(self, name: str, number: int = 1) -> None:
        """Add ``number`` to the counter ``name``."""
        self.counters[name][0] += number

    def values(self, names: Sequence[str], counts: NDArray[np.int64]) -> None:
        """Add the numbers of missing and of unknown values ([2, names]) of the columns ``names``.

        The memory has room only for ``columns``; other columns, which a bundle that was loaded
        later can have, are not counted.
        """
        if names == self.columns:
            self._values += counts
            return
        for name, numbers in zip(names, counts.T, strict=True):
            if name in self.columns:
                self._values[:, self.columns.index(name)] += numbers

    def answer(self, status: int, seconds: float) -> None:
        """Count an answered request."""
        self.requests[STATUSES.index(status)] += 1
        cells = self.histograms["request_seconds"]
        cells[bisect_left(LATENCIES, seconds)] += 1
        cells[-1] += seconds

    def observe(self, name: str, values: NDArray[np.float32]) -> None:
        """Add values to the histogram ``name``, whose last cell is the sum of all values."""
        count_values(values, _BOUNDS[name], self.histograms[name])


class Metrics:
    """The counts of all workers, in memory that must be allocated before the workers are forked."""

    def __init__(self, columns: Mapping[str, Sequence[str]], num_workers: int) -> None:
        self._columns = {"": (), **columns}  # "" stands for requests that name no known model
        sizes = [ModelCounts.size(len(names)) for names in self._columns.values()]
        self._starts = np.cumsum([0, *sizes]).tolist()
        width = self._starts[-1] * 8 + len(sizes) * _VERSION_BYTES
        width += -width % 64  # so that each cache line is written by only one process
        self._memory = mmap.mmap(-1, width * (num_workers + 1))
        shape = (num_workers + 1, width)
        self._bytes = np.frombuffer(self._memory, dtype=np.uint8).reshape(shape)
        self._restarts = self._bytes[-1, :8].view(np.float64)

    def worker(self, number: int) -> dict[str, ModelCounts]:
        """Return the counts that worker ``number`` writes, by model."""
        line = self._bytes[number]
        cells = line[: self._starts[-1] * 8].view(np.float64)
        versions = line[self._starts[-1] * 8 :][: len(self._columns) * _VERSION_BYTES]
        versions = versions.view(f"S{_VERSION_BYTES}")
        return {
            name: ModelCounts(
                columns, cells[self._starts[at] : self._starts[at + 1]], versions[at:]
            )
            for at, (name, columns) in enumerate(self._columns.items())
        }

    def restarted(self) -> None:
        """Count a worker that died and was replaced."""
        self._restarts[0] += 1

    def text(self, now: float) -> str:
        """Return all metrics in Prometheus' text format, version 0.0.4."""
        workers = [self.worker(number) for number in range(len(self._bytes) - 1)]
        sums = {
            name: ModelCounts(
                columns,
                np.sum([worker[name].cells for worker in workers], axis=0),
                np.zeros(1, dtype=f"S{_VERSION_BYTES}"),
            )
            for name, columns in self._columns.items()
        }
        models = {name: model for name, model in sums.items() if name}
        serving = {
            name: [worker[name] for worker in workers if worker[name].trained[0]] for name in models
        }
        lines = head("requests_total", "counter", "Answered requests by HTTP status.")
        lines += [
            line("requests_total", number, model=name, status=str(status))
            for name, model in sums.items()
            for status, number in zip(STATUSES, model.requests, strict=True)
            if number
        ]
        for counter, text in COUNTERS.items():
            lines += head(f"{counter}_total", "counter", text)
            lines += [
                line(f"{counter}_total", model.counters[counter][0], model=name)
                for name, model in models.items()
            ]
        for kind in ("unknown", "missing"):
            lines += head(f"{kind}_values_total", "counter", f"{kind.title()} values by column.")
            lines += [
                line(f"{kind}_values_total", number, model=name, column=column)
                for name, model in models.items()
                for column, number in zip(self._columns[name], getattr(model, kind), strict=True)
            ]
        for histogram, (bounds, text) in HISTOGRAMS.items():
            lines += head(histogram, "histogram", text)
            for name, model in models.items():
                lines += _histogram(histogram, name, bounds, model.histograms[histogram])
        lines += head("staleness_seconds", "gauge", "Age of the oldest weights being served.")
        lines += [
            line("staleness_seconds", now - min(one.trained[0] for one in served), model=name)
            for name, served in serving.items()
            if served
        ]
        lines += head("model_workers", "gauge", "Workers that serve a version of a model.")
        lines += [
            line("model_workers", number, model=name, version=version)
            for name, served in serving.items()
            for version, number in Counter(one.version for one in served).items()
        ]
        lines += head("worker_restarts_total", "counter", "Workers that died and were replaced.")
        lines.append(line("worker_restarts_total", self._restarts[0]))
        return "\n".join(lines) + "\n"


def _histogram(name: str, model: str, bounds: Sequence[float], cells: Array) -> list[str]:
    totals = np.cumsum(cells[:-1])
    edges = [*(f"{bound:g}" for bound in bounds), "+Inf"]
    lines = [
        line(f"{name}_bucket", total, model=model, le=edge)
        for edge, total in zip(edges, totals, strict=True)
    ]
    lines.append(line(f"{name}_sum", cells[-1], model=model))
    return [*lines, line(f"{name}_count", totals[-1], model=model)]
