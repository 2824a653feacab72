"""Tests checkpoints in stores: kills between objects, failing saves, and two runs in one folder."""

import json

import pytest
import torch

from sbpflow.checkpoint.commands import compact, list_text, verify_text
from sbpflow.checkpoint.folder import (
    Claim,
    drop_partial,
    keep_only,
    list_checkpoints,
    piece_file,
    publish,
    remove_checkpoint,
    step_folder,
    tidy,
)
from sbpflow.checkpoint.format import INDEX_FILE, Index, SavedTensor, whole_of
from sbpflow.checkpoint.read import open_checkpoint
from sbpflow.checkpoint.rewrite import given, write_full
from sbpflow.checkpoint.run_file import RunFacts, read_run, write_run
from sbpflow.checkpoint.write import Part, write_parts
from sbpflow.errors import CheckpointError, StoreError
from sbpflow.runtime.files import remote_path
from sbpflow.runtime.files.remote_path import RemotePath, any_path

NAME = "tables/t"


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(remote_path, "_FIRST_PAUSE_S", 0.001)


@pytest.fixture(params=["memory", "s3"])
def folder(request):
    """Yield an empty folder in a store."""
    if request.param == "s3":
        request.getfixturevalue("s3")
        yield any_path("s3://bucket/run")
        return
    pytest.importorskip("fsspec")
    yield any_path("memory://bucket/run")
    RemotePath("memory://bucket").remove_tree()


def save(folder, step, value, nonce="a1", *, only_files=False):
    """Save a tensor of one value as a one-rank run does."""
    values = torch.full((3_000_000,), float(value))
    file = piece_file(step_folder(folder, step), 0, nonce)
    place = whole_of(tuple(values.shape))
    ((_, piece),) = write_parts(file, [Part(name=NAME, place=place, values=values)])
    if only_files:
        return None
    tensor = SavedTensor(shape=(3_000_000,), dtype=values.dtype, pieces=(piece,))
    size = file.stat().st_size
    index = Index(step=step, run="0" * 12, tensors={NAME: tensor}, files={file.name: size})
    return publish(folder, step_folder(folder, step), index)


def value_of(folder, step):
    return float(open_checkpoint(step_folder(folder, step)).tensor(NAME, slice(-1, None)))


@pytest.mark.few(1)
def test_checkpoints_are_saved_listed_and_removed(folder):
    for step in (2, 4, 10):
        save(folder, step, step)
    assert [path.name for path in list_checkpoints(folder)] == ["step-10", "step-4", "step-2"]
    assert value_of(folder, 4) == 4.0
    assert "step-10" in list_text(folder)
    assert verify_text(folder)[1]
    assert "already a full checkpoint" in compact(folder)
    keep_only(folder, newest=1, step=10, and_step=2)
    assert [path.name for path in list_checkpoints(folder)] == ["step-10", "step-2"]
    remove_checkpoint(folder / "step-2")
    assert folder.sizes().keys() == {"step-10/index.json", "step-10/rank-0.a1.bin"}


def test_a_checkpoint_without_an_index_does_not_exist(folder):
    save(folder, 2, 2)
    save(folder, 4, 4, only_files=True)
    (folder / "step-6/model.json").write_bytes(b"of another program")
    assert [path.name for path in list_checkpoints(folder)] == ["step-2"]
    assert tidy(folder) == ["step-4"]
    kept = {"step-2/index.json", "step-2/rank-0.a1.bin", "step-6/model.json"}
    assert folder.sizes().keys() == kept


def test_a_saved_step_is_valid_until_its_new_index_is_written(folder):
    save(folder, 2, 2)
    save(folder, 2, 3, "b2", only_files=True)  # the run is killed before it writes the index
    assert value_of(folder, 2) == 2.0
    save(folder, 2, 3, "c3")
    assert value_of(folder, 2) == 3.0
    assert (folder / "step-2").sizes().keys() == {INDEX_FILE, "rank-0.c3.bin"}


def test_damage_is_found(folder):
    save(folder, 2, 2)
    file = folder / "step-2/rank-0.a1.bin"
    raw = file.read_bytes()
    file.write_bytes(raw[:-4] + b"abcd")
    with pytest.raises(CheckpointError, match="checksum does not match"):
        value_of(folder, 2)
    assert not verify_text(folder)[1]
    file.write_bytes(raw[:-4])
    with pytest.raises(CheckpointError, match="bytes instead of"):
        open_checkpoint(folder / "step-2")
    file.unlink()
    with pytest.raises(CheckpointError, match="has 0 bytes instead of"):
        open_checkpoint(folder / "step-2")


