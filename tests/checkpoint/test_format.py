"""Tests that any rectangle can be read from the pieces of several ranks, and that any damage causes
an error.
"""

import errno
import json
import os
import random
import shutil
from typing import get_type_hints

import numpy as np
import pytest
import torch

from sbpflow.checkpoint import format as form
from sbpflow.checkpoint import read, write
from sbpflow.checkpoint.folder import (
    checked,
    good_checkpoints,
    keep_only,
    list_checkpoints,
    partial_folder,
    publish,
    remove_checkpoint,
    tidy,
)
from sbpflow.checkpoint.format import (
    Index,
    Previous,
    SavedTensor,
    cover_fault,
    digest_of,
    from_json,
    to_json,
)
from sbpflow.checkpoint.read import open_checkpoint
from sbpflow.checkpoint.write import Part, write_parts
from sbpflow.config.checkpoint_options import CheckpointConfig
from sbpflow.embedding.plan.tables import Place
from sbpflow.errors import CheckpointError
from sbpflow.runtime.fields.ranges import broken_rule
from sbpflow.runtime.files.json_file import json_digest

# Block size in bytes: so small that even small tensors have many blocks, some of which start in the
# middle of a row.
BLOCK = 64


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    for module in (form, read, write):
        monkeypatch.setattr(module, "BLOCK_BYTES", BLOCK)


def place(r0, r1, c0, c1):
    return Place(row_start=r0, row_stop=r1, col_start=c0, col_stop=c1)


def values_of(shape, dtype, start):
    count = int(np.prod(shape))
    return (torch.arange(count, dtype=torch.float64) + start).reshape(shape).to(dtype)


# name: (shape, dtype, [(rank, place)]). The tensors have uneven pieces, a grid of pieces, an empty
# piece, no dims, or no rows.
TENSORS = {
    "tables/a": ((9, 5), torch.float32, [(0, (0, 6, 0, 5)), (1, (6, 9, 0, 5))]),
    "tables/b": (
        (7, 6),
        torch.bfloat16,
        [(0, (0, 4, 0, 2)), (1, (0, 4, 2, 6)), (0, (4, 7, 0, 5)), (1, (4, 7, 5, 6))],
    ),
    "tables/a/sum": ((9,), torch.float64, [(1, (0, 9, 0, 1))]),
    "dense/w": ((3, 2, 4), torch.float32, [(0, (0, 2, 0, 8)), (1, (2, 3, 0, 8))]),
    "dense/scale": ((), torch.float32, [(0, (0, 1, 0, 1))]),
    "dense/none": ((0, 4), torch.float32, []),
    "dense/count": ((2,), torch.int64, [(1, (0, 2, 0, 1))]),
}


def wanted():
    return {
        name: values_of(shape, dtype, number * 100)
        for number, (name, (shape, dtype, _)) in enumerate(TENSORS.items())
    }


def save(folder, step=3, run="r1", documents=None):
    """Save a checkpoint from two ranks."""
    partial = partial_folder(folder, step, "ab")
    partial.mkdir(parents=True)
    full = wanted()
    pieces = {name: [] for name in TENSORS}
    for rank in (0, 1):
        parts = [
            Part(
                name=name,
                place=place(*sides),
                values=full[name].reshape(
                    place(*sides).row_stop and form.whole_of(shape).num_rows,
                    form.whole_of(shape).width,
                )[sides[0] : sides[1], sides[2] : sides[3]],
            )
            for name, (shape, _, placed) in TENSORS.items()
            for holder, sides in placed
            if holder == rank
        ]
        for name, piece in write_parts(partial / f"rank-{rank}.bin", parts):
            pieces[name].append(piece)
    index = Index(
        step=step,
        run=run,
        tensors={
            name: SavedTensor(shape=shape, dtype=dtype, pieces=tuple(pieces[name]))
            for name, (shape, dtype, _) in TENSORS.items()
        },
        files={path.name: path.stat().st_size for path in partial.iterdir()},
        documents=documents or {},
    )
    return publish(folder, partial, index)


