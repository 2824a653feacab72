"""Defines the rules of ``parallel.storage``, for tables that do not keep all rows in device
memory."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from sbpflow.config.parse import Example
from sbpflow.embedding.plan.row_storage import Outside
from sbpflow.errors import ConfigError
from sbpflow.runtime.fields.keys import Key

_UNITS = {"MB": 10**6, "GB": 10**9, "TB": 10**12, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_CACHE = re.compile(rf"(\d+(?:\.\d+)?)\s*(%|{'|'.join(_UNITS)})")
_EXAMPLES = 'for example 10% or "4 GB"'


def num_bytes_of(key: str, text: str, example: str) -> int:
    """Return the bytes of a size with a unit; raise ConfigError with ``key`` for other text."""
    match = _CACHE.fullmatch(text.strip())
    if match is None or match[2] == "%":
        units = ", ".join(_UNITS)
        raise ConfigError(f"{key}: {text!r} is not a size in {units}; use, for example, {example}")
    return int(float(match[1]) * _UNITS[match[2]])


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageRule:
    """Sets the storage of the tables that a pattern matches."""

    kind: Annotated[
        Literal["device", Outside],
        Example("file"),
        Key(
            "execution", "Where all rows are stored. With a GPU, host is the memory of the machine."
        ),
    ]
    cache: Annotated[
        str | None,
        Example("10%"),
        Key(
            "execution",
            "Size of the cache on the device: a fraction of the rows, or bytes per rank if all "
            "ranks store the same number of rows.",
        ),
    ] = None
    path: Annotated[
        Path | None,
        Example("/scratch"),
        Key("execution", "Folder of the file. The default is run.dir."),
    ] = None

    def check(self, key: str) -> None:
        """Raise ConfigError if the keys contradict each other."""
        if self.path is not None and self.kind != "file":
            raise ConfigError(f"{key}.path: {self.path} with kind: {self.kind}; use kind: file")
        if self.kind == "device":
            if self.cache is not None:
                raise ConfigError(
                    f"{key}.cache: {self.cache} with kind: device, which stores all rows on the "
                    "device; remove cache, or use kind: file"
                )
            return
        if self.cache is None:
            raise ConfigError(f"{key}.cache: not given for kind: {self.kind}; {_EXAMPLES}")
        number, unit = self._parsed(key)
        if not 0 < number <= (100 if unit == "%" else float("inf")):
            raise ConfigError(
                f"{key}.cache: {self.cache} must be above 0 and at most 100%; {_EXAMPLES}"
            )

    def share(self, key: str, num_bytes: float) -> float:
        """Return the fraction of rows that the slots can contain; ``num_bytes`` is the size of all
        rows of a rank."""
        number, unit = self._parsed(key)
        return number / 100 if unit == "%" else min(1.0, number * _UNITS[unit] / num_bytes)

    def _parsed(self, key: str) -> tuple[float, str]:
        match = _CACHE.fullmatch((self.cache or "").strip())
        if match is None:
            units = ", ".join(_UNITS)
            raise ConfigError(
                f"{key}.cache: {self.cache!r} is not a share or a size in {units}; {_EXAMPLES}"
            )
        return float(match[1]), match[2]
