"""Reads rows from request bodies and writes scores to response bodies, in the server's formats.

The content type of a request determines its format, and a response has the format of its request.
No format uses pickle.
"""

import io
import json
import re
import struct
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any, NoReturn, cast

import numpy as np
from numpy.typing import NDArray

from sbpflow.runtime.files.json_file import kind_name
from sbpflow.serving.columns import brief
from sbpflow.serving.encoder import Encoded
from sbpflow.serving.scorer import Model
from sbpflow.serving.scores import written

Scores = NDArray[np.float32]
TEXT, JSON = "text/tab-separated-values", "application/json"
ARROW = "application/vnd.apache.arrow.stream"
_COMMA, _SPACE = b", ", b" \t\n\r"
_CHARSETS = ("utf-8", "utf8", "us-ascii")
_ROWS = re.compile(rb'[ \t\n\r]*\{[ \t\n\r]*"rows"[ \t\n\r]*:')


class BodyError(ValueError):
    """Raised for a request that cannot be answered; ``status`` is the HTTP status of the
    response.
    """

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Format:
    """``read(body, max_rows)`` returns rows for ``encode``; ``write`` returns the body of a
    response.
    """

    type: bytes
    read: Callable[[bytes, int], Any]
    write: Callable[[Scores, str, str], bytes]


def format_of(content_type: str) -> Format:
    """Return the format of a content type; raise BodyError (415) for an unsupported content
    type.
    """
    kind, *parameters = (part.strip().lower() for part in content_type.split(";"))
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "charset" and value.strip(' "') not in _CHARSETS:
            raise BodyError(f"Content-Type: {parameter} is not supported; use charset=utf-8", 415)
    try:
        return _FORMATS[kind]
    except KeyError:
        raise BodyError(
            f"Content-Type: {kind!r} is not supported; use {TEXT}, {JSON}, or {ARROW}", 415
        ) from None


def check_rows(number: int, max_rows: int) -> None:
    """Raise BodyError (413) for more than ``max_rows`` rows."""
    if number > max_rows:
        raise BodyError(
            f"the request has {number:,} rows, but the server accepts at most {max_rows:,} "
            "(--max-rows)",
            413,
        )


