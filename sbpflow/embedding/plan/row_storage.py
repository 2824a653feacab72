"""Defines the rules of ``parallel.storage``, for tables whose rows are not all in device memory.

``cache.records`` creates the records of a table from its rule.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from sbpflow.errors import ConfigError
from sbpflow.runtime.fields.keys import Example, Key

Outside = Literal["host", "file", "servers"]
_UNITS = {"MB": 10**6, "GB": 10**9, "TB": 10**12, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_CACHE = re.compile(rf"(\d+(?:\.\d+)?)\s*(%|{'|'.join(_UNITS)})")
_EXAMPLES = 'for example, 10% or "4 GB"'
# The keys that only some kinds of storage have.
_KINDS_OF: Mapping[str, tuple[Outside, ...]] = {
    "path": ("file",),
    "addresses": ("servers",),
    "secret_file": ("servers",),
}


def num_bytes_of(key: str, text: str, example: str) -> int:
    """Convert a size with a unit to bytes; raise ConfigError with ``key`` for other text."""
    match = _CACHE.fullmatch(text.strip())
    if match is None or match[2] == "%":
        units = ", ".join(_UNITS)
        raise ConfigError(f"{key}: {text!r} is not a size in {units}; use, for example, {example}")
    return int(float(match[1]) * _UNITS[match[2]])


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageRule:
    """Sets the storage of the tables that match a pattern."""

    kind: Annotated[
        Literal["device", Outside],
        Example("file"),
        Key(
            "execution",
            "Where the rows are stored: on the device, in the host's memory (for tables on "
            "a GPU), in a file, or on embedding servers (`sbpflow embedding-server`).",
        ),
    ]
    cache: Annotated[
        str | None,
        Example("10%"),
        Key(
            "execution",
            "Size of the cache on the device: a fraction of the rows, such as 10%, or, if "
            "all ranks store the same number of rows, bytes per rank, such as 4 GB.",
        ),
    ] = None
    path: Annotated[
        Path | None,
        Example("/scratch"),
        Key("execution", "Folder of the file, for kind: file. The default is run.dir."),
    ] = None
    addresses: Annotated[
        tuple[str, ...] | None,
        Example(("10.0.0.1:7070", "10.0.0.2:7070")),
        Key(
            "execution",
            "host:port of each embedding server. `sbpflow train --servers N` starts servers and "
            "sets this key.",
        ),
    ] = None
    secret_file: Annotated[
        Path | None,
        Example("/etc/sbpflow/secret"),
        Key("execution", "File with the secret that the embedding servers and the ranks share."),
    ] = None

    def check(self, key: str) -> None:
        """Raise ConfigError if the keys contradict each other."""
        for name, kinds in _KINDS_OF.items():
            if getattr(self, name) is not None and self.kind not in kinds:
                raise ConfigError(
                    f"{key}.{name} has no effect with kind: {self.kind}; use kind: "
                    f"{' or '.join(kinds)}, or remove {name}"
                )
        self._check_servers(key)
        if self.kind == "device":
            if self.cache is not None:
                raise ConfigError(
                    f"{key}.cache: {self.cache} has no effect with kind: device, which stores all "
                    "rows on the device; use kind: file, or remove cache"
                )
            return
        if self.cache is None:
            raise ConfigError(
                f"{key}.cache is not given, but kind: {self.kind} needs a cache; {_EXAMPLES}"
            )
        number, unit = self._parsed(key)
        if not 0 < number <= (100 if unit == "%" else float("inf")):
            raise ConfigError(
                f"{key}.cache must be above 0 and at most 100%, got {self.cache}; {_EXAMPLES}"
            )

    def _check_servers(self, key: str) -> None:
        if self.addresses is None:
            return
        if not self.addresses or len(set(self.addresses)) < len(self.addresses):
            raise ConfigError(
                f"{key}.addresses must list one or more addresses, each once, such as "
                f"[10.0.0.1:7070, 10.0.0.2:7070], got {list(self.addresses)}"
            )
        for address in self.addresses:
            split_address(address, f"{key}.addresses")
        if self.secret_file is None:
            raise ConfigError(
                f"{key}.secret_file is not given, but {key}.addresses needs it; use a file with "
                "the secret of the servers, such as /etc/sbpflow/secret"
            )

    def share(self, key: str, num_bytes: float) -> float:
        """Return the fraction of rows that fit in the cache; ``num_bytes`` is the size of all rows
        of a rank.
        """
        number, unit = self._parsed(key)
        return number / 100 if unit == "%" else min(1.0, number * _UNITS[unit] / num_bytes)

    def _parsed(self, key: str) -> tuple[float, str]:
        match = _CACHE.fullmatch((self.cache or "").strip())
        if match is None:
            units = ", ".join(_UNITS)
            raise ConfigError(
                f"{key}.cache: {self.cache!r} is neither a percentage nor a size in {units}; "
                f"{_EXAMPLES}"
            )
        return float(match[1]), match[2]


def split_address(address: str, key: str) -> tuple[str, int]:
    """Return the host and the port of ``host:port``; an IPv6 address may be in brackets."""
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ConfigError(
            f"{key}: {address!r} does not have the form host:port with a port from 1 to 65535; "
            "use, for example, 10.0.0.1:7070"
        )
    try:
        host.encode("idna")  # the encoding that socket functions use
    except UnicodeError as error:
        raise ConfigError(
            f"{key}: {host!r} is not a valid host name ({error}); use, for example, 10.0.0.1:7070"
        ) from error
    return host, int(port)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowStorage:
    """All rows are in storage ``kind``, and slots on the device hold a fraction ``share`` of them.

    ``key`` is the configuration key of the storage rule.
    """

    kind: Outside
    share: float
    key: str

    def num_slots(self, num_rows: int) -> int:
        """Return the number of slots of a rank with ``num_rows`` rows."""
        return min(num_rows, math.ceil(num_rows * self.share))
