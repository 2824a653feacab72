"""Stores the rows of an exported table in floating point or in 8 bits.

An 8-bit row is low + scale * q with q in 0..255 and float32 ``low`` and ``scale`` per row. So its
values are 256 even steps from its minimum to its maximum, as in FBGEMM's rowwise 8-bit format.
"""

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sbpflow.errors import DataError, unknown_value

RowFormat = Literal["as_trained", "float16", "int8"]
ROW_FORMATS: tuple[RowFormat, ...] = get_args(RowFormat)
_BLOCK = 1 << 16  # the number of rows converted together; keeps the float32 copy small
_STEPS = 255


class FloatRows(nn.Module):
    """Stores rows in floating point."""

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight: Tensor
        self.register_buffer("weight", weight)
        self.dtype = dtype
        self.format = str(weight.dtype).removeprefix("torch.")

    def stored(self) -> dict[str, Tensor]:
        """Return the tensors of a file, keyed by the suffix that follows the table name."""
        return {"": self.weight}

    def forward(self, ids: Tensor) -> Tensor:
        """Look up ids of any shape: [*ids.shape, dim] of ``dtype``; IndexError if out of range."""
        return F.embedding(ids, self.weight).to(self.dtype)


class ByteRows(nn.Module):
    """Stores rows in 8 bits, with a scale and a minimum per row."""

    def __init__(self, values: Tensor, scale: Tensor, low: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.values: Tensor
        self.scale: Tensor
        self.low: Tensor
        self.register_buffer("values", values)  # [rows, dim] uint8
        self.register_buffer("scale", scale)  # [rows] float32
        self.register_buffer("low", low)  # [rows] float32
        self.dtype = dtype
        self.format = "int8"

    def stored(self) -> dict[str, Tensor]:
        """Return the tensors of a file, keyed by the suffix that follows the table name."""
        return {"/int8": self.values, "/scale": self.scale, "/low": self.low}

    def forward(self, ids: Tensor) -> Tensor:
        """Look up ids of any shape: [*ids.shape, dim] of ``dtype``; IndexError if out of range."""
        values = F.embedding(ids, self.values).to(torch.float32)
        scale, low = (F.embedding(ids, each.unsqueeze(1)) for each in (self.scale, self.low))
        return (values * scale + low).to(self.dtype)


Rows = FloatRows | ByteRows


def make_rows(name: str, weight: Tensor, row_format: RowFormat, dtype: torch.dtype) -> Rows:
    """Convert table ``name`` [rows, dim] to ``row_format``; lookups return ``dtype``.

    ``int8`` needs dim + 8 bytes per row. Narrow tables that need no more in float16 are stored as
    float16. Raises DataError for a value that the format cannot represent.
    """
    """
    """
    if row_format == "as_trained":
        return FloatRows(weight.contiguous(), dtype)
    rows, dim = weight.shape
    if row_format not in ("float16", "int8"):
        raise unknown_value("row format", row_format, RowFormat)
    if row_format == "float16" or dim + 8 >= 2 * dim:
        return FloatRows(_as_float16(name, weight), dtype)
    values = torch.empty(rows, dim, dtype=torch.uint8)
    scale, low = torch.empty(rows), torch.empty(rows)
    for start in range(0, rows, _BLOCK):
        part = slice(start, start + _BLOCK)
        block = weight[part].float()
        if not bool(block.isfinite().all()):
            raise _refused(name, block.isfinite().logical_not(), start, weight, "int8")
        values[part], scale[part], low[part] = to_bytes(block)
    return ByteRows(values, scale, low, dtype)


def to_bytes(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize [n, dim] float32 to uint8 [n, dim], scale [n] and low [n], within half a step."""
    low, high = rows.aminmax(dim=1)
    scale = (high - low) / _STEPS
    step = torch.where(scale > 0, scale, 1.0).unsqueeze(1)
    values = ((rows - low.unsqueeze(1)) / step).round().clamp(0, _STEPS)
    return values.to(torch.uint8), scale, low


def _as_float16(name: str, weight: Tensor) -> Tensor:
    out = torch.empty(weight.shape, dtype=torch.float16)
    for start in range(0, weight.shape[0], _BLOCK):
        part = slice(start, start + _BLOCK)
        out[part] = weight[part]
        if not bool(out[part].isfinite().all()):
            raise _refused(name, out[part].isfinite().logical_not(), start, weight, "float16")
    return out


def _refused(name: str, bad: Tensor, start: int, weight: Tensor, row_format: str) -> DataError:
    row, column = bad.nonzero()[0].tolist()
    return DataError(
        f"table {name}: {float(weight[start + row, column])} in row {start + row} cannot be "
        f"represented in {row_format}; use --rows as_trained"
    )
