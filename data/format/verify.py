"""Verify the checksum of every file in a set, and the values of labels, dense columns and ids."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sbpflow.data.format.manifest import SPLITS, Manifest, Shard
from sbpflow.data.format.npy import check_file, read_array
from sbpflow.data.format.parts import starts_of
from sbpflow.data.format.shards import shard_files
from sbpflow.data.format.vocabulary import verify_vocabulary
from sbpflow.errors import DataError


def verify_set(manifest: Manifest, workers: int) -> None:
    """Compare every file with its checksum, and check labels, dense values, ids and vocabularies.
    Raises DataError for the first difference or invalid value. Values are checked because a set
    edited by hand can have correct checksums.
    """
    shards = [(manifest, shard) for split in SPLITS for shard in manifest.shards(split)]
    with ThreadPoolExecutor(workers) as pool:
        for _ in pool.map(lambda pair: verify_shard(*pair), shards):
            pass
    for name in manifest.vocabularies:
        verify_vocabulary(manifest, name)


def verify_shard(manifest: Manifest, shard: Shard) -> None:
    """Raise DataError if a file of a shard does not match its checksum, or for the first row with
    an invalid label, dense value, or id.
    """
    for file, crc32, dtype, shape in shard_files(manifest, shard):
        check_file(manifest.file(file), dtype, shape, crc32)
    path = manifest.file(shard.file)
    words = read_array(path, "<i4", (shard.rows, manifest.num_words), 0, shard.rows)
    labels, dense = words[:, 0].view(np.float32), words[:, 1 : 1 + len(manifest.dense)]
    fits = (labels == 0) | (labels == 1) if manifest.labelled else np.isnan(labels)
    rule = "0 or 1" if manifest.labelled else "absent (NaN)"
    _refuse(path, "a label", labels, ~fits, rule)
    for column, entry in enumerate(manifest.content["dense"]):
        values = np.ascontiguousarray(dense[:, column]).view(np.float32)
        low, high = entry.get("range") or (-np.inf, np.inf)
        bad = ~np.isfinite(values) | (values < np.float32(low)) | (values > np.float32(high))
        _refuse(path, entry["name"], values, bad, f"finite, from {low:g} to {high:g}")
    column = 1 + len(manifest.dense)
    fields = [field for field in manifest.fixed if not field.keyed]  # every key is valid
    limits = np.repeat([f.rows for f in fields], [f.hot for f in fields])
    all_ids = words[:, column:]
    in_range = not all_ids.size or bool(
        (all_ids.min(axis=0) >= 0).all() and (all_ids.max(axis=0) < limits).all()
    )
    for field in () if in_range else fields:
        ids = words[:, column : column + field.hot]
        bad = ((ids < 0) | (ids >= field.rows)).any(axis=1)
        _refuse(path, f"{field.name} id", ids, bad, f"0..{field.rows - 1}, a row of its table")
        column += field.hot
    if manifest.lists:
        check_lists(manifest, shard)


def _refuse(
    path: Path, name: str, values: "NDArray[Any]", bad: "NDArray[np.bool_]", rule: str
) -> None:
    if bad.any():
        row = int(bad.argmax())
        raise DataError(
            f"{path}: row {row} has {name} {values[row].tolist()}, but it must be {rule}; the set "
            "was changed after it was made, so prepare the set again"
        )


def check_lists(manifest: Manifest, shard: Shard) -> None:
    """Raise DataError if the lengths, starts and values of a shard's lists are inconsistent, or if
    an id or a weight in a list is invalid.
    """
    types, folder = manifest.part_types, manifest.path

    def whole(name: str) -> "NDArray[Any]":
        part = shard.parts[name]
        shape = types[name].shape(shard.rows, part.count)
        return read_array(manifest.file(part.file), types[name].dtype, shape, 0, shape[0])

    lengths, starts, values = whole("lengths"), whole("starts"), whole("values")
    path = folder / shard.parts["starts"].file
    ends = starts_of(lengths)
    _refuse(path, "start", starts, starts != ends, "the sum of the lengths before it")
    if ends[-1] != len(values):
        raise DataError(
            f"{folder / shard.parts['values'].file} contains {len(values)} ids, but the lengths "
            f"add up to {ends[-1]}; prepare the set again"
        )
    for number, field in enumerate(manifest.lists):
        _refuse(
            folder / shard.parts["lengths"].file,
            f"{field.name} length",
            lengths[:, number],
            lengths[:, number] > field.hot,
            f"at most {field.hot}",
        )
    limits = np.array([field.rows for field in manifest.lists])
    keyed = np.array([field.keyed for field in manifest.lists])
    owner = np.repeat(np.tile(np.arange(len(limits)), len(lengths)), lengths.reshape(-1))
    bad = ((values < 0) | (values >= limits[owner])) & ~keyed[owner]
    if bad.any():
        index = int(bad.argmax())
        row, field = _row_of(index, ends), manifest.lists[owner[index]]
        raise DataError(
            f"{folder / shard.parts['values'].file}: row {row} has {field.name} id "
            f"{values[index]}, but its table has rows 0..{field.rows - 1}; prepare the set again"
        )
    if "value_weights" in types:
        weights = whole("value_weights")
        bad = ~np.isfinite(weights)
        if bad.any():
            index = int(bad.argmax())
            raise DataError(
                f"{folder / shard.parts['value_weights'].file}: row {_row_of(index, ends)} has "
                f"{manifest.lists[owner[index]].name} weight {weights[index]}, but it must be "
                "finite; prepare the set again"
            )


def _row_of(index: int, ends: "NDArray[np.int64]") -> int:
    """Return the row that contains the list value at ``index``; ``ends`` are the first values of
    the rows.
    """
    return int(np.searchsorted(ends, index, side="right")) - 1
