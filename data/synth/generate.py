"""Generate a Criteo-like set with a known best AUC, as a prepared set or as TSV.

``data.synth.generator`` generates the rows. This module assigns ids, writes shards, and computes
the best possible AUC and logloss of every split.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray
from tqdm import tqdm

from sbpflow import __version__
from sbpflow.data.format.ids import assign_ids
from sbpflow.data.format.manifest import SPLITS, Manifest, load_manifest, write_manifest
from sbpflow.data.format.parts import LENGTH_TYPES, Parts, starts_of
from sbpflow.data.format.schema import CRITEO
from sbpflow.data.format.shards import Words, write_splits
from sbpflow.data.prepare.workspace import MARK, discard, only_run, open_work
from sbpflow.data.stats import compute_stats, stats_json
from sbpflow.data.synth.bayes import BayesTally
from sbpflow.data.synth.columns import BLOCK_ROWS, Columns, Rows
from sbpflow.data.synth.generator import Generator, block_ranges
from sbpflow.data.synth.options import CROSSES, Format, Hot, SynthOptions
from sbpflow.data.synth.tails import Floats, Ranks
from sbpflow.data.synth.text import hex_keys, write_tsv
from sbpflow.errors import ConfigError, unknown_value
from sbpflow.runtime.random.splitmix import GAMMA, MIX_1
from sbpflow.serving.cells import FUNCTIONS, MISSING_ID, MISSING_KEY, NUM_RESERVED_IDS

_SHARD_BLOCKS = 4
_HOT_RANKS = 64
_NEXT_PLACE = 0.382
"""Distance between the ids of consecutive values of a rank, as a fraction of the table"""


class IdMaps:
    """Maps values and pairs of values to ids, which ``data.format.ids`` assigns, or to keys.

    A table has as many rows as its column has distinct values at any one time. With drift, an
    id therefore stands for different values over time.
    """

    def __init__(self, options: SynthOptions, columns: Columns) -> None:
        self.hot, self.keyed = dict(options.hot), options.keys
        self.names = (*CRITEO.sparse, *("x".join(pair) for pair in CROSSES))
        self._pair_rows = int(np.clip(400_000 * options.vocab_scale, 20_000, 400_000))
        self._sizes = {name: tail.size for name, tail in columns.tails.items()}
        self._ids: dict[str, NDArray[np.int32]] = {}
        if self.keyed:
            return
        sample = columns.block(0, stream=3)
        for name in self.names:
            size = self._sizes.get(name, self._pair_rows)
            places = self._places(sample, name)
            counts = np.bincount(places[places >= 0], minlength=size)
            reserved = (int((places < 0).sum()), 0)
            self._ids[name] = assign_ids(counts, reserved, options.seed, name)

    def num_rows(self, name: str) -> int:
        """Return the number of rows in a field's table."""
        return len(self._ids[name]) + NUM_RESERVED_IDS

    def hot_of(self, name: str) -> Hot:
        """Return the minimum and maximum number of ids per row. In lists, missing values have no
        ids.
        """
        return self.hot.get(name, (1, 1))

    @property
    def ragged(self) -> tuple[str, ...]:
        """Return the fields with a variable number of ids per row."""
        return tuple(name for name in self.names if len({*self.hot_of(name)}) > 1)

    def lengths(self, rows: Rows, name: str, block: int) -> NDArray[np.int64]:
        """Return the number of ids that each row of a block has in a ragged field: 0 for a missing
        value, or else a number that depends only on the row number.
        """
        least, most = self.hot_of(name)
        numbers = np.arange(BLOCK_ROWS, dtype=np.uint64) + np.uint64(block * BLOCK_ROWS)
        salt = np.uint64((1 + self.names.index(name)) * GAMMA % 2**64)
        drawn = least + _mixed(numbers ^ salt, most - least + 1)
        return np.where(rows.ranks[name] < 0, 0, drawn)

    def ids(self, rows: Rows, name: str) -> "list[NDArray[Any]]":
        """Return the ids or keys of a field (``C1`` or ``C1xC2``), one array per position in the
        list of ids.

        As in the MLPerf DLRMv2 data, a fixed function maps the first id to all other ids, which are
        spread evenly over the table.
        """
        if self.keyed:
            return self._keys(rows, name)
        places, table = self._places(rows, name), self._ids[name]
        present = places >= 0
        out: list[NDArray[np.int32]] = []
        for position in range(self.hot_of(name)[1]):
            spread = places if position == 0 else _spread(places, position, len(table))
            out.append(np.where(present, table[spread], np.int32(MISSING_ID)))
        return out

    def _places(self, rows: Rows, name: str) -> Ranks:
        """Return the positions of the values of a column or pair in its table, or -1 for missing
        values.

        Pairs of two frequent values have separate positions; other pairs are hashed.
        """
        if name in rows.values:
            generation, rank = np.divmod(rows.values[name], self._sizes[name])
            place = (rank + generation * round(_NEXT_PLACE * self._sizes[name])) % self._sizes[name]
            return np.where(generation < 0, -1, place)
        a, b = (rows.values[part] for part in name.split("x"))
        own = _HOT_RANKS * _HOT_RANKS
        hashed = own + _mixed(((a << 32) | b).astype(np.uint64), self._pair_rows - own)
        frequent = (a < _HOT_RANKS) & (b < _HOT_RANKS)
        missing = (a < 0) | (b < 0)
        return np.where(missing, -1, np.where(frequent, a * _HOT_RANKS + b, hashed))

    def _keys(self, rows: Rows, name: str) -> list[NDArray[np.int64]]:
        """Return the keys that ``prepare --keys`` would compute from the text of the same rows."""
        parts = name.split("x")
        values = [rows.values[part] for part in parts]
        missing = np.any([each < 0 for each in values], axis=0)
        columns = [CRITEO.sparse.index(part) for part in parts]
        out: list[NDArray[np.int64]] = []
        for position in range(self.hot_of(name)[1]):
            if position:
                values = [_spread(rows.values[name], position, self._sizes[name])]
            keys = np.zeros(len(missing), dtype=np.uint64)
            for each, column in zip(values, columns, strict=True):
                keys = (keys << np.uint64(32)) | hex_keys(each, column)
            out.append(np.where(missing, MISSING_KEY, keys.view(np.int64)))
        return out


