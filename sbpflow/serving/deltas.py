"""Defines deltas of an exported model, which contain the rows and dense weights that training
changed.

A folder of exports contains bundles ``step-N``, the newest of which is served. While a new
``step-N`` replaces a bundle of the same step, the old one is ``step-N.old``. The deltas of a bundle
are the folders ``deltas/000001``, ``deltas/000002``, ... in the bundle's folder. A delta consists
of two files:
* ``values.safetensors``: the changed rows, ``tables/T/rows`` (int64 [n], ascending); the values of
  these rows under the names that the table has in ``model.safetensors`` (``tables/T``, or
  ``tables/T/int8``, ``/scale`` and ``/low``); all dense weights, ``dense/P``; and for growing
  fields, ``vocabulary/V/keys`` and ``/ids`` (int64 [n] each), where id 1 means that the key no
  longer has a row.
* ``delta.json``: the delta's number, run, step and time; the digests of the bundle, of the
  predecessor and of the values file; and for each vocabulary, the number of keys with new ids
  (``vocabulary``) and of removed keys (``removed``).

All values of a delta are from one training step. Each delta contains the digest of its predecessor,
so that readers detect missing deltas. A delta's folder is written under a temporary name and then
renamed.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sbpflow.errors import DataError
from sbpflow.runtime.files.json_file import (
    JsonError,
    is_count,
    is_number,
    json_digest,
    object_of,
    read_json,
)
from sbpflow.runtime.files.tensors_file import TensorsFile
from sbpflow.serving.cells import RARE_ID
from sbpflow.serving.row_store import DTYPES
from sbpflow.serving.scorer import BundleError, Tensors

FORMAT, VERSION = "sbpflow-delta", 1
BUNDLE_FILE, DELTA_FILE, VALUES_FILE = "model.json", "delta.json", "values.safetensors"
DELTAS_FOLDER = "deltas"
_VOCABULARY = "vocabulary/"
DTYPE_CODES = {getattr(torch, name): code for code, name in DTYPES.items()}
"""The names of dtypes in safetensors files"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaHead:
    """Identifies a delta. ``number`` counts from 1; ``time`` is in seconds since 1970.

    ``base`` is the digest of the bundle; ``previous`` is the digest of delta ``number - 1`` or, for
    delta 1, of the bundle. ``step`` is the training step of all values; ``checkpoint`` is the
    digest of the checkpoint with these values.
    """

    number: int
    base: str
    previous: str
    run: str
    step: int
    time: float
    checkpoint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """A delta whose files were read and verified.

    ``tables`` contains, for each table, the changed rows (int64 [n]) and their values by suffix:
    ``""``, or ``/int8``, ``/scale`` and ``/low``. ``dense`` contains all dense weights by name.
    ``vocabulary`` contains the keys and ids of growing fields (int64 [n] each). The tensors are
    views of a memory map.
    """

    head: DeltaHead
    digest: str
    tables: Mapping[str, tuple[Tensor, Mapping[str, Tensor]]]
    dense: Mapping[str, Tensor]
    vocabulary: Mapping[str, tuple[Tensor, Tensor]]


def digest_of(bundle: Path) -> str:
    """Return the digest of a bundle: the SHA-256 of its ``model.json``."""
    return hashlib.sha256((bundle / BUNDLE_FILE).read_bytes()).hexdigest()


def newest_bundle(folder: Path) -> Path:
    """Return ``folder`` if it is a bundle, else the bundle ``step-N`` in ``folder`` with the
    largest N.
    """
    if (folder / BUNDLE_FILE).is_file():
        return folder
    bundles = bundles_in(folder)
    if not bundles:
        raise DataError(
            f"{folder} contains neither {BUNDLE_FILE} nor any bundle named step-N; use the output "
            "of `sbpflow export`, or wait for the first export of a run"
        )
    return bundles[-1]


