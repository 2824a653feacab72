"""How the rows of an exported table are stored, and what reading them gives: float or 8 bits.

A row of 8 bits is low + scale * q with q in 0..255, ``low`` and ``scale`` float32 per row: its
values lie on 256 even steps from its least to its greatest (as FBGEMM's rowwise 8 bits).
"""

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sbpflow.errors import DataError, unknown_value

RowFormat = Literal["as_trained", "float16", "int8"]
ROW_FORMATS: tuple[RowFormat, ...] = get_args(RowFormat)
_BLOCK = 1 << 16  # rows converted at a time, so that the float copy of a table stays small
_STEPS = 255


class FloatRows(nn.Module):
    """Rows of floating numbers."""

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight: Tensor
        self.register_buffer("weight", weight)
        self.dtype = dtype
        self.format = str(weight.dtype).removeprefix("torch.")

    def stored(self) -> dict[str, Tensor]:
        """What a file holds, by what comes behind the name of the table."""
        return {"": self.weight}

    def forward(self, ids: Tensor) -> Tensor:
        """Ids of any shape -> [*ids.shape, dim] of ``dtype``; IndexError for one that is no row."""
        return F.embedding(ids, self.weight).to(self.dtype)


class ByteRows(nn.Module):
    """Rows of 8 bits with a scale and a least value each."""

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
        """What a file holds, by what comes behind the name of the table."""
        return {"/int8": self.values, "/scale": self.scale, "/low": self.low}

    def forward(self, ids: Tensor) -> Tensor:
        """Ids of any shape -> [*ids.shape, dim] of ``dtype``; IndexError for one that is no row."""
        values = F.embedding(ids, self.values).to(torch.float32)
        scale, low = (F.embedding(ids, one.unsqueeze(1)) for one in (self.scale, self.low))
        return (values * scale + low).to(self.dtype)


Rows = FloatRows | ByteRows


def make_rows(name: str, weight: Tensor, row_format: RowFormat, dtype: torch.dtype) -> Rows:
    """Table ``name``, [rows, dim], in ``row_format``; ``dtype`` is what the dense part computes in.

    ``int8`` needs dim + 8 bytes a row: where float16 needs no more, rows are of float16. Raises
    DataError for a value that the format has none for.
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
    """[n, dim] float32 -> [n, dim] uint8, scale [n], low [n]; off by half a step at most."""
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
    row, column = (int(place) for place in bad.nonzero()[0])
    return DataError(
        f"table {name}: {float(weight[start + row, column])} in row {start + row} has no value in "
        f"{row_format}; export the rows as they were trained, --rows as_trained"
    )
