"""Tests that several machines, simulated by threads with one folder, write the same bytes as one
machine.
"""

import itertools
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest

from sbpflow.data.__main__ import main
from sbpflow.data.prepare.machines import MachinePart, parse_part
from sbpflow.data.prepare.options import PrepareOptions
from sbpflow.data.prepare.prepare import prepare
from sbpflow.data.prepare.schema_file import read_schema
from sbpflow.data.prepare.source import find_inputs
from sbpflow.data.prepare.split import parse_split
from sbpflow.errors import ConfigError, DataError
from tests.data.rows import folder_bytes
from tests.data.tables import SCHEMA, table, write_csv

FILES, ROWS = 5, 60


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """Return five files of unequal lengths with every kind of column, and their schema."""
    folder = tmp_path_factory.mktemp("tables")
    rows = table(FILES * ROWS + 40, seed=3)
    for number in range(FILES):
        stop = (number + 1) * ROWS + 40 * (number == FILES - 1)
        write_csv(folder / f"day_{number}.csv", rows[number * ROWS : stop])
    (folder / "schema.yaml").write_text(SCHEMA)
    return folder


def options_of(folder, output, part, split="time:0.7,0.1,0.2", **more):
    inputs = tuple(folder.glob("day_*.csv"))
    settings = {"schema": read_schema(folder / "schema.yaml"), "crosses": (), "spare": 0.3}
    settings["keep_strings"] = True
    return PrepareOptions(
        inputs=tuple(sorted(inputs)),
        output=output,
        split=parse_split(split),
        piece_bytes=1 << 12,
        max_bad_fraction=0.1,
        part=part,
        **{**settings, **more},
    )


def together(count, make_options):
    """Run all machines at once, and return their results."""
    with ThreadPoolExecutor(count) as pool:
        parts = [MachinePart(number, count, 60.0) for number in range(1, count + 1)]
        return [f.result() for f in [pool.submit(prepare, make_options(p)) for p in parts[::-1]]]


@pytest.mark.parametrize(
    ("count", "split"),
    [(3, "time:0.7,0.1,0.2"), (2, "ratio:0.6,0.2,0.2"), (9, "file:val=day_3*,test=day_4*")],
)
def test_several_machines_make_the_same_bytes_as_one(tmp_path, tables, count, split):
    clean = prepare(options_of(tables, tmp_path / "clean", MachinePart(), split))
    manifests = together(count, lambda part: options_of(tables, tmp_path / "set", part, split))
    assert [manifest for manifest in manifests if manifest is not None] == [manifests[-1]]
    assert folder_bytes(tmp_path / "set") == folder_bytes(clean.path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["clean", "set"]


def test_large_vocabularies_are_added_up_in_ranges(tmp_path, tables, monkeypatch):
    clean = prepare(options_of(tables, tmp_path / "clean", MachinePart()))
    monkeypatch.setattr("sbpflow.data.prepare.distinct._BLOCK", 7)
    monkeypatch.setattr("sbpflow.data.prepare.distinct.count_fields.__defaults__", (15,))
    together(2, lambda part: options_of(tables, tmp_path / "set", part))
    assert folder_bytes(tmp_path / "set") == folder_bytes(clean.path)


def test_machines_that_do_not_wait_resume(tmp_path, tables):
    """Start each machine repeatedly; a machine exits when it needs results from other machines."""
    clean = prepare(options_of(tables, tmp_path / "clean", MachinePart()))
    missing = []
    for number in itertools.islice(itertools.cycle((1, 2, 3)), 18):
        try:
            prepare(options_of(tables, tmp_path / "set", MachinePart(number, 3)))
        except DataError as error:
            missing.append(str(error).split(" are missing")[0])
        if (tmp_path / "set").exists():
            break
    assert folder_bytes(tmp_path / "set") == folder_bytes(clean.path)
    assert "--part 1/3: staged rows of part 2, 3" in missing
    assert "--part 3/3: counted values of part 1, 2" in missing
    assert "--part 1/3: encoded rows of part 2, 3" in missing


def test_machines_share_encoding_and_growing(tmp_path, tables):
    old = prepare(options_of(tables, tmp_path / "old", MachinePart(), spare=0.2))
    for words in (["encode"], ["prepare", "--grow", "--split", "time:1,0,0"]):
        words += ["--like", old.path, "--input", tables / "day_0.csv", tables / "day_4.csv"]
        words += ["--max-bad-fraction", "0.1", "--output"]
        name = words[0]
        assert main([*map(str, words), str(tmp_path / name)]) == 0
        with ThreadPoolExecutor(2) as pool:
            runs = [
                pool.submit(main, [*map(str, words), str(tmp_path / "both"), "--part", part])
                for part in ("1/2", "2/2")
            ]
            assert [run.result() for run in runs] == [0, 0]
        assert folder_bytes(tmp_path / "both") == folder_bytes(tmp_path / name)
        shutil.rmtree(tmp_path / "both")


def test_a_damaged_file_of_another_machine_is_named(tmp_path, tables):
    for number in (1, 2, 3, 1, 2):
        with pytest.raises(DataError):
            prepare(options_of(tables, tmp_path / "set", MachinePart(number, 3)))
    counted = next((tmp_path / "set.work" / "vocabulary").glob("city.counted-2-0.arrow"))
    raw = bytearray(counted.read_bytes())
    raw[-3] ^= 4
    counted.write_bytes(raw)
    with pytest.raises(DataError, match="vocabularies of part 1 are missing"):
        prepare(options_of(tables, tmp_path / "set", MachinePart(3, 3)))
    with pytest.raises(DataError, match=r"city\.counted-2-0\.arrow is .* start all parts"):
        prepare(options_of(tables, tmp_path / "set", MachinePart(1, 3)))


def test_files_are_divided_by_their_bytes(tmp_path):
    for number, size in enumerate((10, 10, 500, 10, 480)):
        (tmp_path / f"day_{number}").write_bytes(b"x" * size)
    owners = MachinePart(1, 2).owners(find_inputs([tmp_path]))
    assert list(owners.values()) == [1, 1, 1, 2, 2]
    assert set(MachinePart(3, 4).owners(find_inputs([tmp_path])).values()) <= {1, 2, 3, 4}


@pytest.mark.parametrize("text", ["0/3", "4/3", "2", "a/3", "1/0", "-1/3", "1/99999"])
def test_an_invalid_part_is_refused(text):
    with pytest.raises(ConfigError, match="write K/N"):
        parse_part(text, 1.0)


def test_parts_with_other_options_are_refused(tmp_path, tables):
    with pytest.raises(DataError, match="staged rows of part 2"):
        prepare(options_of(tables, tmp_path / "set", MachinePart(1, 2)))
    for other in (MachinePart(2, 3), MachinePart(2, 2)):
        with pytest.raises(ConfigError, match="belongs to other inputs or options"):
            prepare(options_of(tables, tmp_path / "set", other, min_count=3))
    with pytest.raises(ConfigError, match="does not exist; start part 1"):
        prepare(options_of(tables, tmp_path / "none", MachinePart(2, 2)))
