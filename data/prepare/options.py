"""What ``prepare`` was asked to do, as one value; two equal values give byte-identical sets."""

from dataclasses import dataclass, field, replace
from pathlib import Path

from sbpflow.data.format.schema import CRITEO, NUM_RESERVED_IDS, Kind, Number, Schema
from sbpflow.data.numbers import MAX_SEED, MAX_WORKERS, by_column, check_ranges
from sbpflow.data.prepare.machines import Part
from sbpflow.data.prepare.remote import InputPath
from sbpflow.data.prepare.split import SplitRule
from sbpflow.data.prepare.transforms import TRANSFORMS
from sbpflow.errors import ConfigError

MOST_PIECES = 8192
"""A piece becomes a shard per split. A loader maps 8,191 shards of words where a process may have
65,530 maps, and reads further ones more slowly from their files."""
_LARGEST_PIECE_BYTES = 128 << 20
"""A worker's memory grows with its piece."""


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """The options of ``sbpflow prepare``; see its help for the meaning of each."""

    inputs: tuple[InputPath, ...]
    output: Path
    split: SplitRule = field(default_factory=lambda: SplitRule("time", (0.8, 0.1, 0.1)))
    crosses: tuple[tuple[str, str], ...] = (("C1", "C2"), ("C3", "C4"))
    schema: Schema = CRITEO
    min_count: int = 2
    transform: str = "log3"
    hash_sizes: tuple[tuple[str, int], ...] = ()
    """Table rows of the fields that are hashed instead of getting a vocabulary."""
    seed: int = 7
    piece_bytes: int = 32 << 20
    """Of text; doubled, up to 128 MiB, until the input has no more than ``MOST_PIECES`` pieces."""
    max_bad_fraction: float = 0.001
    overwrite: bool = False
    workers: int = 2
    like: Path | None = None
    """A set whose ids, transforms and constants the new one shares; it gives all of the above."""
    grow: bool = False
    """Whether values that the set ``like`` has not get ids behind its own."""
    spare: float = 0.0
    """Free ids for later growth, as a fraction of the values kept."""
    part: Part = field(default_factory=Part)
    """Which share of the work this machine has."""
    is_encode: bool = False
    """Whether all rows are test rows, which need no label."""

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the fields: sparse columns, bucketed dense columns, then crosses."""
        buckets = (number.name for number in self.schema.buckets)
        return (*self.schema.sparse, *buckets, *("x".join(pair) for pair in self.crosses))

    @property
    def numbers(self) -> tuple[Number, ...]:
        """Every dense column of the input with the transform that it gets."""
        numbers = (self.schema.number(name) for name in self.schema.dense)
        return tuple(
            replace(n, transform=None if n.buckets else n.transform or self.transform)
            for n in numbers
        )

    @property
    def counted(self) -> dict[str, list[str]]:
        """The vocabularies by name, with their fields: those neither hashed nor buckets."""
        others = {name for name, _ in self.hash_sizes} | {n.name for n in self.schema.buckets}
        found: dict[str, list[str]] = {}
        for name in self.fields:
            if name not in others:
                found.setdefault(self.schema.vocabulary(name), []).append(name)
        return found

    def kind(self, field_name: str) -> Kind | None:
        """What the keys of a field are made of; None for a cross."""
        names = self.schema.sparse
        return self.schema.kind(field_name) if field_name in names else None

    def sized_for(self, num_bytes: int) -> "PrepareOptions":
        """With pieces so large that ``num_bytes`` of text do not have too many."""
        size = self.piece_bytes
        while size * MOST_PIECES < num_bytes and size < _LARGEST_PIECE_BYTES:
            size *= 2
        return replace(self, piece_bytes=size)

    def check(self) -> None:
        """Raise ConfigError for values that cannot work, before anything is read."""
        if self.transform not in TRANSFORMS:
            known = ", ".join(TRANSFORMS)
            raise ConfigError(f"--dense: {self.transform!r} is not known; choose from {known}")
        dense = (number.name for number in self.numbers if not number.buckets)
        names = (self.schema.label, *dense, *self.fields)
        if twice := [name for name in self.fields if names.count(name) > 1]:
            raise ConfigError(
                f"--crosses: {twice[0]!r} is the name of another column, too; rename that column"
            )
        hashable = [name for name in self.fields if name not in self.schema.dense]
        for name, size in self.hash_sizes:
            if name not in hashable:
                is_what = "has buckets" if name in self.fields else "is no field"
                known = ", ".join(hashable)
                raise ConfigError(f"--hash-size: {name!r} {is_what}; choose from {known}")
            if not NUM_RESERVED_IDS < size < 2**31:
                raise ConfigError(f"--hash-size: {name}={size} must be 3 or more, below 2^31")
        self._check_shared()
        if several := [n for pair in self.crosses for n in pair if self.schema.several(n)]:
            raise ConfigError(
                f"--crosses: {several[0]!r} has several values in a cell; cross columns of one"
            )
        self.split.check_column(self.schema.time)
        check_ranges(
            ("--spare", self.spare, 0, 10),
            ("--min-count", self.min_count, 1, 2**31),
            ("--seed", self.seed, 0, MAX_SEED),
            ("--max-bad-fraction", self.max_bad_fraction, 0, 1),
            ("--workers", self.workers, 1, MAX_WORKERS),
        )

    def _check_shared(self) -> None:
        sizes = dict(self.hash_sizes)
        first: dict[str, str] = {}
        for name, vocabulary in self.schema.vocabularies:
            other = first.setdefault(vocabulary, name)
            if sizes.get(name) != sizes.get(other):
                raise ConfigError(
                    f"--hash-size: {other} and {name} share the vocabulary {vocabulary} and need "
                    f"one size for both, for example {other}=1000000,{name}=1000000"
                )
        if odd := [name for name in self.crosses if "x".join(name) in first]:
            raise ConfigError(
                f"--crosses: {'x'.join(odd[0])!r} is the name of a vocabulary, too; rename that"
            )


def parse_hash_sizes(text: str, fields: tuple[str, ...]) -> tuple[tuple[str, int], ...]:
    """Read ``1000000`` (every field) or ``C3=1000000,C12=500000``."""
    example = "a number of table rows or like C3=1000000,C12=500000"
    return by_column("--hash-size", text, int, example, fields)
