"""Identify input files, which may be at URLs (``sbpflow.runtime.files.remote_path``)."""

from sbpflow.runtime.files.remote_path import AnyPath, RemotePath


def identity(path: AnyPath) -> tuple[object, ...]:
    """Return a value that identifies a file, and is equal for all paths to the same file."""
    if isinstance(path, RemotePath):
        return (path.url,)
    stat = path.stat()
    return (stat.st_dev, stat.st_ino)


def version(path: AnyPath) -> tuple[object, ...]:
    """Return the identity and the state of a file. The state changes when the file is written."""
    if isinstance(path, RemotePath):
        return (path.url, path.state)
    return (str(path.resolve()), path.stat().st_mtime_ns)


def written(path: AnyPath, *, again: bool = False) -> tuple[int, object]:
    """Return the size and the time of the last write of a file. For a URL, both come from an
    earlier listing or, if ``again`` is true, from a new request.
    """
    if isinstance(path, RemotePath):
        path = path.fresh() if again else path
        return path.num_bytes, path.state
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns
