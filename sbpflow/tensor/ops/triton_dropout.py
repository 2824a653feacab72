# pyright: basic, reportMissingImports=false
"""Defines Triton kernels for dropout, which compute the mask on the fly instead of storing it.

Import this module only if Triton is installed.
"""

import triton
import triton.language as tl

BLOCK = 1024  # elements per program


# fmt: off
@triton.jit
def drop(
    x, y, key, rows, columns, whole_columns, first, threshold, scale,
    RELU: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):
    """Compute y = x * scale where the bits of ``dropout.counted`` are below ``threshold``, else 0.
    With ``RELU``, also set negative elements to 0.

    The part ``x`` [rows, columns] starts at element ``first`` of the full tensor, which has
    ``whole_columns`` columns. A program computes ``ROWS`` x ``COLUMNS`` elements. Dividing a flat
    index by the number of columns would take longer than computing the mask.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < columns)
    z = (first + row * whole_columns + column) * -7046029254386353131 + tl.load(key)
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    z = z ^ ((z >> 31) & 0x1FFFFFFFF)
    kept = (z & 0x1FFFFFFFFFFFFF) < threshold
    at = row * columns + column
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if RELU:
        kept = kept & ~(value <= 0.0)  # NaN is kept
    tl.store(y + at, tl.where(kept, value * scale, 0.0).to(y.dtype.element_ty), mask=inside)


@triton.jit
def drop_gradient(gradient, y, out, n, scale, BLOCK: tl.constexpr):
    """Compute out = gradient * scale where ``y``, the output of ``drop`` with ``RELU``, is not 0,
    else 0.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    kept = tl.load(y + at, mask=inside, other=0.0) != 0.0
    value = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32) * scale
    tl.store(out + at, tl.where(kept, value, 0.0).to(out.dtype.element_ty), mask=inside)
