"""The data plane: prepare or generate a set, and feed its rows to ranks.

Importing this package imports neither DALI nor Polars; the parts that need them say so when used.
"""

from data.loader import Batch, Loader, RowLoader, open_loader
from data.manifest import Bayes, Manifest, load_manifest
from data.schema import Field

__all__ = [
    "Batch",
    "Bayes",
    "Field",
    "Loader",
    "Manifest",
    "RowLoader",
    "load_manifest",
    "open_loader",
]
