"""Writes safetensors files in pieces, so that a tensor need not fit in memory.

The format consists of an 8-byte length, a JSON header with the dtype, shape, and position of each
tensor, and the tensors without gaps (https://huggingface.co/docs/safetensors). The safetensors
library can only save tensors that are in memory.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sbpflow.errors import DataError

ITEM_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2,
              "I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1}  # fmt: skip
_ALIGNMENT = 64


class TensorsFile:
    """Creates a file for ``tensors`` (name -> (dtype, shape)), which ``put`` fills piece by piece.
    Tensors are sorted by descending item size, so that every tensor is aligned to its item size.
    """

    def __init__(self, file: Path, tensors: Mapping[str, tuple[str, Sequence[int]]]) -> None:
        names = sorted(tensors, key=lambda name: -ITEM_BYTES[tensors[name][0]])
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        self._places: dict[str, tuple[int, int]] = {}
        for name in names:
            dtype, shape = tensors[name]
            row = int(np.prod(shape[1:], dtype=np.int64)) * ITEM_BYTES[dtype]
            size = row * (shape[0] if shape else 1)
            header[name] = {"dtype": dtype, "shape": [*shape], "data_offsets": [end, end + size]}
            self._places[name] = (end, row)
            end += size
        text = json.dumps(header).encode()
        text += b" " * (-(8 + len(text)) % _ALIGNMENT)
        self._start, self._size = 8 + len(text), end
        self._left = end
        self._path = file
        self._file = file.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)

    def put(self, name: str, first: int, values: NDArray[Any]) -> None:
        """Write rows [first, first + n) of a tensor; each element must be written exactly once."""
        place, row = self._places[name]
        data = np.ascontiguousarray(values)
        self._file.seek(self._start + place + first * row)
        self._file.write(data.data if data.size else b"")
        self._left -= data.nbytes

    def __enter__(self) -> "TensorsFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
        if error is None and self._left:
            raise DataError(f"{self._left} of {self._size} bytes were not written to {self._path}")
