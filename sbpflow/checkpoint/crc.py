"""Computes zlib's CRC32 with ISA-L if the optional package isal is installed, else with zlib.

Both libraries compute the same values. For 8 MiB in cache, ISA-L took 0.3 ms and zlib 1.7 ms (Intel
Xeon with AMX, zlib 1.2.13). The difference matters for disks faster than 1 GB/s, and for training
steps that run at the same time.
"""

import zlib
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

crc32: Callable[..., int] = (
    zlib.crc32 if find_spec("isal") is None else import_module("isal.isal_zlib").crc32
)
"""Return the checksum of ``data``. Pass the checksum of the preceding data as the second argument.
"""
