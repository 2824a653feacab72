"""Tests that compressed inputs, Arrow files and other file systems give the same set as plain
text.
"""

import ast
import bz2
import gzip
import importlib.util
import io
import lzma
import tracemalloc
from pathlib import Path

import fsspec
import polars as pl
import pytest
import zstandard

from sbpflow.data.__main__ import main
from sbpflow.data.format.manifest import load_manifest
from sbpflow.data.format.schema import CRITEO
from sbpflow.data.prepare.decompress import COMPRESSIONS, Compression, decompressed
from sbpflow.errors import ConfigError, DataError
from sbpflow.runtime.files.remote_path import RemotePath, input_path
from tests.data.rows import run_prepare, text_rows, write_rows
from tests.quick import diagonal

ROOT = Path(__file__).parents[2]
READERS = {f"pl.{verb}_{kind}" for verb in ("scan", "read") for kind in ("ipc", "parquet")}
ROWS = text_rows(600, seed=11)
TEXT = b"".join("\t".join(row).encode() + b"\n" for row in ROWS)
COMPRESS = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}


def shards_of(folder):
    """Return the bytes of all files except the manifest, which names the inputs."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "manifest.json"
    }


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Return the files of the set made from plain text in pieces of 32 KiB."""
    folder = tmp_path_factory.mktemp("plain")
    run_prepare(folder / "set", write_rows(folder / "rows.tsv", ROWS))
    return shards_of(folder / "set")


@pytest.fixture
def memory():
    """Yield fsspec's file system in memory, with a folder that is removed after the test."""
    system = fsspec.filesystem("memory")
    system.mkdir("/clicks")
    yield system
    system.rm("/clicks", recursive=True)


def as_frame():
    """Return the rows as a typed table."""
    columns = dict(zip(CRITEO.columns, zip(*ROWS, strict=True), strict=True))
    whole = {name: [int(cell) if cell else None for cell in columns[name]]
             for name in (CRITEO.label, *CRITEO.dense)}  # fmt: skip
    return pl.DataFrame({**{k: list(v) for k, v in columns.items()}, **whole})


def same_words(folder, plain):
    """Return whether the words of all splits equal the plain text's words, regardless of pieces."""

    def joined(files):
        return {
            split: b"".join(files[n][128:] for n in sorted(files) if n.startswith(split))
            for split in ("train", "val", "test")
        }

    return joined(shards_of(folder)) == joined(plain)


@pytest.mark.parametrize("suffix", COMPRESS)
def test_compressed_text_gives_the_set_of_the_text(tmp_path, plain, suffix):
    path = tmp_path / f"rows.tsv{suffix}"
    path.write_bytes(COMPRESS[suffix](TEXT))
    run_prepare(tmp_path / "set", path)
    assert same_words(tmp_path / "set", plain)


def test_a_compression_of_the_registry_is_read_and_checked(tmp_path, plain, monkeypatch):
    def opened(raw):
        assert raw.read(4) == b"COPY"
        return raw

    monkeypatch.setitem(COMPRESSIONS, ".copy", Compression("copy", opened, 2.0, b"COPY"))
    path = tmp_path / "rows.tsv.copy"
    path.write_bytes(b"COPY" + TEXT)
    run_prepare(tmp_path / "set", path)
    assert same_words(tmp_path / "set", plain)
    path.write_bytes(TEXT)
    with pytest.raises(ConfigError, match="this is not a copy file"):
        run_prepare(tmp_path / "other", path)


@pytest.mark.parametrize("suffix", COMPRESS)
def test_compressed_text_with_several_frames_is_read_to_the_end(tmp_path, plain, suffix):
    """The file has two concatenated frames, as written by parallel compressors and `cat`."""
    path = tmp_path / f"rows.tsv{suffix}"
    path.write_bytes(COMPRESS[suffix](TEXT[:30_001]) + COMPRESS[suffix](TEXT[30_001:]))
    run_prepare(tmp_path / "set", path)
    assert same_words(tmp_path / "set", plain)


@pytest.mark.parametrize("suffix", COMPRESS)
def test_zeros_may_follow_compressed_text(tmp_path, plain, suffix):
    path = tmp_path / f"rows.tsv{suffix}"
    path.write_bytes(COMPRESS[suffix](TEXT) + bytes(512))
    run_prepare(tmp_path / "set", path)
    assert same_words(tmp_path / "set", plain)


@pytest.mark.parametrize("suffix", [".bz2", ".xz"])
def test_repetitive_text_is_decompressed_in_small_parts(suffix):
    text = bytes(32 << 20)
    with decompressed("rows", io.BytesIO(COMPRESS[suffix](text)), suffix) as stream:
        tracemalloc.start()
        try:
            while stream.read(1 << 20):
                pass
            assert tracemalloc.get_traced_memory()[1] < 16 << 20
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_damaged_frame_does_not_end_the_text(tmp_path, suffix):
    second = bytearray(COMPRESS[suffix](TEXT[30_001:]))
    second[0] ^= 0xFF
    path = tmp_path / f"rows.tsv{suffix}"
    path.write_bytes(COMPRESS[suffix](TEXT[:30_001]) + second)
    with pytest.raises(DataError, match=r"rows\.tsv\.\w+: the .* truncated or damaged"):
        run_prepare(tmp_path / "set", path)


