"""Tests prepare with inputs and outputs in a store: number of requests, kills, and changes."""

import os
import re

import pytest

from sbpflow.data import load_manifest, remote_output
from sbpflow.data.__main__ import main
from sbpflow.data.engine import Engine
from sbpflow.data.format.manifest_check import SET_FILE
from sbpflow.data.prepare import workspace
from sbpflow.data.prepare.source import find_inputs, read_piece
from sbpflow.data.prepare.stage import stage_inputs
from sbpflow.runtime.files import remote_path
from sbpflow.runtime.files.remote_path import RemotePath, any_path
from tests.data.rows import run_prepare, text_rows, write_rows

IN, SET = RemotePath("s3://bucket/in"), RemotePath("s3://bucket/set")


@pytest.fixture
def inputs(s3, tmp_path, monkeypatch):
    """Put 6 files, one of them compressed, into the store; return local copies."""
    monkeypatch.setattr(remote_path, "_FIRST_PAUSE_S", 0.001)
    for number in range(6):
        name = f"day_{number}.tsv" + (".gz" if number == 5 else "")
        file = write_rows(tmp_path / name, text_rows(300, seed=number))
        (IN / name).write_bytes(file.read_bytes())
    s3.clear()
    return sorted(tmp_path.glob("day_*"))


def test_each_file_takes_two_requests_in_addition_to_its_rows(s3, inputs, tmp_path):
    sources = find_inputs([IN])
    assert [source.path.name for source in sources] == [file.name for file in inputs]
    assert len(s3.requests) <= 3 + len(inputs), "the folder's listing, and the start of each file"
    s3.clear()
    remote = run_prepare(tmp_path / "set", IN, piece_bytes=1 << 20)
    local = run_prepare(tmp_path / "local", *inputs, piece_bytes=1 << 20)
    assert remote.fingerprint == local.fingerprint
    # Per file: one request for its start, one for its rows, and one to check that it is unchanged.
    assert len(s3.requests) <= 3 + 3 * len(inputs)


