"""Reads JSON from disk, and raises JsonError for a file that is invalid or exceeds a limit.

``json.loads`` alone accepts NaN and deep nesting, turns large numbers into infinity, keeps only the
last value of a repeated key, and returns numbers and strings that cause errors only when they are
used. Callers must still check the structure of the values. ``read_text`` reads, for example, files
with one JSON value per line.
"""

import hashlib
import json
import math
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn, cast

from sbpflow.errors import StoreError
from sbpflow.runtime.files.remote_path import AnyPath, RemotePath

MAX_BYTES = 2**30
MAX_DEPTH = 64
_MAX_INT = 2**64 - 1
_MAX_DIGITS = 20
_MAX_SHOWN = 400  # maximum length of a reason
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]|[\ud800-\udfff]")


class JsonError(ValueError):
    """Raised if a file cannot be read, or if text is not JSON or exceeds a limit."""


def read_json(path: AnyPath, *, max_bytes: int = MAX_BYTES) -> object:
    """Return the JSON value in a file. Raises FileNotFoundError, a JsonError that names the file,
    or StoreError for a URL that cannot be read."""
    return parse_json(read_text(path, max_bytes=max_bytes), str(path))


def read_text(path: AnyPath, *, max_bytes: int = MAX_BYTES, keep_bad_bytes: bool = False) -> str:
    """Return the UTF-8 text of a file of at most ``max_bytes``.

    Raises the same errors as ``read_json``. With ``keep_bad_bytes``, invalid bytes become
    characters that ``parse_json`` rejects, so the other lines of the file can still be used.
    """
    try:
        if isinstance(path, RemotePath):
            size, raw = 0, path.read_bytes()
        else:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                raw = file.read(max_bytes + 1) if size <= max_bytes else b""
        size = max(size, len(raw))
        if size > max_bytes:
            raise JsonError(
                f"{path}: the file has {size:,} bytes, but at most {max_bytes:,} are supported"
            )
        return raw.decode("utf-8", "surrogateescape" if keep_bad_bytes else "strict")
    except (FileNotFoundError, StoreError):  # a missing file or a lost store, not a damaged file
        raise
    except NotADirectoryError as error:  # a parent in the path is a file, not a folder
        raise FileNotFoundError(*error.args) from error
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise JsonError(f"{path}: the file cannot be read ({reason})") from error
    except UnicodeDecodeError as error:
        raise JsonError(f"{path}: not UTF-8 text ({error.reason}, byte {error.start})") from error


def read_end(path: Path, num_bytes: int) -> str:
    """Return the last ``num_bytes`` of an ASCII file, or the whole file if it is shorter."""
    with path.open("rb") as file:
        file.seek(max(os.fstat(file.fileno()).st_size - num_bytes, 0))
        return file.read().decode("ascii", "replace")


def parse_json(text: str, where: str = "", *, finite: bool = True) -> object:
    """Return the value of JSON text. For other text, raise JsonError with a message that begins
    with ``where``. Also raise JsonError for more than MAX_DEPTH levels, repeated keys, integers
    beyond 64 bits, invalid Unicode and, if ``finite``, NaN and infinity.
    """
    hooks: dict[str, Any] = {"parse_constant": _refuse_constant, "parse_float": _float}
    try:
        value = json.loads(
            text, parse_int=_int, object_pairs_hook=_object, **(hooks if finite else {})
        )
        if _is_deep(value):
            raise JsonError(f"more than {MAX_DEPTH} levels of nesting")
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        why = f"not JSON ({error.msg} at line {error.lineno}, column {error.colno})"
    except UnicodeEncodeError:
        why = "not JSON (a string contains half of a surrogate pair)"
    except RecursionError:
        why = f"more than {MAX_DEPTH} levels of nesting"
    except JsonError as error:
        why = str(error)
    else:
        return value
    raise JsonError(f"{where}: {why}" if where else why)


def object_of(value: object, where: str) -> dict[str, Any]:
    """Return ``value`` if it is a JSON object; else raise JsonError."""
    if not isinstance(value, dict):
        raise JsonError(f"{where} is {kind_name(value)}, not an object with keys")
    return cast("dict[str, Any]", value)


def list_of(value: object, where: str) -> list[Any]:
    """Return ``value`` if it is a JSON list; else raise JsonError."""
    if not isinstance(value, list):
        raise JsonError(f"{where} is {kind_name(value)}, not a list")
    return cast("list[Any]", value)


def kind_name(value: object) -> str:
    """Return the name of a JSON value's kind, with an article."""
    kinds = {bool: "true or false", str: "a string", list: "a list", dict: "an object"}
    other = "null" if value is None else "a number"
    return next((name for kind, name in kinds.items() if isinstance(value, kind)), other)


def why_not(error: Exception) -> str:
    """Return a decoder's error as a short reason, for use in a message."""
    text = f"it has no {error}" if isinstance(error, KeyError) else str(error)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}.."


def json_digest(content: object) -> str:
    """Return the SHA-256 of a JSON value; files store this digest to detect changes."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def is_number(value: object) -> bool:
    """Return whether a value is a finite number; bools do not count as numbers."""
    return type(value) in (int, float) and math.isfinite(cast("float", value))


def is_count(value: object) -> bool:
    """Return whether a value is an integer from 0 to 2**63 - 1; bools do not count as integers."""
    return type(value) is int and 0 <= value < 2**63


def _is_deep(value: object) -> bool:
    """Return whether a value is nested too deeply.

    The check uses a loop, because recursion could overflow the stack.
    """
    level: list[object] = [value]
    for _ in range(MAX_DEPTH + 1):
        inner: list[object] = []
        for item in level:
            if isinstance(item, dict):
                inner += cast("dict[str, object]", item).values()
            elif isinstance(item, list):
                inner += cast("list[object]", item)
        level = [item for item in inner if isinstance(item, dict | list)]
        if not level:
            return False
    return True


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        [(twice, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise JsonError(f"the key {twice[:40]!r} appears twice; remove one of them")
    return value


def _refuse_constant(text: str) -> NoReturn:
    raise JsonError(f"not JSON ({text} is not a JSON number)")


def _int(text: str) -> int:
    value = int(text) if len(text) <= _MAX_DIGITS else _MAX_INT + 1
    if abs(value) > _MAX_INT:
        digits = len(text.lstrip("-"))
        raise JsonError(
            f"a whole number has {digits:,} digits, but numbers can have at most 64 bits"
        )
    return value


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise JsonError(f"the number {text[:40]} is too large for 64 bits")
    return value