def test_written_tensors_are_read_whole_and_as_rectangles(tmp_path):
    path = save(tmp_path, documents={"cursor": {"epoch": 1}})
    checkpoint = open_checkpoint(path)
    assert (checkpoint.step, checkpoint.run, checkpoint.documents) == (
        3,
        "r1",
        {"cursor": {"epoch": 1}},
    )
    assert checkpoint.num_bytes == sum(file.stat().st_size for file in path.glob("*.bin"))
    for name, full in wanted().items():
        assert torch.equal(checkpoint.tensor(name), full), name
        assert checkpoint.tensor(name).shape == full.shape
    full = wanted()["tables/b"]
    for _ in range(50):
        r0, r1 = sorted(random.choices(range(8), k=2))
        c0, c1 = sorted(random.choices(range(7), k=2))
        cut = checkpoint.tensor("tables/b", slice(r0, r1), slice(c0, c1), torch.float64)
        assert torch.equal(cut, full[r0:r1, c0:c1].double())
    out = torch.zeros(4, dtype=torch.float32)
    checkpoint.read_into("tables/a/sum", place(2, 6, 0, 1), out)
    assert out.tolist() == wanted()["tables/a/sum"][2:6].tolist()
    assert torch.equal(checkpoint.tensor("dense/w", slice(1, 3)), wanted()["dense/w"][1:3])
    checkpoint.verify()
    with pytest.raises(CheckpointError, match="has no tensor tables/z"):
        checkpoint.tensor("tables/z")


def test_the_index_is_text_that_gives_an_equal_value(tmp_path):
    checkpoint = open_checkpoint(save(tmp_path, documents={"x": [1, 0.5, None, "\u00e9"]}))
    assert from_json(to_json(checkpoint.index), tmp_path) == checkpoint.index
    pieces = checkpoint.tensors["tables/a"].pieces
    assert [len(piece.crc32) for piece in pieces] == [2, 1], "120 and 60 bytes in blocks of 64"


def reads_right_or_raises(path):
    """Return whether reading raised an error; fail if wrong values were read."""
    try:
        checkpoint = checked(path, run="r1")
        got = {name: checkpoint.tensor(name) for name in checkpoint.tensors}
    except CheckpointError as error:
        message = str(error)
    else:
        message = ""
    if message:
        assert str(path) in message
        assert ";" in message, "it says what to do"
        return True
    assert got.keys() == TENSORS.keys()
    for name, full in wanted().items():
        assert torch.equal(got[name], full), name
    return False


def test_no_flipped_bit_is_ever_loaded(tmp_path):
    path = save(tmp_path)
    generator = random.Random(7)
    raised = 0
    for trial in range(200):
        file = path / ("index.json", "rank-0.bin", "rank-1.bin")[trial % 3]
        good = file.read_bytes()
        at, bit = generator.randrange(len(good)), 1 << generator.randrange(8)
        file.write_bytes(good[:at] + bytes([good[at] ^ bit]) + good[at + 1 :])
        raised += reads_right_or_raises(path)
        file.write_bytes(good)
    assert raised >= 198, "a flip of a blank in the index may change nothing"
    assert not reads_right_or_raises(path)


