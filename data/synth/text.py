"""Write generated rows as Criteo text: label, integers, and hex categories. Missing cells are
empty.
"""

from functools import partial
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray
from tqdm import tqdm

from sbpflow.data.engine import EngineOptions, open_engine
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


def _block_text(generator: Generator, span: tuple[int, int, int]) -> bytes:
    block, first, last = span
    rows, _, labels = generator.block(block)
    frame = text_frame(rows, labels, first, last)
    text = frame.write_csv(include_header=False, separator="\t", quote_style="never")
    return text.encode("ascii")


def write_tsv(generator: Generator, options: SynthOptions) -> None:
    """Write all rows to ``options.output``, which appears only when it is complete."""
    unfinished = Path(str(options.output) + ".partial")
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    with (
        open_engine(EngineOptions(), options.workers) as engine,
        unfinished.open("wb") as file,
        tqdm(total=options.rows, unit="row", unit_scale=True, desc="synth") as bar,
    ):
        blocks = list(block_ranges(0, options.rows))
        texts = engine.run(partial(_block_text, generator), blocks)
        for (_, first, last), text in zip(blocks, texts, strict=True):
            file.write(text)
            bar.update(last - first)
    unfinished.replace(options.output)
