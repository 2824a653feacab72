"""Raw rows to a prepared set: stage every piece, count the train part, assign ids, encode, publish.

Memory holds a few pieces and the vocabularies, never the rows. Every result is a file written in one
step under ``OUTPUT.work``; a run that was killed goes on from the files that are there.
"""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from tqdm import tqdm

from data.ids import IdTable
from data.manifest import MANIFEST, SPLITS, Manifest, load_manifest, write_manifest
from data.options import PrepareOptions
from data.schema import MISSING_ID
from data.shards import Words, verify_shards, write_shard
from data.source import Input, find_inputs
from data.stage import SPLIT_COLUMN, Staged, bad_counts, describe_bad, stage_inputs
from data.transforms import TRANSFORMS
from data.vocabulary import Vocabulary, build_vocabularies
from sbpflow import __version__
from sbpflow.errors import ConfigError, DataError

_LOG = logging.getLogger(__name__)


def prepare(options: PrepareOptions) -> Manifest:
    """Prepare ``options.inputs`` into ``options.output`` and return its verified manifest."""
    _check_output(options)
    inputs = find_inputs(options.inputs)
    work = _open_work(options, inputs)
    total = sum(source.num_bytes for source in inputs)
    with tqdm(total=total, unit="B", unit_scale=True, desc="parse") as bar:
        staged = stage_inputs(inputs, options, work / "stage", bar)
    if bad := describe_bad(staged):
        _LOG.warning("bad lines were left out:%s", bad)
    names = [*options.schema.sparse, *("x".join(pair) for pair in options.crosses)]
    vocabularies = build_vocabularies(staged, names, options, work / "vocabulary")
    shards, clamped = _encode_all(staged, vocabularies, options, work / "set")
    content = _content(options, inputs, staged, vocabularies, shards, clamped)
    write_manifest(work / "set", content)
    verify_shards(load_manifest(work / "set"))
    return _publish(work, options)


def _check_output(options: PrepareOptions) -> None:
    output = options.output
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not (output / MANIFEST).exists():
        raise ConfigError(f"--output {output}: exists and is not a prepared set; choose another")
    if not options.overwrite:
        raise ConfigError(f"--output {output}: a set is there already; --overwrite replaces it")


def _open_work(options: PrepareOptions, inputs: Sequence[Input]) -> Path:
    """The folder of unfinished results; emptied unless it belongs to the same inputs and options."""
    work = options.output.with_name(options.output.name + ".work")
    sources = [(str(s.path.resolve()), s.num_bytes, s.path.stat().st_mtime_ns) for s in inputs]
    plan = json.dumps([asdict(options), sources, __version__, pl.__version__], default=str)
    digest = hashlib.sha256(plan.encode()).hexdigest()
    if work.exists():
        saved = work / "plan"
        if saved.exists() and saved.read_text(encoding="ascii") == digest:
            _LOG.info("going on with the unfinished run in %s", work)
            return work
        shutil.rmtree(work)
    work.mkdir(parents=True)
    (work / "plan.partial").write_text(digest, encoding="ascii")
    os.replace(work / "plan.partial", work / "plan")
    return work


def _encode_all(
    staged: Sequence[Staged],
    vocabularies: Sequence[Vocabulary],
    options: PrepareOptions,
    folder: Path,
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, int]]:
    """Write the shards of every piece; returns them by split, and clamped values by column."""
    folder.mkdir(exist_ok=True)
    tables = [vocabulary.table() for vocabulary in vocabularies]
    names = [vocabulary.name for vocabulary in vocabularies]
    starts = np.cumsum([0, *(piece.num_rows for piece in staged)]).tolist()

    def encode(index: int) -> dict[str, Any]:
        record = folder.parent / "encoded" / f"{index:06d}.json"
        if not record.exists():
            frame = pl.read_ipc(staged[index].path)
            words, clamped = encode_frame(frame, names, tables, options)
            split = _split_of(frame, starts[index], starts[-1], options)
            shards = {
                name: asdict(write_shard(folder, f"{name}-{index:06d}.npy", words[split == k]))
                for k, name in enumerate(SPLITS)
                if (split == k).any()
            }
            partial = record.with_suffix(".partial")
            partial.write_text(json.dumps({"shards": shards, "clamped": clamped}))
            os.replace(partial, record)
        return json.loads(record.read_text())

    (folder.parent / "encoded").mkdir(exist_ok=True)
    with ThreadPoolExecutor(options.workers) as pool:
        jobs = pool.map(encode, range(len(staged)))
        records = list(tqdm(jobs, total=len(staged), unit="piece", desc="encode"))
    shards = {k: [r["shards"][k] for r in records if k in r["shards"]] for k in SPLITS}
    clamped = {n: sum(r["clamped"][n] for r in records) for n in options.schema.dense}
    return shards, clamped


def encode_frame(
    frame: pl.DataFrame, names: Sequence[str], tables: Sequence[IdTable], options: PrepareOptions
) -> tuple[Words, dict[str, int]]:
    """Words [rows, 1 + dense + fields] of a staged piece, and the clamped values by dense column."""
    schema = options.schema
    num_floats = 1 + len(schema.dense)
    words = np.empty((len(frame), num_floats + len(names)), dtype=np.int32)
    floats = words[:, :num_floats].view(np.float32)
    floats[:, 0] = frame[schema.label].to_numpy()
    clamped: dict[str, int] = {}
    for column, name in enumerate(schema.dense, start=1):
        missing = frame[name].is_null().to_numpy()
        values = frame[name].fill_null(0).to_numpy().astype(np.float64)
        floats[:, column], clamped[name] = TRANSFORMS[options.transform](values, missing)
    for column, (name, table) in enumerate(zip(names, tables, strict=True), start=num_floats):
        ids = table.lookup(frame[name].fill_null(0).to_numpy())
        ids[frame[name].is_null().to_numpy()] = MISSING_ID
        words[:, column] = ids
    return words, clamped


def _split_of(
    frame: pl.DataFrame, start: int, total: int, options: PrepareOptions
) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    if options.split.kind != "time":
        return frame[SPLIT_COLUMN].to_numpy()
    rows = np.arange(start, start + len(frame))
    return np.searchsorted(options.split.bounds(total), rows, side="right").astype(np.uint8)


def _content(
    options: PrepareOptions,
    inputs: Sequence[Input],
    staged: Sequence[Staged],
    vocabularies: Sequence[Vocabulary],
    shards: Mapping[str, Any],
    clamped: Mapping[str, int],
) -> dict[str, Any]:
    return {
        "source": "prepare",
        "inputs": [{"name": s.path.name, "bytes": s.num_bytes} for s in inputs],
        "dense": [
            {"name": n, "transform": options.transform, "clamped": clamped[n]}
            for n in options.schema.dense
        ],
        "fields": [
            {
                "name": v.name,
                "rows": v.num_rows,
                "train_missing": v.missing,
                "train_rare": v.rare,
                "rare_values": v.rare_values,
            }
            for v in vocabularies
        ],
        "splits": dict(shards),
        "split": asdict(options.split),
        "min_count": options.min_count,
        "seed": options.seed,
        "lines": sum(piece.num_lines for piece in staged),
        "bad_lines": bad_counts(staged),
        "versions": {"sbpflow": __version__, "polars": pl.__version__, "numpy": np.__version__},
    }


def _publish(work: Path, options: PrepareOptions) -> Manifest:
    """Put the finished set in place; an old one is removed only after the new one is complete."""
    output = options.output
    old = work / "replaced"
    if output.exists():
        os.replace(output, old)
    os.replace(work / "set", output)
    shutil.rmtree(work)
    return load_manifest(output)
