"""Parses the cells of text lines in one pass compiled by numba, and computes the hashes of
``cells.string_key``. Import this module only if numba is installed.
"""

from typing import Any

import numpy as np

from sbpflow.runtime.compute.compiled import Array, compiled

U8, U32, U64 = np.uint8, np.uint32, np.uint64
SKIPPED, WHOLE, REAL, HEX, INTEGER, STRING = range(6)
_END, _PLUS, _MINUS, _POINT, _ZERO = 10, 43, 45, 46, 48
POWERS = 10.0 ** np.arange(23)
"""The powers of ten that float64 represents exactly."""
NIBBLES = np.full(256, 255, dtype=U8)
"""The value of each hexadecimal digit, and 255 for every other character."""
NIBBLES[list(b"0123456789abcdef")] = range(16)
NIBBLES[list(b"ABCDEF")] = range(10, 16)
_IV = np.array(
    [0x6A09E667F3BCC908, 0xBB67AE8584CAA73B, 0x3C6EF372FE94F82B, 0xA54FF53A5F1D36F1,
     0x510E527FADE682D1, 0x9B05688C2B3E6C1F, 0x1F83D9ABFB41BD6B, 0x5BE0CD19137E2179],
    dtype=U64,
)  # fmt: skip
_SIGMA = np.array(
    [[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15],
     [14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3],
     [11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4],
     [7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8],
     [9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13],
     [2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9],
     [12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11],
     [13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10],
     [6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5],
     [10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0]],
    dtype=np.int64,
)  # fmt: skip
_MIXES = np.array(
    [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15],
     [0, 5, 10, 15], [1, 6, 11, 12], [2, 7, 8, 13], [3, 4, 9, 14]],
    dtype=np.int64,
)  # fmt: skip
"""The initial state, the orders of words, and the mixed words of blake2b (RFC 7693)."""


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
def _rotated(x: Any, bits: int) -> Any:
    return (x >> U64(bits)) | (x << U64(64 - bits))


@compiled
def digest(text: Array, start: int, stop: int) -> tuple[Any, Any]:
    """Return two words whose first 12 bytes are the blake2b hash of text[start:stop] (RFC 7693)."""
    h = _IV.copy()
    h[0] ^= U64(0x01010000 ^ 12)
    m, v = np.empty(16, dtype=U64), np.empty(16, dtype=U64)
    done, size = 0, stop - start
    while True:
        length = min(128, size - done)
        m[:] = U64(0)
        for k in range(length):
            m[k >> 3] |= U64(text[start + done + k]) << U64(8 * (k & 7))
        done += length
        v[:8], v[8:] = h, _IV
        v[12] ^= U64(done)
        if done == size:
            v[14] = ~v[14]
        for number in range(12):
            order = _SIGMA[number % 10]
            for k in range(8):
                a, b, c, d = _MIXES[k]
                v[a] += v[b] + m[order[2 * k]]
                v[d] = _rotated(v[d] ^ v[a], 32)
                v[c] += v[d]
                v[b] = _rotated(v[b] ^ v[c], 24)
                v[a] += v[b] + m[order[2 * k + 1]]
                v[d] = _rotated(v[d] ^ v[a], 16)
                v[c] += v[d]
                v[b] = _rotated(v[b] ^ v[c], 63)
        for k in range(8):
            h[k] ^= v[k] ^ v[k + 8]
        if done == size:
            return h[0], h[1]


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
