"""Loops over text and keys that numba compiles: one pass where Polars and numpy take several.

Imported only with numba there; what they give is equal to the code beside each call. All of them
let other threads run meanwhile.
"""

import numpy as np

from sbpflow.runtime.compiled import Array, compiled

U64 = np.uint64
LABEL, INTEGER, HEX = 0, 1, 2
"""What a column of a line is."""
_END, _MINUS, _ZERO = 10, 45, 48
_HEX_DIGITS, _MOST_DIGITS = 8, 9
"""Nine digits fit into 32 bits whatever they are."""

NIBBLES = np.full(256, 255, dtype=np.uint8)
"""The value of a hex digit, by its byte."""
for _number in range(16):
    NIBBLES[ord(f"{_number:x}")] = NIBBLES[ord(f"{_number:X}")] = _number


@compiled
def _hex_cell(text: Array, at: int, stop: int, nibbles: Array) -> tuple[np.uint32, int]:
    """The number of a cell at ``at`` and where the next begins; -1 unless ``stop`` ends it."""
    if at + _HEX_DIGITS >= text.size:
        return np.uint32(0), -1
    value, bad = np.uint32(0), np.uint8(0)
    for k in range(at, at + _HEX_DIGITS):
        nibble = nibbles[text[k]]
        bad |= nibble
        value = (value << np.uint32(4)) | np.uint32(nibble)
    fits = bad <= 15 and text[at + _HEX_DIGITS] == stop
    return value, at + _HEX_DIGITS + 1 if fits else -1


@compiled
def _integer_cell(text: Array, at: int, stop: int) -> tuple[int, int]:
    """As ``_hex_cell``, of a whole number of up to nine digits."""
    sign = 1
    if text[at] == _MINUS:
        sign, at = -1, at + 1
    first, number = at, 0
    while at < text.size and text[at] != stop:
        digit = np.int64(text[at]) - _ZERO
        if digit < 0 or digit > 9:
            return 0, -1
        number = 10 * number + digit
        at += 1
    digits = at - first
    fits = at < text.size and 0 < digits <= _MOST_DIGITS
    return sign * number, at + 1 if fits else -1


@compiled
def parse_lines(
    text: Array,
    separator: int,
    nibbles: Array,
    kinds: Array,
    labels: Array,
    integers: Array,
    has_integer: Array,
    keys: Array,
    has_key: Array,
) -> bool:
    """Lines of labels, integers and eight hex digits into columns; False if a cell is anything
    else, or the lines are not as many, or one has another number of cells.

    ``kinds`` [columns]; ``labels`` [rows], ``integers`` [integer columns, rows], ``keys`` [hex
    columns, rows], and whether a cell has one; the outputs may have anything after False.
    """
    at, columns = 0, kinds.size
    for row in range(labels.size):
        integer, key = 0, 0
        for column in range(columns):
            stop = _END if column == columns - 1 else separator
            if at >= text.size:
                return False
            is_there = text[at] != stop
            kind = kinds[column]
            if kind == HEX:
                keys[key, row], has_key[key, row] = 0, is_there
                if is_there:
                    keys[key, row], at = _hex_cell(text, at, stop, nibbles)
                key += 1
            elif kind == INTEGER:
                integers[integer, row], has_integer[integer, row] = 0, is_there
                if is_there:
                    integers[integer, row], at = _integer_cell(text, at, stop)
                integer += 1
            else:
                label = text[at] - _ZERO
                fits = 0 <= label <= 1 and at + 1 < text.size and text[at + 1] == stop
                labels[row], is_there, at = label, True, at + 2 if fits else -1
            if not is_there:
                at += 1
            if at < 0:
                return False
    return at == text.size


@compiled
def look_up_narrow(
    entries: Array, keys: Array, factor: np.uint64, unknown: int, ids: Array
) -> None:
    """Ids [n] of 32-bit ``keys`` [n] from slots with the key above the id; an empty slot holds
    ``unknown`` and key 0. A key's slot is the high half of its product with ``factor``, as a
    fraction of the number of slots.
    """
    capacity = U64(entries.size)
    for k in range(keys.size):
        key = U64(keys[k])
        slot = (((key * factor) >> U64(32)) * capacity) >> U64(32)
        entry = entries[slot]
        while (entry >> U64(32)) != key and np.int32(entry & U64(0xFFFFFFFF)) != unknown:
            slot += U64(1)
            if slot == capacity:
                slot = U64(0)
            entry = entries[slot]
        ids[k] = np.int32(entry & U64(0xFFFFFFFF))


@compiled
def look_up_wide(
    slots: Array, slot_ids: Array, keys: Array, factor: np.uint64, unknown: int, ids: Array
) -> None:
    """As ``look_up_narrow``, of 64-bit keys in ``slots`` with their ids beside them."""
    capacity = U64(slots.size)
    for k in range(keys.size):
        key = keys[k]
        slot = (((key * factor) >> U64(32)) * capacity) >> U64(32)
        while slots[slot] != key and slot_ids[slot] != unknown:
            slot += U64(1)
            if slot == capacity:
                slot = U64(0)
        ids[k] = slot_ids[slot]
