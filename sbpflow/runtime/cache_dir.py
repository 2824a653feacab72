"""Where things are kept that can be made again: compiled code, measurements of this machine."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """The user's cache folder for sbpflow, by the XDG base directory specification."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(given) if given and Path(given).is_absolute() else Path.home() / ".cache"
    return base / "sbpflow"
