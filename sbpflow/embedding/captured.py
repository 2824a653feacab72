"""Decides whether a CUDA graph can contain a collection's work, from reading rows to updating
them.
"""

from collections.abc import Iterable

from sbpflow.embedding.plan.table_batch import TableBatch
from sbpflow.embedding.storage.store import DeviceStore, RowStore
from sbpflow.embedding.storage.torch_storage import TorchStorage


def why_not_captured(stores: Iterable[tuple[TableBatch, RowStore]], num_ranks: int) -> str:
    """Return why a CUDA graph cannot contain the moves that use these stores, or "" if it can."""
    if num_ranks > 1:
        return "vectors and gradients are exchanged between ranks"
    for stack, store in stores:
        table = stack.tables[0].name
        if stack.grows:
            return f"table {table} grows, so the host initializes rows in every step"
        if stack.ragged:
            return f"table {table} has lists of ids, whose total length varies between batches"
        if not isinstance(store, DeviceStore):
            return f"table {table} has rows that are not in device memory"
        if not isinstance(store.kernel, TorchStorage):
            return f"table {table}: kernel {store.kernel.name} reads its learning rate on the host"
    return ""
