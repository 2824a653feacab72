"""Raw rows to a prepared set: stage every piece, count the train part, assign ids, encode, publish.

Memory holds a few pieces and the vocabularies, never the rows. Every result is a file written in
one step under ``OUTPUT.work``; a run that was killed goes on from the files that are there.
"""

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import polars as pl
from tqdm import tqdm

from data.format.ids import HashedIds, Ids
from data.format.manifest import MANIFEST, SPLITS, Manifest, load_manifest, write_manifest
from data.format.verify import verify_set
from data.prepare.encode import Record, encode_all
from data.prepare.options import PrepareOptions
from data.prepare.source import Input, find_inputs
from data.prepare.stage import Staged, bad_counts, describe_bad, stage_inputs
from data.prepare.vocabulary import Vocabulary, build_vocabularies
from data.prepare.workspace import MARK, DamagedWork, discard, open_work, work_folder
from data.stats import compute_stats, stats_json
from sbpflow import __version__
from sbpflow.errors import ConfigError, DataError

_LOG = logging.getLogger(__name__)
_PUBLISHING = "publishing"
_SHARE = {"parse": 0.55, "count": 0.10, "encode": 0.35}
"""Of the time each phase takes, for the ETA only."""


def prepare(options: PrepareOptions) -> Manifest:
    """Prepare ``options.inputs`` into ``options.output`` and return its verified manifest."""
    options.check()
    inputs = find_inputs(options.inputs)
    options.split.check_files([source.path.name for source in inputs])
    plan = _plan(options, inputs)
    if _was_published(options, plan):
        return _publish(work_folder(options.output), options)
    _check_output(options)
    work, goes_on = open_work(options.output, plan)
    if goes_on:
        _LOG.info("going on with the unfinished run in %s", work)
    try:
        _build(options, inputs, work)
    except DamagedWork as error:
        if not goes_on:
            raise
        _LOG.warning("starting anew: %s", error)
        discard(work)
        work, _ = open_work(options.output, plan)
        _build(options, inputs, work)
    return _publish(work, options)


def _build(options: PrepareOptions, inputs: Sequence[Input], work: Path) -> None:
    """Make the finished set as ``work/set``, from whatever parts of it are there."""
    num_bytes = sum(source.num_bytes for source in inputs)
    with tqdm(total=num_bytes, unit="B", unit_scale=True, desc="parse", smoothing=0.05) as bar:
        staged = stage_inputs(
            inputs, options, work, lambda size: _advance(bar, _SHARE["parse"] * size)
        )
        bar.set_description("count")
        vocabularies = build_vocabularies(staged, _counted(options), options, work / "vocabulary")
        bar.update(int(_SHARE["count"] * num_bytes))
        bar.set_description("encode")
        per_row = _SHARE["encode"] * num_bytes / sum(piece.num_rows for piece in staged)
        records = encode_all(
            staged,
            _tables(vocabularies, options),
            options,
            work,
            lambda rows: _advance(bar, per_row * rows),
        )
        bar.update(num_bytes - bar.n)
    if bad := describe_bad(staged):
        _LOG.warning("bad lines were left out:%s", bad)
    content = _content(options, inputs, staged, vocabularies, records)
    _finish(work / "set", content, vocabularies, options)


def _advance(bar: "tqdm[NoReturn]", num_bytes: float) -> None:
    bar.update(int(num_bytes))


def _counted(options: PrepareOptions) -> list[str]:
    hashed = dict(options.hash_sizes)
    return [name for name in options.fields if name not in hashed]


def _tables(vocabularies: Sequence[Vocabulary], options: PrepareOptions) -> dict[str, Ids]:
    """What turns keys into ids, by field in the order of the manifest."""
    tables: dict[str, Ids] = {v.name: v.table() for v in vocabularies}
    for name, num_rows in options.hash_sizes:
        tables[name] = HashedIds(num_rows, options.seed, name)
    return {name: tables[name] for name in options.fields}


def _check_output(options: PrepareOptions) -> None:
    output = options.output
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not (output / MANIFEST).exists():
        raise ConfigError(f"--output {output}: exists and is not a prepared set; choose another")
    if not options.overwrite:
        raise ConfigError(f"--output {output}: a set is there already; --overwrite replaces it")


def _plan(options: PrepareOptions, inputs: Sequence[Input]) -> str:
    """A digest of all that decides the result."""
    sources = [(str(s.path.resolve()), s.num_bytes, s.path.stat().st_mtime_ns) for s in inputs]
    asked = {key: value for key, value in asdict(options).items() if key not in _NOT_IN_RESULT}
    versions = (__version__, pl.__version__, np.__version__)
    plan = json.dumps([asked, sources, versions], default=str)
    return hashlib.sha256(plan.encode()).hexdigest()


def _has_plan(work: Path, plan: str) -> bool:
    saved = work / MARK
    return saved.is_file() and saved.read_text(encoding="ascii") == plan


_NOT_IN_RESULT = ("inputs", "output", "overwrite", "workers")


def _content(
    options: PrepareOptions,
    inputs: Sequence[Input],
    staged: Sequence[Staged],
    vocabularies: Sequence[Vocabulary],
    records: Sequence[Record],
) -> dict[str, Any]:
    """Everything of the manifest but the statistics."""
    by_name = {vocabulary.name: vocabulary for vocabulary in vocabularies}
    hashed = dict(options.hash_sizes)
    fields = [
        {"name": name, "rows": hashed[name], "hashed": True}
        if name in hashed
        else {"name": name, "rows": by_name[name].num_rows, **by_name[name].dropped()}
        for name in options.fields
    ]
    return {
        "source": "prepare",
        "inputs": [{"name": s.path.name, "bytes": s.num_bytes} for s in inputs],
        "schema": asdict(options.schema),
        "dense": [
            {
                "name": name,
                "transform": options.transform,
                "clamped": sum(record["clamped"][name] for record in records),
            }
            for name in options.schema.dense
        ],
        "fields": fields,
        "splits": {k: [r["shards"][k] for r in records if k in r["shards"]] for k in SPLITS},
        "split": asdict(options.split),
        "min_count": options.min_count,
        "seed": options.seed,
        "lines": sum(piece.num_lines for piece in staged),
        "bad_lines": bad_counts(staged),
        "versions": {"sbpflow": __version__, "polars": pl.__version__, "numpy": np.__version__},
    }


def _finish(
    folder: Path,
    content: dict[str, Any],
    vocabularies: Sequence[Vocabulary],
    options: PrepareOptions,
) -> None:
    """Write the manifest, add the statistics of the finished shards, and verify every checksum."""
    write_manifest(folder, content)
    manifest = load_manifest(folder)
    try:
        verify_set(manifest, options.workers)
    except DataError as error:
        raise DamagedWork(str(error)) from error
    known = {vocabulary.name: vocabulary.lookups() for vocabulary in vocabularies}
    write_manifest(folder, {**content, "stats": stats_json(compute_stats(manifest, known))})


def _was_published(options: PrepareOptions, plan: str) -> bool:
    """Whether a run of this plan was killed after its set was in place, before it tidied up."""
    work = work_folder(options.output)
    started = _has_plan(work, plan) and (work / _PUBLISHING).exists()
    return started and not (work / "set").exists() and (options.output / MANIFEST).exists()


def _publish(work: Path, options: PrepareOptions) -> Manifest:
    """Put the finished set in place; an old one goes only after the new one is complete."""
    if (work / "set").exists():
        (work / _PUBLISHING).touch()
        if options.output.exists():
            os.replace(options.output, work / "replaced")
        os.replace(work / "set", options.output)
    discard(work)
    return load_manifest(options.output)
