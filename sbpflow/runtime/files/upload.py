"""Copies a local folder to an object store; the files that mark the folder as complete are written
last.
"""

import re
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sbpflow.errors import ConfigError
from sbpflow.runtime.files.own_files import other_file
from sbpflow.runtime.files.remote_path import RemotePath

_UPLOADS = 8


def check_own_files(option: str, target: RemotePath, owned: re.Pattern[str]) -> None:
    """Raise ConfigError if ``target`` contains a file that is not hidden and does not match
    ``owned``.
    """
    if other := other_file(target.sizes(), owned):
        raise ConfigError(
            f"{option} {target} already contains other files, such as {other}; use a new folder, "
            f"such as {target / 'new'}"
        )


def upload(
    folder: Path,
    target: RemotePath,
    *,
    owned: re.Pattern[str],
    last: Collection[str],
    done: Collection[str] = (),
    on_file: Callable[[str], None] = lambda name: None,
) -> list[str]:
    """Make ``target`` contain the files of ``folder``, and no other files whose relative names
    match ``owned``; return the names of the files.

    Files named in ``last`` are removed first and written last, so a reader that waits for these
    files never sees a mixture of old and new files. Files in folders that ``folder`` does not have,
    such as an earlier bundle, stay until the new files are complete. ``done`` contains files that
    an interrupted earlier call already wrote, as reported through ``on_file``.
    """
    files = {str(p.relative_to(folder)): p for p in sorted(folder.rglob("*")) if p.is_file()}
    there = target.sizes()
    todo = [
        name
        for name, path in files.items()
        if name not in done or there.get(name) != path.stat().st_size
    ]
    final = [name for name in todo if Path(name).name in last]
    stale = [name for name in there if name not in files and owned.fullmatch(name)]
    tops = {name.partition("/")[0] for name in files}
    mixed = [name for name in stale if name.partition("/")[0] in tops]
    for name in [*final, *(name for name in mixed if Path(name).name in last)]:
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
    for name in sorted(stale, key=lambda name: Path(name).name not in last):
        (target / name).unlink(missing_ok=True)
    return list(files)