def test_run_files_are_replaced(folder):
    assert read_run(folder) is None
    for status in ("training", "finished"):
        write_run(folder, RunFacts(run="0" * 12, facts={"a": "b"}, status=status))
        assert read_run(folder).status == status
    (folder / "run.json").write_bytes(b"{")
    with pytest.raises(CheckpointError, match="cannot be used"):
        read_run(folder)


def test_a_later_run_takes_the_folder(folder):
    first = Claim(folder)
    first.check()
    second = Claim(folder)
    second.check()
    with pytest.raises(CheckpointError, match="another run has started saving here"):
        first.check()


def test_a_failing_upload_leaves_no_checkpoint(s3, quick):
    folder = any_path("s3://bucket/run")
    s3.fault = lambda request: "503" if "index.json" in request.path else ""
    with pytest.raises(CheckpointError, match=r"step-2 cannot be written \(.* \(5 tries"):
        save(folder, 2, 2)
    s3.clear()
    assert list_checkpoints(folder) == []


def test_a_published_checkpoint_is_complete_even_if_leftovers_cannot_be_listed(monkeypatch):
    """A save that failed would remove its files."""
    pytest.importorskip("fsspec")
    folder = any_path("memory://bucket/run")

    def fail(self):
        raise StoreError(f"{self} cannot be listed (5 tries in 60 s)")

    save(folder, 2, 2, only_files=True)  # of an interrupted save
    with monkeypatch.context() as patch:
        patch.setattr(RemotePath, "sizes", fail)
        save(folder, 2, 3, "b2")
    assert value_of(folder, 2) == 3.0
    assert (folder / "step-2").sizes().keys() == {INDEX_FILE, "rank-0.a1.bin", "rank-0.b2.bin"}
    remove_checkpoint(folder / "step-2")
    assert not folder.sizes()


def test_a_failed_save_keeps_files_that_the_index_refers_to():
    """A store may have written the index although the save received an error."""
    pytest.importorskip("fsspec")
    folder = any_path("memory://bucket/run")
    save(folder, 2, 2, only_files=True)
    drop_partial(folder / "step-2", "a1")
    assert not folder.sizes()
    save(folder, 2, 2)
    drop_partial(folder / "step-2", "a1")
    assert value_of(folder, 2) == 2.0
    remove_checkpoint(folder / "step-2")


def test_a_rewritten_checkpoint_is_complete_even_if_writing_its_index_seems_to_fail(monkeypatch):
    """A store may have written an object although the client received no answer."""
    pytest.importorskip("fsspec")
    folder, write = any_path("memory://bucket/run"), RemotePath.write_bytes

    def fail(self, data):
        write(self, data)
        raise StoreError(f"{self} cannot be written (5 tries in 60 s)")

    save(folder, 2, 2)
    index, values = open_checkpoint(folder / "step-2").index, torch.full((3_000_000,), 3.0)
    with monkeypatch.context() as patch:
        patch.setattr(RemotePath, "write_bytes", fail)
        with pytest.raises(CheckpointError, match="5 tries"):
            write_full(folder, index, {NAME: given(values)})
    assert value_of(folder, 2) == 3.0
    remove_checkpoint(folder / "step-2")


def test_reads_that_fail_temporarily_are_repeated(s3, quick):
    folder = any_path("s3://bucket/run")
    save(folder, 2, 2)
    seen: dict[str, int] = {}

    def fault(request):
        seen[request.path] = seen.get(request.path, 0) + 1
        return ("503", "cut", "drop", "")[min(seen[request.path], 4) - 1]

    s3.fault = fault
    assert value_of(folder, 2) == 2.0
    s3.fault = lambda request: "503"
    with pytest.raises((CheckpointError, StoreError), match="5 tries"):
        list_checkpoints(folder)


def test_reading_takes_a_request_per_block(s3):
    folder = any_path("s3://bucket/run")
    save(folder, 2, 2)
    s3.clear()
    open_checkpoint(folder / "step-2").tensor(NAME)  # 12 MB, in 2 blocks
    ranges = [r.range for r in s3.requests if "rank-0" in r.path]
    assert ranges == ["bytes=0-8388607", "bytes=8388608-11999999"]
    # The other requests read the index's size and content, and list the folder.
    assert len(s3.requests) == 5
    assert json.loads((folder / "step-2" / INDEX_FILE).read_bytes())["version"] == 1
