"""Defines the group ``data.cache``: a local cache, on each host, for sets at URLs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from sbpflow.embedding.plan.row_storage import num_bytes_of
from sbpflow.errors import ConfigError
from sbpflow.runtime.fields.keys import Example, Key


@dataclass(frozen=True, kw_only=True, slots=True)
class DataCache:
    """Configures each host's cache for the files of sets at URLs."""

    dir: Annotated[
        Path | None,
        Example("/scratch/sets"),
        Key(
            "execution",
            "Folder on a local disk of each host for the files of sets at URLs. The default is "
            "sbpflow/sets in the user's cache folder.",
        ),
    ] = None
    size: Annotated[
        str, Key("execution", "Maximum size of data.cache.dir, such as 500 GB or 2 TB.")
    ] = "50 GB"

    def __post_init__(self) -> None:
        if self.num_bytes < 1:
            raise ConfigError(
                f"data.cache.size must be above 0, got {self.size!r}; for example, size: 500 GB"
            )

    @property
    def num_bytes(self) -> int:
        """Return the maximum size in bytes."""
        return num_bytes_of("data.cache.size", self.size, "size: 500 GB")
