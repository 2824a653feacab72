"""Stores the rows of an exported table in floating point or in 8 bits.

An 8-bit row is low + scale * q with q in 0..255 and float32 ``low`` and ``scale`` per row. The 256
values are evenly spaced from the row's minimum to its maximum, as in FBGEMM's rowwise 8-bit format.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sbpflow.errors import DataError, unknown_value
from sbpflow.serving.row_store import quantized

RowFormat = Literal["as_trained", "float16", "int8"]
ROW_FORMATS: tuple[RowFormat, ...] = get_args(RowFormat)
_BLOCK = 1 << 16  # rows converted at a time, so that the float32 copy stays small


class Rows(nn.Module):
    """Stores rows in the tensors that ``to_stored`` returns."""

    def __init__(self, stored: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self._names = {suffix: suffix.removeprefix("/") or "weight" for suffix in stored}
        for suffix, name in self._names.items():
            self.register_buffer(name, stored[suffix])

    def stored(self) -> dict[str, Tensor]:
        """Return the tensors to save, by the suffix to append to the table name."""
        return {suffix: self.get_buffer(name) for suffix, name in self._names.items()}

    def forward(self, ids: Tensor) -> Tensor:
        """Look up ids of any shape; return [*ids.shape, dim] in ``dtype``.

        Raises IndexError if an id is out of range.
        """
        stored = self.stored()
        if "" in stored:
            return F.embedding(ids, stored[""]).to(self.dtype)
        values = F.embedding(ids, stored["/int8"]).to(torch.float32)
        scale, low = (F.embedding(ids, stored[each].unsqueeze(1)) for each in ("/scale", "/low"))
        return (values * scale + low).to(self.dtype)


class SavedRows(nn.Module):
    """Reads the rows of a few ids with ``read(rows)``, so the table need not be in memory."""

    def __init__(
        self,
        name: str,
        read: Callable[[slice], Tensor],
        num_rows: int,
        row_format: RowFormat,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self._name, self._read, self._num_rows = name, read, num_rows
        self._row_format: RowFormat = row_format
        self._dtype = dtype

    def forward(self, ids: Tensor) -> Tensor:
        """Look up ids of any shape; return [*ids.shape, dim] in ``dtype``.

        Raises IndexError if an id is out of range.
        """
        rows, places = ids.unique(return_inverse=True)
        if len(rows) and (int(rows[0]) < 0 or int(rows[-1]) >= self._num_rows):
            raise IndexError(f"table {self._name} has only rows 0 to {self._num_rows - 1}")
        numbers = rows.tolist() or [0]
        read = [self._read(slice(row, row + 1)) for row in numbers]
        stored = to_stored(self._name, torch.cat(read), numbers, self._row_format)
        return Rows(stored, self._dtype)(places)


def make_rows(name: str, weight: Tensor, row_format: RowFormat, dtype: torch.dtype) -> Rows:
    """Convert table ``name`` [rows, dim] to ``row_format``; lookups return ``dtype``.

    Raises DataError for a value that the format cannot represent.
    """
    if row_format == "as_trained":
        return Rows({"": weight.contiguous()}, dtype)
    stored: dict[str, Tensor] = {}
    for start in range(0, weight.shape[0], _BLOCK):
        rows = range(start, min(start + _BLOCK, weight.shape[0]))
        for key, part in to_stored(name, weight[start : rows.stop], rows, row_format).items():
            out = stored.setdefault(key, part.new_empty(weight.shape[0], *part.shape[1:]))
            out[start : start + len(part)] = part
    return Rows(stored, dtype)


def to_stored(
    name: str, block: Tensor, rows: Sequence[int], row_format: RowFormat
) -> dict[str, Tensor]:
    """Convert rows [n, dim] of table ``name``, which have the numbers ``rows``.

    Returns the tensors to save, by the suffix to append to the table name: ``/int8`` (uint8 [n,
    dim]), ``/scale`` and ``/low`` (float32 [n]), or only "" (floating point [n, dim]).
    ``int8`` needs dim + 8 bytes per row. A table so narrow that float16 needs no more space is
    stored as float16.
    """
    if row_format == "as_trained":
        return {"": block}
    dim = block.shape[1]
    if row_format not in ("float16", "int8"):
        raise unknown_value("row format", row_format, RowFormat)
    narrow = row_format == "float16" or dim + 8 >= 2 * dim
    converted = block.to(torch.float16) if narrow else block.float()
    if not bool(converted.isfinite().all()):
        row, column = converted.isfinite().logical_not().nonzero()[0].tolist()
        stored_as = "float16" if narrow else "int8"
        raise DataError(
            f"table {name}: {float(block[row, column])} in row {rows[row]} cannot be represented "
            f"in {stored_as}; use --rows as_trained"
        )
    if narrow:
        return {"": converted}
    return dict(zip(("/int8", "/scale", "/low"), quantized(converted), strict=True))
