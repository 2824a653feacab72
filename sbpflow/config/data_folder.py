"""What to tell somebody whose prepared set is not there; light, for ``data`` asks it too."""

from pathlib import Path

HOW_TO_MAKE_DATA = (
    "make a set with `sbpflow prepare --input train.tsv --output DIR` "
    "or `sbpflow synth --rows 300000 --output DIR`"
)


def data_folder_problem(folder: Path, key: str = "data.path") -> str | None:
    """Why a prepared set cannot be read from ``folder``, which ``key`` names, and what to do; None
    if it is a folder.
    """
    if folder.is_dir():
        return None
    what = "is not a folder" if folder.exists() else "does not exist"
    return f"{key}: {folder} {what}; {HOW_TO_MAKE_DATA}"
