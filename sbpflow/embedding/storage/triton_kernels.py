# pyright: basic, reportMissingImports=false, reportAssignmentType=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false
"""Triton kernels: pooled lookup, and a fused segment sum, optimizer step, and rounding.

Import this module only if Triton is installed. The size of every launch depends only on the shape
of the batch, so the host need not count or deduplicate anything. ``docs/decisions/gpu.md`` lists
the bytes that each kernel moves.
"""

import triton
import triton.language as tl

# A program processes ``BLOCK`` positions, and sums at most ``SPLIT`` gradient rows of a run
# sequentially. If a run is longer (a very frequent id), ``sum_long_runs`` first sums the rest of
# the run in other programs.
BLOCK = 32
SPLIT = 64

FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2


# Several arguments per line: one line per argument would double the length of this file.
# fmt: off
@triton.jit
def _sum_rows(
    grads, source, scale, first, count, column, width,
    HAS_SCALE: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):
    """Return the sum of ``count`` rows, added in order starting at sorted position ``first``, as
    float32 [BLOCK, COLUMNS].
    """
    total = tl.zeros([BLOCK, COLUMNS], tl.float32)
    longest = tl.max(count, 0)
    step = longest * 0
    while step < longest:
        more = step < count
        at = tl.load(source + first + step, mask=more, other=0).to(tl.int64)
        place = at[:, None] * width + column[None, :]
        shown = more[:, None] & (column < width)[None, :]
        row = tl.load(grads + place, mask=shown, other=0.0).to(tl.float32)
        if HAS_SCALE:
            row = row * tl.load(scale + first + step, mask=more, other=0.0)[:, None]
        total += row
        step += 1
    return total


@triton.jit
def lookup(
    table, addresses, offsets, weights, out, bags, width,
    HAS_OFFSETS: tl.constexpr, HAS_WEIGHTS: tl.constexpr, BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write the weighted sum of each bag's rows in ``table`` to ``out`` (float32 [bags, width])."""
    bag = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, COLUMNS)
    inside = bag < bags
    shown = inside[:, None] & (column < width)[None, :]
    if HAS_OFFSETS:
        first = tl.load(offsets + bag, mask=inside, other=0)
        count = tl.load(offsets + bag + 1, mask=inside, other=0) - first
    else:
        first = bag.to(tl.int64)
        count = inside.to(tl.int64)
    total = _sum_rows(
        table, addresses, weights, first, count, column, width, HAS_WEIGHTS, BLOCK, COLUMNS
    )
    tl.store(out + bag.to(tl.int64)[:, None] * width + column[None, :], total, mask=shown)


@triton.jit
def sum_long_runs(
    start, stop, source, scale, grads, partial, n, width,
    HAS_SCALE: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):
    """Divide each run into chunks of ``SPLIT`` positions, and write the sum of every chunk except
    the first to ``partial`` [n // SPLIT + 1, width].

    These chunks begin at least ``SPLIT`` positions apart, so the first position of a chunk, divided
    by ``SPLIT``, identifies the chunk.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    begin = tl.load(start + at, mask=inside, other=0)
    end = tl.load(stop + at, mask=inside, other=0)
    begins = inside & (at > begin) & ((at - begin) % SPLIT == 0)
    count = tl.where(begins, tl.minimum(end - at, SPLIT), 0)
    column = tl.arange(0, COLUMNS)
    total = _sum_rows(grads, source, scale, at, count, column, width, HAS_SCALE, BLOCK, COLUMNS)
    place = (at // SPLIT).to(tl.int64)[:, None] * width + column[None, :]
    tl.store(partial + place, total, mask=begins[:, None] & (column < width)[None, :])


@triton.jit
def _sum_run(
    start, stop, source, scale, grads, partial, at, inside, column, width,
    HAS_SCALE: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):
    """Return a mask of positions where a run begins, and the sum of each run."""
    begin = tl.load(start + at, mask=inside, other=-1)
    end = tl.load(stop + at, mask=inside, other=0)
    heads = inside & (at == begin)
    length = tl.where(heads, end - at, 0)
    count = tl.minimum(length, SPLIT)
    total = _sum_rows(grads, source, scale, at, count, column, width, HAS_SCALE, BLOCK, COLUMNS)
    longest = tl.max(length, 0)
    done = longest * 0 + SPLIT
    while done < longest:
        more = done < length
        place = ((at + done) // SPLIT).to(tl.int64)[:, None] * width + column[None, :]
        shown = more[:, None] & (column < width)[None, :]
        total += tl.load(partial + place, mask=shown, other=0.0)
        done += SPLIT
    return heads, total


@triton.jit
def sum_runs(
    start, stop, source, scale, grads, partial, out, n, width,
    HAS_SCALE: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):
    """Write each run's sum to its first position in out [n, width], and zeros elsewhere."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    column = tl.arange(0, COLUMNS)
    _, total = _sum_run(
        start, stop, source, scale, grads, partial, at, inside, column, width,
        HAS_SCALE, SPLIT, BLOCK, COLUMNS,
    )
    shown = inside[:, None] & (column < width)[None, :]
    tl.store(out + at.to(tl.int64)[:, None] * width + column[None, :], total, mask=shown)


