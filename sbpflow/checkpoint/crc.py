"""The CRC32 of zlib, computed by ISA-L if the optional package isal is installed, else by zlib.

Both give the same numbers. ISA-L took 0.3 ms for 8 MiB in cache where zlib took 1.7 ms (Intel Xeon
with AMX, zlib 1.2.13). That matters for disks faster than 1 GB/s, and for concurrent steps.
"""

import zlib
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

crc32: Callable[..., int] = (
    zlib.crc32 if find_spec("isal") is None else import_module("isal.isal_zlib").crc32
)
"""(data, value=0) -> the checksum of data, continued from ``value``."""
