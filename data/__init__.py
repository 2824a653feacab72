"""Prepare or generate a data set, and read its rows on all ranks. DALI, Polars, and torch are
imported on first use, so that commands that do not read batches start without torch.
"""

from typing import TYPE_CHECKING

from sbpflow.data.format.manifest import Bayes, Manifest, load_manifest
from sbpflow.data.format.schema import Field

if TYPE_CHECKING:
    from sbpflow.data.read.batch import Batch, Cursor
    from sbpflow.data.read.fields import fields_of
    from sbpflow.data.read.loader import RowLoader, open_loader

__all__ = [
    "Batch",
    "Bayes",
    "Cursor",
    "Field",
    "Manifest",
    "RowLoader",
    "fields_of",
    "load_manifest",
    "open_loader",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from sbpflow.data.read import batch, fields, loader

    return next(getattr(m, name) for m in (batch, fields, loader) if hasattr(m, name))
