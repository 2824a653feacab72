"""Converts text to a path on this machine, for configuration keys and command-line options.

``Path`` would accept a URL as a folder: ``Path("s3://bucket/set")`` is ``s3:/bucket/set`` below the
working folder, and files written there are lost when a container ends.
"""

import os
import re
from argparse import ArgumentTypeError
from pathlib import Path

from sbpflow.errors import ConfigError

# Also matches a single slash, because Path shortens "//" to "/". fsspec chains look like "a::b://".
_URL = re.compile(r"\s*[A-Za-z][A-Za-z0-9+.-]*(::[A-Za-z][A-Za-z0-9+.-]*)*:/")

# Below Linux's limits (4096 and 255), to leave room for file names and suffixes.
MAX_BYTES, MAX_NAME_BYTES = 3800, 240
_MAX_SHOWN = 200


class PathError(ConfigError, ArgumentTypeError):
    """Raised if text is not a local path; argparse prints its message after the option's name."""


def local_path(given: str | Path) -> Path:
    """Convert ``given`` to a path; raise PathError if it is a URL or not a valid path."""
    text = str(given)
    if _URL.match(text):
        raise PathError(
            f"{text!r} is a URL, but only files and folders on this machine are supported here; "
            "use a local path such as out/criteo, or mount the store and use the mount path (for "
            "a local folder with such a name, use an absolute path)"
        )
    return plain_path(text)


def plain_path(text: str) -> Path:
    """Convert text to a path even if it looks like a URL, with a leading ``~`` expanded.

    Shells do not expand the ``~`` in ``key=~/x`` and ``--option=~/x``. Raises PathError for
    invalid or too long text, and for the home folder of an unknown user.
    """
    if fault := _fault(text):
        shown = text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}.."
        raise PathError(f"{shown!r} {fault}; use a local path such as out/criteo")
    expanded = os.path.expanduser(text)  # unlike Path.expanduser, this keeps "./~"
    if text.startswith("~") and expanded == text:
        raise PathError(
            f"{text!r}: the home folder of {Path(text).parts[0]} cannot be found; use an absolute "
            f"path, or ./{text} for a folder of that name"
        )
    return Path(expanded)


def is_utf8(path: object) -> bool:
    """Return whether a path or a name is UTF-8; Linux also accepts other bytes."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def _fault(text: str) -> str:
    """Return the reason why a path is invalid, or "" if it is valid."""
    if not text:
        return "is empty"
    if "\0" in text:
        return "contains a NUL character"
    try:
        raw = os.fsencode(text)
    except UnicodeEncodeError:
        return "contains half of a surrogate pair"
    if len(raw) > MAX_BYTES:
        return f"has {len(raw):,} bytes, but a path can have at most {MAX_BYTES:,}"
    longest = max(map(len, raw.split(b"/")))
    if longest > MAX_NAME_BYTES:
        return f"contains a name of {longest:,} bytes, but a name can have at most {MAX_NAME_BYTES}"
    return ""
