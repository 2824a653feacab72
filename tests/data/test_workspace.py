"""Tests which folders prepare and synth may remove, and which numbers options accept."""

import pytest

from sbpflow.data.format.schema import CRITEO
from sbpflow.data.prepare.options import PrepareOptions
from sbpflow.data.prepare.split import parse_split
from sbpflow.data.prepare.workspace import MARK, discard, open_work
from sbpflow.errors import ConfigError


def test_a_folder_of_the_user_is_never_emptied(tmp_path):
    users_folder = tmp_path / "set.work"
    users_folder.mkdir()
    (users_folder / "precious").write_text("x")
    with pytest.raises(ConfigError, match=r"set\.work already exists and was not created by"):
        open_work(tmp_path / "set", "plan a")
    assert (users_folder / "precious").read_text() == "x"


def test_a_work_folder_is_resumed_or_replaced(tmp_path, caplog):
    work, resumes = open_work(tmp_path / "set", "plan a")
    assert not resumes
    (work / "stage").mkdir()
    assert open_work(tmp_path / "set", "plan a") == (work, True)
    assert (work / "stage").exists()
    assert not caplog.text
    assert open_work(tmp_path / "set", "plan b") == (work, False)
    assert "set.work, the results of a command with other options" in caplog.text
    assert [entry.name for entry in work.iterdir()] == [MARK]
    discard(work)
    assert not work.exists()


@pytest.mark.parametrize("output", [".", "/", "ok.tsv/x"])
def test_an_impossible_output_is_refused(tmp_path, monkeypatch, output):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ok.tsv").write_text("")
    from pathlib import Path

    with pytest.raises(ConfigError, match="--output"):
        open_work(Path(output), "plan")


@pytest.mark.parametrize("fraction", [float("nan"), -0.1, 2.0])
def test_max_bad_fraction_must_be_a_fraction(tmp_path, fraction):
    options = PrepareOptions(
        inputs=(tmp_path,),
        output=tmp_path / "out",
        split=parse_split("time:0.8,0.1,0.1"),
        crosses=(),
        schema=CRITEO,
        max_bad_fraction=fraction,
    )
    with pytest.raises(ConfigError, match="--max-bad-fraction"):
        options.check()
