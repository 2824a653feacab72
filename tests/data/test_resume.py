"""Tests resuming an unfinished prepare: only missing parts are made, and damage never reaches the
set.
"""

import json
import random
import shutil

import pytest

from sbpflow.data.__main__ import main
from sbpflow.data.prepare import prepare, stage
from sbpflow.data.prepare.encode import encode_all
from sbpflow.data.prepare.stage import stage_inputs
from tests.data.rows import folder_bytes, run_prepare, text_rows, write_rows
from tests.quick import quick

STEPS = ("stage", "vocabulary", "half", "encoded", "all")


class Stopped(Exception):
    """Simulates a kill."""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("text") / "rows.tsv", text_rows(900))


@pytest.fixture(scope="module")
def clean(tmp_path_factory, source):
    folder = tmp_path_factory.mktemp("clean") / "set"
    run_prepare(folder, source)
    return folder_bytes(folder)


def stopped_at(monkeypatch, step, output, source):
    """Return the work folder of a run that ended after ``step``."""

    def stop(*_):
        raise Stopped

    def half(staged, encoding, engine, advance):
        encode_all(staged, encoding, engine, advance)
        for record in sorted((encoding.work / "encoded").iterdir())[1::2]:
            record.unlink()  # without their records, these pieces count as not encoded
        raise Stopped

    def all_encoded(*arguments):
        encode_all(*arguments)
        raise Stopped

    place = {
        "stage": ("build_vocabularies", stop),
        "vocabulary": ("encode_all", stop),
        "half": ("encode_all", half),
        "encoded": ("encode_all", all_encoded),
        "all": ("_publish", stop),
    }[step]
    with monkeypatch.context() as patch:
        patch.setattr(prepare, *place)
        with pytest.raises(Stopped):
            run_prepare(output, source)
    return output.with_name("set.work")


def counted(monkeypatch):
    """Return a list that grows by one for each piece that is read from now on."""
    calls = []
    read = stage._read
    monkeypatch.setattr(stage, "_read", lambda *args: calls.append(1) or read(*args))
    return calls


@pytest.mark.few(2)
@pytest.mark.parametrize("step", STEPS)
def test_only_missing_parts_are_made_again(tmp_path, monkeypatch, source, clean, step):
    work = stopped_at(monkeypatch, step, tmp_path / "set", source)
    num_pieces = len(list((work / "stage").glob("*.json")))
    read = counted(monkeypatch)
    run_prepare(tmp_path / "set", source)
    assert len(read) == (num_pieces // 2 if step == "half" else 0)
    assert num_pieces > 4
    assert folder_bytes(tmp_path / "set") == clean
    assert not work.exists()


def flip(path, rng):
    raw = bytearray(path.read_bytes())
    raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    path.write_bytes(raw)


def cut(path, rng):
    path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])


def remove(path, _):
    path.unlink()


def kinds_of(work, rng):
    """Map each kind of file, (folder, suffix), to one path in the folder."""
    files = [p for p in sorted(work.rglob("*")) if p.is_file() and p.name != "plan"]
    return {(p.parent.name, p.suffix): p for p in rng.sample(files, len(files))}


@pytest.mark.slow
@pytest.mark.parametrize("step", quick(STEPS, lambda n: n in (0, 3)))
def test_a_damaged_part_is_made_again(tmp_path, monkeypatch, capsys, source, clean, step):
    """Damage one file of each kind at a time, in every way if this step is the first to write the
    kind, and otherwise in one way.
    """
    number = STEPS.index(step)
    rng = random.Random(number)
    whole = stopped_at(monkeypatch, step, tmp_path / "whole" / "set", source)
    known = set()
    if number:
        before = stopped_at(monkeypatch, STEPS[number - 1], tmp_path / "before" / "set", source)
        known = {*kinds_of(before, rng)}
    output = tmp_path / "set"
    ways = [flip, cut, remove]
    for place, (kind, path) in enumerate(kinds_of(whole, rng).items()):
        for how in [ways[(place + number) % 3]] if kind in known else ways:
            shutil.copytree(whole, tmp_path / "set.work")
            how(tmp_path / "set.work" / path.relative_to(whole), rng)
            run_prepare(output, source)
            assert folder_bytes(output) == clean, (path, how)
            shutil.rmtree(output)


def edits(record):
    """Yield copies of a record, each with one changed value or one added key or item."""
    for key, value in record.items():
        if isinstance(value, dict):
            yield from ({**record, key: inner} for inner in edits(value))
            yield {**record, key: {**value, "other": 3}}
        elif isinstance(value, list):
            yield {**record, key: [*value, [0, "other", "line"]]}
        else:
            yield {**record, key: value + 1 if isinstance(value, int) else value + "x"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "folder"),
    [pytest.param("stage", "stage", marks=pytest.mark.slow), ("encoded", "encoded")],
)
def test_an_edited_record_is_ignored(tmp_path, monkeypatch, source, clean, step, folder):
    """Some counts, such as that of clamped values, are in the manifest but not in a shard."""
    whole = stopped_at(monkeypatch, step, tmp_path / "whole" / "set", source)
    record = sorted((whole / folder).glob("*.json"))[1]
    changed = list(edits(json.loads(record.read_text())))
    for number, content in enumerate(changed):
        output = tmp_path / str(number) / "set"
        shutil.copytree(whole, output.with_name("set.work"))
        (output.with_name("set.work") / folder / record.name).write_text(json.dumps(content))
        run_prepare(output, source)
        assert folder_bytes(output) == clean, content
    assert len(changed) > 6


@pytest.mark.parametrize(("step", "folder"), [("stage", "stage"), ("encoded", "encoded")])
def test_swapped_records_are_ignored(tmp_path, monkeypatch, source, clean, step, folder):
    work = stopped_at(monkeypatch, step, tmp_path / "set", source)
    first, second = sorted((work / folder).glob("*.json"))[:2]
    raw = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(raw)
    run_prepare(tmp_path / "set", source)
    assert folder_bytes(tmp_path / "set") == clean


def test_an_error_of_the_current_run_does_not_start_it_over(tmp_path, monkeypatch, capsys, source):
    from sbpflow.data.format.shards import write_shard

    def faulty(folder, name, words, parts):
        shard = write_shard(folder, name, words, parts)
        (folder / name).write_bytes((folder / name).read_bytes()[:-1])
        return shard

    monkeypatch.setattr("sbpflow.data.format.shards.write_shard", faulty)
    arguments = ["--input", str(source), "--output", str(tmp_path / "set")]
    assert main(["prepare", *arguments, "--max-bad-fraction", "0"]) == 2
    assert "changed or truncated" in capsys.readouterr().err


def test_a_resumed_run_reports_the_same_bad_lines(tmp_path, monkeypatch, source):
    """Staged records also contain the bad lines."""
    bad = tmp_path / "bad.tsv"
    bad.write_bytes(source.read_bytes() + b"short\tline\n")
    seen = []

    def spy(*arguments):
        staged = stage_inputs(*arguments)
        seen.append([(piece.num_lines, piece.bad.counts, piece.bad.examples) for piece in staged])
        return staged

    monkeypatch.setattr(prepare, "stage_inputs", spy)
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "encode_all", lambda *_: (_ for _ in ()).throw(Stopped))
        with pytest.raises(Stopped):
            run_prepare(tmp_path / "set", bad, max_bad_fraction=0.1)
    run_prepare(tmp_path / "set", bad, max_bad_fraction=0.1)
    assert seen[0] == seen[1]
    assert seen[0][-1][2] == [(seen[0][-1][0] - 1, "2 fields instead of 40", "short\tline", "")]
