"""Creates the store of each stack of a run, on the device or cached in slots."""

from collections.abc import Callable
from pathlib import Path

import torch

from sbpflow.embedding.cache.records import RecordLayout, RecordStore, file_records, host_records
from sbpflow.embedding.cache.store import CachedStore
from sbpflow.embedding.plan.row_storage import RowStorage
from sbpflow.embedding.storage.store import RowStore, StoreFactory, StoreRequest, device_store


def stores_of(folder_of: Callable[[str], Path], device: torch.device) -> StoreFactory:
    """Return a factory that follows ``TableConfig.storage``; files go to ``folder_of(key)``."""

    def make(request: StoreRequest) -> RowStore:
        storage = request.shards[0].table.storage if request.shards else None
        if storage is None:
            return device_store(request)

        def records(num_rows: int, layout: RecordLayout) -> RecordStore:
            return _records(storage, num_rows, layout, folder_of(storage.key), device)

        slots = storage.num_slots(request.num_rows)
        return CachedStore(request, records, slots, key=storage.key)

    return make


def _records(
    storage: RowStorage, num_rows: int, layout: RecordLayout, folder: Path, device: torch.device
) -> RecordStore:
    if storage.kind == "host":
        return host_records(num_rows, layout, pinned=device.type == "cuda")
    return file_records(num_rows, layout, folder, storage.key)
