"""Reads the tensors of a bundle, and gathers table rows, including rows that deltas have
changed.
"""

import json
import weakref
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sbpflow.serving.columns import Array
from sbpflow.serving.operations import BundleError

_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
           "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8",
           "U32": "uint32", "U64": "uint64", "BOOL": "bool"}  # fmt: skip


class Tensors:
    """The arrays of a safetensors file, mapped into memory."""

    def __init__(self, file: Path) -> None:
        try:
            with file.open("rb") as opened:
                size = int.from_bytes(opened.read(8), "little")
                header = json.loads(opened.read(size))
        except (OSError, ValueError) as error:
            raise BundleError(
                f"{file}: cannot be read ({error}); export the bundle again"
            ) from error
        self._start, self._file = 8 + size, file
        header.pop("__metadata__", None)
        self.entries: dict[str, Any] = header
        self._bytes = np.memmap(file, dtype=np.uint8, mode="c")
        ends = [entry["data_offsets"][1] for entry in header.values()]
        if len(self._bytes) != self._start + max(ends, default=0):
            raise BundleError(f"{file}: has {len(self._bytes):,} bytes; export the bundle again")

    def array(self, *names: str) -> Array:
        """Return an array. Several names, which must be adjacent in the file, give one array with
        the rows of all.
        """
        entries = [self.entries[name] for name in names]
        first, last = entries[0]["data_offsets"][0], entries[-1]["data_offsets"][1]
        kind = {"BF16": "uint16"}.get(entries[0]["dtype"], _DTYPES[entries[0]["dtype"]])
        flat = self._bytes[self._start + first : self._start + last].view(kind)
        if len(entries) == 1:
            return flat.reshape(entries[0]["shape"])
        return flat.reshape(-1, *entries[0]["shape"][1:])

    def tensor(self, *names: str) -> Tensor:
        """Return the result of ``array`` as a tensor that shares its memory."""
        tensor = torch.from_numpy(self.array(*names))
        return tensor.view(torch.bfloat16) if self.entries[names[0]]["dtype"] == "BF16" else tensor


def quantized(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize rows [n, dim] float32 to uint8 [n, dim], with a scale [n] and a lowest value [n];
    the error is at most half of the scale.
    """
    low, high = rows.aminmax(dim=1)
    scale = (high - low) / 255
    step = torch.where(scale > 0, scale, 1.0).unsqueeze(1)
    values = ((rows - low.unsqueeze(1)) / step).round().clamp(0, 255)
    return values.to(torch.uint8), scale, low


class Store:
    """The rows of all tables with the same width and format, including rows that deltas have
    changed.

    ``base`` is mapped from the bundle. A changed row is stored in a free slot of ``extra``, which
    all versions of the model share. Each version has ``slots`` [rows] int32, where slots from
    ``num_rows`` on are in ``extra``. A slot becomes free when no version uses it anymore.
    """

    def __init__(self, base: Sequence[Tensor], dtype: torch.dtype) -> None:
        self._base, self._dtype = tuple(base), dtype
        self.num_rows, self.dim = base[0].shape[0], base[0].shape[1]
        self._slots: Tensor | None = None
        self._extra: tuple[Tensor, ...] = tuple(part[:0] for part in base)
        self._versions: weakref.WeakSet[Store] = weakref.WeakSet()

    @cached_property
    def arrays(self) -> tuple[Array, Array, Array] | None:
        """Return ``base``, ``slots`` (empty if no row was changed), and ``extra`` as arrays.

        Returns None if rows must be converted when they are read.
        """
        base = self._base[0]
        if len(self._base) > 1 or base.dtype != self._dtype or base.dtype == torch.bfloat16:
            return None
        slots = torch.empty(0, dtype=torch.int32) if self._slots is None else self._slots
        return base.numpy(), slots.numpy(), self._extra[0].numpy()

    def gather(self, rows: Tensor) -> Tensor:
        """Return the values [n, dim], in the compute dtype, of ``rows`` int64 [n]."""
        if self._slots is None:
            return self._values([part.index_select(0, rows) for part in self._base])
        slots = self._slots.index_select(0, rows)
        changed = (slots >= self.num_rows).nonzero().reshape(-1)
        found = [part.index_select(0, rows) for part in self._base]
        if len(changed):
            at = slots.index_select(0, changed) - self.num_rows
            for part, extra in zip(found, self._extra, strict=True):
                part.index_copy_(0, changed, extra.index_select(0, at))
        return self._values(found)

    def _values(self, parts: Sequence[Tensor]) -> Tensor:
        if len(parts) == 1:
            return parts[0].to(self._dtype)
        values, scale, low = parts
        return (values.float() * scale.unsqueeze(1) + low.unsqueeze(1)).to(self._dtype)

    def with_rows(self, rows: Tensor, values: Tensor) -> "Store":
        """Return a store in which ``rows`` int64 [n], which must be unique, have ``values``."""
        parts = (values.to(self._base[0].dtype),)
        if len(self._base) > 1:
            parts = quantized(values.float())
        new = Store(self._base, self._dtype)
        new._versions = self._versions
        if self._slots is None:
            new._slots = torch.arange(self.num_rows, dtype=torch.int32)
        else:
            new._slots = self._slots.clone()
        slots = self._free_slots(len(rows))
        used, size = len(self._extra[0]), int(slots.max()) + 1 if len(slots) else 0
        new._extra = self._extra
        if size > used:
            more = max(size - used, used // 2)
            new._extra = tuple(
                torch.cat([part, part.new_empty(more, *part.shape[1:])]) for part in self._extra
            )
        for part, changed in zip(new._extra, parts, strict=True):
            part.index_copy_(0, slots, changed)
        new._slots.index_copy_(0, rows, (slots + self.num_rows).to(torch.int32))
        new._versions.add(new)
        return new

    def _free_slots(self, count: int) -> Tensor:
        """Return ``count`` slots that no live version uses, preferably slots before the end of
        ``extra``.
        """
        used = torch.zeros(len(self._extra[0]), dtype=torch.bool)
        for version in list(self._versions):
            if version._slots is not None:
                used[version._slots[version._slots >= self.num_rows] - self.num_rows] = True
        free = (~used).nonzero().reshape(-1)[:count]
        return torch.cat([free, torch.arange(len(used), len(used) + count - len(free))])
