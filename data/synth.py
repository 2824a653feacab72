"""Generate a Criteo-like set with a known best AUC, as a prepared set or as TSV.

The rows come from ``data.columns``, the labels from ``data.signal``; this file gives values their ids,
writes shards or text, and tallies the Bayes AUC and logloss of every split.
"""

import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from data.bayes import BayesTally
from data.columns import BLOCK_ROWS, Columns, Rows
from data.ids import assign_ids
from data.manifest import MANIFEST, SPLITS, Manifest, load_manifest, write_manifest
from data.schema import CRITEO, MISSING_ID, NUM_RESERVED_IDS
from data.shards import Words, write_shard
from data.signal import Signal, pair_rank
from data.split import SplitRule
from data.tails import Floats, Ranks
from data.transforms import TRANSFORMS
from sbpflow import __version__
from sbpflow.errors import ConfigError

CROSSES = (("C1", "C2"), ("C3", "C4"))
_SHARD_BLOCKS = 4
_HOT = 64


@dataclass(frozen=True, kw_only=True)
class SynthOptions:
    """The options of ``python -m data synth``; see its help."""

    rows: int
    output: Path
    format: Literal["prepared", "tsv"] = "prepared"
    vocab_scale: float = 1.0
    ctr: float = 0.2562
    auc: float = 0.80
    min_mass: float = 5e-4
    split: SplitRule = SplitRule("time", (0.8, 0.1, 0.1))
    seed: int = 7
    workers: int = 2


class Generator:
    """Rows, labels and click probabilities of any row range, from the options alone."""

    def __init__(self, options: SynthOptions) -> None:
        self.columns = Columns(options.seed, options.vocab_scale)
        self.signal = Signal(
            self.columns, options.seed, ctr=options.ctr, auc=options.auc, min_mass=options.min_mass
        )

    def block(self, index: int) -> tuple[Rows, Floats, NDArray[np.bool_]]:
        """Rows, click probabilities and labels of one block."""
        rows = self.columns.block(index)
        probability = self.signal.probability(rows)
        return rows, probability, rows.label_draw < probability


