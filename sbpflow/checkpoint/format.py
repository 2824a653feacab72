"""The form of a checkpoint: what its index says, written and read in one place. No tensor data.

A checkpoint is a folder with ``index.json`` and files of bytes. The index has logical names with
full shapes and, for each, the rectangles that its pieces cover: where a piece starts in which file,
and a CRC32 per block of it. It knows nothing of ranks or layouts. It ends with nothing executed or
imported, whatever it holds: JSON and bytes only, and it has a digest of itself.
"""

import hashlib
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, cast

import torch

from sbpflow.errors import CheckpointError
from sbpflow.runtime.files.json_file import is_count, object_of, parse_json, why_not

FORMAT = "sbpflow-checkpoint"
VERSION = 1
INDEX_FILE = "index.json"
BLOCK_BYTES = 8 * 2**20  # of a piece per CRC; a multiple of every item size
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
    )
}
_FILE_NAME = re.compile(r"rank-\d+\.bin")


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Place:
    """A rectangle [row_start:row_stop, col_start:col_stop] of a logical tensor.

    Columns are all dims behind the first, flattened; a tensor of one dim has one column.
    """

    row_start: int
    row_stop: int
    col_start: int
    col_stop: int

    @property
    def num_rows(self) -> int:
        return self.row_stop - self.row_start

    @property
    def num_columns(self) -> int:
        return self.col_stop - self.col_start

    @property
    def num_elements(self) -> int:
        return self.num_rows * self.num_columns

    def common(self, other: "Place") -> "Place | None":
        """What both cover; ``None`` if that is nothing."""
        both = Place(
            row_start=max(self.row_start, other.row_start),
            row_stop=min(self.row_stop, other.row_stop),
            col_start=max(self.col_start, other.col_start),
            col_stop=min(self.col_stop, other.col_stop),
        )
        return both if both.num_rows > 0 and both.num_columns > 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """``place`` of a tensor, row by row, from byte ``offset`` of ``file`` on.

    ``crc32`` has one number per ``BLOCK_BYTES`` of it; the last block may be shorter.
    """

    file: str
    offset: int
    place: Place
    crc32: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """A logical tensor: full ``shape``, and pieces that cover it without a hole or an overlap.

    ``column_starts`` is there for state that is kept once per row and column shard: where the
    shards started in the table's columns.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]
    column_starts: tuple[int, ...] | None = None

    @property
    def whole(self) -> Place:
        return whole_of(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """All of a checkpoint but its bytes.

    ``run`` names the run that wrote it, ``files`` has the size of every file in bytes, and
    ``documents`` are further values, each any JSON: configuration, plan, cursor and so on.
    """

    step: int
    run: str
    tensors: Mapping[str, SavedTensor]
    files: Mapping[str, int]
    documents: Mapping[str, Any] = field(default_factory=dict[str, Any])


def whole_of(shape: Sequence[int]) -> Place:
    """All of a tensor of this shape."""
    rows = shape[0] if shape else 1
    return Place(row_start=0, row_stop=rows, col_start=0, col_stop=math.prod(shape[1:]))


def num_blocks(num_bytes: int) -> int:
    """CRCs of a piece of that many bytes."""
    return -(-num_bytes // BLOCK_BYTES)


def to_json(index: Index) -> str:
    """The text of the index file; ``from_json`` of it gives an equal value."""
    content = {
        "step": index.step,
        "run": index.run,
        "byte_order": sys.byteorder,
        "block_bytes": BLOCK_BYTES,
        "files": dict(index.files),
        "tensors": {name: _tensor_to_json(tensor) for name, tensor in index.tensors.items()},
        "documents": dict(index.documents),
    }
    head = {"format": FORMAT, "version": VERSION, "sha256": _digest(content)}
    return json.dumps({**head, "content": content}) + "\n"


def from_json(text: str, path: Path) -> Index:
    """The index of ``to_json``; CheckpointError, naming ``path``, for anything else."""
    try:
        return _parse(text)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"{path}: is not an index that this version reads ({why_not(error)}); use another "
            "checkpoint"
        ) from error


def piece_to_json(piece: Piece) -> list[Any]:
    """[file, offset, row start, row stop, column start, column stop, CRCs]."""
    at = piece.place
    sides = [at.row_start, at.row_stop, at.col_start, at.col_stop]
    return [piece.file, piece.offset, *sides, list(piece.crc32)]


def piece_from_json(value: Sequence[Any]) -> Piece:
    """The piece of ``piece_to_json``; ValueError for anything else."""
    file, *numbers, crc32 = value
    if not isinstance(file, str) or not _FILE_NAME.fullmatch(file):
        _wrong(f"{file!r} is no name of one of its files")
    offset, row_start, row_stop, col_start, col_stop = (_count(number) for number in numbers)
    place = Place(row_start=row_start, row_stop=row_stop, col_start=col_start, col_stop=col_stop)
    crcs = tuple(_count(crc) for crc in crc32)
    return Piece(file=file, offset=offset, place=place, crc32=crcs)


def _parse(text: str) -> Index:
    # A document may hold infinity, such as a loss that was watched; its reader checks that.
    tree = object_of(parse_json(text, finite=False), "the file")
    if tree["format"] != FORMAT:
        _wrong(f"its format is {tree['format']!r}, not {FORMAT}")
    if type(tree["version"]) is not int or tree["version"] != VERSION:
        _wrong(f"it is of version {tree['version']!r}, this program reads {VERSION}")
    content = tree["content"]
    if _digest(content) != tree["sha256"]:
        _wrong("its checksum does not fit: it was changed after it was written")
    if content["byte_order"] != sys.byteorder:
        _wrong(f"it was written on a {content['byte_order']}-endian machine")
    if content["block_bytes"] != BLOCK_BYTES:
        _wrong(
            f"it has blocks of {content['block_bytes']!r} bytes, this program reads {BLOCK_BYTES}"
        )
    files = {name: _count(size) for name, size in content["files"].items()}
    tensors = {
        name: _tensor_from_json(name, value, files) for name, value in content["tensors"].items()
    }
    documents = object_of(content["documents"], "documents")
    if not isinstance(content["run"], str):
        _wrong(f"run {content['run']!r} is no name")
    return Index(
        step=_count(content["step"]),
        run=content["run"],
        tensors=tensors,
        files=files,
        documents=documents,
    )


def _tensor_to_json(tensor: SavedTensor) -> dict[str, Any]:
    found: dict[str, Any] = {
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "pieces": [piece_to_json(piece) for piece in tensor.pieces],
    }
    if tensor.column_starts is not None:
        found["column_starts"] = list(tensor.column_starts)
    return found


def _tensor_from_json(name: str, value: Mapping[str, Any], files: Mapping[str, int]) -> SavedTensor:
    dtype = DTYPES[value["dtype"]]
    starts = value.get("column_starts")
    tensor = SavedTensor(
        shape=tuple(_count(size) for size in value["shape"]),
        dtype=dtype,
        pieces=tuple(piece_from_json(piece) for piece in value["pieces"]),
        column_starts=None if starts is None else tuple(_count(start) for start in starts),
    )
    for piece in tensor.pieces:
        num_bytes = piece.place.num_elements * dtype.itemsize
        if piece.offset + num_bytes > files[piece.file]:
            _wrong(f"{name}: {piece.place} ends behind {piece.file}")
        if len(piece.crc32) != num_blocks(num_bytes):
            _wrong(f"{name}: {piece.place} has {len(piece.crc32)} checksums")
    if reason := cover_fault(tensor.whole, [piece.place for piece in tensor.pieces]):
        _wrong(f"{name}: {reason}")
    return tensor


def cover_fault(whole: Place, places: Sequence[Place]) -> str:
    """Why ``places`` do not tile ``whole``; "" if they do."""
    area = sum(place.num_elements for place in places)
    if area != whole.num_elements:
        return f"its pieces have {area} elements of {whole.num_elements}"
    for place in places:
        if place.common(whole) != place and place.num_elements:
            return f"{place} lies outside {whole}"
    # A sweep down the rows: those that are open at a time must not share a column.
    is_open: list[Place] = []
    for place in sorted(places):
        is_open = [other for other in is_open if other.row_stop > place.row_start]
        if any(place.common(other) for other in is_open):
            return f"{place} overlaps another piece"
        is_open.append(place)
    return ""


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _count(value: object) -> int:
    if not is_count(value):
        _wrong(f"{str(value)[:80]!r} is no count")
    return cast("int", value)


def _wrong(why: str) -> NoReturn:
    raise ValueError(why)
