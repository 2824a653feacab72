"""Computes the hashes of ``cells.string_key`` in loops compiled by numba, instead of with
hashlib.
"""

from typing import Any

import numpy as np

from sbpflow.runtime.compute.compiled import Array, compiled

U64 = np.uint64
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
