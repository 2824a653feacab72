"""Define the options of ``prepare``; equal options and inputs produce byte-identical sets."""

from dataclasses import dataclass, field, replace
from pathlib import Path

from sbpflow.data.engine import EngineOptions
from sbpflow.data.format.schema import CRITEO, DenseColumn, Kind, Schema
from sbpflow.data.numbers import MAX_SEED, MAX_WORKERS, by_column, check_ranges
from sbpflow.data.prepare.split import SplitRule
from sbpflow.errors import ConfigError, choices
from sbpflow.runtime.files.remote_path import AnyPath
from sbpflow.serving.cells import NUM_RESERVED_IDS, TRANSFORMS

MAX_PIECES = 8192
"""Pieces are made larger, up to ``_LARGEST_PIECE_BYTES``, to have at most this many. Each piece
becomes at most one shard per split.

With the usual limit of 65,530 maps per process, a loader maps up to 8,191 shards of words; reading
from shards that are not mapped is slower.
"""
_LARGEST_PIECE_BYTES = 128 << 20
"""Maximum bytes of text per piece, because a worker's memory grows with the size of a piece."""


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """The options of ``sbpflow prepare``; see ``sbpflow prepare --help``."""

    inputs: tuple[AnyPath, ...]
    output: Path
    split: SplitRule = field(default_factory=lambda: SplitRule("time", (0.8, 0.1, 0.1)))
    crosses: tuple[tuple[str, str], ...] = (("C1", "C2"), ("C3", "C4"))
    schema: Schema = CRITEO
    min_count: int = 2
    transform: str = "log3"
    hash_sizes: tuple[tuple[str, int], ...] = ()
    """Number of table rows of each hashed field, which has no vocabulary"""
    keys: tuple[str, ...] = ()
    """Fields for which rows contain 64-bit keys instead of vocabulary ids"""
    seed: int = 7
    piece_bytes: int = 32 << 20
    """Bytes of text per piece, which ``sized_for`` doubles, up to 128 MiB, until there are at most
    ``MAX_PIECES`` pieces
    """
    max_bad_fraction: float = 0.001
    overwrite: bool = False
    workers: int | None = 2
    """Maximum number of concurrent tasks; None for one per CPU that the engine can use"""
    engine: EngineOptions = field(default_factory=EngineOptions)
    """Where tasks run; this does not affect the set"""
    like: AnyPath | None = None
    """Existing set that provides the ids, transforms and constants of the new set"""
    grow: bool = False
    """True to assign new ids to values without an id in ``like``"""
    spare: float = 0.0
    """Number of unused ids for later growth, as a fraction of the number of values"""
    keep_strings: bool = False
    """True to store the original string of every id of string columns"""
    is_encode: bool = False
    """True to make all rows test rows, which need no label"""

    @property
    def fields(self) -> tuple[str, ...]:
        """Return the names of the fields: sparse columns, bucketed dense columns, then crosses."""
        buckets = (number.name for number in self.schema.buckets)
        return (*self.schema.sparse, *buckets, *("x".join(pair) for pair in self.crosses))

    @property
    def numbers(self) -> tuple[DenseColumn, ...]:
        """Return every dense column of the input. Columns without a transform use the default
        transform.
        """
        columns = (self.schema.dense_column(name) for name in self.schema.dense)
        return tuple(
            replace(c, transform=None if c.buckets else c.transform or self.transform)
            for c in columns
        )

    @property
    def counted(self) -> dict[str, list[str]]:
        """Return the fields of each vocabulary.

        Hashed, bucketed, and keyed fields have no vocabulary.
        """
        others = {name for name, _ in self.hash_sizes} | {c.name for c in self.schema.buckets}
        others |= set(self.keys)
        vocabularies: dict[str, list[str]] = {}
        for name in self.fields:
            if name not in others:
                vocabularies.setdefault(self.schema.vocabulary(name), []).append(name)
        return vocabularies

    @property
    def adds_strings(self) -> bool:
        """Return True if the strings of the input are stored in the set."""
        return self.keep_strings and (self.like is None or self.grow)

    def kind(self, field_name: str) -> Kind | None:
        """Return the kind of values in a field, or None for a cross or a bucketed column."""
        names = self.schema.sparse
        return self.schema.kind(field_name) if field_name in names else None

    def sized_for(self, num_bytes: int) -> "PrepareOptions":
        """Return the options with a piece size that suits an input of ``num_bytes`` bytes of
        text.
        """
        size = self.piece_bytes
        while size * MAX_PIECES < num_bytes and size < _LARGEST_PIECE_BYTES:
            size *= 2
        return replace(self, piece_bytes=size)

    def check(self) -> None:
        """Raise ConfigError for invalid values, before any input is read."""
        if self.transform not in TRANSFORMS:
            known = ", ".join(TRANSFORMS)
            raise ConfigError(f"--dense: {self.transform!r} is unknown; choose from {known}")
        dense = (column.name for column in self.numbers if not column.buckets)
        names = (self.schema.label, *dense, *self.fields)
        if twice := [name for name in self.fields if names.count(name) > 1]:
            raise ConfigError(
                f"--crosses: {twice[0]!r} is also the name of a column; rename that column"
            )
        hashable = [name for name in self.fields if name not in self.schema.dense]
        for key, names in (("--hash-size", dict(self.hash_sizes)), ("--keys", self.keys)):
            for name in names:
                if name not in hashable:
                    problem = "has buckets" if name in self.fields else "is not a field"
                    known = choices(name, hashable)
                    raise ConfigError(f"{key}: {name!r} {problem}; choose from {known}")
        for name, size in self.hash_sizes:
            if name in self.keys:
                raise ConfigError(
                    f"--keys: {name} also has a --hash-size, but a field with keys has no hashed "
                    "ids; remove one of the two"
                )
            if not NUM_RESERVED_IDS < size < 2**31:
                raise ConfigError(
                    f"--hash-size must be 3 or more and below 2^31, got {name}={size}"
                )
        self._check_shared()
        lists = {column.name for column in self.schema.many}
        if crossed := [name for pair in self.crosses for name in pair if name in lists]:
            raise ConfigError(
                f"--crosses: cells of {crossed[0]!r} contain several values and cannot be "
                "crossed; choose other columns"
            )
        self.split.check_column(self.schema.time)
        self.engine.check()
        if self.workers is not None:
            check_ranges(("--workers", self.workers, 1, MAX_WORKERS))
        check_ranges(
            ("--spare", self.spare, 0, 10),
            ("--min-count", self.min_count, 1, 2**31),
            ("--seed", self.seed, 0, MAX_SEED),
            ("--max-bad-fraction", self.max_bad_fraction, 0, 1),
        )

    def _check_shared(self) -> None:
        sizes = dict(self.hash_sizes)
        first: dict[str, str] = {}
        for name, vocabulary in self.schema.vocabularies:
            other = first.setdefault(vocabulary, name)
            if sizes.get(name) != sizes.get(other):
                raise ConfigError(
                    f"--hash-size: {other} and {name} share the vocabulary {vocabulary} and need "
                    f"the same size (for example, {other}=1000000,{name}=1000000)"
                )
            if (name in self.keys) != (other in self.keys):
                raise ConfigError(
                    f"--keys: {other} and {name} share the vocabulary {vocabulary}, so both or "
                    f"neither must have keys; use, for example, --keys {other},{name}"
                )
        if same := [pair for pair in self.crosses if "x".join(pair) in first]:
            raise ConfigError(
                f"--crosses: {'x'.join(same[0])!r} is also the name of a vocabulary; rename that "
                "vocabulary"
            )


def parse_keys(text: str, fields: tuple[str, ...]) -> tuple[str, ...]:
    """Parse field names such as ``C1,C2``, or ``*`` for all fields; return the names in the order
    of ``fields``.
    """
    if text == "*":
        return fields
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in fields]:
        known = choices(unknown[0], fields)
        raise ConfigError(f"--keys: {unknown[0]!r} is not a field; choose from {known}")
    return tuple(name for name in fields if name in names)


def parse_hash_sizes(text: str, fields: tuple[str, ...]) -> tuple[tuple[str, int], ...]:
    """Parse ``1000000`` (the size for every field) or ``C3=1000000,C12=500000``."""
    example = "a number of table rows, or a list such as C3=1000000,C12=500000"
    return by_column("--hash-size", text, int, example, fields)
