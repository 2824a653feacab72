"""Writes and reads the index of a checkpoint, without tensor data.

A checkpoint is a folder with ``index.json`` and binary files. For every logical tensor, the index
contains the full shape and the pieces that cover it: the rectangle of each piece, its file and
offset, and a CRC32 per block. In a delta, the tensors of tables have patches instead: the row
numbers and the values of the rows that changed since the previous checkpoint. Rows of growing
tables are numbered as of this step. An unchanged row may have another number in the previous
checkpoint, where its key identifies it. The index does not depend on ranks or layouts, and includes
a digest of its own content. Reading untrusted files is safe: they contain only JSON and bytes, and
nothing is executed or imported.
"""

import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any, NoReturn, cast

import torch

from sbpflow.embedding.plan.tables import Place
from sbpflow.errors import CheckpointError
from sbpflow.runtime.files.json_file import is_count, json_digest, object_of, parse_json, why_not
from sbpflow.runtime.files.remote_path import AnyPath

FORMAT = "sbpflow-checkpoint"
VERSION, DELTA_VERSION = 1, 2
INDEX_FILE = "index.json"
# Each block of this size has a CRC. The size is a multiple of every item size.
BLOCK_BYTES = 8 * 2**20
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint64,
        torch.uint32,
        torch.uint16,
        torch.uint8,
        torch.bool,
    )
}
# In a store, names also contain the nonce of the attempt.
_FILE_NAME = re.compile(r"rank-\d+(\.[0-9a-f]+)?\.bin")


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The location of the bytes of ``place``: row by row, starting at byte ``offset`` of ``file``.

    ``crc32`` contains one checksum per ``BLOCK_BYTES``; the last block may be shorter.
    """

    file: str
    offset: int
    place: Place
    crc32: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """The changed rows of the rectangle ``place``: their numbers and their values.

    ``rows`` is the piece with the row numbers in the tensor (int64 [n], ascending). For a growing
    table, these numbers are relative to the first row of ``place``. ``values`` is the piece with
    the values ([n, columns]). The ``place`` of either piece covers the rows [0, n).
    """

    place: Place
    rows: Piece
    values: Piece


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """A logical tensor: its full ``shape``, and pieces that cover it without gaps or overlaps.

    In a delta, a tensor of a table has ``patches``, whose rectangles cover the tensor, instead of
    ``pieces``.

    ``column_starts`` is set only for state with one value per row and column shard: it contains the
    first table column of each shard. ``keys`` names the tensor with the keys of a growing table:
    row 0 is the shared row, and row i + 1 belongs to key i.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]
    column_starts: tuple[int, ...] | None = None
    patches: tuple[Patch, ...] = ()
    keys: str | None = None

    @property
    def whole(self) -> Place:
        return whole_of(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Previous:
    """The checkpoint that a delta continues: its step and the digest of its index.

    ``number`` counts deltas since the last full checkpoint, starting at 1.
    """

    step: int
    sha256: str
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """Everything in a checkpoint except the bytes of its tensors.

    ``run`` is the ID of the run that wrote it, ``files`` maps every file to its size in bytes, and
    ``documents`` contains further JSON values, such as configuration, plan, and cursor.
    ``previous`` is set only for a delta.
    """

    step: int
    run: str
    tensors: Mapping[str, SavedTensor]
    files: Mapping[str, int]
    documents: Mapping[str, Any] = field(default_factory=dict[str, Any])
    previous: Previous | None = None


def whole_of(shape: Sequence[int]) -> Place:
    """Return the rectangle that covers a whole tensor of this shape."""
    return Place(0, shape[0] if shape else 1, 0, math.prod(shape[1:]))


def to_json(index: Index) -> str:
    """Return the text of the index file; ``from_json`` reads it."""
    content = _content(index)
    version = VERSION if index.previous is None else DELTA_VERSION
    head = {"format": FORMAT, "version": version, "sha256": json_digest(content)}
    return json.dumps({**head, "content": content}) + "\n"


def digest_of(index: Index) -> str:
    """Return the digest that the index file contains."""
    return json_digest(_content(index))


def _content(index: Index) -> dict[str, Any]:
    content: dict[str, Any] = {
        "step": index.step,
        "run": index.run,
        "byte_order": sys.byteorder,
        "block_bytes": BLOCK_BYTES,
        "files": dict(index.files),
        "tensors": {name: _tensor_to_json(tensor) for name, tensor in index.tensors.items()},
        "documents": dict(index.documents),
    }
    if index.previous is not None:
        content["previous"] = list(astuple(index.previous))
    return content


def from_json(text: str, path: AnyPath) -> Index:
    """Parse the text of ``to_json``. For any other text, raise CheckpointError naming ``path``."""
    try:
        return _parse(text)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is not a checkpoint index that this version can read ({why_not(error)}); "
            "use another checkpoint"
        ) from error