def _spread(places: Ranks, position: int, size: int) -> Ranks:
    salt = np.uint64(position * 0xD6E8FEB86659FD93 % 2**64)
    return _mixed(places.astype(np.uint64) + salt, size)


def _mixed(keys: NDArray[np.uint64], size: int) -> Ranks:
    mixed = keys * np.uint64(GAMMA)
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(MIX_1)
    return ((mixed >> np.uint64(33)) % np.uint64(size)).astype(np.int64)


def synth(options: SynthOptions) -> Manifest | None:
    """Generate rows; return the manifest of the prepared set, or None for TSV."""
    options.check()
    with only_run(options.output):
        if options.output.exists():
            raise ConfigError(
                f"--output {options.output} already exists; remove it or use a new path"
            )
        generator = Generator(options)
        if options.format == "tsv":
            write_tsv(generator, options)
            return None
        if options.format == "prepared":
            return _write_prepared(generator, options)
        raise unknown_value("--format", options.format, Format)


def _write_prepared(generator: Generator, options: SynthOptions) -> Manifest:
    maps = IdMaps(options, generator.columns)
    work, _ = open_work(options.output, "synth")
    # shards of an interrupted command are not reused, because generating a shard is faster than
    # checking it
    discard(work)
    work, _ = open_work(options.output, "synth")
    step = _SHARD_BLOCKS * BLOCK_ROWS
    ranges = [(start, min(start + step, options.rows)) for start in range(0, options.rows, step)]
    bounds = options.split.bounds(options.rows)
    done: list[tuple[dict[str, Any], dict[str, BayesTally]]] = []
    with (
        ThreadPoolExecutor(options.workers) as pool,
        tqdm(total=options.rows, unit="row", unit_scale=True, desc="synth") as bar,
    ):
        jobs = pool.map(partial(_write_range, generator, maps, work, bounds), ranges)
        for (start, stop), result in zip(ranges, jobs, strict=True):
            done.append(result)
            bar.update(stop - start)
    content = _content(maps, options, done)
    write_manifest(work, content)
    manifest = load_manifest(work)
    write_manifest(work, {**content, "stats": stats_json(compute_stats(manifest))})
    (work / MARK).unlink()
    os.replace(work, options.output)
    return load_manifest(options.output)


def _content(
    maps: IdMaps, options: SynthOptions, done: list[tuple[dict[str, Any], dict[str, BayesTally]]]
) -> dict[str, Any]:
    crosses = {"x".join(pair): pair for pair in CROSSES}
    return {
        "source": "synth",
        "dense": [{"name": name, "transform": "log3", "clamped": 0} for name in CRITEO.dense],
        "fields": [
            {
                "name": name,
                **({"keyed": True} if maps.keyed else {"rows": maps.num_rows(name)}),
                "hot": maps.hot_of(name)[1],
                "ragged": name in maps.ragged,
                **({"parts": list(crosses[name])} if name in crosses else {}),
            }
            for name in maps.names
        ],
        "length_type": _length_type(maps),
        "splits": {k: [shards[k] for shards, _ in done if k in shards] for k in SPLITS},
        "options": {k: v for k, v in asdict(options).items() if k not in ("output", "workers")},
        "bayes": _bayes([tallies for _, tallies in done]),
        "versions": {"sbpflow": __version__, "numpy": np.__version__},
    }


