"""The one reader of JSON from disk: whatever a file holds, a value within limits or one JsonError.

``json.loads`` alone accepts NaN, overflows to infinity, recurses as deep as a file says, and makes
numbers and texts that fail only where they are used. Values that need a form of their own are
checked by the caller; ``read_text`` is for files with a JSON value per line.
"""

import json
import math
import os
import re
from pathlib import Path
from typing import Any, NoReturn, cast

MAX_BYTES = 2**30
MAX_DEPTH = 64
_MAX_INT = 2**64 - 1
_MAX_DIGITS = 20
_MOST_SHOWN = 400  # characters of a reason
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]|[\ud800-\udfff]")


class JsonError(ValueError):
    """A file that cannot be read, or text that is not JSON or is beyond a limit."""


def read_json(path: Path, *, max_bytes: int = MAX_BYTES) -> object:
    """The value in the file; FileNotFoundError where there is none, else JsonError naming it."""
    return parse_json(read_text(path, max_bytes=max_bytes), str(path))


def read_text(path: Path, *, max_bytes: int = MAX_BYTES, keep_bad_bytes: bool = False) -> str:
    """The UTF-8 text of a file of at most ``max_bytes``; raises what ``read_json`` raises.

    With ``keep_bad_bytes`` a byte that is not UTF-8 becomes a character that ``parse_json`` refuses
    in its line, so that the other lines can be used.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            raw = file.read(max_bytes + 1) if size <= max_bytes else b""
        size = max(size, len(raw))
        if size > max_bytes:
            raise JsonError(f"{path}: has {size:,} bytes; at most {max_bytes:,} are read")
        return raw.decode("utf-8", "surrogateescape" if keep_bad_bytes else "strict")
    except FileNotFoundError:
        raise
    except NotADirectoryError as error:  # of a part of the path
        raise FileNotFoundError(*error.args) from error
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise JsonError(f"{path}: cannot be read ({reason})") from error
    except UnicodeDecodeError as error:
        raise JsonError(f"{path}: not UTF-8 text ({error.reason}, byte {error.start})") from error


def parse_json(text: str, where: str = "", *, finite: bool = True) -> object:
    """The value of JSON text; JsonError, which begins with ``where``, for anything else.

    Refused are more than MAX_DEPTH levels, whole numbers beyond 64 bits, texts that are not Unicode
    and, with ``finite``, numbers that are not finite.
    """
    hooks: dict[str, Any] = {"parse_constant": _refuse_constant, "parse_float": _float}
    try:
        value = json.loads(text, parse_int=_int, **(hooks if finite else {}))
        if _is_deep(value):
            raise JsonError(f"more than {MAX_DEPTH} levels of nesting")
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        why = f"not JSON ({error.msg} at line {error.lineno}, column {error.colno})"
    except UnicodeEncodeError:
        why = "not JSON (a text has half of a surrogate pair)"
    except RecursionError:
        why = f"more than {MAX_DEPTH} levels of nesting"
    except JsonError as error:
        why = str(error)
    else:
        return value
    raise JsonError(f"{where}: {why}" if where else why)


def object_of(value: object, where: str) -> dict[str, Any]:
    """``value`` if it is a JSON object; else JsonError."""
    if not isinstance(value, dict):
        raise JsonError(f"{where}: holds {kind_name(value)}, not an object with keys")
    return cast("dict[str, Any]", value)


def list_of(value: object, where: str) -> list[Any]:
    """``value`` if it is a JSON list; else JsonError."""
    if not isinstance(value, list):
        raise JsonError(f"{where}: holds {kind_name(value)}, not a list")
    return cast("list[Any]", value)


def kind_name(value: object) -> str:
    """What JSON calls the kind of ``value``."""
    kinds = {bool: "true or false", str: "a text", list: "a list", dict: "an object"}
    other = "null" if value is None else "a number"
    return next((name for kind, name in kinds.items() if isinstance(value, kind)), other)


def why_not(error: Exception) -> str:
    """What is wrong with a value that a reader looked into, as long as a message can hold."""
    text = f"it has no {error}" if isinstance(error, KeyError) else str(error)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}.."


def is_number(value: object) -> bool:
    """Whether it is a finite number; ``True`` is none."""
    return type(value) in (int, float) and math.isfinite(cast("float", value))


def is_count(value: object) -> bool:
    """Whether it is a whole number from 0 to 2**63 - 1; ``True`` is none."""
    return type(value) is int and 0 <= value < 2**63


def _is_deep(value: object) -> bool:
    """Goes level by level, so that the check itself does not recurse."""
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


def _refuse_constant(text: str) -> NoReturn:
    raise JsonError(f"not JSON ({text} is not a JSON number)")


def _int(text: str) -> int:
    value = int(text) if len(text) <= _MAX_DIGITS else _MAX_INT + 1
    if abs(value) > _MAX_INT:
        digits = len(text.lstrip("-"))
        raise JsonError(f"a whole number of {digits:,} digits; numbers have at most 64 bits")
    return value


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise JsonError(f"the number {text[:40]} is beyond 64 bits")
    return value
