"""Prepare a set: stage all pieces, count values in train, assign ids, encode, and publish.

Only a few pieces and the vocabularies are in memory at any time. Each result is a file that is
created atomically in ``OUTPUT.work``, so that a killed run can be resumed from existing files.
"""

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from tqdm.auto import tqdm

from sbpflow import __version__
from sbpflow.data.engine import Cached, Engine, Home, open_engine
from sbpflow.data.format.ids import Counts
from sbpflow.data.format.manifest import (
    MANIFEST,
    SPLITS,
    Ancestor,
    Manifest,
    load_manifest,
    write_manifest,
)
from sbpflow.data.format.manifest_check import SET_FILE
from sbpflow.data.format.verify import verify_shard
from sbpflow.data.format.vocabulary import fetch_vocabularies, verify_vocabulary, vocabulary_content
from sbpflow.data.prepare.bad_rows import bad_lines
from sbpflow.data.prepare.content import manifest_content
from sbpflow.data.prepare.count import build_vocabularies, field_entry, fit_columns
from sbpflow.data.prepare.encode import Encoding, encode_all
from sbpflow.data.prepare.options import PrepareOptions
from sbpflow.data.prepare.remote import version, written
from sbpflow.data.prepare.report import report_values
from sbpflow.data.prepare.source import Input, fetch_table, find_inputs
from sbpflow.data.prepare.stage import stage_inputs
from sbpflow.data.prepare.workspace import (
    MARK,
    DamagedWork,
    discard,
    only_run,
    open_work,
    read_mark,
    work_folder,
)
from sbpflow.data.stats import compute_stats, stats_json
from sbpflow.errors import ConfigError, DataError
from sbpflow.runtime.files.local_path import is_utf8
from sbpflow.runtime.files.own_files import other_file

_LOG = logging.getLogger(__name__)
_PUBLISHING, _REPLACED = "publishing", "replaced"
_SHARE = {"parse": 0.55, "count": 0.10, "encode": 0.35}
"""Fraction of the total time that each phase takes, used only for the ETA"""


def prepare(options: PrepareOptions) -> Manifest:
    """Prepare ``options.inputs`` into ``options.output``; return the manifest of the verified set.

    The set does not depend on the engine. Raises ConfigError or DataError for bad input.
    """
    options.check()
    like = None if options.like is None else load_manifest(options.like, "--like")
    if like is not None:
        fetch_vocabularies(like)
    inputs = find_inputs(options.inputs)
    if options.output.is_symlink():  # keep the link; replace the set to which it points
        options = replace(options, output=options.output.resolve())
    options = options.sized_for(sum(source.text_bytes for source in inputs))
    options.split.check_files([source.path.name for source in inputs])
    with only_run(options.output):
        return _prepare(options, inputs, like)


def _prepare(options: PrepareOptions, inputs: Sequence[Input], like: Manifest | None) -> Manifest:
    plan = _plan(options, inputs, like)
    work = work_folder(options.output)
    if _was_published(options, plan):
        return _publish(work, options)
    replaced = work / _REPLACED
    if (work / _PUBLISHING).exists() and replaced.exists() and not options.output.exists():
        # An earlier run was killed between the two renames of ``_publish``.
        os.replace(replaced, options.output)
    _check_output(options, inputs)
    with open_engine(options.engine, options.workers) as engine:
        work, resumes = open_work(options.output, plan)
        if resumes:
            _LOG.info("resuming the unfinished run in %s", work)
        engine.home = Home.of(work / MARK)
        try:
            _build(options, inputs, work, plan, like, engine)
        except DamagedWork as error:
            if not resumes:
                raise
            _LOG.warning("starting over: %s", error)
            discard(work)
            work, _ = open_work(options.output, plan)
            _build(options, inputs, work, plan, like, engine)
    return _publish(work, options)


