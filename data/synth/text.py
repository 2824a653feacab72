"""Write generated rows as Criteo text: label, integers, and hex categories. Missing cells are
empty.
"""

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray
from tqdm import tqdm

from sbpflow.data.format.schema import CRITEO
from sbpflow.data.synth.columns import Rows
from sbpflow.data.synth.generator import Generator, block_ranges
from sbpflow.data.synth.options import SynthOptions
from sbpflow.data.synth.tails import Ranks

_DIGITS = pl.Series([f"{value:04x}" for value in range(1 << 16)])


def hex_keys(values: Ranks, column: int) -> NDArray[np.uint32]:
    """Map the values of a column to different 32-bit numbers, with MurmurHash3's finalizer."""
    key = (np.maximum(values, 0) + column * 0x06F0_0001).astype(np.uint32)
    key ^= key >> np.uint32(16)
    key *= np.uint32(0x85EBCA6B)
    key ^= key >> np.uint32(13)
    key *= np.uint32(0xC2B2AE35)
    return key ^ (key >> np.uint32(16))


def text_frame(rows: Rows, labels: NDArray[np.bool_], first: int, last: int) -> pl.DataFrame:
    """Return rows [first, last) of a block as columns of text and integers."""
    columns = {"label": pl.Series(labels[first:last]).cast(pl.UInt8)}
    for name in CRITEO.dense:
        values = pl.Series(rows.integers[name][first:last])
        mask = rows.missing.get(name)
        columns[name] = values if mask is None else _blank(values, mask[first:last])
    for number, name in enumerate(CRITEO.sparse):
        values = rows.values[name][first:last]
        keys = hex_keys(values, number)
        text = _DIGITS.gather(keys >> np.uint32(16)) + _DIGITS.gather(keys & np.uint32(0xFFFF))
        columns[name] = _blank(text, values < 0)
    return pl.DataFrame(columns)


def _blank(values: pl.Series, missing: NDArray[np.bool_]) -> pl.Series:
    return values.set(pl.Series(missing), None) if missing.any() else values


def _block_text(generator: Generator, block: int, first: int, last: int) -> bytes:
    rows, _, labels = generator.block(block)
    frame = text_frame(rows, labels, first, last)
    text = frame.write_csv(include_header=False, separator="\t", quote_style="never")
    return text.encode("ascii")


def write_tsv(generator: Generator, options: SynthOptions) -> None:
    """Write all rows to ``options.output``, which appears only when it is complete."""
    partial = Path(str(options.output) + ".partial")
    partial.parent.mkdir(parents=True, exist_ok=True)
    waiting: deque[tuple[int, Future[bytes]]] = deque()
    with (
        ThreadPoolExecutor(options.workers) as pool,
        partial.open("wb") as file,
        tqdm(total=options.rows, unit="row", unit_scale=True, desc="synth") as bar,
    ):

        def finish() -> None:
            num_rows, future = waiting.popleft()
            file.write(future.result())
            bar.update(num_rows)

        for block, first, last in block_ranges(0, options.rows):
            future = pool.submit(_block_text, generator, block, first, last)
            waiting.append((last - first, future))
            if len(waiting) > options.workers:
                finish()
        while waiting:
            finish()
    partial.replace(options.output)
