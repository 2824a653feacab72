"""The one converter from text to a path of this machine, for configuration keys and options.

``Path`` would take a URL for a folder: ``Path("s3://bucket/set")`` is ``s3:/bucket/set``, below the
folder that the process runs in, and what is written there is lost with a container.
"""

import os
import re
from argparse import ArgumentTypeError
from pathlib import Path

from sbpflow.errors import ConfigError

# With one slash too: that is what Path makes of a URL. "a::b://" is a chain of fsspec.
_URL = re.compile(r"\s*[A-Za-z][A-Za-z0-9+.-]*(::[A-Za-z][A-Za-z0-9+.-]*)*:/")

# Room is left for the names of files in the folder, and for what is put behind a name.
MAX_BYTES, MAX_NAME_BYTES = 3800, 240
_MOST_SHOWN = 200


class PathError(ConfigError, ArgumentTypeError):
    """Text that is not a local path; argparse shows the message after the option's name."""


def local_path(given: str | Path) -> Path:
    """``given`` as a path; PathError for a URL and for text that no file system takes."""
    text = str(given)
    if _URL.match(text):
        raise PathError(
            f"{text!r} is a URL, and only folders and files of this machine can be used here; use "
            "a local path such as out/criteo, or mount the store and use the path of the mount (a "
            "local folder with such a name needs its absolute path)"
        )
    return plain_path(text)


def plain_path(text: str) -> Path:
    """``text`` as a path, whatever it looks like; PathError for what no file system takes."""
    if what := _fault(text):
        shown = text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}.."
        raise PathError(f"{shown!r} {what}; use a local path such as out/criteo")
    return Path(text)


def _fault(text: str) -> str:
    """Why no file can have this path; "" if one can."""
    if not text:
        return "is empty"
    if "\0" in text:
        return "has a NUL character"
    try:
        raw = os.fsencode(text)
    except UnicodeEncodeError:
        return "has half of a surrogate pair"
    if len(raw) > MAX_BYTES:
        return f"has {len(raw):,} bytes, and a path has at most {MAX_BYTES:,}"
    longest = max(map(len, raw.split(b"/")))
    if longest > MAX_NAME_BYTES:
        return f"has a name of {longest:,} bytes, and names have at most {MAX_NAME_BYTES}"
    return ""