def piece_to_json(piece: Piece) -> list[Any]:
    """Return a piece as [file, offset, row start, row stop, column start, column stop, CRCs]."""
    return [piece.file, piece.offset, *astuple(piece.place), list(piece.crc32)]


def piece_from_json(value: Sequence[Any]) -> Piece:
    """Invert ``piece_to_json``; raise ValueError for a malformed value."""
    file, *numbers, crc32 = value
    if not isinstance(file, str) or not _FILE_NAME.fullmatch(file):
        _wrong(f"{file!r} is not a file name of the form rank-N.bin")
    offset, row_start, row_stop, col_start, col_stop = (_count(number) for number in numbers)
    place = Place(row_start, row_stop, col_start, col_stop)
    crcs = tuple(_count(crc) for crc in crc32)
    return Piece(file=file, offset=offset, place=place, crc32=crcs)


def patch_to_json(patch: Patch) -> list[Any]:
    """Return a patch as [rectangle, piece with the row numbers, piece with the values]."""
    return [list(astuple(patch.place)), piece_to_json(patch.rows), piece_to_json(patch.values)]


def patch_from_json(value: Sequence[Any]) -> Patch:
    """Invert ``patch_to_json``; raise ValueError for a malformed value."""
    sides, rows, values = value
    place = Place(*(_count(side) for side in sides))
    patch = Patch(place=place, rows=piece_from_json(rows), values=piece_from_json(values))
    num_rows = patch.rows.place.num_rows
    if patch.rows.place != Place(0, num_rows, 0, 1):
        _wrong(f"the row numbers of a patch are {patch.rows.place}, not a column of rows from 0")
    if patch.values.place != Place(0, num_rows, place.col_start, place.col_stop):
        _wrong(f"the patch of {place} has values {patch.values.place}, which do not match it")
    return patch


def _parse(text: str) -> Index:
    # Documents may contain infinity, such as an infinite loss. The code that reads a document
    # checks its values.
    tree = object_of(parse_json(text, finite=False), "the file")
    if tree["format"] != FORMAT:
        _wrong(f"its format is {tree['format']!r}, not {FORMAT}")
    version = tree["version"]
    if type(version) is not int or version not in (VERSION, DELTA_VERSION):
        _wrong(f"its version is {version!r}, but this program reads {VERSION} and {DELTA_VERSION}")
    content = tree["content"]
    if json_digest(content) != tree["sha256"]:
        _wrong("its checksum does not match, so the file was changed after it was written")
    if content["byte_order"] != sys.byteorder:
        _wrong(f"its byte order is {content['byte_order']}, not {sys.byteorder} as on this machine")
    if content["block_bytes"] != BLOCK_BYTES:
        _wrong(f"its block_bytes is {content['block_bytes']!r}, not {BLOCK_BYTES}")
    files = {name: _count(size) for name, size in content["files"].items()}
    tensors = {
        name: _tensor_from_json(name, value, files) for name, value in content["tensors"].items()
    }
    for name, tensor in tensors.items():
        num_rows = tensor.whole.num_rows
        if tensor.keys is not None and tensors[tensor.keys].whole.num_rows + 1 != num_rows:
            _wrong(f"{name} has {num_rows} rows, but must have one row more than {tensor.keys}")
    documents = object_of(content["documents"], "documents")
    if not isinstance(content["run"], str):
        _wrong(f"its run is {content['run']!r}, not a string")
    previous = None
    if version == DELTA_VERSION:
        step, sha256, number = content["previous"]
        previous = Previous(step=_count(step), sha256=str(sha256), number=_count(number))
    if previous is None and any(tensor.patches for tensor in tensors.values()):
        _wrong("it has patches, but does not name the previous checkpoint")
    return Index(
        step=_count(content["step"]),
        run=content["run"],
        tensors=tensors,
        files=files,
        documents=documents,
        previous=previous,
    )


