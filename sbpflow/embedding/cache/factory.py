"""Creates the store of each stack of a run, on the device or cached in slots."""

from collections.abc import Callable
from pathlib import Path

import torch

from sbpflow.embedding.cache.records import RECORDS, RecordLayout, RecordRequest, RecordStore
from sbpflow.embedding.cache.store import CachedStore
from sbpflow.embedding.storage.store import RowStore, StoreFactory, StoreRequest, device_store


def stores_of(folder_of: Callable[[str], Path], device: torch.device) -> StoreFactory:
    """Return a factory that follows ``TableConfig.storage``; files go to ``folder_of(key)``."""

    def make(request: StoreRequest) -> RowStore:
        storage = request.shards[0].table.storage if request.shards else None
        if storage is None:
            return device_store(request)

        def records(num_rows: int, layout: RecordLayout) -> RecordStore:
            folder = folder_of(storage.key)
            request = RecordRequest(num_rows, layout, folder, storage.key, device)
            return RECORDS[storage.kind](request)

        slots = storage.num_slots(request.num_rows)
        return CachedStore(request, records, slots, key=storage.key)

    return make
