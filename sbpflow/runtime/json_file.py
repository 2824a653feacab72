"""The one reader of JSON from disk: files of people, of other programs, and damaged ones.

``json.loads`` alone accepts NaN, recurses as deep as a file says, and makes numbers that overflow
where they are used. Every refusal is a JsonError, a ValueError that names the file and the limit.
"""

import json
import math
import os
from pathlib import Path
from typing import NoReturn, cast

MAX_BYTES = 2**30
MAX_DEPTH = 64
_MAX_INT = 2**64 - 1


class JsonError(ValueError):
    """Text that is not JSON, or is beyond a limit."""


def read_json(path: Path, *, max_bytes: int = MAX_BYTES) -> object:
    """The JSON value in the file; JsonError, or OSError where it cannot be read."""
    return parse_json(read_text(path, max_bytes=max_bytes), str(path))


def read_text(path: Path, *, max_bytes: int = MAX_BYTES) -> str:
    """The UTF-8 text of a file of at most ``max_bytes``; JsonError, or OSError."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        raw = file.read(max_bytes + 1) if size <= max_bytes else b""
    if size > max_bytes or len(raw) > max_bytes:
        raise JsonError(
            f"{path}: has {max(size, len(raw)):,} bytes; at most {max_bytes:,} are read"
        )
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise JsonError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error


def parse_json(text: str, where: str = "") -> object:
    """The value of JSON text; JsonError, which begins with ``where``.

    Refused are more than MAX_DEPTH levels, whole numbers beyond 64 bits, and numbers that are not
    finite.
    """
    try:
        value = json.loads(
            text, parse_constant=_refuse_constant, parse_int=_int, parse_float=_float
        )
        _check_depth(value)
    except (ValueError, RecursionError) as error:
        deep = isinstance(error, RecursionError)
        why = f"more than {MAX_DEPTH} levels deep" if deep else f"not JSON ({error})"
        raise JsonError(f"{where}: {why}" if where else why) from error
    return value


def _check_depth(value: object) -> None:
    """Level by level, so that the check itself does not recurse."""
    level: list[object] = [value]
    for _ in range(MAX_DEPTH + 1):
        inner: list[object] = []
        for one in level:
            if isinstance(one, dict):
                inner += cast("dict[str, object]", one).values()
            elif isinstance(one, list):
                inner += cast("list[object]", one)
        level = [one for one in inner if isinstance(one, dict | list)]
        if not level:
            return
    raise RecursionError


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")


def _int(text: str) -> int:
    value = int(text) if len(text) <= 21 else _MAX_INT + 1
    if abs(value) > _MAX_INT:
        raise ValueError(f"a whole number of {len(text.lstrip('-'))} digits; use 64 bits or fewer")
    return value


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:40]} is not finite")
    return value