def _tensor_to_json(tensor: SavedTensor) -> dict[str, Any]:
    value: dict[str, Any] = {
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "pieces": [piece_to_json(piece) for piece in tensor.pieces],
    }
    if tensor.column_starts is not None:
        value["column_starts"] = list(tensor.column_starts)
    if tensor.patches:
        value["patches"] = [patch_to_json(patch) for patch in tensor.patches]
    if tensor.keys is not None:
        value["keys"] = tensor.keys
    return value


def _tensor_from_json(name: str, value: Mapping[str, Any], files: Mapping[str, int]) -> SavedTensor:
    dtype = DTYPES[value["dtype"]]
    starts = value.get("column_starts")
    tensor = SavedTensor(
        shape=tuple(_count(size) for size in value["shape"]),
        dtype=dtype,
        pieces=tuple(piece_from_json(piece) for piece in value["pieces"]),
        column_starts=None if starts is None else tuple(_count(start) for start in starts),
        patches=tuple(patch_from_json(patch) for patch in value.get("patches", ())),
        keys=value.get("keys"),
    )
    sizes = [(piece, dtype.itemsize) for piece in tensor.pieces]
    for patch in tensor.patches:
        sizes += [(patch.rows, torch.int64.itemsize), (patch.values, dtype.itemsize)]
    for piece, itemsize in sizes:
        num_bytes = piece.place.num_elements * itemsize
        if piece.offset + num_bytes > files[piece.file]:
            _wrong(f"{name}: {piece.place} goes beyond the end of {piece.file}")
        if len(piece.crc32) != -(-num_bytes // BLOCK_BYTES):
            _wrong(f"{name}: {piece.place} has the wrong number of checksums, {len(piece.crc32)}")
    if tensor.pieces and tensor.patches:
        _wrong(f"{name} has both pieces and patches")
    places = [part.place for part in (*tensor.pieces, *tensor.patches)]
    if reason := cover_fault(tensor.whole, places):
        _wrong(f"{name}: {reason}")
    return tensor


def cover_fault(whole: Place, places: Sequence[Place]) -> str:
    """Return why ``places`` do not tile ``whole`` exactly, or "" if they do."""
    area = sum(place.num_elements for place in places)
    if area != whole.num_elements:
        return f"its pieces have {area} elements, but the tensor has {whole.num_elements}"
    for place in places:
        if place.common(whole) != place and place.num_elements:
            return f"{place} lies outside {whole}"
    # Sweep down the rows, and compare each place only with earlier ones that extend to its first
    # row. Comparing all pairs would take quadratic time.
    reaching: list[Place] = []
    for place in sorted(places):
        reaching = [other for other in reaching if other.row_stop > place.row_start]
        if any(place.common(other) for other in reaching):
            return f"{place} overlaps another piece"
        reaching.append(place)
    return ""


def _count(value: object) -> int:
    if not is_count(value):
        _wrong(f"{str(value)[:80]!r} is not a whole number of 0 or more")
    return cast("int", value)


def _wrong(why: str) -> NoReturn:
    raise ValueError(why)