def _bayes(tallies: list[dict[str, BayesTally]]) -> dict[str, dict[str, float]]:
    total = {name: BayesTally() for name in SPLITS}
    for part in tallies:
        for name, tally in part.items():
            total[name].merge(tally)
    return {
        name: {"auc": tally.auc(), "logloss": tally.logloss(), "ctr": tally.ctr()}
        for name, tally in total.items()
        if tally.rows
    }


def _write_range(
    generator: Generator, maps: IdMaps, folder: Path, bounds: tuple[int, int], rows: tuple[int, int]
) -> tuple[dict[str, Any], dict[str, BayesTally]]:
    """Write the shards of rows [start, stop); return the shards and the ``BayesTally``, by
    split.
    """
    words, parts, probability = make_rows(generator, maps, *rows)
    split = np.searchsorted(bounds, np.arange(*rows), side="right")
    shards = write_splits(folder, rows[0] // BLOCK_ROWS, words, parts, split)
    tallies = {name: BayesTally() for name in shards}
    for name, tally in tallies.items():
        tally.add(probability[split == SPLITS.index(name)])
    return shards, tallies


def make_rows(
    generator: Generator, maps: IdMaps, start: int, stop: int
) -> tuple[Words, Parts, Floats]:
    """Generate rows [start, stop); return words [rows, 1 + dense + fixed ids], parts, and click
    probabilities.
    """
    pieces: list[Words] = []
    probabilities: list[Floats] = []
    lengths: list[NDArray[np.int64]] = []
    values: list[NDArray[Any]] = []
    keys: list[NDArray[np.int64]] = []
    for block, first, last in block_ranges(start, stop):
        rows, probability, labels = generator.block(block)
        columns = [labels.astype(np.float32).view(np.int32)]
        columns += [_dense_bits(rows, name) for name in CRITEO.dense]
        fixed = [ids for n in maps.names if n not in maps.ragged for ids in maps.ids(rows, n)]
        if maps.keyed:
            keys.append(np.stack([ids[first:last] for ids in fixed], axis=1))
        else:
            columns += fixed
        if maps.ragged:
            block_lengths, block_values = _lists(maps, rows, block, first, last)
            lengths.append(block_lengths)
            values.append(block_values)
        by_place = {str(place): column[first:last] for place, column in enumerate(columns)}
        pieces.append(pl.DataFrame(by_place).to_numpy(order="c"))
        probabilities.append(probability[first:last])
    parts: Parts = {"keys": np.concatenate(keys)} if keys else {}
    if lengths:
        all_lengths = np.concatenate(lengths)
        parts["lengths"] = all_lengths.astype(_length_type(maps))
        parts["starts"] = starts_of(all_lengths)
        parts["values"] = np.concatenate(values)
    return np.concatenate(pieces), parts, np.concatenate(probabilities)


def _lists(
    maps: IdMaps, rows: Rows, block: int, first: int, last: int
) -> tuple[NDArray[np.int64], "NDArray[Any]"]:
    """For rows [first, last) of a block, return the list lengths ([rows, lists]) and the ids in
    lists ([n]), ordered by row.
    """
    names = maps.ragged
    lengths = np.stack([maps.lengths(rows, name, block)[first:last] for name in names], axis=1)
    flat = lengths.reshape(-1)
    begin = (np.cumsum(flat) - flat).reshape(lengths.shape)
    values = np.empty(int(flat.sum()), dtype=np.int64 if maps.keyed else np.int32)
    for number, name in enumerate(names):
        for position, ids in enumerate(maps.ids(rows, name)):
            has = lengths[:, number] > position
            values[begin[has, number] + position] = ids[first:last][has]
    return lengths, values


def _length_type(maps: IdMaps) -> str:
    return LENGTH_TYPES[max(maps.hot_of(name)[1] for name in maps.names) > np.iinfo(np.uint8).max]


def _dense_bits(rows: Rows, name: str) -> NDArray[np.int32]:
    values = rows.integers[name].astype(np.float32)
    missing = rows.missing.get(name)
    mask = np.zeros(len(values), dtype=np.bool_) if missing is None else missing
    return FUNCTIONS["log3"](values, mask)[0].view(np.int32)
