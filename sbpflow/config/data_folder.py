"""Builds the message for a missing prepared set.

This module imports little, because ``data`` also imports it.
"""

from pathlib import Path

HOW_TO_MAKE_DATA = (
    "make a set with `sbpflow prepare --input train.tsv --output DIR` "
    "or `sbpflow synth --rows 300000 --output DIR`"
)


def data_folder_problem(folder: Path, key: str = "data.path") -> str | None:
    """Return an error message with ``key`` if ``folder`` is not a folder, else None."""
    if folder.is_dir():
        return None
    problem = "is not a folder" if folder.exists() else "does not exist"
    return f"{key}: {folder} {problem}; {HOW_TO_MAKE_DATA}"
