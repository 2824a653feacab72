"""Parses the cells of text lines in one pass compiled by numba. Import this module only if numba is
installed.
"""

from typing import Any

import numpy as np

from sbpflow.runtime.compute.compiled import Array, compiled
from sbpflow.serving.hash_loops import digest

U8, U32, U64 = np.uint8, np.uint32, np.uint64
SKIPPED, WHOLE, REAL, HEX, INTEGER, STRING = range(6)
_END, _PLUS, _MINUS, _POINT, _ZERO = 10, 43, 45, 46, 48
POWERS = 10.0 ** np.arange(23)
"""The powers of ten that float64 represents exactly."""
NIBBLES = np.full(256, 255, dtype=U8)
"""The value of each hexadecimal digit, and 255 for every other character."""
NIBBLES[list(b"0123456789abcdef")] = range(16)
NIBBLES[list(b"ABCDEF")] = range(10, 16)


@compiled
def _integer(text: Array, at: int, stop: int, most: int) -> tuple[Any, bool]:
    """Return text[at:stop] as an integer, and whether it is an integer of at most ``most``
    digits.
    """
    negative = text[at] == _MINUS
    at += negative
    if stop == at or stop - at > most:
        return 0, False
    number = np.int64(0)
    for k in range(at, stop):
        digit = np.int64(text[k]) - _ZERO
        if digit < 0 or digit > 9:
            return 0, False
        number = 10 * number + digit
    return (-number if negative else number), True


@compiled
def _real(text: Array, at: int, stop: int, powers: Array) -> tuple[float, bool]:
    """Return text[at:stop] as a decimal number, and whether it is a number of at most 15 digits
    times an exact power of ten. float64 represents both of these factors exactly, so their product
    is rounded correctly.
    """
    negative = text[at] == _MINUS
    at += negative
    mantissa, digits, scale, seen_point = np.int64(0), 0, 0, False
    while at < stop:
        digit = np.int64(text[at]) - _ZERO
        if digit >= 0 and digit <= 9:
            mantissa = 10 * mantissa + digit
            digits += 1
            scale -= seen_point
        elif text[at] == _POINT and not seen_point:
            seen_point = True
        else:
            break
        at += 1
    if digits == 0 or digits > 15:
        return 0.0, False
    if at < stop and (text[at] == 101 or text[at] == 69):
        at += 1
        if at < stop and text[at] == _PLUS:
            at += 1
            if at < stop and text[at] == _MINUS:
                return 0.0, False
        if at == stop:
            return 0.0, False
        exponent, fits = _integer(text, at, stop, 3)
        if not fits:
            return 0.0, False
        scale, at = scale + exponent, stop
    if at < stop or scale < -22 or scale > 22:
        return 0.0, False
    number = mantissa / powers[-scale] if scale < 0 else mantissa * powers[scale]
    return (-number if negative else number), True


@compiled
def parse_text(  # noqa: C901 - a function per kind of cell is three times slower
    text: Array,
    separator: int,
    kinds: Array,
    targets: Array,
    powers: Array,
    numbers: Array,
    keys: Array,
    checks: Array,
    missing: Array,
) -> bool:
    """Parse text lines into ``numbers`` ([rows, dense]), ``keys``, ``checks``, and ``missing``
    ([rows, n]).

    ``kinds`` and ``targets`` [columns] contain each cell's kind and its column in the outputs.
    Returns False if a cell has a format that only ``cells`` parses, or if the number of lines or
    cells is wrong.
    """
    at, end, columns = 0, text.size, kinds.size
    for row in range(numbers.shape[0]):
        for column in range(columns):
            last = _END if column == columns - 1 else separator
            start, kind, target = at, kinds[column], targets[column]
            if kind == HEX and at + 8 < end and text[at + 8] == last:
                value, bits = U64(0), U8(0)
                for k in range(at, at + 8):
                    digit = NIBBLES[text[k]]
                    value = (value << U64(4)) | U64(digit)
                    bits |= digit
                if bits < 16:
                    keys[row, target] = value
                    at += 9
                    continue
            while at < end and text[at] != separator and text[at] != _END:
                at += 1
            if at == end or text[at] != last:
                return False
            if kind == WHOLE or kind == REAL:
                fits, number = True, np.nan
                if at > start:
                    if kind == WHOLE:
                        number, fits = _integer(text, start, at, 9)
                    else:
                        number, fits = _real(text, start, at, powers)
                if not fits:
                    return False
                numbers[row, target] = number
            elif kind != SKIPPED:
                if at == start:
                    missing[row, target] = True
                elif kind == HEX:
                    return False
                elif kind == INTEGER:
                    whole, fits = _integer(text, start, at, 18)
                    if not fits:
                        return False
                    keys[row, target] = U64(whole)
                elif kind == STRING:
                    keys[row, target], check = digest(text, start, at)
                    checks[row, target] = U32(check & U64(0xFFFFFFFF))
                else:
                    raise ValueError(
                        "the kind of a cell must be one of the constants of this module"
                    )
            at += 1
    return at == end
