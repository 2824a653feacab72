"""Replaces a file atomically."""

from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4


@contextmanager
def replacing(path: Path) -> Generator[Path]:
    """Yield a temporary path for the new content of ``path``; then move it there, or remove it
    after an error.

    The temporary path is unique, because several processes, even on different hosts, may write
    ``path`` at the same time.
    """
    partial = path.with_name(f"{path.name}.{uuid4().hex[:12]}.partial")
    try:
        yield partial
        partial.replace(path)
    finally:
        with suppress(OSError):  # of a file that was moved or never written
            partial.unlink()
