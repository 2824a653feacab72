"""Tests that compiled code is loaded from a cache only if no other user could have written it."""

import errno
import os
import pickle
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from sbpflow.runtime.compute.compiler import keep_compiled_privately
from sbpflow.runtime.files.cache_dir import code_cache, make_private

ROOT = Path(__file__).resolve().parents[2]
STRANGER = 12345
PROGRAM = """
import numpy as np
from sbpflow.runtime.compute.compiled import compiled


@compiled
def doubled(x):
    return 2 * x


@compiled
def tripled(x):
    return 3 * x


print(doubled(21), tripled(14))
"""

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")


class Plant:
    """When unpickled, creates a folder; an attacker's pickle could run any command."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def test_the_cache_belongs_to_a_version_of_the_intrinsics(monkeypatch):
    pytest.importorskip("numba")
    from sbpflow.runtime.compute import compiled

    names = []
    for source in (b"a", b"b", b"a"):
        monkeypatch.setattr(Path, "read_bytes", lambda _, source=source: source)
        compiled._version.cache_clear()
        names.append(compiled._version())
    compiled._version.cache_clear()
    assert names[0] == names[2] != names[1]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return a function that runs a program with two compiled functions and returns its output."""
    pytest.importorskip("numba")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)

    def run() -> tuple[str, str]:
        done = subprocess.run(
            [sys.executable, str(program)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
            timeout=200,
        )
        return done.stdout, done.stderr

    return run


def planted(folder: Path, mark: Path) -> None:
    indexes = list(folder.rglob("*.nbi"))
    assert indexes, "numba cached nothing"
    for index in indexes:
        index.write_bytes(pickle.dumps(Plant(mark)))


@pytest.mark.slow
def test_numba_loads_cached_code_only_from_a_folder_of_this_user(run, tmp_path):
    """A file planted in this user's own folder is loaded, which shows that the other tests can
    fail.
    """
    assert run() == ("42 42\n", "")
    (folder,) = (tmp_path / "cache" / "sbpflow").glob("numba-*")
    modes = [stat.S_IMODE(one.stat().st_mode) for one in (folder, *list(folder.parents)[:2])]
    assert modes == [0o700] * 3
    planted(folder, tmp_path / "mark")
    with pytest.raises(subprocess.CalledProcessError):
        run()  # loading the first index file creates the mark
    assert (tmp_path / "mark").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("how", [pytest.param("owner", marks=root_only), "mode"])
def test_a_planted_cache_is_not_loaded(run, tmp_path, how):
    run()
    (folder,) = (tmp_path / "cache" / "sbpflow").glob("numba-*")
    planted(folder, tmp_path / "mark")
    if how == "owner":
        os.chown(folder, STRANGER, STRANGER)
    else:
        folder.chmod(0o777)
    printed, warned = run()
    assert printed == "42 42\n"
    assert not (tmp_path / "mark").exists()
    assert warned.count(f"compiled code is not cached in {folder}") == 1
    assert (f"belongs to user {STRANGER}" if how == "owner" else "(mode 0777)") in warned
    assert "set XDG_CACHE_HOME to a folder that you own" in warned
    assert len(warned.splitlines()) == 1


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return this user's cache with a folder and a file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "cache" / "sbpflow" / "numba"
    make_private(folder / "module")
    (folder / "module" / "file").touch(mode=0o600)
    return folder


def test_a_private_folder_of_this_user_is_used(folder):
    # A umask of 002 gives files this mode, but other users cannot enter the folder.
    (folder / "module" / "file").chmod(0o664)
    folder.parent.parent.chmod(0o1777)  # the mode of /tmp
    assert code_cache("numba") == folder


@pytest.mark.parametrize(
    ("which", "mode", "problem"),
    [
        ("", 0o770, "numba is writable by other users (mode 0770)"),
        ("", 0o702, "numba is writable by other users (mode 0702)"),
        ("..", 0o777, "sbpflow is writable by other users (mode 0777)"),
        ("module", 0o775, "module is writable by other users (mode 0775)"),
        ("module/file", 0o666, "file is writable by other users (mode 0666)"),
    ],
)
def test_a_path_that_others_may_write_to_is_refused(folder, caplog, which, mode, problem):
    folder.chmod(0o755)
    (folder / which).chmod(mode)
    assert code_cache("numba") is None
    assert code_cache("numba") is None
    (message,) = caplog.messages
    assert problem in message


@root_only
@pytest.mark.parametrize("which", ["", "..", "module", "module/file"])
def test_a_path_of_another_user_is_refused(folder, caplog, which):
    os.chown(folder / which, STRANGER, STRANGER)
    assert code_cache("numba") is None
    (message,) = caplog.messages
    assert f"belongs to user {STRANGER}, but you are user 0" in message


def test_a_link_is_followed_before_the_check(folder, tmp_path):
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    assert code_cache("numba") == tmp_path / "elsewhere"
    (tmp_path / "elsewhere").chmod(0o777)
    folder.unlink()
    folder.parent.rename(tmp_path / "other")
    folder.parent.symlink_to(tmp_path / "other")
    (tmp_path / "other" / "code").symlink_to(tmp_path / "elsewhere")
    assert code_cache("code") is None


def test_a_folder_that_cannot_be_created_is_a_warning(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert code_cache("numba") is None
    (message,) = caplog.messages
    assert str(tmp_path / "file") in message


def test_a_user_without_a_home_folder_has_no_cache(monkeypatch, caplog):
    def unknown(number):
        raise KeyError(number)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    assert code_cache("numba") is None
    assert code_cache("inductor") is None
    (message,) = caplog.messages
    assert "compiled code is not cached" in message
    assert "set XDG_CACHE_HOME to a folder that you own" in message


@pytest.mark.parametrize("by_torch", [True, False])
def test_torch_compile_caches_code_in_the_users_cache(folder, monkeypatch, by_torch):
    """torch's default folder has a predictable name in the shared temporary folder."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # monkeypatch restores the old value
    if by_torch:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())
    else:
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    keep_compiled_privately()
    kept = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert kept == folder.parent / "inductor"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o700
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "given")
    keep_compiled_privately()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "given"


def test_torch_compile_gets_a_private_folder_if_the_cache_is_unsafe(folder, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # monkeypatch restores the old value
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    (folder.parent / "inductor").mkdir()
    (folder.parent / "inductor").chmod(0o777)
    keep_compiled_privately()
    kept = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert folder.parent not in kept.parents
    assert (kept.stat().st_uid, stat.S_IMODE(kept.stat().st_mode)) == (os.geteuid(), 0o700)
    assert not list(kept.iterdir())


def test_a_read_only_folder_is_not_used(folder, monkeypatch, caplog):
    """numba would then use another folder, which is not checked, or fail."""

    def read_only(*, dir):
        raise OSError(errno.EROFS, "Read-only file system", str(dir))

    monkeypatch.setattr("sbpflow.runtime.files.cache_dir.tempfile.TemporaryFile", read_only)
    assert code_cache("numba") is None
    (message,) = caplog.messages
    assert f"compiled code is not cached in {folder}" in message
    assert "Read-only file system" in message


def test_a_full_disk_loses_the_cache_but_not_the_run(folder, monkeypatch, caplog):
    caching = pytest.importorskip("numba.core.caching")
    from sbpflow.runtime.compute.compiled import compiled

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(caching.IndexDataCacheFile, "save", full)

    @compiled
    def doubled(x):
        return 2 * x

    assert (doubled(21), doubled(2.5)) == (42, 5.0)
    (message,) = caplog.messages
    assert f"compiled code is not cached in {folder.parent}/numba-" in message
    assert "No space left on device; free some space" in message