class IdMaps:
    """Ranks and pairs of ranks to ids of embedding tables, by the rule of ``data.ids``."""

    def __init__(self, options: SynthOptions, columns: Columns) -> None:
        sample = columns.block(0, stream=3)
        self._ids: dict[str, NDArray[np.int32]] = {}
        for name, tail in columns.tails.items():
            self._ids[name] = _levelled(sample.ranks[name], tail.size, options.seed, name)
        self._pair_rows = int(np.clip(400_000 * options.vocab_scale, 20_000, 400_000))
        for pair in CROSSES:
            name = "x".join(pair)
            places = self._place(sample, pair)
            self._ids[name] = _levelled(places, self._pair_rows, options.seed, name)

    def _place(self, rows: Rows, pair: tuple[str, str]) -> Ranks:
        """A place for each pair: its own if both ranks are frequent, hashed into the rest if not."""
        a, b = (rows.ranks[name] for name in pair)
        keys = pair_rank(rows, pair)
        spread = (keys.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(33)
        hashed = _HOT * _HOT + (spread % np.uint64(self._pair_rows - _HOT * _HOT)).astype(np.int64)
        return np.where(keys < 0, -1, np.where((a < _HOT) & (b < _HOT), a * _HOT + b, hashed))

    def num_rows(self, name: str) -> int:
        """Rows of the table of a field."""
        return len(self._ids[name]) + NUM_RESERVED_IDS

    def ids(self, rows: Rows, name: str) -> NDArray[np.int32]:
        """Ids of a field (``C1`` or ``C1xC2``) for every row."""
        pair = name.split("x")
        places = rows.ranks[name] if len(pair) == 1 else self._place(rows, (pair[0], pair[1]))
        return np.where(places < 0, np.int32(MISSING_ID), self._ids[name][places])


def _levelled(sample: Ranks, size: int, seed: int, name: str) -> NDArray[np.int32]:
    present = sample[sample >= 0]
    counts = np.bincount(present, minlength=size)
    return assign_ids(counts, (len(sample) - len(present), 0), seed, name)


def synth(options: SynthOptions) -> Manifest | None:
    """Generate what the options say; returns the manifest of a prepared set, None for TSV."""
    if options.rows < 1:
        raise ConfigError(f"--rows: {options.rows} must be 1 or more")
    if options.split.kind != "time":
        raise ConfigError("--split: generated rows are split by time, like time:0.8,0.1,0.1")
    if options.output.exists():
        raise ConfigError(f"--output {options.output}: exists; choose another or remove it")
    generator = Generator(options)
    if options.format == "tsv":
        from data.synth_text import write_tsv

        write_tsv(generator, options)
        return None
    return _write_prepared(generator, options)


def _write_prepared(generator: Generator, options: SynthOptions) -> Manifest:
    maps = IdMaps(options, generator.columns)
    work = options.output.with_name(options.output.name + ".work")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    step = _SHARD_BLOCKS * BLOCK_ROWS
    starts = range(0, options.rows, step)
    bounds = options.split.bounds(options.rows)

    def job(start: int) -> tuple[dict[str, Any], dict[str, BayesTally]]:
        return _write_range(generator, maps, work, (start, min(start + step, options.rows)), bounds)

    with ThreadPoolExecutor(options.workers) as pool:
        done = list(tqdm(pool.map(job, starts), total=len(starts), unit="shard", desc="synth"))
    names = [*CRITEO.sparse, *("x".join(pair) for pair in CROSSES)]
    content = {
        "source": "synth",
        "dense": [{"name": name, "transform": "log3", "clamped": 0} for name in CRITEO.dense],
        "fields": [{"name": name, "rows": maps.num_rows(name)} for name in names],
        "splits": {k: [shards[k] for shards, _ in done if k in shards] for k in SPLITS},
        "options": {**asdict(options), "output": None, "workers": None},
        "bayes": _bayes([tallies for _, tallies in done]),
        "versions": {"sbpflow": __version__, "numpy": np.__version__},
    }
    write_manifest(work, content)
    os.replace(work, options.output)
    return load_manifest(options.output)


def _bayes(tallies: list[dict[str, BayesTally]]) -> dict[str, dict[str, float]]:
    total = {name: BayesTally() for name in SPLITS}
    for part in tallies:
        for name, tally in part.items():
            total[name].merge(tally)
    return {
        k: {"auc": t.auc(), "logloss": t.logloss(), "ctr": t.ctr()}
        for k, t in total.items()
        if t.rows
    }


def _write_range(
    generator: Generator, maps: IdMaps, folder: Path, rows: tuple[int, int], bounds: tuple[int, int]
) -> tuple[dict[str, Any], dict[str, BayesTally]]:
    """Write the shards of rows [start, stop) and tally their Bayes figures, by split."""
    words, probability = _words(generator, maps, *rows)
    split = np.searchsorted(bounds, np.arange(*rows), side="right")
    shards: dict[str, Any] = {}
    tallies: dict[str, BayesTally] = {}
    for k, name in enumerate(SPLITS):
        if (split == k).any():
            file = f"{name}-{rows[0] // BLOCK_ROWS:06d}.npy"
            shards[name] = asdict(write_shard(folder, file, words[split == k]))
            tallies[name] = BayesTally()
            tallies[name].add(probability[split == k])
    return shards, tallies


def _words(generator: Generator, maps: IdMaps, start: int, stop: int) -> tuple[Words, Floats]:
    names = [*CRITEO.sparse, *("x".join(pair) for pair in CROSSES)]
    num_floats = 1 + len(CRITEO.dense)
    words = np.empty((stop - start, num_floats + len(names)), dtype=np.int32)
    probability = np.empty(stop - start)
    for block, first, last in block_ranges(start, stop):
        rows, p, labels = generator.block(block)
        here = slice(block * BLOCK_ROWS + first - start, block * BLOCK_ROWS + last - start)
        floats = words[here, :num_floats].view(np.float32)
        floats[:, 0] = labels[first:last]
        for column, name in enumerate(CRITEO.dense, start=1):
            values, missing = rows.integers[name].astype(np.float32), rows.missing.get(name)
            mask = np.zeros(BLOCK_ROWS, dtype=bool) if missing is None else missing
            floats[:, column] = TRANSFORMS["log3"](values, mask)[0][first:last]
        for column, name in enumerate(names, start=num_floats):
            words[here, column] = maps.ids(rows, name)[first:last]
        probability[here] = p[first:last]
    return words, probability


def block_ranges(start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """(block, first, last): the rows of each block that lie in [start, stop)."""
    for block in range(start // BLOCK_ROWS, -(-stop // BLOCK_ROWS)):
        base = block * BLOCK_ROWS
        yield block, max(start - base, 0), min(stop - base, BLOCK_ROWS)
