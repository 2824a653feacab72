"""Write one machine's value counts of a vocabulary to files for another machine to merge."""

from dataclasses import dataclass
from pathlib import Path

import polars as pl

from sbpflow.data.format.npy import file_crc32
from sbpflow.data.prepare.distinct import FieldCounts
from sbpflow.data.prepare.workspace import DamagedWork, require_record, write_record

COUNTS_KEYS = ("files", "crc32", "values", "missing")


@dataclass(frozen=True)
class PartCounts:
    """Contains the value counts of one machine; ``rows`` is a valid input of ``count_fields``."""

    rows: pl.LazyFrame
    values: int
    missing: int


def counts_record(folder: Path, name: str, part: int) -> Path:
    """Return the path of the record that exists once ``part`` has counted vocabulary ``name``."""
    return folder / f"{name}.counted-{part}.json"


def write_counts(folder: Path, name: str, part: int, counted: FieldCounts) -> None:
    """Write each block of values to a file, and then write the record."""
    files: list[str] = []
    for number, frame in enumerate(counted.frames()):
        files.append(f"{name}.counted-{part}-{number}.arrow")
        frame.write_ipc(folder / files[-1], compression="uncompressed")
    content = {
        "files": files,
        "crc32": [file_crc32(folder / file) for file in files],
        "values": len(counted.keys),
        "missing": counted.missing,
    }
    write_record(counts_record(folder, name, part), content)


def read_counts(folder: Path, name: str, part: int) -> PartCounts:
    """Read the files that ``write_counts`` wrote. Raise DamagedWork if the files have changed."""
    record = require_record(counts_record(folder, name, part), COUNTS_KEYS)
    for file, crc32 in zip(record["files"], record["crc32"], strict=True):
        if not (folder / file).is_file() or file_crc32(folder / file) != crc32:
            raise DamagedWork(f"{folder / file} is missing or damaged")
    rows = pl.concat([pl.scan_ipc(folder / file) for file in record["files"]])
    return PartCounts(rows, record["values"], record["missing"])