def bundles_in(folder: Path) -> list[Path]:
    """Return the bundles ``step-N`` in ``folder``, oldest first. A bundle ``step-N.old``, which
    ``step-N`` is replacing, comes before it.
    """
    paths = [file.parent for file in folder.glob(f"step-*/{BUNDLE_FILE}")]
    found = {path: re.fullmatch(r"step-(\d+)(\.old)?", path.name) for path in paths}
    order = {path: (int(match[1]), match[2] is None) for path, match in found.items() if match}
    return sorted(order, key=order.__getitem__)


def delta_folder(bundle: Path, number: int) -> Path:
    """Return the folder of delta ``number`` of a bundle, whether or not the delta exists."""
    return bundle / DELTAS_FOLDER / f"{number:06d}"


class DeltaWriter:
    """Writes one delta of ``bundle``; ``tensors`` contains the dtypes and shapes of the delta's
    values.

    Call ``append`` with the rows of each tensor in order, in pieces of any size, and then
    ``close``, which publishes the delta and returns its digest. An existing delta with the same
    number is replaced.
    """

    def __init__(
        self,
        bundle: Path,
        head: DeltaHead,
        tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    ) -> None:
        self._target = delta_folder(bundle, head.number)
        self._work = self._target.with_name(f".{self._target.name}.partial")
        shutil.rmtree(self._work, ignore_errors=True)
        self._work.mkdir(parents=True)
        self._head = head
        sizes = {name: (DTYPE_CODES[dtype], shape) for name, (dtype, shape) in tensors.items()}
        self._file = TensorsFile(self._work / VALUES_FILE, sizes)
        self._num_rows = dict.fromkeys(tensors, 0)
        self._counts: dict[str, dict[str, int]] = {"removed": {}, "vocabulary": {}}

    def append_keys(self, name: str, keys: Tensor, ids: Tensor) -> None:
        """Write all changed keys of a vocabulary with their new ids, or with RARE_ID if they no
        longer have a row.
        """
        self.append(f"{_VOCABULARY}{name}/keys", keys)
        self.append(f"{_VOCABULARY}{name}/ids", ids)
        num_removed = int((ids == RARE_ID).sum())
        self._counts["removed"][name] = num_removed
        self._counts["vocabulary"][name] = len(ids) - num_removed

    def append(self, name: str, values: Tensor) -> None:
        """Write the next rows of the tensor ``name``."""
        values = values.detach().cpu().contiguous()
        if values.dtype == torch.bfloat16:
            values = values.view(torch.int16)
        self._file.put(name, self._num_rows[name], values.numpy())
        self._num_rows[name] += len(values) if values.ndim else 1

    def close(self) -> str:
        """Complete and publish the delta; return its digest."""
        with self._file:  # closing the file checks that every value was written
            pass
        path = self._work / VALUES_FILE
        with path.open("rb") as file:
            os.fsync(file.fileno())
            values = hashlib.file_digest(file, "sha256").hexdigest()
        content = {
            **asdict(self._head),
            "values": {"bytes": path.stat().st_size, "sha256": values},
            **self._counts,
        }
        digest = json_digest(content)
        whole = {"format": FORMAT, "version": VERSION, "sha256": digest, "content": content}
        with (self._work / DELTA_FILE).open("w", encoding="ascii") as file:
            file.write(json.dumps(whole, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        # A delta with this number is moved aside first, because a folder can only replace an empty
        # folder.
        old = self._target.with_name(f".{self._target.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        if self._target.exists():
            self._target.rename(old)
        self._work.rename(self._target)
        shutil.rmtree(old, ignore_errors=True)
        return digest


def read_delta(bundle: Path, number: int, *, base: str, previous: str) -> Delta:
    """Read and verify delta ``number``; ``previous`` is the digest of its predecessor. Raises
    FileNotFoundError if the delta does not exist yet, and DataError if it is damaged or does not
    continue the chain of deltas.
    """
    folder = delta_folder(bundle, number)
    head, digest, values = read_head(folder)
    wanted = {"number": number, "base": base, "previous": previous}
    for key, value in wanted.items():
        if getattr(head, key) != value:
            raise DataError(
                f"{folder}: {key} is {getattr(head, key)!r}, but {value!r} is expected, so the "
                "delta belongs to another chain or an earlier delta is missing; load the newest "
                "bundle"
            )
    tensors = _read_values(folder / VALUES_FILE, values)
    tables: dict[str, tuple[Tensor, Mapping[str, Tensor]]] = {}
    for name in [name for name in tensors if name.endswith("/rows")]:
        table, rows = name.removesuffix("/rows"), tensors.pop(name)
        suffixes = ("", "/int8", "/scale", "/low")
        parts = {end: tensors.pop(table + end) for end in suffixes if table + end in tensors}
        if not parts or any(part.shape[:1] != rows.shape for part in parts.values()):
            raise DataError(f"{folder}: {table} must have one entry for each changed row")
        tables[table.removeprefix("tables/")] = rows, parts
    vocabulary: dict[str, tuple[Tensor, Tensor]] = {}
    for name in [
        name for name in tensors if name.startswith(_VOCABULARY) and name.endswith("/ids")
    ]:
        start = name.removesuffix("/ids")
        keys, ids = tensors.pop(f"{start}/keys", torch.empty(0)), tensors.pop(name)
        if keys.shape != ids.shape or {keys.dtype, ids.dtype} != {torch.int64}:
            raise DataError(f"{folder}: {start} must have one id for each of its keys")
        vocabulary[start.removeprefix(_VOCABULARY)] = keys, ids
    dense = {name.removeprefix("dense/"): values for name, values in tensors.items()}
    return Delta(head=head, digest=digest, tables=tables, dense=dense, vocabulary=vocabulary)


def read_head(folder: Path) -> tuple[DeltaHead, str, Mapping[str, Any]]:
    """Return the head of the delta in ``folder``, its digest, and the size and SHA-256 of its
    values. Raises FileNotFoundError for a missing delta, and DataError for a damaged file or an
    unknown format.
    """
    path = folder / DELTA_FILE
    try:
        tree = object_of(read_json(path), "the file")
        if tree["format"] != FORMAT or tree["version"] != VERSION:
            raise JsonError(
                f"its format is {tree['format']} version {tree['version']}, but this program reads "
                f"{FORMAT} version {VERSION}"
            )
        content = object_of(tree["content"], "content")
        if json_digest(content) != tree["sha256"]:
            raise JsonError("its checksum does not match")
        values = object_of(content["values"], "values")
        number, step, time = content["number"], content["step"], content["time"]
        if not (is_count(number) and is_count(step) and is_number(time)):
            raise JsonError(
                "number and step must be whole numbers of 0 or more, and time must be a number"
            )
        names = ("base", "previous", "run", "checkpoint")
        texts = {name: str(content[name]) for name in names}
        return DeltaHead(number=number, step=step, time=time, **texts), tree["sha256"], values
    except KeyError as error:
        raise DataError(f"{path}: the key {error} is missing; load the newest bundle") from error
    except (JsonError, TypeError) as error:
        reason = str(error).removeprefix(f"{path}: ")
        raise DataError(f"{path}: {reason}; load the newest bundle") from error


def _read_values(path: Path, values: Mapping[str, Any]) -> dict[str, Tensor]:
    """Verify the digest of the values file; return its tensors by name."""
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            if (file.tell(), digest) != (values["bytes"], values["sha256"]):
                raise DataError(f"{path} is damaged; load the newest bundle")
        rows, others = Tensors(path), Tensors(path)
    except (OSError, BundleError) as error:
        raise DataError(f"{path} cannot be read ({error}); load the newest bundle") from error
    # A server reads changed rows from the file for as long as it uses the delta. All other values
    # have their own mapping, which is released with the version of the model, so that their pages
    # do not stay in memory.
    return {name: (rows if _is_values(name) else others).tensor(name) for name in rows.entries}


def _is_values(name: str) -> bool:
    return name.startswith("tables/") and not name.endswith("/rows")