def _build(
    options: PrepareOptions,
    inputs: Sequence[Input],
    work: Path,
    plan: str,
    like: Manifest | None,
    engine: Engine,
) -> None:
    """Build the set in ``work/set`` from existing and new results."""
    states, sources = [written(source.path) for source in inputs], inputs
    if not engine.shares_memory:  # the workers of a cluster may run in other folders
        work = work.absolute()
        inputs = [replace(source, path=source.path.absolute()) for source in inputs]
    inputs = list(engine.run(partial(fetch_table, work=work), inputs))
    num_bytes = sum(source.num_bytes for source in inputs)
    with tqdm(
        total=num_bytes, unit="B", unit_scale=True, desc="parse", smoothing=0.05, disable=None
    ) as bar:
        staged = stage_inputs(
            inputs, options, work, engine, lambda size: bar.update(int(_SHARE["parse"] * size))
        )
        _check_unwritten(sources, states)
        bar.set_description("count")
        vocabularies = build_vocabularies(staged, options, work, like, engine)
        fitted = fit_columns(staged, options, work, like, engine)
        _check_weights(fitted, options)
        bar.update(int(_SHARE["count"] * num_bytes))
        bar.set_description("encode")
        rows = sum(piece.num_rows for piece in staged)
        per_row = _SHARE["encode"] * num_bytes / max(rows, 1)
        encoding = Encoding(work.absolute(), plan, rows, vocabularies, fitted, options)
        records = encode_all(staged, encoding, engine, lambda rows: bar.update(int(per_row * rows)))
        bar.update(num_bytes - bar.n)
    if bad := bad_lines(staged):
        _LOG.warning("\n  ".join(["bad lines were skipped:", *bad]))
    fields = [field_entry(name, options, vocabularies, fitted) for name in options.fields]
    content = manifest_content(options, inputs, staged, records, fields, fitted, like)
    report_values(content, has_own_ids=like is None)
    entries = {name: vocabularies[of].entry for of, names in options.counted.items()
               for name in names}  # fmt: skip
    content["vocabulary"] = vocabulary_content(entries, fields, options.seed, _ancestors(like))
    if like is not None and content["vocabulary"]["digest"] == like.vocabulary_digest:
        content["vocabulary"]["ancestors"] = like.content["vocabulary"]["ancestors"]
    lookups: dict[str, Callable[[], Counts]] = {}
    if like is None:
        unshared = {of: names[0] for of, names in options.counted.items() if len(names) == 1}
        lookups = {name: vocabularies[of].lookups for of, name in unshared.items()}
    _finish(work / "set", content, lookups, options, engine)


def _check_unwritten(inputs: Sequence[Input], states: Sequence[tuple[int, object]]) -> None:
    """Raise DataError if a file changed during the run, because rows may be lost or duplicated.

    ``states`` contains the values that ``written`` returned before the files were read.
    """
    for source, state in zip(inputs, states, strict=True):
        if written(source.path, again=True) != state or state[0] != source.num_bytes:
            raise DataError(
                f"{source.path} changed while it was read; rerun this command after the file has "
                "been written completely"
            )


def _ancestors(like: Manifest | None) -> list[Ancestor]:
    """Return the earlier vocabularies whose ids remain valid in a set that is made with ``like``,
    nearest first.
    """
    if like is None or like.vocabulary_digest is None:
        return []
    rows = {field.name: field.rows for field in like.fields if not field.keyed}
    return [Ancestor(like.vocabulary_digest, rows), *like.ancestors]


def _check_weights(fitted: Mapping[str, Any], options: PrepareOptions) -> None:
    weight = options.schema.weight
    if weight is not None and not fitted[weight]["mean"] > 0:
        raise DataError(
            f"--schema: all weights in column {weight!r} of the train split are 0 and cannot be "
            "scaled to mean 1; remove `weight` from the schema"
        )


