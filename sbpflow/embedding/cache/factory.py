"""Creates the store of each stack in a run, either with all rows on the device or with a cache."""

from collections.abc import Callable
from itertools import count

import torch

from sbpflow.embedding.cache.records import RECORDS, RecordLayout, RecordRequest, RecordStore
from sbpflow.embedding.cache.remote_records import Servers
from sbpflow.embedding.cache.store import CachedStore
from sbpflow.embedding.plan.row_storage import StorageRule
from sbpflow.embedding.storage.store import RowStore, StoreFactory, StoreRequest, device_store


def stores_of(
    rule_of: Callable[[str], StorageRule],
    device: torch.device,
    servers: Servers | None = None,
    num_threads: int = 1,
) -> StoreFactory:
    """Return a factory that creates the kind of store that ``TableConfig.storage`` requests, by
    the storage rule ``rule_of(key)``. Each cache is planned by ``num_threads`` threads.

    See ``RecordRequest`` for ``servers``.
    """
    numbers = count()

    def make(request: StoreRequest) -> RowStore:
        storage = request.shards[0].table.storage if request.shards else None
        if storage is None:
            return device_store(request)

        def records(num_rows: int, layout: RecordLayout) -> RecordStore:
            rule = rule_of(storage.key)
            new = RecordRequest(num_rows, layout, rule, storage.key, device, next(numbers), servers)
            return RECORDS[storage.kind](new)

        slots = storage.num_slots(request.num_rows)
        return CachedStore(request, records, slots, key=storage.key, num_threads=num_threads)

    return make
