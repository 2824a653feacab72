# pyright: basic, reportMissingImports=false
"""Defines a Triton kernel for dropout that computes the mask on the fly instead of storing it.

Import this module only if Triton is installed. The backward pass applies the same kernel to the
gradient.
"""

import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def drop(x, y, key, n, columns, whole_columns, first, threshold, scale, BLOCK: tl.constexpr):
    """Compute y = x * scale where the bits of ``dropout.counted`` are below ``threshold``, else 0.

    The part has ``columns`` columns and starts at element ``first`` of the full tensor. The full
    tensor has ``whole_columns`` columns.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    number = first + (at // columns) * whole_columns + at % columns
    z = number * -7046029254386353131 + tl.load(key)
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    z = z ^ ((z >> 31) & 0x1FFFFFFFF)
    kept = (z & 0x1FFFFFFFFFFFFF) < threshold
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * scale
    tl.store(y + at, tl.where(kept, value, 0.0).to(y.dtype.element_ty), mask=inside)
