"""Reads the tensors of a bundle, and gathers table rows, including rows that deltas have
changed.
"""

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sbpflow.serving.columns import Array
from sbpflow.serving.operations import BundleError

DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
          "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8",
          "U16": "uint16", "U32": "uint32", "U64": "uint64", "BOOL": "bool"}  # fmt: skip
_MOST_PLACES = 2**31 - 1  # the places of more rows need int64


class Tensors:
    """The arrays of a safetensors file, mapped into memory."""

    def __init__(self, file: Path) -> None:
        try:
            with file.open("rb") as opened:
                size = int.from_bytes(opened.read(8), "little")
                header = json.loads(opened.read(size))
        except (OSError, ValueError) as error:
            raise BundleError(
                f"{file} cannot be read ({error}); export the bundle again"
            ) from error
        self._start, self._file = 8 + size, file
        header.pop("__metadata__", None)
        self.entries: dict[str, Any] = header
        self._bytes = np.memmap(file, dtype=np.uint8, mode="c")
        ends = [entry["data_offsets"][1] for entry in header.values()]
        expected = self._start + max(ends, default=0)
        if len(self._bytes) != expected:
            raise BundleError(
                f"{file} has {len(self._bytes):,} bytes instead of {expected:,}; export the "
                "bundle again"
            )

    def array(self, *names: str) -> Array:
        """Return an array. Several names must be adjacent in the file; the array then contains the
        rows of all of them.
        """
        entries = [self.entries[name] for name in names]
        first, last = entries[0]["data_offsets"][0], entries[-1]["data_offsets"][1]
        kind = {"BF16": "uint16"}.get(entries[0]["dtype"], DTYPES[entries[0]["dtype"]])
        flat = self._bytes[self._start + first : self._start + last].view(kind)
        if len(entries) == 1:
            return flat.reshape(entries[0]["shape"])
        return flat.reshape(-1, *entries[0]["shape"][1:])

    def tensor(self, *names: str) -> Tensor:
        """Return the result of ``array`` as a tensor that shares its memory."""
        tensor = torch.from_numpy(self.array(*names))
        return tensor.view(torch.bfloat16) if self.entries[names[0]]["dtype"] == "BF16" else tensor


