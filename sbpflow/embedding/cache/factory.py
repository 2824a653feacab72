"""Creates the store of each stack in a run, either with all rows on the device or with a cache."""

from collections.abc import Callable
from itertools import count
from pathlib import Path

import torch

from sbpflow.embedding.cache.records import RECORDS, RecordLayout, RecordRequest, RecordStore
from sbpflow.embedding.cache.remote_records import Servers
from sbpflow.embedding.cache.store import CachedStore
from sbpflow.embedding.storage.store import RowStore, StoreFactory, StoreRequest, device_store


def stores_of(
    folder_of: Callable[[str], Path],
    device: torch.device,
    servers: Servers | None = None,
    num_threads: int = 1,
) -> StoreFactory:
    """Return a factory that creates the kind of store that ``TableConfig.storage`` requests; files
    go to ``folder_of(key)``, and each cache is planned by ``num_threads`` threads.

    See ``RecordRequest`` for ``servers``.
    """
    numbers = count()

    def make(request: StoreRequest) -> RowStore:
        storage = request.shards[0].table.storage if request.shards else None
        if storage is None:
            return device_store(request)

        def records(num_rows: int, layout: RecordLayout) -> RecordStore:
            folder = folder_of(storage.key)
            new = RecordRequest(
                num_rows, layout, folder, storage.key, device, next(numbers), servers
            )
            return RECORDS[storage.kind](new)

        slots = storage.num_slots(request.num_rows)
        return CachedStore(request, records, slots, key=storage.key, num_threads=num_threads)

    return make