def _check_output(options: PrepareOptions, inputs: Sequence[Input]) -> None:
    output = options.output
    if not is_utf8(output):
        raise ConfigError(
            f"--output {str(output)!r}: the path is not UTF-8, so Polars cannot write to it; use "
            "another path"
        )
    if os.path.ismount(output):
        raise ConfigError(
            f"--output {output} is a mount point, which the finished set cannot replace; use a "
            f"folder in it, such as {output / 'set'}"
        )
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not (output / MANIFEST).exists():
        raise ConfigError(f"--output {output} exists but is not a prepared set; use a new folder")
    if not options.overwrite:
        raise ConfigError(f"--output {output}: a set already exists; use --overwrite to replace it")
    for path in (source.path for source in inputs):
        if isinstance(path, Path) and path.resolve().is_relative_to(output.resolve()):
            raise ConfigError(
                f"--output {output}: --overwrite would delete the input {path}; move it to another "
                "folder, or use a new folder for the set"
            )
    files = (path for path in output.rglob("*") if not path.is_dir())
    if other := other_file((path.relative_to(output).as_posix() for path in files), SET_FILE):
        raise ConfigError(
            f"--output {output}: --overwrite would delete {other}, which is not a file of the "
            "set; move it to another folder, or use a new folder for the set"
        )


def _plan(options: PrepareOptions, inputs: Sequence[Input], like: Manifest | None) -> str:
    """Return a digest of all inputs and options that affect the result."""
    sources = [(*version(source.path), source.num_bytes) for source in inputs]
    settings = {key: value for key, value in asdict(options).items() if key not in _NOT_IN_RESULT}
    versions = (__version__, pl.__version__, np.__version__)
    parent = None if like is None else like.fingerprint
    plan = json.dumps([settings, sources, versions, parent], default=str)
    return hashlib.sha256(plan.encode()).hexdigest()


_NOT_IN_RESULT = ("inputs", "output", "overwrite", "workers", "like", "engine")


def _finish(
    folder: Path,
    content: dict[str, Any],
    lookups: Mapping[str, Callable[[], Counts]],
    options: PrepareOptions,
    engine: Engine,
) -> None:
    """Write the manifest, verify the set and, except for ``encode``, add the statistics of the
    tables.
    """
    write_manifest(folder, content)
    manifest = load_manifest(folder)
    try:
        jobs = [(split, at) for split in SPLITS for at in range(len(manifest.shards(split)))]
        jobs += [("", name) for name in manifest.vocabularies]
        for _ in engine.run(partial(_verify, key=(folder, manifest.fingerprint)), jobs):
            pass
    except DataError as error:
        raise DamagedWork(str(error)) from error
    finally:
        _cached_manifest.clear()
    if not options.is_encode:
        stats = stats_json(compute_stats(manifest, lookups))
        write_manifest(folder, {**content, "stats": stats})


_cached_manifest = Cached[tuple[Path, str], Manifest](lambda key: load_manifest(key[0]))


def _verify(job: tuple[str, Any], *, key: tuple[Path, str]) -> None:
    """Verify the shard (split, index) or the vocabulary ("", name) of the set that ``key``
    identifies by its folder and fingerprint. The folder alone is not enough, because a cluster's
    worker may have cached an earlier set in this folder.
    """
    (split, which), manifest = job, _cached_manifest(key)
    if split:
        verify_shard(manifest, manifest.shards(split)[which])
    else:
        verify_vocabulary(manifest, which)


def _was_published(options: PrepareOptions, plan: str) -> bool:
    """Return whether an earlier run of this plan published its set but was killed before it cleaned
    up.
    """
    work = work_folder(options.output)
    if read_mark(work) != plan or not (work / _PUBLISHING).exists():
        return False
    return not (work / "set").exists() and (options.output / MANIFEST).exists()


def _publish(work: Path, options: PrepareOptions) -> Manifest:
    """Move the finished set to the output; a set that is already there is replaced only at this
    point.
    """
    if (work / "set").exists():
        for unfinished in (work / "set").rglob("*.partial"):
            # This file was left by a worker that died, or a worker that runs a copy of a task is
            # still writing it.
            unfinished.unlink(missing_ok=True)
        (work / _PUBLISHING).touch()
        if options.output.exists():
            os.replace(options.output, work / _REPLACED)
        os.replace(work / "set", options.output)
    discard(work)
    return load_manifest(options.output)