@pytest.mark.parametrize("size", [40, 64, 1000, 1 << 20])
def test_pieces_of_remote_files_equal_local_pieces(tmp_path, size, monkeypatch):
    monkeypatch.setattr("sbpflow.data.prepare.source._REST_BYTES", 7)
    text = b"\n".join(b"x" * (n * 37 % 90) for n in range(60))
    for end in (b"", b"\n", b"\n\n"):
        (tmp_path / "f.tsv").write_bytes(text + end)
        remote, local = RemotePath("memory://pieces/f.tsv"), tmp_path / "f.tsv"
        remote.write_bytes(text + end)
        pieces = range(-(-len(text + end) // size))
        assert [read_piece(remote, k, size) for k in pieces] == [
            read_piece(local, k, size) for k in pieces
        ]
        assert b"".join(read_piece(remote, k, size) for k in pieces) == text + end


def command(*more):
    return main(["prepare", "--input", str(IN), "--output", str(SET), "--workers", "2", *more])


@pytest.mark.slow
def test_an_interrupted_upload_continues(s3, inputs, cache, tmp_path, capsys):
    def fault(request):
        return "503" if request.method == "PUT" and "/set/val" in request.path else ""

    s3.fault = fault
    assert command() == 2
    message = capsys.readouterr().err
    assert re.search(r"s3://bucket/set/val-\d+\.npy cannot be written \(5 tries", message)
    assert "manifest.json" not in SET.sizes()
    first = {r.path for r in s3.requests if r.method == "PUT"}
    done = set(SET.sizes())
    assert done
    s3.clear()
    assert command() == 0
    puts = [r.path for r in s3.requests if r.method == "PUT"]
    assert puts[-1] == "/bucket/set/manifest.json"
    assert not {f"/bucket/set/{name}" for name in done} & set(puts), "uploaded twice"
    assert first
    assert not any((cache / "prepare").iterdir())
    local = run_prepare(tmp_path / "set", *inputs, piece_bytes=32 << 20, max_bad_fraction=0.001)
    assert load_manifest(SET).fingerprint == local.fingerprint
    assert main(["verify", str(SET)]) == 0


@pytest.mark.parametrize("changed", ["nothing", "unread", "rows", "schema", "like"])
def test_an_upload_continues_only_if_no_file_has_changed(
    cache, tmp_path, monkeypatch, caplog, changed
):
    rows, schema, old = (tmp_path / name for name in ("in/rows.csv", "schema.yaml", "old"))
    url = RemotePath(f"memory://continued/{changed}")

    def write_values(value):
        rows.write_text("click,c\n" + "".join(f"{n % 2},{value}{n % 3}\n" for n in range(60)))

    def write_schema(kind):
        lines = ("separator: ','", "header: true", "label: click", f"sparse: {{c: {kind}}}")
        schema.write_text("\n".join(lines))

    def run(output, *options):
        return main(["prepare", "--input", str(rows.parent), "--output", str(output), *options])

    rows.parent.mkdir()
    write_values("1")
    write_schema("string")
    assert run(old, "--schema", str(schema)) == 0
    options = ("--like", str(old)) if changed == "like" else ("--schema", str(schema))
    with monkeypatch.context() as patch:
        patch.setattr(remote_output, "upload", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(url.url, *options)
    if changed == "rows":
        write_values("2")
    elif changed == "unread":
        (rows.parent / "_SUCCESS").touch()
    elif changed == "schema":
        write_schema("integer")
    elif changed == "like":
        assert run(old, "--schema", str(schema), "--seed", "8", "--overwrite") == 0
    caplog.set_level("INFO")
    assert run(url.url, *options) == 0
    assert ("resuming the upload" in caplog.text) == (changed in ("nothing", "unread"))
    assert run(tmp_path / "set", *options) == 0
    assert load_manifest(url).fingerprint == load_manifest(tmp_path / "set").fingerprint


def test_only_one_run_at_a_time_writes_a_url(cache, tmp_path, monkeypatch, capsys):
    rows = write_rows(tmp_path / "rows.tsv", text_rows(60))
    url = "memory://once/set"
    words = ["prepare", "--input", str(rows), "--output", url, "--overwrite"]
    upload = remote_output.upload

    def upload_during_another_run(*args, **options):
        assert main([*words, "--seed", "8"]) == 2
        upload(*args, **options)

    monkeypatch.setattr(remote_output, "upload", upload_during_another_run)
    assert main(words) == 0
    assert f"--output: another run (process {os.getpid()} on" in (error := capsys.readouterr().err)
    assert f" is writing {url}; wait until" in error
    assert load_manifest(url).content["seed"] == 7
    assert not any((cache / "prepare").iterdir())


def test_a_set_made_by_a_run_that_has_just_ended_is_not_replaced(
    cache, tmp_path, monkeypatch, capsys
):
    rows = write_rows(tmp_path / "rows.tsv", text_rows(60))
    words = ["prepare", "--input", str(rows), "--output", "memory://ended/set"]
    only_run = remote_output.only_run

    def only_run_after_another(*args):
        monkeypatch.setattr(remote_output, "only_run", only_run)
        assert main([*words, "--seed", "8"]) == 0
        return only_run(*args)

    monkeypatch.setattr(remote_output, "only_run", only_run_after_another)
    assert main(words) == 2
    assert "a set already exists; use --overwrite to replace it" in capsys.readouterr().err
    assert load_manifest("memory://ended/set").content["seed"] == 8


def test_other_files_at_the_url_are_not_removed(cache, tmp_path, capsys):
    rows = write_rows(tmp_path / "rows.tsv", text_rows(60))
    url = RemotePath("memory://other-files")
    words = ["prepare", "--input", str(rows), "--output", str(url), "--overwrite"]
    (url / "raw/day_0.tsv").write_bytes(rows.read_bytes())
    assert main(words) == 2
    assert f"--output {url} already contains other files, such as raw/day_0" in (
        capsys.readouterr().err
    )
    assert list(url.sizes()) == ["raw/day_0.tsv"]
    (url / "raw/day_0.tsv").unlink()
    (url / "test-000007.values.npy").write_bytes(b"of an interrupted upload")
    assert main(words) == 0
    assert main([*words, "--seed", "8"]) == 0
    assert all(SET_FILE.fullmatch(name) for name in url.sizes())
    assert "test-000007.values.npy" not in url.sizes()


@pytest.mark.parametrize("at_url", [False, True])
def test_the_like_set_is_not_replaced(cache, tmp_path, capsys, at_url):
    rows = write_rows(tmp_path / "rows.tsv", text_rows(60))
    place = "memory://like/set" if at_url else str(tmp_path / "set")
    words = ["--input", str(rows), "--output", place]
    assert main(["prepare", *words]) == 0
    before = load_manifest(any_path(place)).fingerprint
    for command in (["encode"], ["prepare", "--grow"]):
        capsys.readouterr()
        assert main([*command, *words, "--like", place, "--overwrite"]) == 2
        assert f"--output {place}: this folder contains the --like set" in capsys.readouterr().err
    assert load_manifest(any_path(place)).fingerprint == before


@pytest.mark.parametrize("is_lock", [False, True])
def test_a_cache_folder_that_cannot_be_used_is_named(cache, tmp_path, monkeypatch, capsys, is_lock):
    rows = write_rows(tmp_path / "rows.tsv", text_rows(60))
    if is_lock:
        monkeypatch.setattr(workspace, "hold", lambda path: path.parent.open())
    else:
        cache.mkdir(parents=True, exist_ok=True)
        (cache / "prepare").touch()
    assert main(["prepare", "--input", str(rows), "--output", "memory://unusable/set"]) == 2
    error = capsys.readouterr().err
    assert "cannot be created" in error
    assert "; set XDG_CACHE_HOME to a folder that you own" in error


@pytest.mark.slow
def test_an_existing_set_is_replaced_only_on_request(s3, inputs, cache, capsys):
    assert command() == 0
    assert command() == 2
    assert "use --overwrite to replace it" in capsys.readouterr().err
    (IN / "day_0.tsv").unlink()
    s3.clear()
    assert command("--overwrite") == 0
    changes = [r for r in s3.requests if r.method in ("PUT", "DELETE") and "/set/" in r.path]
    assert (changes[0].method, changes[0].path) == ("DELETE", "/bucket/set/manifest.json")
    names = [entry["name"] for entry in load_manifest(SET).content["inputs"]]
    assert names == [f"day_{k}.tsv" for k in range(1, 5)] + ["day_5.tsv.gz"]
    assert main(["verify", str(SET)]) == 0


def test_a_file_that_changes_while_it_is_read_is_reported(s3, inputs, tmp_path, capsys):
    changed = []

    def fault(request):
        if request.method == "HEAD" and "day_3" in request.path and not changed:
            changed.append(request)
            s3.fault = lambda request: ""
            (IN / "day_3.tsv").write_bytes(inputs[3].read_bytes() + b"\n")
        return ""

    s3.fault = fault
    words = ["prepare", "--input", str(IN), "--output", str(tmp_path / "set")]
    assert main(words) == 2
    assert "day_3.tsv changed while it was read" in capsys.readouterr().err


def test_vocabularies_that_the_full_cache_has_dropped_are_downloaded_again(
    cache, tmp_path, monkeypatch
):
    rows, dropped = write_rows(tmp_path / "rows.tsv", text_rows(60)), []
    url = "memory://full/set"

    def after_a_long_time(*arguments):
        dropped.extend((cache / "sets").rglob("*keys*"))
        for file in dropped:
            file.unlink()
        return stage_inputs(*arguments)

    assert main(["prepare", "--input", str(rows), "--output", url]) == 0
    monkeypatch.setattr("sbpflow.data.prepare.prepare.stage_inputs", after_a_long_time)
    words = ["prepare", "--input", str(rows), "--like", url, "--output", str(tmp_path / "set")]
    assert main(words) == 0
    assert dropped


def test_workers_do_not_read_the_cache_of_the_command(cache, tmp_path, monkeypatch):
    """The workers of a cluster may run on other machines, which do not have the cached files."""
    rows, sets = write_rows(tmp_path / "rows.tsv", text_rows(60)), cache / "sets"
    url = "memory://machines/set"

    def on_other_machines(self, function, items):
        items = list(items)
        sets.rename(cache / "elsewhere")
        yield from map(function, items)
        (cache / "elsewhere").rename(sets)

    assert main(["prepare", "--input", str(rows), "--output", url]) == 0
    words = ["prepare", "--input", str(rows), "--like", url, "--output"]
    assert main([*words, str(tmp_path / "here")]) == 0
    monkeypatch.setattr(Engine, "run", on_other_machines)
    monkeypatch.setattr(Engine, "shares_memory", False)
    assert main([*words, str(tmp_path / "there")]) == 0
    here, there = (load_manifest(tmp_path / name) for name in ("here", "there"))
    assert here.fingerprint == there.fingerprint
