"""Parse text and look up keys in single passes compiled by numba, where Polars and numpy would need
several passes.

This module is imported only if numba is installed. Every loop gives the same results as the code
that it replaces, and releases the GIL.
"""

import numpy as np

from sbpflow.runtime.compute.compiled import Array, compiled
from sbpflow.serving.text_loops import NIBBLES

U64 = np.uint64
LABEL, INTEGER, HEX = 0, 1, 2
"""Kinds of columns in a line"""
_END, _MINUS, _ZERO = 10, 45, 48
_HEX_DIGITS, _MAX_DIGITS = 8, 9
"""Integers with up to this many digits always fit into 32 bits"""


@compiled
def parse_lines(  # noqa: C901 - a function per kind of cell is three times slower
    text: Array,
    separator: int,
    kinds: Array,
    labels: Array,
    integers: Array,
    has_integer: Array,
    keys: Array,
    has_key: Array,
) -> bool:
    """Parse lines of labels, integers and hex values of eight digits into columns.

    If a cell is invalid or the number of lines or cells is wrong, returns False, and the outputs
    are undefined. The shapes are ``kinds`` [columns], ``labels`` [rows], ``integers`` [integer
    columns, rows], and ``keys`` [hex columns, rows]. ``has_integer`` and ``has_key`` are False for
    empty cells.
    """
    at, end, columns = 0, text.size, kinds.size
    for row in range(labels.size):
        integer, key = 0, 0
        for column in range(columns):
            stop = _END if column == columns - 1 else separator
            kind = kinds[column]
            if kind == HEX:
                if at < end and text[at] == stop:
                    keys[key, row], has_key[key, row] = 0, False
                else:
                    if at + _HEX_DIGITS >= end:
                        return False
                    value, bad = np.uint32(0), np.uint8(0)
                    for k in range(at, at + _HEX_DIGITS):
                        nibble = NIBBLES[text[k]]
                        bad |= nibble
                        value = (value << np.uint32(4)) | np.uint32(nibble)
                    at += _HEX_DIGITS
                    if bad > 15 or text[at] != stop:
                        return False
                    keys[key, row], has_key[key, row] = value, True
                key += 1
            elif kind == INTEGER:
                negative = at < end and text[at] == _MINUS
                at += negative
                first, number = at, 0
                while at < end and text[at] != stop:
                    digit = np.int64(text[at]) - _ZERO
                    if digit < 0 or digit > 9:
                        return False
                    number = 10 * number + digit
                    at += 1
                digits = at - first
                if at == end or digits > _MAX_DIGITS or (negative and digits == 0):
                    return False
                integers[integer, row] = -number if negative else number
                has_integer[integer, row] = digits > 0
                integer += 1
            elif kind == LABEL:
                if at + 1 >= end or text[at + 1] != stop:
                    return False
                label = np.int64(text[at]) - _ZERO
                if label < 0 or label > 1:
                    return False
                labels[row] = label
                at += 1
            else:
                raise ValueError("a column kind must be LABEL, INTEGER or HEX")
            at += 1
    return at == end


@compiled
def look_up(
    slots: Array, slot_ids: Array, keys: Array, factor: np.uint64, unknown: int, ids: Array
) -> None:
    """Look up ``keys`` [n], and write ``ids`` [n].

    ``slots`` contains the keys of the slots, and ``slot_ids`` their ids. An empty slot contains key
    0 and the id ``unknown``. A key's first slot is the high half of key * ``factor``, scaled to the
    number of slots.
    """
    capacity = U64(slots.size)
    for k in range(keys.size):
        key = keys[k]
        slot = (((U64(key) * factor) >> U64(32)) * capacity) >> U64(32)
        while slots[slot] != key and slot_ids[slot] != unknown:
            slot += U64(1)
            if slot == capacity:
                slot = U64(0)
        ids[k] = slot_ids[slot]
