"""Which rows are train, val and test: by time (row order), by ratio (seeded), or by file name."""

from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from data.manifest import SPLITS
from sbpflow.errors import ConfigError

_EXAMPLES = "time:0.8,0.1,0.1 or ratio:0.8,0.1,0.1 or file:val=day_22*,test=day_23*"


@dataclass(frozen=True, slots=True)
class SplitRule:
    """``time`` and ``ratio`` have fractions of train, val, test; ``file`` has name patterns."""

    kind: Literal["time", "ratio", "file"]
    fractions: tuple[float, float, float] = (0.0, 0.0, 0.0)
    patterns: tuple[tuple[str, str], ...] = ()

    def bounds(self, num_rows: int) -> tuple[int, int]:
        """Rows at which val and test start when ``num_rows`` rows are split in order."""
        train, val, _ = self.fractions
        return round(num_rows * train), round(num_rows * (train + val))

    def of_piece(self, file_name: str, key: tuple[int, ...], num_rows: int) -> NDArray[np.uint8]:
        """0 train, 1 val, 2 test for the rows of a piece; ``time`` decides later and gives 0."""
        if self.kind == "ratio":
            draws = np.random.PCG64(np.random.SeedSequence(key)).random_raw(num_rows) / 2.0**64
            return np.searchsorted(np.cumsum(self.fractions)[:2], draws, side="right").astype(
                np.uint8
            )
        for split, pattern in self.patterns:
            if fnmatch(file_name, pattern):
                return np.full(num_rows, SPLITS.index(split), dtype=np.uint8)
        return np.zeros(num_rows, dtype=np.uint8)


def parse_split(text: str) -> SplitRule:
    """Read ``time:0.8,0.1,0.1``, ``ratio:...`` or ``file:val=PATTERN,test=PATTERN``."""
    kind, _, rest = text.partition(":")
    if kind == "file":
        return SplitRule("file", patterns=_patterns(text, rest))
    if kind not in ("time", "ratio"):
        raise ConfigError(f"--split: {text!r} is not known; write {_EXAMPLES}")
    try:
        train, val, test = (float(part) for part in rest.split(","))
    except ValueError as error:
        raise ConfigError(f"--split: {text!r} needs three fractions; write {_EXAMPLES}") from error
    if not (train > 0 and val >= 0 and test >= 0 and abs(train + val + test - 1) < 1e-6):
        raise ConfigError(f"--split: the fractions of {text!r} must add up to 1, train above 0")
    return SplitRule("time" if kind == "time" else "ratio", (train, val, test))


def _patterns(text: str, rest: str) -> tuple[tuple[str, str], ...]:
    pairs = [item.partition("=") for item in rest.split(",")]
    if any(split not in ("val", "test") or not pattern for split, _, pattern in pairs):
        raise ConfigError(f"--split: {text!r} must name files of val and test; write {_EXAMPLES}")
    return tuple((split, pattern) for split, _, pattern in pairs)
