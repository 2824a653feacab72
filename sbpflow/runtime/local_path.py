"""The one converter from text to a path of this machine, for configuration keys and options.

``Path`` would take a URL for a folder: ``Path("s3://bucket/set")`` is ``s3:/bucket/set``, below the
folder that the process runs in, and what is written there is lost with a container.
"""

import re
from argparse import ArgumentTypeError
from pathlib import Path

from sbpflow.errors import ConfigError

# With one slash too: that is what Path makes of a URL. "a::b://" is a chain of fsspec.
_URL = re.compile(r"\s*[A-Za-z][A-Za-z0-9+.-]*(::[A-Za-z][A-Za-z0-9+.-]*)*:/")


class PathError(ConfigError, ArgumentTypeError):
    """Text that is not a local path; argparse shows the message after the option's name."""


def local_path(given: str | Path) -> Path:
    """``given`` as a path; PathError for a URL, an empty text and one with a NUL character."""
    text = str(given)
    if _URL.match(text):
        raise PathError(
            f"{text!r} is a URL, and only folders and files of this machine can be used here; use "
            "a local path such as out/criteo, or mount the store and use the path of the mount (a "
            "local folder with such a name needs its absolute path)"
        )
    if not text or "\0" in text:
        what = "has a NUL character" if text else "is empty"
        raise PathError(f"{text!r} {what}; use a local path such as out/criteo")
    return Path(text)