@triton.jit
def _mixed(z):
    """Apply the finalizer of SplitMix64 to int64, as ``streams.mix`` does."""
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return z ^ ((z >> 31) & 0x1FFFFFFFF)


@triton.jit
def _noise(
    keys, bases, shift, row, column, words_per_row, first_column,
    SHARDS: tl.constexpr, HALVINGS: tl.constexpr,
):
    """Return the same noise as ``RowNoise.draw``, as int32 [BLOCK, COLUMNS] in 0..65535."""
    low = row * 0
    high = low + SHARDS
    for _ in range(HALVINGS):  # binary search for the shard that contains the row
        middle = (low + high) // 2
        goes_on = (middle < SHARDS) & (high - low > 1)
        base = tl.load(bases + middle, mask=goes_on, other=0)
        up = goes_on & (base <= row)
        low = tl.where(up, middle, low)
        high = tl.where(goes_on & (base > row), middle, high)
    key = tl.load(keys + low)
    number = (row + tl.load(shift + low)) * words_per_row
    at = (first_column + column).to(tl.int64)
    word = _mixed((number[:, None] + (at // 4)[None, :]) * -7046029254386353131 + key[:, None])
    return ((word >> ((at % 4) * 16)[None, :]) & 0xFFFF).to(tl.int32)


@triton.jit
def _rounded(value, noise, ROWS_AS: tl.constexpr):
    """Round to bfloat16 or float16 as ``rounding.round_randomly`` does, but return float32."""
    BITS: tl.constexpr = 16 if ROWS_AS == 1 else 13
    TOP: tl.constexpr = 3.3895313892515355e38 if ROWS_AS == 1 else 65504.0
    raw = value.to(tl.int32, bitcast=True)
    finite = (raw & 0x7F800000) != 0x7F800000
    moved = (raw + (noise & ((1 << BITS) - 1))) & -(1 << BITS)
    near = tl.where(finite, moved, raw).to(tl.float32, bitcast=True)
    near = tl.minimum(tl.maximum(near, -TOP), TOP)
    return tl.where(finite, near, value)


@triton.jit
def update(
    keys, slots, start, stop, source, scale, grads, partial, squares, table, state_a, state_b,
    noise_keys, noise_bases, noise_shift, numbers, n, num_rows, width, rate, decay, correction,
    a, b, c, d, squares_factor, words_per_row, first_column,
    STEP: tl.constexpr, ROWWISE: tl.constexpr, ROWS_AS: tl.constexpr, HAS_SCALE: tl.constexpr,
    HAS_SUMS: tl.constexpr, IN_SLOTS: tl.constexpr, ON_DEVICE: tl.constexpr,
    SHARDS: tl.constexpr, HALVINGS: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Take one optimizer step on each distinct row in ``keys`` (sorted row numbers with
    duplicates). The step is computed at the first position of each run of equal keys.

    With ``HAS_SUMS``, ``grads`` [n, width] already contains the sums of the runs, and ``squares``
    [n] is set. Keys of ``num_rows`` and above are skipped. ``STEP`` is a function of
    ``triton_rules`` with constants ``a`` to ``d``. With ``IN_SLOTS``, ``slots`` [n] are the slots
    of the rows. With ``ON_DEVICE``, ``numbers`` (float64 [3]) contains ``rate``, ``decay``, and
    ``correction``. With ``ROWWISE``, the optimizer has row state.
    """
    if ON_DEVICE:
        rate = tl.load(numbers).to(tl.float32)
        decay = tl.load(numbers + 1).to(tl.float32)
        correction = tl.load(numbers + 2).to(tl.float32)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    column = tl.arange(0, COLUMNS)
    row = tl.load(keys + at, mask=inside, other=0).to(tl.int64)
    if HAS_SUMS:
        heads = inside & (at == tl.load(start + at, mask=inside, other=-1))
        seen = heads[:, None] & (column < width)[None, :]
        place = at.to(tl.int64)[:, None] * width + column[None, :]
        grad = tl.load(grads + place, mask=seen, other=0.0)
    else:
        heads, grad = _sum_run(
            start, stop, source, scale, grads, partial, at, inside, column, width,
            HAS_SCALE, SPLIT, BLOCK, COLUMNS,
        )
    heads = heads & (row < num_rows)
    shown = heads[:, None] & (column < width)[None, :]
    slot = row
    if IN_SLOTS:
        slot = tl.load(slots + at, mask=heads, other=0).to(tl.int64)
    place = slot[:, None] * width + column[None, :]
    weight = tl.load(table + place, mask=shown, other=0.0).to(tl.float32) * decay
    square = rate
    if ROWWISE:
        if HAS_SUMS:
            square = tl.load(squares + at, mask=heads, other=0.0)
        else:
            square = tl.sum(grad * grad, 1) * squares_factor
    weight = STEP(
        weight, grad, square, state_a, state_b, place, shown, slot, heads, rate, correction,
        a, b, c, d,
    )
    if ROWS_AS != 0:
        noise = _noise(
            noise_keys, noise_bases, noise_shift, row, column, words_per_row, first_column,
            SHARDS, HALVINGS,
        )
        weight = _rounded(weight, noise, ROWS_AS)
    tl.store(table + place, weight, mask=shown)


# fmt: on
