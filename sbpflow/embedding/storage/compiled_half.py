"""Defines loops, compiled by numba, for pooled reads and rounded writes of half-precision rows.

The rules in the docstring of ``compiled`` apply; all results of this module are bit-equal to those
of ``TorchStorage``. Rows are passed as int16 bits, because NumPy has no bfloat16 type.
"""

from collections.abc import Callable
from typing import cast

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from sbpflow.embedding.storage.compiled import GAMMA_64, U64, fma, mixed
from sbpflow.runtime.compute.compiled import DISTANCE, Array, Node, compiled, prefetch


@intrinsic
def _from_bits(_: Node, a: Node) -> Node:
    def generate(_context: Node, builder: Node, _signature: Node, values: Node) -> Node:
        word = ir.IntType(32)
        bits = builder.shl(builder.zext(values[0], word), ir.Constant(word, 16))
        return builder.bitcast(bits, ir.FloatType())

    return types.float32(a), generate


@intrinsic
def _from_half(_: Node, a: Node) -> Node:
    def generate(_context: Node, builder: Node, _signature: Node, values: Node) -> Node:
        return builder.fpext(builder.bitcast(values[0], ir.HalfType()), ir.FloatType())

    return types.float32(a), generate


# These functions convert the int16 bits of a half-precision number exactly to float32.
_from_bfloat16 = cast("Callable[[int], float]", _from_bits)
_from_float16 = cast("Callable[[int], float]", _from_half)


@compiled
def _as_float16(bits: np.int64) -> np.int64:
    """Return the bits of the float16 nearest to a float32 value, which is passed as bits. A finite
    value must be at most 65504 in magnitude and, in the normal range, already be rounded.
    """
    sign, exponent, mantissa = (bits >> 16) & 0x8000, (bits >> 23) & 0xFF, bits & 0x7FFFFF
    if exponent == 255:
        return sign | 0x7C00 | (0x200 if mantissa else 0)
    exponent -= 112
    if exponent > 0:
        return sign | (exponent << 10) | (mantissa >> 13)
    if exponent < -10:
        return sign
    mantissa |= 0x800000
    shift = 14 - exponent
    nearest, rest, middle = mantissa >> shift, mantissa & ((1 << shift) - 1), 1 << (shift - 1)
    if rest > middle or (rest == middle and nearest & 1):
        nearest += 1
    return sign | nearest


@compiled
def store_rounded(
    values: Array,
    out: Array,
    slots: Array,
    rows: Array,
    keys: Array,
    bases: Array,
    shift: Array,
    addresses: Array,
    words_per_row: int,
    first_column: int,
    dropped: int,
) -> None:
    """Round ``values`` [n, width] (float32 as int32 bits), and write them to ``slots`` of ``out``
    (int16).

    ``dropped`` is the number of mantissa bits to drop: 16 gives bfloat16, 13 gives float16. The
    result equals that of ``round_randomly`` with the noise of ``rounding.RowNoise`` for ``rows``
    (ascending). ``keys`` (uint64) are the noise keys of the step. For growing tables, ``addresses``
    are the addresses of the rows' keys; for other tables, the array is empty.
    """
    top = 0x7F7F0000 if dropped == 16 else 0x477FE000  # largest finite value, as float32 bits
    mask = (1 << dropped) - 1
    shard = 0
    for j in range(rows.size):
        slot, row = np.int64(slots[j]), np.int64(rows[j])
        while shard + 1 < bases.size and bases[shard + 1] <= row:
            shard += 1
        number = addresses[j] if addresses.size else row + shift[shard]
        number *= words_per_row
        word, held = U64(0), -1
        for k in range(values.shape[1]):
            column = first_column + k
            if column >> 2 != held:
                held = column >> 2
                word = mixed(U64(number + held) * GAMMA_64 + keys[shard])
            bits = np.int64(values[j, k]) & 0xFFFFFFFF
            if (bits & 0x7F800000) != 0x7F800000:
                noise = np.int64((word >> U64(16 * (column & 3))) & U64(0xFFFF)) & mask
                sign = bits & 0x80000000
                bits = sign | min(((bits & 0x7FFFFFFF) + noise) & ~mask, top)
            narrow = bits >> 16 if dropped == 16 else _as_float16(bits)
            out[slot, k] = np.int16(narrow - 0x10000 if narrow >= 0x8000 else narrow)


@compiled
def _as_float32(bits: int, dropped: int) -> float:
    return _from_bfloat16(bits) if dropped == 16 else _from_float16(bits)


@compiled
def widen(weights: Array, addresses: Array, out: Array, dropped: int) -> None:
    """Convert half-precision rows (int16 bits) to float32, and write them to ``out`` [n, width].

    ``dropped`` is 16 for bfloat16 and 13 for float16.
    """
    for i in range(addresses.size):
        if i + DISTANCE < addresses.size:
            prefetch(weights, addresses[i + DISTANCE])
        a = np.uintp(addresses[i])
        for k in range(out.shape[1]):
            out[i, k] = _as_float32(weights[a, k], dropped)


@compiled
def pool(
    weights: Array, addresses: Array, ends: Array, shares: Array, out: Array, dropped: int
) -> None:
    """Widen rows as ``widen`` does, and sum each bag, in order, into ``out`` (float32 [bags,
    width]).

    Bag b consists of addresses ``ends[b]`` to ``ends[b + 1] - 1``. ``shares`` contains the weights
    of the rows (float32 [n]), or is empty if the rows have no weights.
    """
    out[:] = 0
    for b in range(ends.size - 1):
        for i in range(ends[b], ends[b + 1]):
            if i + DISTANCE < addresses.size:
                prefetch(weights, addresses[i + DISTANCE])
            a = np.uintp(addresses[i])
            if shares.size:
                for k in range(out.shape[1]):
                    out[b, k] = fma(_as_float32(weights[a, k], dropped), shares[i], out[b, k])
            else:
                for k in range(out.shape[1]):
                    out[b, k] += _as_float32(weights[a, k], dropped)
