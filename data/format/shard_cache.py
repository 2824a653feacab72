"""Cache the files of sets at URLs on this host, within a size limit, for all ranks and runs.

``DIR/FINGERPRINT/`` contains the manifest and some files of a set. A file gets its final name there
only when it is complete and its checksum is verified. File locks, which are released when their
process ends, decide which process downloads a file and which one makes room. The least recently
used files are removed first, except those of splits that a process has mapped.
"""

import contextlib
import fcntl
import os
import threading
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from sbpflow.data.format.npy import file_crc32
from sbpflow.errors import ConfigError, DataError, StoreError
from sbpflow.runtime.files.file_lock import HeldError, hold
from sbpflow.runtime.files.remote_path import RemotePath

_PARTIAL, _RESERVED, _PIN = ".partial", ".reserved", ".pin"
FOLDER_DIGITS = 32  # digits of a fingerprint in the name of a set's folder
_SET = "[0-9a-f]" * FOLDER_DIGITS  # all other folders belong to the user
_NUM_LOCKS = 256
_DOWNLOADS = 8
_TRIES = 3  # maximum number of times to download a file whose checksum does not match
_WAIT_S = 0.05
_AHEAD = 4  # number of files of a split to download ahead of reading


@dataclass(frozen=True, slots=True)
class CacheLimit:
    """The cache folder on this host, and the maximum size of its files."""

    folder: Path
    num_bytes: int


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """The checksum and the size of one file of a set, from the manifest."""

    crc32: int
    num_bytes: int


