"""Tests predictions into a folder of blocks, which continue after a kill and equal a single
file."""

import json
import os
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from sbpflow.commands.predict import predict
from sbpflow.data.predictions import Scoring
from sbpflow.data.score_blocks import INDEX, ScoreBlocks
from sbpflow.errors import ConfigError
from tests import deadlines
from tests.data.tables import INF, table, write_csv
from tests.run.test_predict import ROOT, _train, prepared, words
from tests.torchrun import torchrun

BLOCK = ("--block-rows", "40")


class Killed(BaseException):
    """Simulates a kill: no code of the command handles it."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a prepared set, and two files with the rows of its test split."""
    folder = prepared(tmp_path_factory.mktemp("blocks"))
    rows = [row for row in table(900)[24 * 24 :] if row["price"] != INF]
    (folder / "new").mkdir()
    write_csv(folder / "new" / "part-1.csv", rows[:100])
    write_csv(folder / "new" / "part-2.csv", rows[100:])
    return folder


@pytest.fixture(scope="module")
def run(_cpu_ranks, folder) -> Path:
    _cpu_ranks(1, _train, folder, folder / "run")
    return folder / "run"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def joined(folder: Path) -> pl.DataFrame:
    """Return the rows of all files in the order of the index."""
    files = json.loads((folder / INDEX).read_text())["content"]["files"]
    assert [file["start"] for file in files] == [40 * number for number in range(len(files))]
    assert names(folder) == [*(file["file"] for file in files), INDEX]
    return pl.concat([pl.read_parquet(folder / file["file"]) for file in files])


def check_equal(found: pl.DataFrame, wanted: pl.DataFrame) -> None:
    assert found.drop("score").equals(wanted.drop("score"))
    # The last batch of a file has a different size than a block's batches, and rounding depends on
    # the size.
    np.testing.assert_allclose(found["score"], wanted["score"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("source", ["set", "new"])
def test_the_blocks_of_a_folder_equal_one_file(run, folder, tmp_path, source):
    assert predict(words(run, folder / source, tmp_path / "s.parquet")) == 0
    assert predict(words(run, folder / source, tmp_path / "scores", *BLOCK)) == 0
    wanted = pl.read_parquet(tmp_path / "s.parquet")
    check_equal(joined(tmp_path / "scores"), wanted)
    content = json.loads((tmp_path / "scores" / INDEX).read_text())["content"]
    assert (content["rows"], len(content["files"])) == (len(wanted), -(-len(wanted) // 40))
    assert names(tmp_path) == ["s.parquet", "scores"]


@pytest.mark.parametrize("output", ["scores", "s.parquet"])
def test_a_full_disk_is_reported_with_the_output(run, folder, tmp_path, monkeypatch, output):
    def full(*_):  # Polars raises OSError or this error, which is not an OSError
        raise pl.exceptions.ComputeError("parquet: No space left on device (os error 28)")

    monkeypatch.setattr(pl.DataFrame, "write_parquet", full)
    with pytest.raises(ConfigError, match=rf"--output .*{output}.* \(no space left on device\)"):
        predict(words(run, folder / "set", tmp_path / output))


def test_fewer_rows_than_a_batch_are_scored(run, folder, tmp_path):
    source = write_csv(tmp_path / "few.csv", table(3))
    assert predict(words(run, source, tmp_path / "s.parquet")) == 0
    assert predict(words(run, source, tmp_path / "scores", "--block-rows", "2")) == 0
    files = sorted((tmp_path / "scores").glob("*.parquet"))
    found = pl.concat([pl.read_parquet(file) for file in files])
    check_equal(found, pl.read_parquet(tmp_path / "s.parquet"))


@pytest.mark.parametrize("source", ["set", "new"])
def test_a_killed_prediction_keeps_its_finished_blocks(run, folder, tmp_path, monkeypatch, source):
    assert predict(words(run, folder / source, tmp_path / "whole", *BLOCK)) == 0
    real, encode, written, encoded = ScoreBlocks.write, Scoring.encode, [], []

    def write(self, manifest, block, scores, labels):
        if len(written) in (2, 4):
            written.append(None)
            raise Killed
        written.append(block.number)
        real(self, manifest, block, scores, labels)

    monkeypatch.setattr(ScoreBlocks, "write", write)
    monkeypatch.setattr(
        Scoring,
        "encode",
        lambda *of: (encoded.append(1), encode(*of)),  # counts the calls
    )
    command = words(run, folder / source, tmp_path / "scores", *BLOCK)
    for _ in range(2):
        with pytest.raises(Killed):
            predict(command)
        assert not (tmp_path / "scores" / INDEX).exists()
    damaged = tmp_path / "scores" / "part-000001.parquet"
    raw = bytearray(damaged.read_bytes())
    raw[len(raw) // 2] ^= 1
    damaged.write_bytes(bytes(raw))
    assert predict(command) == 0
    assert written[:5] == [0, 1, None, 2, None]
    assert written[5:7] == [1, 3], "finished blocks are kept, but not the damaged one"
    assert sum(encoded) == (source == "new"), "encoded rows are kept"
    assert names(tmp_path / "scores") == names(tmp_path / "whole")
    for name in names(tmp_path / "scores"):
        one, two = (tmp_path / folder / name for folder in ("scores", "whole"))
        if name != INDEX:
            assert one.read_bytes() == two.read_bytes()


def test_existing_files_of_a_folder_are_replaced_only_on_request(
    run, folder, tmp_path, monkeypatch
):
    command = words(run, folder / "set", tmp_path / "scores", *BLOCK)
    assert predict(command) == 0
    with pytest.raises(ConfigError, match=r"scores already exists; use --overwrite"):
        predict(command)
    notes = tmp_path / "scores" / "notes.md"
    notes.touch()
    with pytest.raises(ConfigError, match=r"would delete notes\.md, which is not a file of a pred"):
        predict([*command, "--overwrite"])
    assert (tmp_path / "scores" / INDEX).is_file()
    notes.rename(tmp_path / "scores" / ".hidden")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "scores")
    linked = words(run, folder / "set", link, *BLOCK)
    assert predict([*linked, "--overwrite"]) == 0
    assert link.is_symlink()
    assert (link / INDEX).is_file()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    for more in ((), ("--overwrite",)):
        with pytest.raises(ConfigError, match="mine is not empty, but does not contain scores"):
            predict(words(run, folder / "set", tmp_path / "mine", *more))
    assert names(tmp_path / "mine") == ["thesis.txt"]

    def killed(*of):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(ScoreBlocks, "write", killed)
        with pytest.raises(Killed):
            predict(words(run, folder / "set", tmp_path / "other", *BLOCK))
    changed = words(run, folder / "set", tmp_path / "other", "--block-rows", "50")
    with pytest.raises(ConfigError, match="unfinished scores for other rows, weights, or options"):
        predict(changed)
    assert predict([*changed, "--overwrite"]) == 0
    with pytest.raises(ConfigError, match="--block-rows must be 1 or more, got 0"):
        predict(words(run, folder / "set", tmp_path / "none", "--block-rows", "0"))


@pytest.mark.slow
def test_two_ranks_write_a_folder_from_the_command_line(run, folder, tmp_path):
    source = folder / "new"
    assert predict(words(run, source, tmp_path / "s.parquet")) == 0
    command = [*torchrun(tmp_path), "-m", "sbpflow", "predict"]
    done = deadlines.run(
        [*command, *words(run, source, tmp_path / "scores", *BLOCK)],
        60,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    check_equal(joined(tmp_path / "scores"), pl.read_parquet(tmp_path / "s.parquet"))