def test_truncated_missing_or_unrelated_files_are_never_loaded(tmp_path):
    path = save(tmp_path / "one")
    other = save(tmp_path / "two", step=4, run="r2")
    (tmp_path / "bare").mkdir()
    for name in ("index.json", "rank-0.bin", "rank-1.bin"):
        file = path / name
        good = file.read_bytes()
        for cut in (0, 1, len(good) // 2, len(good) - 1):
            file.write_bytes(good[:cut])
            # Without its last byte, a newline, the index is still valid.
            if name != "index.json" or cut != len(good) - 1:
                assert reads_right_or_raises(path), (name, cut)
        file.write_bytes(good + b"\0")
        assert reads_right_or_raises(path) or name == "index.json"
        file.unlink()
        assert reads_right_or_raises(path), name
        file.write_bytes(good)
    index = (path / "index.json").read_bytes()
    (path / "index.json").write_bytes((other / "index.json").read_bytes())
    with pytest.raises(CheckpointError, match="of step 4"):
        checked(path)
    (path / "index.json").write_bytes(index)
    with pytest.raises(CheckpointError, match="another run"):
        checked(other, run="r1")
    one, two = path / "rank-0.bin", path / "rank-1.bin"
    one_bytes = one.read_bytes()
    one.write_bytes(bytes(reversed(one_bytes)))
    assert reads_right_or_raises(path)
    one.write_bytes(two.read_bytes())
    assert reads_right_or_raises(path)
    with pytest.raises(CheckpointError, match=r"bare: has no index\.json; .* such as runs/train"):
        open_checkpoint(tmp_path / "bare")
    with pytest.raises(CheckpointError, match="does not exist; give the folder"):
        open_checkpoint(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda tree: tree["content"].update(step=-1), "checksum"),
        (lambda tree: tree.update(version=3), "version is 3"),
        (lambda tree: tree.update(version=2), "has no 'previous'"),
        (lambda tree: tree.update(format="other"), "'other'"),
        (lambda tree: tree.pop("content"), "'content'"),
        (lambda tree: tree.update(content=[]), "checksum"),
    ],
)
def test_an_index_that_was_changed_is_refused(tmp_path, change, why):
    file = save(tmp_path) / "index.json"
    tree = json.loads(file.read_text())
    change(tree)
    file.write_text(json.dumps(tree))
    with pytest.raises(CheckpointError, match=why):
        open_checkpoint(file.parent)


def resigned(file, change):
    """Change the index and its checksum, as an attacker would."""
    tree = json.loads(file.read_text())
    change(tree["content"])
    tree["sha256"] = json_digest(tree["content"])
    file.write_text(json.dumps(tree))


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content["tensors"]["tables/a"]["pieces"].pop(),
        lambda content: content["tensors"]["tables/a"]["pieces"][0].__setitem__(0, "../../x"),
        lambda content: content["tensors"]["tables/a"]["pieces"][0].__setitem__(0, "rank-9.bin"),
        lambda content: content["tensors"]["tables/a"]["pieces"][0].__setitem__(1, 10**9),
        lambda content: content["tensors"]["tables/a"]["pieces"][0].__setitem__(2, -1),
        lambda content: content["tensors"]["tables/a"]["pieces"][0][-1].pop(),
        lambda content: content["tensors"]["tables/a"].update(shape=[10**12, 10**6]),
        lambda content: content["tensors"]["tables/a"].update(dtype="object"),
        lambda content: content["tensors"]["tables/a"]["pieces"].__setitem__(1, None),
        lambda content: content.update(byte_order="middle"),
        lambda content: content.update(block_bytes=7),
        lambda content: content.update(step=True),
        lambda content: content.update(run=None),
    ],
)
def test_an_index_that_contradicts_itself_is_refused(tmp_path, change):
    file = save(tmp_path) / "index.json"
    resigned(file, change)
    with pytest.raises(CheckpointError):
        open_checkpoint(file.parent)


def test_deeply_nested_indexes_are_refused(tmp_path):
    file = save(tmp_path) / "index.json"
    file.write_text("[" * 200_000)
    with pytest.raises(CheckpointError):
        open_checkpoint(file.parent)


def test_pieces_with_gaps_or_overlaps_are_refused():
    whole = place(0, 4, 0, 4)
    assert cover_fault(whole, [place(0, 4, 0, 2), place(0, 1, 2, 4), place(1, 4, 2, 4)]) == ""
    assert "elements" in cover_fault(whole, [place(0, 4, 0, 2)])
    assert "overlaps" in cover_fault(whole, [place(0, 2, 0, 4), place(1, 3, 0, 4)])
    assert "outside" in cover_fault(whole, [place(0, 2, 0, 4), place(3, 5, 0, 4)])


