"""Follows the folder of a served model: applies new deltas, and loads newer bundles.

A new version shares all unchanged values with the current version and replaces it in a single
assignment, so no request waits or sees values of two versions. After an error, the server keeps the
current version, whose age grows in the metrics until a good delta or a newer bundle appears.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from sbpflow.errors import DataError
from sbpflow.serving.deltas import (
    BUNDLE_FILE,
    DELTA_FILE,
    DELTAS_FOLDER,
    VALUES_FILE,
    delta_folder,
    digest_of,
    newest_bundle,
    read_delta,
)
from sbpflow.serving.scorer import BundleError, Model, Version

logger = logging.getLogger(__name__)

Load = Callable[[Path], Model]
# A rejected bundle is read again when one of these files changes.
_BUNDLE_FILES = (BUNDLE_FILE, "model.safetensors", "vocabulary.safetensors", "sample.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelVersion:
    """A version of a model: the bundle in ``bundle`` with its first ``number`` deltas.

    ``stamp`` identifies the bundle's file; ``base`` is the digest of the bundle; ``last`` is the
    digest of the last delta or, without deltas, of the bundle; ``trained`` is the time of the
    values in seconds since 1970 (for a bundle, the time of its export). ``last_stamp`` identifies
    the file of the last delta; it is () without deltas, or if the file appeared while it was read.
    """

    model: Model
    bundle: Path
    stamp: tuple[int, ...]
    base: str
    last: str
    number: int
    trained: float
    last_stamp: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        """Return the run, step, and delta number as text without spaces."""
        return "-".join(map(str, self.model.version))


class Follower:
    """Provides the newest good version of the model in ``folder``.

    ``folder`` is a bundle, or a folder of bundles ``step-N``. ``load`` loads and checks a bundle.
    ``count`` is called with the name of each event (``metrics.COUNTERS``).
    """

    def __init__(self, folder: Path, load: Load) -> None:
        self._folder, self._load = folder, load
        # The last rejected delta and the last rejected bundle, which are not read again.
        self._refused_delta: object = None
        self._refused_bundle: object = None
        self.count: Callable[[str], None] = lambda event: None
        self.version = self._first()

    def _first(self) -> ModelVersion:
        """Load the newest bundle. If an export replaces it in the meantime, load the new one."""
        while True:
            bundle = newest_bundle(self._folder)
            stamp = _stamp(bundle / BUNDLE_FILE)
            try:
                return self._replayed(bundle)
            except (DataError, BundleError, OSError):
                newest = newest_bundle(self._folder)
                if (newest, _stamp(newest / BUNDLE_FILE)) == (bundle, stamp):
                    raise

    def poll(self) -> bool:
        """Look for a newer version; return whether ``version`` has been replaced."""
        old, stamps = self.version, self._stamps_of_next()
        try:
            bundle = self._other_bundle()
            if bundle is not None and self._reload(bundle, only_newer=False):
                return True
            # If the new bundle is damaged, a replacement worker still needs the old one's deltas.
            if self._refused_delta == stamps:
                return False
            self._check_last(old)
            following = self._next(old)
        except (DataError, BundleError, OSError) as error:
            if self._refused_delta == stamps:
                return False
            if self._stamps_of_next() != stamps:
                return False  # The files changed while they were read; read them again later.
            self._refused_delta = None if _may_pass(error) else stamps
            self._refuse(error)
            # The bundle and its deltas may have been rewritten.
            return self._reload(old.bundle, only_newer=True)
        if following is not None:
            self.version = following
        return following is not None

    def _reload(self, bundle: Path, *, only_newer: bool) -> bool:
        """Load a bundle with its deltas; return whether it replaces the current version."""
        stamps = bundle, *(_stamp(bundle / name) for name in _BUNDLE_FILES)
        if self._refused_bundle == stamps:
            return False
        try:
            version = self._replayed(bundle)
        except (DataError, BundleError, OSError) as error:
            self._refused_bundle = None if _may_pass(error) else stamps
            self._refuse(error)
            return False
        self.count("reloads")
        if only_newer and version.trained <= self.version.trained:
            return False
        self.version = version
        return True

    def poll_for_bundle(self) -> bool:
        """Look for a bundle that replaces the current bundle, but not for deltas; return whether
        ``version`` has been replaced.
        """
        try:
            bundle = self._other_bundle()
        except (DataError, OSError):
            return False  # ``poll`` reports the error
        return bundle is not None and self._reload(bundle, only_newer=False)

    def _other_bundle(self) -> Path | None:
        """Return the newest bundle, or None if it is that of the current version."""
        bundle, version = newest_bundle(self._folder), self.version
        is_same = (bundle, _stamp(bundle / BUNDLE_FILE)) == (version.bundle, version.stamp)
        return None if is_same else bundle

    def _refuse(self, error: Exception) -> None:
        self.count("delta_errors")
        logger.error("%s; version %s is kept", error, self.version.text)

    def _replayed(self, bundle: Path) -> ModelVersion:
        """Load a bundle and its deltas, up to the first bad or missing delta."""
        stamp, base = _stamp(bundle / BUNDLE_FILE), digest_of(bundle)
        model = self._load(bundle)
        version = ModelVersion(
            model=model,
            bundle=bundle,
            stamp=stamp,
            base=base,
            last=base,
            number=0,
            trained=(bundle / BUNDLE_FILE).stat().st_mtime,
        )
        try:
            while (following := self._next(version)) is not None:
                version = following
        except (DataError, BundleError, OSError) as error:
            logger.error("%s; version %s is used", error, version.text)
        return version

    def _next(self, version: ModelVersion) -> ModelVersion | None:
        """Return ``version`` with the next delta applied, or None if it has not arrived.

        Raises DataError for a bad delta.
        """
        number, bundle = version.number + 1, version.bundle
        stamp = _stamp(delta_folder(bundle, number) / DELTA_FILE)
        try:
            delta = read_delta(bundle, number, base=version.base, previous=version.last)
        except FileNotFoundError:
            later = [path.name for path in (bundle / DELTAS_FOLDER).glob("[0-9]*")]
            if any(int(name) > number for name in later if name.isdigit()):
                raise DataError(
                    f"{delta_folder(bundle, number)} is missing, but later deltas exist; write a "
                    "new bundle"
                ) from None
            return None
        origin = Version(run=delta.head.run, step=delta.head.step, delta=number)
        tables = {
            name: (rows.numpy(), tuple(parts.values()))
            for name, (rows, parts) in delta.tables.items()
        }
        vocabulary = {
            name: (keys.numpy().view(np.uint64), ids.numpy().astype(np.int32))
            for name, (keys, ids) in delta.vocabulary.items()
        }
        try:
            model = version.model.with_changes(tables, delta.dense, origin, vocabulary)
            scores = model.score(model.sample["rows"])
        except (LookupError, RuntimeError, TypeError, ValueError) as error:
            folder = delta_folder(bundle, number)
            raise DataError(
                f"{folder} cannot be applied ({error}); write a delta of this bundle"
            ) from error
        if not np.isfinite(scores).all():
            raise DataError(
                f"{delta_folder(bundle, number)}: the score of a sample row is "
                f"{scores[~np.isfinite(scores)][0]}; write a delta that gives finite scores"
            )
        self.count("deltas_applied")
        return replace(
            version,
            model=model,
            number=number,
            last=delta.digest,
            trained=delta.head.time,
            last_stamp=stamp,
        )

    def _check_last(self, version: ModelVersion) -> None:
        """Raise DataError if another delta has replaced the last applied one. An export writes a
        damaged delta again, with the values of a later checkpoint.
        """
        folder = delta_folder(version.bundle, version.number)
        if version.last_stamp and _stamp(folder / DELTA_FILE) not in ((), version.last_stamp):
            raise DataError(f"{folder} was written again after it was applied")

    def _stamps_of_next(self) -> object:
        bundle = self.version.bundle
        folder = delta_folder(bundle, self.version.number + 1)
        files = (bundle / BUNDLE_FILE, folder / DELTA_FILE, folder / VALUES_FILE)
        return folder, *map(_stamp, files)


def _may_pass(error: Exception) -> bool:
    """Return whether an error may pass without a change of the files, as too many open files do."""
    causes = (error, error.__cause__)
    return any(isinstance(e, OSError) and not isinstance(e, FileNotFoundError) for e in causes)


def _stamp(path: Path) -> tuple[int, ...]:
    """Return numbers that change when the file is replaced, or () if the file does not exist."""
    try:
        status = path.stat()
    except OSError:
        return ()
    return status.st_ino, status.st_mtime_ns, status.st_size
