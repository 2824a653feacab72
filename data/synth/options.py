"""Define the options of ``synth``; equal options produce byte-identical sets."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from sbpflow.data.format.schema import CRITEO
from sbpflow.data.numbers import MAX_SEED, MAX_WORKERS, by_column, check_ranges
from sbpflow.data.prepare.split import SplitRule
from sbpflow.errors import ConfigError

CROSSES = (("C1", "C2"), ("C3", "C4"))

# fmt: off
MLPERF_HOT = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
# fmt: on
"""Ids per row of C1..C26 in MLPerf DLRMv2 (facebookresearch/dlrm, torchrec_dlrm README)"""

Hot = tuple[int, int]
"""Minimum and maximum number of ids per row; if the two are equal, ids are stored in words;
otherwise, in lists
"""


Format = Literal["prepared", "tsv"]


@dataclass(frozen=True, kw_only=True)
class SynthOptions:
    """The options of ``sbpflow synth``; see ``sbpflow synth --help``."""

    rows: int
    output: Path
    format: Format = "prepared"
    vocab_scale: float = 1.0
    ctr: float = 0.2562
    auc: float = 0.80
    min_mass: float = 5e-4
    """Minimum frequency of values and pairs that affect the label"""
    products: float = 0.0
    """Share of the logit's variance that comes from dot products between the vectors of two
    columns' values
    """
    skew: tuple[tuple[str, float], ...] = ()
    drift: float = 0.0
    keys: bool = False
    """True to write 64-bit keys instead of ids: the keys that ``prepare --keys`` computes from the
    text
    """
    hot: tuple[tuple[str, Hot], ...] = ()
    split: SplitRule = field(default_factory=lambda: SplitRule("time", (0.8, 0.1, 0.1)))
    seed: int = 7
    workers: int = os.cpu_count() or 1

    def check(self) -> None:
        """Raise ConfigError for invalid values."""
        if self.split.kind != "time":
            raise ConfigError("--split: generated rows need a split such as time:0.8,0.1,0.1")
        if self.format == "tsv" and any(most != (1, 1) for _, most in self.hot):
            raise ConfigError("--hot: Criteo text has one value per column; use --format prepared")
        if self.format == "tsv" and self.keys:
            raise ConfigError(
                "--keys: text output has no ids; prepare that text with `prepare --keys`"
            )
        check_ranges(
            ("--rows", self.rows, 1, 10**11),
            ("--ctr", self.ctr, 0.001, 0.999),
            ("--auc", self.auc, 0.51, 0.98),
            ("--products", self.products, 0, 0.95),
            ("--seed", self.seed, 0, MAX_SEED),
            ("--drift", self.drift, 0, 1000),
            ("--workers", self.workers, 1, MAX_WORKERS),
            ("--vocab-scale", self.vocab_scale, 1e-6, 1),
            *(("--hot " + name, least, 0, most) for name, (least, most) in self.hot),
            *(("--hot " + name, most, 1, 1000) for name, (_, most) in self.hot),
            *(("--skew " + name, skew, 0, 10) for name, skew in self.skew),
        )
        self.split.check_train(self.rows)


def parse_hot(text: str) -> tuple[tuple[str, Hot], ...]:
    """Parse ``mlperf`` (MLPerf's n ids per row), ``mlperf-ragged`` (1 to 2n - 1 ids) or
    ``C1=3,C20=0-12``.
    """
    sizes = zip(CRITEO.sparse, MLPERF_HOT, strict=True)
    if text == "mlperf":
        return tuple((name, (hot, hot)) for name, hot in sizes)
    if text == "mlperf-ragged":
        return tuple((name, (1, 2 * hot - 1)) for name, hot in sizes)
    example = "mlperf, mlperf-ragged, or a list such as C1=3,C20=0-12"
    return by_column("--hot", text, _hot, example, CRITEO.sparse, takes_one=False)


def _hot(text: str) -> Hot:
    least, dash, most = text.partition("-")
    return int(least), int(most if dash else least)


def parse_skew(text: str) -> tuple[tuple[str, float], ...]:
    """Parse ``1.2`` (for every column) or ``C3=1.2,C1=0.5``."""
    example = "a number, or a list such as C1=3,C20=0.5"
    return by_column("--skew", text, float, example, CRITEO.sparse)