def quantized(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize float32 rows to uint8 ([n, dim] each); return the values, and the scale and the
    minimum of each row ([n] each). The error is at most half of the scale.
    """
    low, high = rows.aminmax(dim=1)
    scale = (high - low) / 255
    step = torch.where(scale > 0, scale, 1.0).unsqueeze(1)
    values = ((rows - low.unsqueeze(1)) / step).round().clamp(0, 255)
    return values.to(torch.uint8), scale, low


class Store:
    """The rows of all tables with the same width and format, including rows that deltas have
    changed.

    ``base`` is mapped from the bundle. Changed rows are in ``pieces``. The pieces of a delta are
    mapped from the delta's file, so that the workers of a server share this memory. ``slots``
    ([rows], int32 or, if there are more places, int64) contains the place of each row: below
    ``num_rows`` in ``base``, otherwise in the pieces. Compiled loops can read any number of pieces.
    Without compiled loops (``merges``), or if rows must be converted when they are read, each
    change merges all pieces into one.
    """

    def __init__(self, base: Sequence[Tensor], dtype: torch.dtype, *, merges: bool = True) -> None:
        self._base, self._dtype = tuple(base), dtype
        self.num_rows, self.dim = base[0].shape[0], base[0].shape[1]
        self._merges = merges or not self._is_read_as_stored()
        self._slots: Tensor | None = None
        self._pieces: tuple[tuple[Tensor, ...], ...] = ()
        self._starts = torch.empty(0, dtype=torch.int64)  # the first place in each piece

    def _is_read_as_stored(self) -> bool:
        kind = self._base[0].dtype
        return len(self._base) == 1 and kind == self._dtype and kind != torch.bfloat16

    @cached_property
    def arrays(self) -> tuple[Array, ...] | None:
        """Return the rows, the slots (empty if no row was changed), and the first place and the
        address of each piece as arrays.

        Returns None if rows must be converted when they are read.
        """
        if not self._is_read_as_stored():
            return None
        slots = torch.empty(0, dtype=torch.int32) if self._slots is None else self._slots
        addresses = [piece[0].data_ptr() for piece in self._pieces]
        return (
            self._base[0].numpy(),
            slots.numpy(),
            self._starts.numpy(),
            np.array(addresses, dtype=np.int64),
        )

    def gather(self, rows: Tensor) -> Tensor:
        """Look up ``rows`` (int64 [n]); return their values ([n, dim]) in the compute dtype."""
        found = [part.index_select(0, rows) for part in self._base]
        if self._slots is not None:
            slots = self._slots.index_select(0, rows)
            changed = (slots >= self.num_rows).nonzero().reshape(-1)
            if len(changed):
                at = slots.index_select(0, changed).long() - self.num_rows
                for part, values in zip(found, self._changed(at), strict=True):
                    part.index_copy_(0, changed, values)
        return self._values(found)

    def _changed(self, at: Tensor) -> tuple[Tensor, ...]:
        """Return the changed rows at places ``at`` (int64 [n]) in the pieces."""
        if len(self._pieces) == 1:
            return tuple(part.index_select(0, at) for part in self._pieces[0])
        values = tuple(part.new_empty(len(at), *part.shape[1:]) for part in self._base)
        numbers = torch.bucketize(at, self._starts, right=True) - 1
        for number in numbers.unique().tolist():
            own = (numbers == number).nonzero().reshape(-1)
            inside = at.index_select(0, own) - self._starts[number]
            for value, part in zip(values, self._pieces[number], strict=True):
                value.index_copy_(0, own, part.index_select(0, inside))
        return values

    def _values(self, parts: Sequence[Tensor]) -> Tensor:
        if len(parts) == 1:
            return parts[0].to(self._dtype)
        values, scale, low = parts
        return (values.float() * scale.unsqueeze(1) + low.unsqueeze(1)).to(self._dtype)

    def with_rows(self, *changes: tuple[Tensor, Tensor | tuple[Tensor, ...]]) -> "Store":
        """Return a store with ``changes``: pairs of rows (int64 [n], no duplicates) and values.

        Values are [n, dim], or the parts in which the base stores them. Values that have the base's
        dtype are copied only when pieces are merged.
        """
        new = Store(self._base, self._dtype, merges=self._merges)
        pieces, end = list(self._pieces), self._end
        num_places = self.num_rows + end + sum(len(rows) for rows, _ in changes)
        dtype = torch.int32 if num_places <= _MOST_PLACES else torch.int64
        if self._slots is None:
            new._slots = torch.arange(self.num_rows, dtype=dtype)
        else:
            new._slots = self._slots.to(dtype, copy=True)
        for rows, values in changes:
            if len(rows):
                pieces.append(self._stored(len(rows), values))
                places = torch.arange(end, end + len(rows), dtype=dtype)
                new._slots.index_copy_(0, rows, places + self.num_rows)
                end += len(rows)
        new._set_pieces(pieces)
        # a chain of deltas may change the same rows again and again
        if len(pieces) > 1 and (new._merges or end > 2 * self.num_rows):
            changed = (new._slots >= self.num_rows).nonzero().reshape(-1)
            at = new._slots.index_select(0, changed).long() - self.num_rows
            new._set_pieces([new._changed(at)])
            places = torch.arange(len(changed), dtype=dtype)
            new._slots.index_copy_(0, changed, places + self.num_rows)
        return new

    def _stored(self, num_rows: int, values: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return values in the parts and dtypes of the base; raise BundleError for other shapes."""
        if not isinstance(values, tuple):
            values = quantized(values.float()) if len(self._base) > 1 else (values,)
        shapes = [(num_rows, *part.shape[1:]) for part in self._base]
        if [tuple(value.shape) for value in values] != shapes:
            found = [tuple(value.shape) for value in values]
            raise BundleError(f"changed rows must have the shapes {shapes}, got {found}")
        return tuple(
            value.to(part.dtype).contiguous()
            for value, part in zip(values, self._base, strict=True)
        )

    @property
    def _end(self) -> int:
        """Return the number of rows in the pieces."""
        return sum(len(piece[0]) for piece in self._pieces)

    def _set_pieces(self, pieces: Sequence[tuple[Tensor, ...]]) -> None:
        ends = np.cumsum([0, *(len(piece[0]) for piece in pieces)], dtype=np.int64)
        self._pieces, self._starts = tuple(pieces), torch.from_numpy(ends[:-1].copy())
