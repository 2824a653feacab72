"""Defines fixtures: a bucket on moto's S3, and on `rclone serve s3`."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from sbpflow.runtime.files.remote_path import RemotePath
from tests.objects.server import Proxy, moto, rclone

BUCKET = "bucket"


@pytest.fixture(scope="session")
def _moto() -> Iterator[Proxy]:
    with moto() as proxy:
        yield proxy


@pytest.fixture(scope="session")
def _rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    folder = tmp_path_factory.mktemp("rclone")
    (folder / BUCKET).mkdir()
    with rclone(folder) as proxy:
        yield proxy


@pytest.fixture
def s3(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """Yield an S3 server with an empty bucket; the parameter names the server."""
    import s3fs

    name = getattr(request, "param", "moto")
    proxy: Proxy = request.getfixturevalue(f"_{name}")
    for key, value in proxy.environment().items():
        monkeypatch.setenv(key, value)
    s3fs.S3FileSystem.clear_instance_cache()
    if name == "moto" and not RemotePath(f"s3://{BUCKET}").exists():
        s3fs.S3FileSystem().mkdir(BUCKET)
    proxy.clear()
    yield proxy
    proxy.clear()
    RemotePath(f"s3://{BUCKET}").remove_tree()
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the user's cache folder for this test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "sbpflow"
