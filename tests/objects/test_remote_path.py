"""Tests reading and writing of files at URLs: retries, messages, and credentials."""

import logging
import os
import re
import subprocess
import sys
import tempfile

import pytest

from sbpflow.checkpoint.write import PieceFile, named
from sbpflow.errors import CheckpointError, StoreError
from sbpflow.runtime.files import remote_path
from sbpflow.runtime.files.local_path import PathError
from sbpflow.runtime.files.remote_path import (
    TRIES,
    RemotePath,
    any_path,
    input_path,
    redacted,
)
from tests.objects.server import SECRET

FILE = RemotePath("s3://bucket/x/file")


@pytest.fixture
def quick(monkeypatch):
    """Shorten the pauses between attempts."""
    monkeypatch.setattr(remote_path, "_FIRST_PAUSE_S", 0.001)


def failing(s3, fault, times):
    """Make the first ``times`` requests fail; return the list of all requests from now on."""
    seen = []

    def decide(request):
        seen.append(request)
        return fault if len(seen) <= times else ""

    s3.fault = decide
    return seen


@pytest.mark.parametrize("fault", ["503", "cut", "drop"])
def test_requests_are_repeated(s3, quick, fault):
    FILE.write_bytes(b"0123456789" * 1000)
    failing(s3, fault, 2)
    assert FILE.fresh().read(5, 15) == b"5678901234"
    failing(s3, fault, 1)
    FILE.write_bytes(b"abc")
    s3.clear()
    assert FILE.read_bytes() == b"abc"


def test_a_failing_store_is_reported_with_the_url_and_the_error(s3, quick, caplog):
    FILE.write_bytes(b"abc")
    s3.fault = lambda request: "503"
    with caplog.at_level(logging.DEBUG, "sbpflow"), pytest.raises(StoreError) as caught:
        FILE.read_bytes()
    assert str(caught.value).startswith(f"s3://bucket/x/file cannot be read ({TRIES} tries in ")
    assert re.search("SlowDown|Service Unavailable", str(caught.value))
    assert SECRET not in str(caught.value) + caplog.text
    assert caught.value.__cause__ is None
    with pytest.raises(
        CheckpointError, match=r"s3://bucket/x/file cannot be written \(.* \(5 tries"
    ):
        with named(FILE):
            FILE.write_bytes(b"")


def test_a_full_folder_for_temporary_files_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    full = os.open("/dev/full", os.O_WRONLY)
    monkeypatch.setattr(os, "dup", lambda file: full)
    text = rf"x/file cannot be written \(no space left.* temporary file in {tmp_path} .* set TMPDIR"
    with pytest.raises(CheckpointError, match=text), PieceFile(FILE) as file:
        file.write(memoryview(b"rows"), 0)


def test_concurrent_downloads_of_a_file_do_not_write_to_the_same_file(tmp_path, monkeypatch):
    """On a cluster, a copy of a slow task may download the same file."""
    target, copies = tmp_path / "rows.parquet", [FILE]

    def download(path, partial):
        partial.write_bytes(b"0123")
        if copies:
            copies.pop().fetch(target)
        with partial.open("ab") as file:
            file.write(b"4567")

    monkeypatch.setattr(RemotePath, "download", download)
    FILE.fetch(target)
    assert target.read_bytes() == b"01234567"
    assert list(tmp_path.iterdir()) == [target]


def test_missing_files_and_denied_requests_are_not_repeated(s3, quick):
    with pytest.raises(FileNotFoundError):
        FILE.read_bytes()
    assert len(s3.requests) == len(set(s3.requests))
    assert not FILE.exists()
    assert not FILE.is_dir()
    assert FILE.parent.sizes() == {}


def test_a_large_file_is_written_in_parts_or_not_at_all(s3, quick, monkeypatch):
    monkeypatch.setattr("s3fs.S3FileSystem.default_block_size", 5 << 20)
    with tempfile.TemporaryFile() as file:
        file.truncate(12 << 20)
        s3.fault = lambda request: "503" if "partNumber=2" in request.path else ""
        with pytest.raises(StoreError, match="cannot be written"):
            FILE.upload(file.fileno())
        assert not FILE.fresh().exists()
        s3.clear()
        FILE.upload(file.fileno())
        assert FILE.num_bytes == 12 << 20
        parts = [r.path for r in s3.requests if "partNumber" in r.path]
        assert len(parts) == 2, parts


def test_files_are_listed_with_their_sizes_in_one_request(s3):
    for name in ("a", "b/c", "b/d"):
        (FILE.parent / name).write_bytes(name.encode())
    s3.clear()
    assert FILE.parent.sizes() == {"a": 1, "b/c": 3, "b/d": 3}
    assert len(s3.requests) == 1
    entries = {path.name: path for path in FILE.parent.iterdir()}
    assert len(s3.requests) == 2
    assert (entries["a"].num_bytes, entries["b"].is_dir()) == (1, True)
    assert entries["a"].state == (FILE.parent / "a").state != (FILE.parent / "b/c").state
    FILE.parent.remove_tree(first="b/d")
    removed = [r.path for r in s3.requests if r.method == "DELETE"]
    assert removed == [f"/bucket/x/{name}" for name in ("b/d", "a", "b/c")]


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("s3://key:secret@bucket/x", "s3://***@bucket/x"),
        ("https://h/x?X-Amz-Signature=secret", "https://h/x?***"),
    ],
)
def test_urls_with_credentials_are_shown_without_them(given, shown):
    assert redacted(f"at {given} now") == f"at {shown} now"
    path = input_path(given)
    assert str(path) == shown
    assert repr(path) == f"RemotePath('{shown}')"
    assert path.url == given
    assert path.name == "x"
    with pytest.raises(PathError) as caught:
        any_path(given)
    assert "secret" not in str(caught.value)
    assert shown in str(caught.value)


def test_azure_containers_are_not_credentials():
    url = "abfs://container@account.dfs.core.windows.net/set"
    assert str(any_path(url)) == url


def test_fsspec_is_imported_only_for_urls():
    code = "import sys, sbpflow.commands.train, sbpflow.run.saved.save, sbpflow.data.__main__\n"
    code += "from sbpflow.runtime.files.remote_path import any_path\nany_path('s3://b/x')\n"
    code += "import torch\nprint([m for m in sys.modules if m.partition('.')[0] == 's3fs'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
