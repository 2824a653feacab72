"""What prepare and synth may remove, and limits that no number slips through."""

import pytest

from sbpflow.data.format.schema import CRITEO
from sbpflow.data.prepare.options import PrepareOptions
from sbpflow.data.prepare.parse import _fits, _is_int32
from sbpflow.data.prepare.split import parse_split
from sbpflow.data.prepare.workspace import MARK, discard, open_work
from sbpflow.errors import ConfigError


def test_a_folder_of_the_user_is_never_emptied(tmp_path):
    theirs = tmp_path / "set.work"
    theirs.mkdir()
    (theirs / "precious").write_text("x")
    with pytest.raises(ConfigError, match="was not made by this program"):
        open_work(tmp_path / "set", "plan a")
    assert (theirs / "precious").read_text() == "x"


def test_our_own_folder_goes_on_or_starts_anew(tmp_path):
    work, goes_on = open_work(tmp_path / "set", "plan a")
    assert not goes_on
    (work / "stage").mkdir()
    assert open_work(tmp_path / "set", "plan a") == (work, True)
    assert (work / "stage").exists()
    assert open_work(tmp_path / "set", "plan b") == (work, False)
    assert [entry.name for entry in work.iterdir()] == [MARK]
    discard(work)
    assert not work.exists()


@pytest.mark.parametrize("output", [".", "/", "ok.tsv/x"])
def test_an_output_that_cannot_be_is_said(tmp_path, monkeypatch, output):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ok.tsv").write_text("")
    from pathlib import Path

    with pytest.raises(ConfigError, match="--output"):
        open_work(Path(output), "plan")


@pytest.mark.parametrize("fraction", [float("nan"), -0.1, 2.0])
def test_the_limit_of_bad_lines_is_a_fraction(tmp_path, fraction):
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


def test_long_digits_are_judged_and_not_converted():
    assert not _is_int32("9" * 5000)
    assert _is_int32("0" * 5000 + "7")
    assert _is_int32("-2147483648")
    assert not _is_int32("2147483648")
    assert _fits("integer", "9223372036854775807")
    assert _fits("integer", "-9223372036854775808")
    assert not _fits("integer", "9223372036854775808")
    assert not _fits("integer", "+5")
    assert not _fits("hex", "1234567")