def read_json_body(body: bytes) -> object:
    """Return the JSON value of a body; raise BodyError if the body is not JSON or is nested too
    deeply.
    """
    # The stricter ``parse_json`` would call Python code for each number, which takes too long here.
    try:
        return json.loads(body, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise BodyError("the body has too many levels of nesting") from error
    except ValueError as error:  # also raised for invalid UTF-8
        raise BodyError(f"the body is not JSON ({error})") from error


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number; use null for a missing value")


def _read_text(body: bytes, max_rows: int) -> bytes:
    return body  # rows are counted after encoding, because quoted cells may contain newlines


def _write_text(scores: Scores, name: str, version: str) -> bytes:
    return written(scores, b"\n")


@dataclass(frozen=True, slots=True)
class JsonRows:
    """Rows in a JSON body, which is parsed only when the rows are encoded."""

    body: bytes
    max_rows: int

    def encode(self, model: Model) -> Encoded:
        """Encode the rows; raise BodyError if the body is not JSON or does not contain rows."""
        text = self.body
        if (start := _ROWS.match(text)) and (text := text.rstrip(_SPACE)).endswith(b"}"):
            text = text[start.end() : -1]
        return model.encode_json(text) or model.encode(self.parsed())

    def parsed(self) -> Any:
        """Return the rows as a list of dicts, or as columns; raise BodyError for any other body."""
        value = read_json_body(self.body)
        keys = cast("Mapping[str, Any]", value) if isinstance(value, dict) else {"rows": value}
        if len(keys) != 1 or not keys.keys() <= {"rows", "columns"}:
            raise BodyError(
                f"the body has the keys {brief(sorted(keys))}; use "
                '{"rows": [{"column": value, ..}, ..]} or {"columns": {"column": [value, ..], ..}}'
            )
        (key, found), wanted = next(iter(keys.items())), list if "rows" in keys else dict
        if not isinstance(found, wanted):
            use = '[{"column": value, ..}, ..]' if wanted is list else '{"column": [value, ..], ..}'
            raise BodyError(f"{key} is {kind_name(found)}; use {use}")
        if wanted is list:
            check_rows(len(found), self.max_rows)
            for row, cells in enumerate(found):
                if not isinstance(cells, dict):
                    what = f"row {row} is {kind_name(cells)}"
                    raise BodyError(f'{what}, not an object; use {{"column": value, ..}}')
            return found
        for column, values in cast("dict[str, Any]", found).items():
            if not isinstance(values, list):
                what = f"columns: {column} is {kind_name(values)}"
                raise BodyError(f"{what}, not a list; use one value per row")
            check_rows(len(cast("list[Any]", values)), self.max_rows)
        return found


def encode(model: Model, rows: Any) -> Encoded:
    """Encode the rows that ``Format.read`` returned."""
    return rows.encode(model) if isinstance(rows, JsonRows) else model.encode(rows)


def _write_json(scores: Scores, name: str, version: str) -> bytes:
    # Model names and versions contain no characters that JSON must escape.
    end = f'], "model": "{name}", "version": "{version}"}}\n'
    return b'{"scores": [' + written(scores, _COMMA)[: -len(_COMMA)] + end.encode()


def _read_arrow(body: bytes, max_rows: int) -> Any:
    arrow = _pyarrow()
    try:
        _check_messages(arrow, body, max_rows)
        table = arrow.ipc.open_stream(body).read_all()
        table.validate(full=True)  # the offsets in a malicious body could point outside its buffers
        names = table.column_names
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise BodyError(f"the body is not an Arrow IPC stream ({error})") from error
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise BodyError(f"the column {twice[0]!r} occurs twice; send each column once")
    return table


def _check_messages(arrow: ModuleType, body: bytes, max_rows: int) -> None:
    """Raise BodyError for too many rows or for compressed buffers, before the stream is decoded."""
    stream, num_rows = io.BytesIO(body), 0
    reader = arrow.ipc.MessageReader.open_stream(stream)
    for message in reader:
        if message.type in ("record batch", "dictionary"):
            rows, compressed = _batch_facts(message)
            num_rows += rows if message.type == "record batch" else 0
            check_rows(max(num_rows, rows), max_rows)
            if compressed:
                raise BodyError(
                    "the Arrow stream is compressed, so its uncompressed size is unknown; write "
                    "it without compression"
                )


def _batch_facts(message: Any) -> tuple[int, bool]:
    """Return the number of rows of a batch, read from its flatbuffer, and whether the batch is
    compressed.

    The flatbuffer is read here because pyarrow, which has verified it, does not expose these
    fields.
    """
    data = bytes(message.metadata)

    def field(table: int, number: int) -> int:
        """Return the position of a field of a flatbuffer table, or 0 if the table lacks the
        field.
        """
        entries = table - struct.unpack_from("<i", data, table)[0]
        if 4 + 2 * number >= struct.unpack_from("<H", data, entries)[0]:
            return 0
        offset = struct.unpack_from("<H", data, entries + 4 + 2 * number)[0]
        return table + offset if offset else 0

    def target(place: int) -> int:
        return place + struct.unpack_from("<I", data, place)[0]

    batch = target(field(target(0), 2))  # Message.header
    if message.type == "dictionary":
        batch = target(field(batch, 1))  # DictionaryBatch.data
    length = field(batch, 0)
    rows = struct.unpack_from("<q", data, length)[0] if length else 0
    return rows, bool(field(batch, 3))  # RecordBatch.compression


def _write_arrow(scores: Scores, name: str, version: str) -> bytes:
    arrow = _pyarrow()
    table = arrow.table({"score": scores})
    table = table.replace_schema_metadata({"model": name, "version": version})
    sink = arrow.BufferOutputStream()
    with arrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def _pyarrow() -> ModuleType:
    try:
        import_module("pyarrow.ipc")
        return import_module("pyarrow")
    except ImportError as error:
        raise BodyError(
            f"Content-Type: {ARROW} needs pyarrow on the server ({error})", 415
        ) from error


_TEXT = Format(b"text/plain", _read_text, _write_text)
_FORMATS = {
    TEXT: _TEXT,
    "text/plain": _TEXT,
    "text/csv": _TEXT,
    "": _TEXT,
    "application/x-www-form-urlencoded": _TEXT,  # the default of curl --data-binary
    JSON: Format(b"application/json", JsonRows, _write_json),
    ARROW: Format(ARROW.encode(), _read_arrow, _write_arrow),
}