class ShardCache:
    """Downloads the files of one set.

    ``files`` contains all files by name; ``order`` contains the names of each split's files, by
    shard.
    """

    def __init__(
        self,
        url: RemotePath,
        folder: Path,
        limit: CacheLimit,
        files: Mapping[str, RemoteFile],
        order: Mapping[str, Sequence[Sequence[str]]],
    ) -> None:
        self.url, self.folder = url, folder
        self._limit, self._files = limit, files
        self._locks, self._room = limit.folder / "locks", limit.folder / "room.lock"
        self._locks.mkdir(parents=True, exist_ok=True)
        self._next = {
            name: [name for later in shards[k + 1 : k + 1 + _AHEAD] for name in later]
            for shards in order.values()
            for k, names in enumerate(shards)
            for name in names
        }
        self._order = order
        self._pins: list[IO[str]] = []
        self._pool: ThreadPoolExecutor | None = None
        self._ahead: dict[str, Future[None]] = {}
        self._guard = threading.Lock()

    def get(self, path: Path) -> None:
        """Make sure that the file at ``path``, in ``folder``, exists, and start downloading the
        next files. Raises DataError if the file cannot be downloaded, and ConfigError if the cache
        has no room for it.
        """
        name = str(path.relative_to(self.folder))
        self._get(name)
        self._fetch_ahead(self._next.get(name, ()))

    def get_all(self, names: Sequence[str]) -> None:
        """Download files in parallel. Files that other processes are downloading come last."""
        with ThreadPoolExecutor(_DOWNLOADS) as pool:
            done = zip(names, pool.map(self._get_free, names), strict=True)
            for _ in pool.map(self._get, [name for name, is_here in done if not is_here]):
                pass

    def get_split(self, split: str) -> None:
        """Download all files of a split, and keep them as long as this process runs.

        Raises ConfigError if the cache is too small.
        """
        names = [name for shard in self._order[split] for name in shard]
        need = sum(self._files[name].num_bytes for name in names)
        if need > self._limit.num_bytes:
            raise ConfigError(
                f"data.cache.size: {self._limit.num_bytes / 1e9:g} GB is not enough, because "
                f"a batch of a shuffled epoch can have rows from any of the {need / 1e9:.3g} GB of "
                f"{split}; use at least data.cache.size='{need / 1e9 * 1.05:.3g} GB', or "
                "data.shuffle=none"
            )
        pin = (self.folder / f"{split}{_PIN}").open("a", encoding="ascii")
        fcntl.flock(pin, fcntl.LOCK_SH)
        self._pins.append(pin)
        # Each process starts at a different file, so that the processes of a host share the work.
        start = os.getpid() % max(1, len(names))
        self.get_all([*names[start:], *names[:start]])

    def _fetch_ahead(self, names: Iterable[str]) -> None:
        with self._guard:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(2, thread_name_prefix="fetch-ahead")
            self._ahead = {name: each for name, each in self._ahead.items() if not each.done()}
            room = self._limit.num_bytes // 2
            for name in names:
                room -= self._files[name].num_bytes
                if room < 0:
                    break
                if name not in self._ahead and not (self.folder / name).exists():
                    self._ahead[name] = self._pool.submit(self._try, name)

    def _try(self, name: str) -> None:
        # The error is ignored here; if it persists, ``get`` raises it when the file is read.
        with contextlib.suppress(DataError, ConfigError, OSError):
            self._get(name)

    def _get_free(self, name: str) -> bool:
        """Download a file unless another process is downloading it; return False in that case."""
        try:
            self._get(name, wait=False)
        except HeldError:
            return False
        return True

    def _get(self, name: str, *, wait: bool = True) -> None:
        path = self.folder / name
        with contextlib.suppress(FileNotFoundError):
            os.utime(path)
            return
        with hold(self._lock_of(path), wait=wait):
            if not path.exists():
                self._download(name, path)

    def _download(self, name: str, path: Path) -> None:
        file, partial = self._files[name], path.with_name(path.name + _PARTIAL)
        reserved = path.with_name(path.name + _RESERVED)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._reserve(reserved, file.num_bytes)
        try:
            for number in range(1, _TRIES + 1):
                (self.url / name).download(partial)
                if partial.stat().st_size == file.num_bytes and file_crc32(partial) == file.crc32:
                    # The lock ensures that other processes that add up sizes see exactly one of
                    # the reservation and the file.
                    with hold(self._room, wait=True):
                        partial.replace(path)
                        reserved.unlink()
                    return
                if number == _TRIES:
                    raise DataError(
                        f"{self.url / name}: all {_TRIES} downloads differ from the manifest; "
                        "prepare the set again"
                    )
        except (FileNotFoundError, StoreError) as error:
            reason = str(error) if isinstance(error, StoreError) else f"{self.url / name}: missing"
            raise DataError(f"{reason}; check the store, and start again") from None
        finally:
            partial.unlink(missing_ok=True)
            reserved.unlink(missing_ok=True)

    def _reserve(self, reserved: Path, num_bytes: int) -> None:
        """Reserve room by creating the file ``reserved`` with ``num_bytes`` bytes, whose size other
        processes take into account. The downloaded file cannot serve as the reservation, because
        the store's client truncates it first. If downloads in progress occupy the room, this method
        waits for them.
        """
        while True:
            excess, waits = self._try_reserve(reserved, num_bytes)
            if not excess:
                return
            if waits:
                time.sleep(_WAIT_S)
                continue
            limit, folder = self._limit.num_bytes, self._limit.folder
            raise ConfigError(
                f"data.cache.size: the files in use and another file of {num_bytes / 1e9:.3g} GB "
                f"exceed the limit of {limit / 1e9:g} GB for {folder}; use, for example, "
                f"data.cache.size='{(limit + excess) / 1e9 * 1.05:.3g} GB'"
            )

    def _try_reserve(self, reserved: Path, num_bytes: int) -> tuple[int, bool]:
        """Remove files to make room; return how many bytes are still needed, and whether downloads
        in progress occupy some of the room.

        Downloads begin and complete under the same lock, so the two results are consistent.
        """
        waits, own_lock = False, self._lock_of(reserved.with_suffix(""))
        with hold(self._room, wait=True):
            # Reservations of killed processes come first, so that they do not evict files.
            files = sorted(
                _files_in(self._limit.folder), key=lambda file: (file[2].suffix != _RESERVED, file)
            )
            excess = sum(size for _, size, _ in files) + num_bytes - self._limit.num_bytes
            for _, size, path in files:
                if excess <= 0:
                    break
                if self._remove(path, own_lock):
                    excess -= size
                else:
                    waits = waits or path.suffix == _RESERVED
            if excess <= 0:
                with reserved.open("wb") as file:
                    file.truncate(num_bytes)
            return max(0, excess), waits

    def _remove(self, path: Path, own_lock: Path) -> bool:
        """Remove a file of any set, unless it is mapped or being downloaded; return whether it was
        removed. The caller holds ``own_lock``.
        """
        name = path.name.removesuffix(_RESERVED)
        partial = path.with_name(name + _PARTIAL)
        if path.suffix == _RESERVED:
            lock_needed = self._lock_of(path.with_name(name))
            is_free = lock_needed == own_lock  # the process that made the reservation was killed
        else:
            lock_needed = path.parent / f"{name.partition('-')[0]}{_PIN}"
            is_free = not lock_needed.exists()
        try:
            with contextlib.nullcontext() if is_free else hold(lock_needed):
                if path.suffix == _RESERVED:
                    partial.unlink(missing_ok=True)
                path.unlink(missing_ok=True)
        except HeldError:
            return False
        return True

    def _lock_of(self, path: Path) -> Path:
        name = str(path.relative_to(self._limit.folder)).encode()
        return self._locks / str(zlib.crc32(name) % _NUM_LOCKS)


def _files_in(folder: Path) -> Iterable[tuple[float, int, Path]]:
    """For each file and reservation of all sets, yield the time of last use, the size, and the
    path.
    """
    for pattern in (f"{_SET}/**/*.npy", f"{_SET}/**/*.npy{_RESERVED}"):
        for path in folder.glob(pattern):
            with contextlib.suppress(FileNotFoundError):
                facts = path.stat()
                yield facts.st_mtime, facts.st_size, path