def test_the_longest_chain_of_deltas_is_read(tmp_path):
    """Python limits recursion, so a run must not write longer chains, which cannot be read."""
    rule = get_type_hints(CheckpointConfig, include_extras=True)["deltas"]
    longest = 256
    assert broken_rule(longest, rule) is None
    assert broken_rule(longest + 1, rule) == "a finite number >= 0 and <= 256"
    previous = None
    for step in range(longest + 1):
        index = Index(step=step, run="r", tensors={}, files={}, previous=previous)
        (tmp_path / f"step-{step}").mkdir()
        (tmp_path / f"step-{step}" / "index.json").write_text(to_json(index))
        previous = Previous(step=step, sha256=digest_of(index), number=step + 1)
    newest = next(good_checkpoints(tmp_path))
    assert (newest.step, newest.chain_length) == (longest, longest + 1)


def test_the_newest_good_checkpoint_is_found(tmp_path, caplog):
    for step in (2, 10, 9):
        save(tmp_path, step=step)
    partial_folder(tmp_path, 11, "0f").mkdir()
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-10", "step-9", "step-2"]
    (tmp_path / "step-10" / "rank-1.bin").unlink()
    assert [checkpoint.step for checkpoint in good_checkpoints(tmp_path)] == [9, 2]
    assert "step-10/rank-1.bin" in caplog.text
    assert tidy(tmp_path) == [".step-11.partial-0f"]
    remove_checkpoint(tmp_path / "step-10")
    save(tmp_path, step=9, run="r3")
    assert [checkpoint.run for checkpoint in good_checkpoints(tmp_path)] == ["r3", "r1"]
    # A kill during the replacement would leave these folders.
    (tmp_path / "step-2").rename(tmp_path / ".replaced-step-2")
    assert tidy(tmp_path) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-2", "step-9"]
    save(tmp_path / "x", step=2, run="r4").rename(tmp_path / ".replaced-step-2")
    assert tidy(tmp_path) == [".replaced-step-2"]
    assert checked(tmp_path / "step-2").run == "r1"


def test_a_removed_or_replaced_checkpoint_that_is_being_read_does_not_end_the_run(
    tmp_path, monkeypatch, caplog
):
    """On NFS, the folder of open files cannot be removed before they are closed."""

    def remove(path):
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path))

    for step in (2, 4):
        save(tmp_path, step=step)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", remove)
        keep_only(tmp_path, newest=1, step=4, and_step=None)
        assert tidy(tmp_path) == []
    assert caplog.text.count("/.removed-step-2 is left until the next start of a run") == 2
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-4"]
    assert tidy(tmp_path) == [".removed-step-2"]
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", remove)
        save(tmp_path, step=4, run="r2")
    assert checked(tmp_path / "step-4").run == "r2"
    assert tidy(tmp_path) == [".replaced-step-4"]


def test_a_checkpoint_that_its_run_removes_while_it_is_read_is_named(tmp_path):
    checkpoint = open_checkpoint(save(tmp_path))
    remove_checkpoint(checkpoint.path)
    message = r"step-3 was removed while it was read, .*; repeat the command, or .* larger"
    with pytest.raises(CheckpointError, match=message):
        checkpoint.tensor("tables/a")


def test_a_file_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    part = Part(name="a", place=place(0, 1, 0, 1), values=torch.zeros(1, 1))
    with pytest.raises(CheckpointError, match=r"nowhere/rank-0\.bin cannot be written"):
        write_parts(tmp_path / "nowhere" / "rank-0.bin", [part])
    (tmp_path / "there.bin").touch()
    with pytest.raises(CheckpointError, match="file exists"):
        write_parts(tmp_path / "there.bin", [part])
    full = os.open("/dev/full", os.O_WRONLY)
    monkeypatch.setattr(os, "open", lambda *_: full)
    with pytest.raises(CheckpointError, match="no space left on device"):
        write_parts(tmp_path / "rank-0.bin", [part])
