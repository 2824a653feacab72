"""Tests listing, verifying, comparing and pruning checkpoints from the command line."""

import shutil

import pytest
import torch

from sbpflow.checkpoint import commands
from sbpflow.checkpoint.folder import checked, list_checkpoints
from sbpflow.commands.checkpoint import checkpoint
from sbpflow.errors import CheckpointError, ConfigError
from sbpflow.runtime.files.run_folder import RunLock
from tests.checkpoint.test_format import save


@pytest.fixture
def folder(tmp_path):
    """Return a run with checkpoints of steps 3, 5 and 8; the checkpoint of step 5 has a flipped
    bit.
    """
    kept = tmp_path / "checkpoints"
    for step in (3, 5, 8):
        save(kept, step=step, documents={"config": {"train": {"epochs": step}}})
    flip(kept / "step-5" / "rank-0.bin", 40)
    return tmp_path


def flip(path, place):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(bytes(data))


def names(folder):
    return [path.name for path in list_checkpoints(folder / "checkpoints")]


def test_ls_prints_one_line_per_checkpoint_newest_first(folder, capsys):
    (folder / "checkpoints/step-3/rank-1.bin").unlink()
    assert checkpoint(["ls", str(folder)]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["checkpoint", "written", "size", "tensors", "state"]
    assert [line.split()[0] for line in lines] == ["step-8", "step-5", "step-3"]
    assert lines[0].endswith("run r1, written by 2 ranks")
    assert "DAMAGED" in lines[2]
    assert "rank-1.bin" in lines[2]


def test_verify_reads_every_byte_and_sets_the_exit_code(folder, capsys):
    assert checkpoint(["verify", str(folder)]) == 1
    first, second, third = capsys.readouterr().out.splitlines()
    assert first.startswith("ok ")
    assert second.startswith("DAMAGED")
    assert "rank-0.bin" in second
    assert third.startswith("ok ")
    assert checkpoint(["verify", str(folder / "checkpoints/step-8")]) == 0


@pytest.mark.parametrize("command", ["verify", "ls"])
def test_a_checkpoint_that_a_run_removes_meanwhile_is_not_damaged(
    folder, capsys, monkeypatch, command
):
    kept, pruned = folder / "checkpoints", folder / "checkpoints/step-5"

    def checked_while_a_run_prunes(path, **more):
        opened = checked(path, **more)
        shutil.rmtree(pruned, ignore_errors=True)
        return opened

    monkeypatch.setattr(commands, "checked", checked_while_a_run_prunes)
    assert checkpoint([command, str(folder)]) == 0
    out = capsys.readouterr().out
    assert "DAMAGED" not in out
    assert f"ok      {kept / 'step-3'}: all 452" in out or command == "ls"
    assert (f"removed {pruned}: it was deleted before" in out) == (command == "verify")


@pytest.mark.parametrize("command", ["verify", "ls"])
def test_a_link_to_a_missing_checkpoint_is_damaged(folder, capsys, command):
    shutil.rmtree(folder / "checkpoints/step-5")
    (folder / "checkpoints/step-5").symlink_to("/other/disk/step-5")
    checkpoint([command, str(folder)])
    assert "DAMAGED" in capsys.readouterr().out


def test_diff_names_what_differs_and_by_how_much(folder, tmp_path, capsys, monkeypatch):
    import tests.checkpoint.test_format as made

    other = tmp_path / "other"
    values = made.wanted()
    values["tables/a"][4, 1] += 0.5
    values["tables/a"][4, 2] -= 2.0
    values["dense/scale"] = torch.tensor(float("nan"))
    monkeypatch.setattr(made, "wanted", lambda: values)
    save(other, step=9, documents={"config": {"train": {"epochs": 8, "stop": "x" * 99}}})
    left, right = folder / "checkpoints/step-8", other / "step-9"
    assert checkpoint(["diff", str(left), str(right)]) == 1
    text = capsys.readouterr().out
    assert "tables/a: 2 elements in 1 rows differ, by at most 2" in text
    assert "dense/scale: 1 elements in 1 rows differ, by at most inf" in text
    assert "config.train.stop: None -> 'xxx" in text
    assert "config.train.epochs" not in text
    assert text.endswith("5 tensors are equal\n")
    assert checkpoint(["diff", str(right), str(right)]) == 0
    assert "equal: 7 tensors" in capsys.readouterr().out


def test_prune_keeps_valid_checkpoints_and_never_counts_damaged_ones(folder, capsys):
    flip(folder / "checkpoints/step-8" / "rank-0.bin", 40)
    save(folder / "checkpoints", step=2)
    assert checkpoint(["prune", str(folder), "--keep", "1", "--dry-run"]) == 0
    assert "would remove" in capsys.readouterr().out
    assert names(folder) == ["step-8", "step-5", "step-3", "step-2"]
    lock = RunLock(folder / "checkpoints", rank=0)
    with pytest.raises(ConfigError, match=r"a run is saving there .* checkpoint\.keep"):
        checkpoint(["prune", str(folder), "--keep", "1"])
    lock.close()
    assert checkpoint(["prune", str(folder), "--keep", "1"]) == 0
    assert names(folder) == ["step-8", "step-5", "step-3"]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["skipped,", "skipped,", "kept", "removed"]
    with pytest.raises(ConfigError, match="--keep must be 1 or more, got 0"):
        checkpoint(["prune", str(folder), "--keep", "0"])


def test_folders_without_checkpoints_are_reported(tmp_path):
    with pytest.raises(CheckpointError, match="has no checkpoints; give a checkpoint"):
        checkpoint(["ls", str(tmp_path)])
