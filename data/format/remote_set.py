"""Open a prepared set at a URL, whose files are downloaded on demand to a cache folder on this
host.
"""

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from sbpflow.data.format.manifest import MANIFEST, SPLITS, Manifest, checked_content
from sbpflow.data.format.npy import file_bytes
from sbpflow.data.format.shard_cache import FOLDER_DIGITS, CacheLimit, RemoteFile, ShardCache
from sbpflow.data.format.shards import shard_files
from sbpflow.data.format.vocabulary import array_files
from sbpflow.errors import DataError, StoreError
from sbpflow.runtime.files.atomic_file import replacing
from sbpflow.runtime.files.cache_dir import cache_dir
from sbpflow.runtime.files.json_file import JsonError, parse_json
from sbpflow.runtime.files.remote_path import RemotePath

if TYPE_CHECKING:
    from sbpflow.config.data_cache import DataCache


def open_remote(url: RemotePath, key: str, options: "DataCache | None" = None) -> Manifest:
    """Return the manifest of the set at ``url``; the manifest's ``path`` is a folder in the cache.

    Raises DataError if the manifest cannot be read or is invalid.
    """
    if options is None:
        from sbpflow.config.data_cache import DataCache

        options = DataCache()
    limit = CacheLimit(options.dir or cache_dir() / "sets", options.num_bytes)
    try:
        raw = (url / MANIFEST).read_bytes()
        content = checked_content(url / MANIFEST, parse_json(raw.decode("utf-8"), str(url)))
    except FileNotFoundError:
        raise DataError(
            f"{key}: {url} has no {MANIFEST}; make a set with `sbpflow prepare --output {url}`"
        ) from None
    except (StoreError, JsonError, UnicodeDecodeError) as error:
        raise DataError(f"{key}: {error}; check the store and the set") from error
    folder = limit.folder / content["fingerprint"][:FOLDER_DIGITS]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write_once(folder / MANIFEST, raw)
        local = Manifest(folder, content)
        cache = ShardCache(url, folder, limit, _files_of(local), _order_of(local))
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise DataError(
            f"data.cache.dir: {limit.folder} cannot be used ({reason}); use a folder that you can "
            "write to"
        ) from error
    return Manifest(folder, content, cache)


def _write_once(path: Path, raw: bytes) -> None:
    with contextlib.suppress(FileNotFoundError):
        if path.read_bytes() == raw:
            return
    with replacing(path) as partial:
        partial.write_bytes(raw)


def _files_of(manifest: Manifest) -> dict[str, RemoteFile]:
    files = {
        name: RemoteFile(crc32, file_bytes(dtype, shape))
        for split in SPLITS
        for shard in manifest.shards(split)
        for name, crc32, dtype, shape in shard_files(manifest, shard)
    }
    for entry in manifest.vocabularies.values():
        for _, part, dtype, shape in array_files(entry):
            files[part["file"]] = RemoteFile(part["crc32"], file_bytes(dtype, shape))
    return files


def _order_of(manifest: Manifest) -> dict[str, list[list[str]]]:
    return {
        split: [
            [name for name, *_ in shard_files(manifest, shard)]
            for shard in manifest.shards(split)
            if shard.rows
        ]
        for split in SPLITS
    }
