"""Copies a local folder to an object store; the files that mark the folder as complete are written
last.
"""

from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sbpflow.runtime.files.remote_path import RemotePath

_UPLOADS = 8


def upload(
    folder: Path,
    target: RemotePath,
    *,
    last: Collection[str],
    done: Collection[str] = (),
    on_file: Callable[[str], None] = lambda name: None,
) -> list[str]:
    """Make ``target`` contain exactly the files of ``folder``; return their relative names.

    Files named in ``last`` are removed first and written last, so a reader that waits for these
    files never sees a mixture of old and new files. ``done`` contains files that an interrupted
    earlier call already wrote, as reported through ``on_file``.
    """
    files = {str(p.relative_to(folder)): p for p in sorted(folder.rglob("*")) if p.is_file()}
    there = target.sizes()
    todo = [
        name
        for name, path in files.items()
        if name not in done or there.get(name) != path.stat().st_size
    ]
    final = [name for name in todo if Path(name).name in last]
    stale = [name for name in there if name not in files]
    for name in [*final, *(name for name in stale if Path(name).name in last)]:
        if name in there:
            (target / name).unlink(missing_ok=True)

    def write(name: str) -> None:
        with files[name].open("rb") as file:
            (target / name).upload(file.fileno())
        on_file(name)

    with ThreadPoolExecutor(_UPLOADS) as pool:
        for _ in pool.map(write, [name for name in todo if name not in final]):
            pass
    for name in final:
        write(name)
    for name in stale:
        (target / name).unlink(missing_ok=True)
    return list(files)
