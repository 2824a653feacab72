"""Counts the row transfers that early requests and copied hot rows take off the critical path.

    python -m benchmarks.early_rows [--input train.txt]

The program only counts the rows of shuffled batches; it does not start any ranks. Every rank
requests the distinct rows of its samples (the ``unique`` exchange). A request is early if no rank
used the row in the previous batch, and critical otherwise. ``predicted`` is the prediction of
``explain`` from the statistics of the set. Hot rows are the most frequent rows in the set; every
rank stores them, and their gradients are all-reduced in every step, because nearly every batch uses
them. All counts are numbers of rows that all ranks together send per batch. ``exposed`` counts the
rows whose transfer cannot overlap other work: critical rows and gradients. ``deferred`` is
``exposed`` with late gradients and without hot rows: gradients of rows that the next batch does not
use arrive one batch late, and rows that either of the two previous batches used are critical.

The program counts Zipf ids and, with --input or a file or prepared set in SBPFLOW_CRITEO_ROWS, real
rows.
"""

import argparse
import os
from collections.abc import Sequence

import numpy as np

from benchmarks.cache import generated_rows, genuine_rows, prepared
from benchmarks.cache_policies import Array
from benchmarks.click_model import Shape
from benchmarks.record import Results
from sbpflow.embedding.plan.id_statistics import IdFrequencies

RANKS = (2, 4, 8)
HOT = (0, 1024, 4096, 16_384)
BATCH = 8192


def counts_of(batches: Sequence[Array], sizes: Sequence[int]) -> list[Array]:
    """Return how often each row of each table is looked up."""
    counts = np.bincount(np.concatenate([batch.ravel() for batch in batches]), minlength=sum(sizes))
    return np.split(counts, np.cumsum(sizes)[:-1])


def count(batches: Sequence[Array], hot: Array, size: int) -> dict[str, float]:
    """Return the mean number of rows that all ranks together send per batch; ``hot`` (bool [rows])
    marks hot rows.
    """
    names = ("early", "critical", "gradients", "hot", "deferred")
    totals: dict[str, float] = dict.fromkeys(names, 0.0)
    used, used_before = np.zeros(hot.size, bool), np.zeros(hot.size, bool)
    remote = (size - 1) / size  # share of the requests that go to other ranks
    last: list[Array] = []  # the requests of the previous batch
    for place, batch in enumerate(batches):
        wanted = [np.unique(part) for part in np.array_split(batch, size)]
        cold = [rows[~hot[rows]] for rows in wanted]
        now = np.zeros(hot.size, bool)
        now[batch] = True
        if place > 1:
            critical = sum(int(used[rows].sum()) for rows in cold)
            requests = sum(rows.size for rows in cold)
            rows_late = sum(int((used | used_before)[rows].sum()) for rows in cold)
            totals["deferred"] += remote * (rows_late + sum(int(now[rows].sum()) for rows in last))
            touched = np.unique(np.concatenate([rows[hot[rows]] for rows in wanted])).size
            totals["critical"] += remote * critical
            totals["early"] += remote * (requests - critical)
            totals["gradients"] += remote * requests
            totals["hot"] += 2 * (size - 1) * touched  # a ring all-reduce for the hot rows
        last, used, used_before = cold, now, used
    means = {name: value / (len(batches) - 2) for name, value in totals.items()}
    return {**means, "exposed": means["critical"] + means["gradients"] + means["hot"]}


def predicted(counts: Sequence[Array], size: int) -> float:
    """Return the expected number of critical rows, as ``run/planning/early_rows.py`` computes
    it.
    """
    critical = 0.0
    for field in counts:
        # Group rows by their number of lookups, in bins bounded by powers of two, as in the
        # statistics of a prepared set.
        bins = np.frexp(field[field > 0])[1]
        rows, lookups = np.bincount(bins), np.bincount(bins, weights=field[field > 0])
        pairs = tuple((int(n), int(total)) for n, total in zip(rows, lookups, strict=True))
        critical += IdFrequencies(pairs, 1.0).overlap(BATCH / size, BATCH)[1]
    return (size - 1) * critical


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--input", default=os.environ.get("SBPFLOW_CRITEO_ROWS"))
    args = parser.parse_args()
    results = Results("early_rows")
    with prepared(args.input) as folder:
        kinds = {"Zipf 1.2": generated_rows(Shape(rows_per_rank=BATCH, num_batches=12))}
        if folder is not None:
            kinds["genuine"] = genuine_rows(folder, BATCH)
    for ids, (batches, sizes) in kinds.items():
        counts = counts_of(batches, sizes)
        by_row = np.concatenate(counts)
        order = np.argsort(-by_row, kind="stable")
        for size in RANKS:
            plain = None
            for num_hot in HOT:
                hot = np.zeros(by_row.size, bool)
                hot[order[:num_hot]] = True
                rows = count(batches, hot, size)
                plain = plain or rows
                requests = plain["early"] + plain["critical"]
                results.add(
                    benchmark="early_rows",
                    ids=ids,
                    ranks=size,
                    batch=BATCH,
                    batches=len(batches) - 2,
                    hot_rows=num_hot,
                    **{name: round(value) for name, value in rows.items()},
                    critical_share=round(rows["critical"] / requests, 3),
                    total=round((rows["early"] + rows["exposed"]) / (2 * requests), 3),
                    exposed_share=round(rows["exposed"] / plain["exposed"], 3),
                    **({} if num_hot else {"predicted": round(predicted(counts, size))}),
                )


if __name__ == "__main__":
    main()
