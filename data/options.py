"""What ``prepare`` was asked to do, as one value; two equal values give byte-identical sets."""

from dataclasses import dataclass
from pathlib import Path

from data.schema import CRITEO, Schema
from data.split import SplitRule

DEFAULT_CROSSES = "C1xC2,C3xC4"


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """The options of ``python -m data prepare``; see its help for the meaning of each."""

    inputs: tuple[Path, ...]
    output: Path
    split: SplitRule = SplitRule("time", (0.8, 0.1, 0.1))
    crosses: tuple[tuple[str, str], ...] = (("C1", "C2"), ("C3", "C4"))
    schema: Schema = CRITEO
    min_count: int = 2
    transform: str = "log3"
    seed: int = 7
    piece_bytes: int = 64 << 20
    max_bad_fraction: float = 0.001
    overwrite: bool = False
    workers: int = 2
