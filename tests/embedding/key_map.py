"""Implements a map from addresses of keys to rows for tests with a Python dict."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from sbpflow.embedding.storage.keyed import KeyedStore
from sbpflow.embedding.storage.store import RowStore, StoreRequest, device_store
from tests.embedding.dict_store import DictStore


class DictMap:
    """A ``RowMap``."""

    def __init__(self) -> None:
        self.rows: dict[int, int] = {}

    def find(self, addresses: Tensor) -> Tensor:
        assert addresses.dtype == torch.int64
        return torch.tensor([self.rows.get(a, -1) for a in addresses.tolist()], dtype=torch.int64)

    def add(self, addresses: Tensor, rows: Tensor) -> None:
        new = dict(zip(addresses.tolist(), rows.tolist(), strict=True))
        assert len(new) == addresses.numel()
        assert not new.keys() & self.rows.keys()
        self.rows |= new

    def remove(self, addresses: Tensor) -> None:
        for address in addresses.tolist():
            del self.rows[address]


@dataclass
class KeyedStores:
    """Makes stores for tables with and without keys, on the device or with few ``slots``."""

    slots: int | None = None
    made: list[KeyedStore] = field(default_factory=list)

    def __call__(self, request: StoreRequest) -> RowStore:
        rows: RowStore = device_store(request)
        if self.slots is not None:
            rows = DictStore(request, min(self.slots, request.num_rows))
        if not any(shard.table.by_key for shard in request.shards):
            return rows
        self.made.append(KeyedStore(request, rows, DictMap()))
        return self.made[-1]
