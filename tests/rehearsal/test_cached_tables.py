"""Tests cached tables on rehearsed devices: the streams, events, and memory that move rows."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from sbpflow.embedding.cache.records import file_records, host_records
from sbpflow.embedding.cache.store import CachedStore
from sbpflow.embedding.rules.registry import sparse_optimizer
from sbpflow.embedding.storage.store import device_store
from tests.embedding.test_mixes import UNIQUE_COLUMNS, mix_of
from tests.embedding.test_stores import AHEAD, train_ahead


def both_ways(world, mix, slots, folder):
    """Train with all rows on the device, and with a cache of few slots; all values must be
    equal."""
    made = []

    def stores(request):
        if not request.num_rows:
            return device_store(request)
        records = partial(host_records, device=world.device)
        if folder is not None:
            records = partial(file_records, folder=folder, key="key")
        made.append(CachedStore(request, records, min(slots, request.num_rows)))
        return made[-1]

    plain, rows = train_ahead(world, mix, device_store, 0)
    found, held = train_ahead(world, mix, stores, AHEAD)
    for one, other in zip(plain, found, strict=True):
        assert torch.equal(one, other)
    for one, other in zip(rows, held, strict=True):
        assert all((a == b).all() for a, b in zip(one[1:], other[1:], strict=True)), one[0]
    for store in made:
        store._mover.wait_idle()
    return sum(store.counts.written for store in made)


QUICK = {("unique", "host")}


@pytest.mark.parametrize(
    ("exchange", "kind"),
    [
        pytest.param(exchange, kind, marks=[pytest.mark.slow] * ((exchange, kind) not in QUICK))
        for exchange in ("columns", "reduce", "unique", UNIQUE_COLUMNS)
        for kind in ("host", "file")
    ],
)
def test_cached_tables_equal_tables_on_the_device(rehearsed_ranks, tmp_path, exchange, kind):
    rule = sparse_optimizer("rowwise_adagrad", lr=0.1)
    mix = mix_of(exchange, 8, rule, accumulate=2, batch_sizes=(2, 1, 0, 2, 1) * 4)
    (output,) = mix.outputs
    tables = tuple(replace(table, num_rows=10 * table.num_rows) for table in output.tables)
    mix = replace(mix, outputs=(replace(output, tables=tables),))
    folder = None if kind == "host" else Path(tmp_path)
    assert sum(rehearsed_ranks(2, both_ways, mix, 25, folder)) > 20
