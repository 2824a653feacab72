"""Tests the doctor's checks that move data: links, a disk, and a checkpoint that all ranks read."""

from pathlib import Path

import pytest

from sbpflow.boxing.executor import Boxing
from sbpflow.errors import ConfigError
from sbpflow.run.execution import machine_checks
from sbpflow.runtime.compute import doctor
from sbpflow.runtime.compute.doctor import Finding
from sbpflow.runtime.ranks.world import World


def _round_trip(world: World, folder: Path) -> Finding:
    return machine_checks.checkpoint(folder, Boxing(world))


def test_a_checkpoint_is_written_and_read_by_every_rank(ranks, tmp_path):
    results = ranks(2, _round_trip, tmp_path)
    assert [one.state for one in results] == ["ok", "ok"]
    assert "32 MiB written at" in results[0].text
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_cannot_be_read_back_is_broken(tmp_path, monkeypatch):
    monkeypatch.setattr(machine_checks, "write_full", lambda *_: None)
    with World.start("cpu") as world:
        check = machine_checks.checkpoint(tmp_path, Boxing(world))
    assert check.state == "broken"
    assert "does not exist; give the folder of a checkpoint" in check.text


def test_the_free_space_of_a_disk_is_reported(tmp_path):
    check = machine_checks.disk(tmp_path / "runs" / "x")
    assert check.state == "ok"
    assert check.text.endswith(f"free in {tmp_path}")


def test_the_report_includes_data_checks_and_fails_with_them(tmp_path, capsys):
    def moving(folder: Path) -> list[Finding]:
        assert folder == tmp_path
        return [Finding("checkpoint", "broken", "no room")]

    assert doctor.main(["--dir", str(tmp_path)], moving) == 1
    assert capsys.readouterr().out.endswith("broken: checkpoint\n")

    def failing(folder: Path) -> list[Finding]:
        raise ValueError("a bug")

    assert doctor.main([], failing) == 1
    assert "BROKEN ranks" in capsys.readouterr().out


def test_a_file_instead_of_a_folder_is_refused(tmp_path):
    (tmp_path / "t.csv").write_text("")
    with pytest.raises(
        ConfigError, match=r"t.csv is a file; use a folder .for example, --dir runs"
    ):
        doctor.main(["--dir", str(tmp_path / "t.csv")])