@pytest.mark.parametrize("suffix", COMPRESS)
def test_truncated_or_damaged_compressed_text_is_refused(tmp_path, suffix):
    whole = COMPRESS[suffix](TEXT)
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 0xFF
    for number, content in enumerate((whole[:-1], whole[: len(whole) // 2], whole[:3], damaged)):
        path = tmp_path / f"{number}.tsv{suffix}"
        path.write_bytes(content)
        with pytest.raises(DataError, match=f"{number}.tsv{suffix}: the .* truncated or damaged"):
            run_prepare(tmp_path / "set", path)


@pytest.mark.parametrize(
    ("suffix", "compression"),
    diagonal([".arrow", ".feather", ".parquet"], ["zstd", "lz4", "uncompressed"]),
)
def test_tables_give_the_set_of_the_text(tmp_path, plain, suffix, compression):
    path, frame = tmp_path / f"rows{suffix}", as_frame()
    if suffix == ".parquet":
        frame.write_parquet(path, compression=compression)
    else:
        frame.write_ipc(path, compression=compression)
    run_prepare(tmp_path / "set", path)
    assert same_words(tmp_path / "set", plain)


@pytest.mark.parametrize("suffix", [".arrow", ".parquet"])
def test_glob_characters_in_paths_have_no_special_meaning(tmp_path, plain, suffix):
    frame, output = as_frame(), tmp_path / "[v2]" / "set*"
    for name, rows in (("part[12]", frame), ("part1", frame[:9]), ("part2", frame[9:20])):
        path = tmp_path / f"{name}{suffix}"
        rows.write_parquet(path) if suffix == ".parquet" else rows.write_ipc(path)
    run_prepare(output, tmp_path / f"part[12]{suffix}")
    assert same_words(output, plain)


def test_no_table_is_read_by_a_pattern():
    """Without ``glob=False``, Polars expands [, ], *, and ? in paths; ``read_ipc`` always does."""
    calls = [
        (path, node)
        for folder in ("sbpflow", "data")
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in READERS
    ]
    assert len(calls) >= 5
    for path, call in calls:
        words = {word.arg: ast.unparse(word.value) for word in call.keywords}
        assert words.get("glob") == "False", f"{path}:{call.lineno}"


def test_a_damaged_arrow_file_gives_a_message(tmp_path):
    path = tmp_path / "rows.arrow"
    as_frame().write_ipc(path)
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(DataError, match=r"rows\.arrow cannot be read as an Arrow file"):
        run_prepare(tmp_path / "set", path)


@pytest.mark.parametrize("name", ["rows.tsv", "rows.tsv.gz", "rows.tsv.zst", "rows.parquet"])
def test_remote_inputs(tmp_path, plain, memory, name):
    if name == "rows.parquet":
        as_frame().write_parquet(tmp_path / name)
        memory.put_file(str(tmp_path / name), "/clicks/rows.parquet")
    else:
        suffix = name.removeprefix("rows.tsv")
        memory.pipe_file(f"/clicks/{name}", COMPRESS[suffix](TEXT) if suffix else TEXT)
    manifest = run_prepare(tmp_path / "set", input_path(f"memory://clicks/{name}"))
    assert same_words(tmp_path / "set", plain)
    size = memory.size(f"/clicks/{name}")
    assert manifest.content["inputs"] == [{"name": name, "bytes": size}]
    assert not (tmp_path / "set.work").exists()


def test_the_command_reads_a_remote_folder(tmp_path, plain, memory):
    lines = TEXT.splitlines(keepends=True)
    memory.pipe_file("/clicks/day_10", b"".join(lines[200:]))
    memory.pipe_file("/clicks/day_9", b"".join(lines[:200]))
    memory.pipe_file("/clicks/notes.md", b"not data")
    arguments = ["--output", str(tmp_path / "set"), "--max-bad-fraction", "0"]
    assert main(["prepare", "--input", "memory://clicks", *arguments]) == 0
    manifest = load_manifest(tmp_path / "set")
    assert [entry["name"] for entry in manifest.content["inputs"]] == ["day_9", "day_10"]
    assert same_words(tmp_path / "set", plain)


def test_file_urls_are_local_paths(tmp_path, plain):
    path = write_rows(tmp_path / "with blank.tsv", ROWS)
    assert input_path(path.as_uri()) == path
    assert input_path("rows/day_1.tsv") == type(path)("rows/day_1.tsv")
    run_prepare(tmp_path / "set", input_path(path.as_uri()))
    assert shards_of(tmp_path / "set") == plain


def test_the_version_of_a_remote_file_changes_with_its_content(tmp_path, memory):
    path = RemotePath("memory://clicks/rows.tsv")
    memory.pipe_file("/clicks/rows.tsv", TEXT)
    before = path.state
    assert path.fresh().state == before
    memory.pipe_file("/clicks/rows.tsv", TEXT[::-1])
    assert path.fresh().state != before


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("memory://clicks/absent.tsv", "no such file or folder"),
        ("nothing://clicks/rows.tsv", "nothing"),
        ("memory://clicks", "this folder contains no file whose name ends in one of .tsv"),
    ],
)
def test_an_unreadable_input_is_reported_with_its_url(tmp_path, memory, url, message):
    with pytest.raises(ConfigError, match=message) as caught:
        run_prepare(tmp_path / "set", input_path(url))
    assert f"--input {url}" in str(caught.value)


def test_the_same_url_twice_is_refused(tmp_path, memory):
    memory.pipe_file("/clicks/rows.tsv", TEXT)
    with pytest.raises(ConfigError, match="would be duplicated"):
        run_prepare(tmp_path / "set", *[input_path("memory://clicks/rows.tsv")] * 2)


@pytest.mark.skipif(importlib.util.find_spec("gcsfs") is not None, reason="gcsfs is installed")
def test_a_missing_package_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"--input gs://bucket/rows\.tsv: .*gcsfs"):
        run_prepare(tmp_path / "set", input_path("gs://bucket/rows.tsv"))
