"""Creates copies of a file with seeded random damage, like the damage that disks, editors, and
programs cause.
"""

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

# Replacement values of different types, including extreme numbers and strings.
VALUES = (
    *("null", "true", "false", "0", "-1", "1", "2", "0.5", "-0.0", "1e-300", "5e-324", "1e300"),
    *("1e999", "-1e999", "NaN", "Infinity", "-Infinity", str(2**31), str(2**63), str(2**64)),
    *(str(10**23), "-" + "9" * 45, "9" * 5000, "1" * 400 + ".5", '""', '"x"', '"S(0)"', '"B"'),
    *('"a\\nb"', '"\\u0000"', '"\\ud800"', '"\\u2028"', '"' + "x" * 5000 + '"', '"10"', '"nan"'),
    *("[]", "{}", "[[]]", "[null]", '{"": null}', '{"is": "Path"}', "[1, 2]", '{"a": 1, "a": 2}'),
    *(
        "[" * 40 + "]" * 40,
        "[" * 70 + "]" * 70,
        "[" * 3000 + "]" * 3000,
        '{"a":' * 2000 + "1" + "}" * 2000,
    ),
)
FILES = (
    *(b"", b"\n", b"null", b"[]", b"{}", b"3", b'"text"', b"true", b"{ half", b"[" * 100_000),
    *(b'{"a":' * 50_000, b"\xff\xfe\x00", b"\x00" * 64, b"\xef\xbb\xbf{}", b"NaN", b"9" * 6000),
    *(b"a: 1\n", b"<html>", b'{"format": 1}\n', b'{"format": "sbpflow-prepared"}', b"\n\n{}\n"),
    "{\u2028}".encode(),
)


def damaged(
    raw: bytes, count: int, *, seed: int = 0, others: tuple[bytes, ...] = ()
) -> Iterator[bytes]:
    """Yield ``count`` copies that differ from ``raw``; ``others`` contains the contents of other
    files."""
    draw, num_copies = random.Random(seed), 0
    kinds: tuple[Callable[[random.Random, bytes], bytes], ...] = (
        *(_flip, _flip, _cut, _paste, _value, _value, _value, _value, _delete, _delete),
        lambda draw, _: draw.choice((*FILES, *others)),
    )
    while num_copies < count:
        copy = draw.choice(kinds)(draw, raw)
        if copy != raw:
            num_copies += 1
            yield copy


def _flip(draw: random.Random, raw: bytes) -> bytes:
    changed = bytearray(raw)
    for _ in range(draw.choice((1, 1, 1, 8))):
        changed[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _cut(draw: random.Random, raw: bytes) -> bytes:
    return raw[: draw.randrange(len(raw))]


def _paste(draw: random.Random, raw: bytes) -> bytes:
    at, start = draw.randrange(len(raw)), draw.randrange(len(raw))
    return raw[:at] + raw[start : start + draw.randrange(1, 64)] + raw[at:]


def _value(draw: random.Random, raw: bytes) -> bytes:
    """Replace a value at a random place."""
    mark = "a value that stands for another"

    def change(parent: Any, key: Any) -> None:
        parent[key] = mark

    text = _changed(draw, raw, change)
    return text.replace(json.dumps(mark), draw.choice(VALUES)).encode("utf-8")


def _delete(draw: random.Random, raw: bytes) -> bytes:
    def change(parent: Any, key: Any) -> None:
        del parent[key]

    return _changed(draw, raw, change).encode()


def _changed(draw: random.Random, raw: bytes, change: Callable[[Any, Any], None]) -> str:
    """Apply ``change`` at a position in the JSON value, or in one of the lines; return the text."""
    text = raw.decode()
    try:
        return json.dumps(_change_one(draw, json.loads(text), change)) + "\n"
    except ValueError:
        lines = text.splitlines()
    at = draw.randrange(len(lines))
    try:
        lines[at] = json.dumps(_change_one(draw, json.loads(lines[at]), change))
    except ValueError:  # a file that is not JSON, such as start.txt
        change(lines, at)
    return "\n".join(lines) + "\n"


def _change_one(draw: random.Random, tree: Any, change: Callable[[Any, Any], None]) -> Any:
    """Change a value at a random depth; choosing among all values would hardly ever change the
    upper levels.
    """
    node, depth = tree, draw.randrange(1, 9)
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys:
            return tree
        key = draw.choice(keys)
        depth -= 1
        below = node[key]
        if depth == 0 or not isinstance(below, dict | list) or not below:
            change(node, key)
            return tree
        node = below
